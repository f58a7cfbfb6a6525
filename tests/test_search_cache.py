"""What a search keeps of what it measured: resumed after a kill, keyed by all that counts, never believed blindly."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from collapse import Options
from collapse.analysis import store
from collapse.analysis.layer_search import LayerSearch, Step
from collapse.budget import parse_budgets
from collapse.canonical import digest, dumps
from collapse.certify.losses import SequenceLoss
from collapse.cli import _cache
from collapse.errors import CollapseError
from collapse.pipeline import make_plan
from collapse.search.alone import Alone
from collapse.search.measure import Judge
from collapse.search.memory import Content, Memory, key_of, remembering
from collapse.search.shapes import Shape, Uneven
from collapse.search.sweep import Sweep
from collapse.search.trials import FRACTIONS, sizes_of
from collapse.search.units import Units
from tests.command import Command
from tests.test_export import LOG
from tests.test_shrink import idle_llama

FREE = Options(passes=("neurons",), budgets=parse_budgets("params=-5%"), layout="free")
NATIVE = Options(passes=("layers", "neurons"), budgets=parse_budgets("kl<=0.3,params=-12%"))
TRIED = 3 * len(FRACTIONS)  # sizes of the neurons of three blocks
MAPS = replace(FREE, passes=("neurons", "stand-in"), budgets=parse_budgets("params=-8%"))
CASES = {"free": (FREE, 3), "native": (NATIVE, 4), "maps": (MAPS, 5)}  # and after so many files the run is killed

KILLER = """
import os, signal, sys
from pathlib import Path
from collapse.analysis import store
from tests.test_search_cache import CASES, plan
options, files = CASES[sys.argv[3]]
written = []
write = store._write
def dies(path, content):
    write(path, content)
    written.append(path)
    if len(written) == files:
        os.kill(os.getpid(), signal.SIGKILL)
store._write = dies
plan(Path(sys.argv[1]), options, Path(sys.argv[2]), Path(sys.argv[2]) / "plan.json")
"""


def plan(model: Path, options: Options, cache: Path | None, file: Path) -> dict[str, bytes]:
    """Make a plan in one thread, as every test does, and return the bytes of all of its files by their suffixes."""
    torch.set_num_threads(1)
    make_plan(model, LOG, replace(options, cache=cache), save=file)
    return {one.name.partition(".")[2]: one.read_bytes() for one in file.parent.glob(f"{file.stem}.*")}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what costs time: fits of whole models, their divergences and losses, single trials, ranked blocks."""
    seen: Counter[str] = Counter()

    def count(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def counted(*arguments: object, **options: object) -> object:
            seen[f"{kind.__name__}.{name.strip('_')}"] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(kind, name, counted)

    for kind, name in ((Sweep, "run"), (Judge, "kl"), (Judge, "losses"), (Alone, "kl"), (LayerSearch, "_next")):
        count(kind, name)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_a_killed_search_goes_on_where_it_was_and_gives_the_same_bytes(
    name: str,
    llama: Path,
    tmp_path: Path,
    calls: Counter[str],
) -> None:
    options, files = CASES[name]
    whole = plan(llama, options, None, tmp_path / "whole.json")
    total, cache = Counter(calls), tmp_path / "cache"
    assert set(whole) == {"json", "safetensors", "path.json"}
    root = Path(__file__).parent.parent
    run = [sys.executable, "-c", KILLER, str(llama), str(cache), name]
    killed = subprocess.run(run, cwd=root, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    (kept,) = cache.glob("*.json")
    known = json.loads(kept.read_bytes())
    calls.clear()
    assert plan(llama, options, cache, tmp_path / "resumed.json") == whole
    if name != "native":
        assert len(known["kl"]) == files - 1 and known["written"] and known["steps"] == []
        assert calls["Alone.kl"] == total["Alone.kl"] - sum(map(len, known["kl"].values()))
    else:
        assert len(known["steps"]) >= 1
        assert calls["LayerSearch.next"] == total["LayerSearch.next"] - len(known["steps"])
    calls.clear()
    assert plan(llama, options, cache, tmp_path / "again.json") == whole
    assert calls == {"Sweep.run": 1}, "the model that is taken is fitted once more, and nothing is measured"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return idle_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def kept(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a finished search."""
    cache = tmp_path_factory.mktemp("kept")
    plan(llama, FREE, cache, cache / "plan.json")
    (file,) = (one for one in cache.glob("*.json") if not one.name.startswith("plan"))
    return file


def test_another_budget_tries_no_block_again(
    llama: Path,
    kept: Path,
    tmp_path: Path,
    calls: Counter[str],
) -> None:
    shutil.copy(kept, tmp_path / kept.name)
    plan(llama, replace(FREE, budgets=parse_budgets("params=-3%")), tmp_path, tmp_path / "other.json")
    assert calls["Alone.kl"] == 0 and calls["Judge.kl"] == calls["Sweep.run"] == 1


def test_what_was_measured_of_another_model_text_or_code_is_not_used(
    llama: Path,
    kept: Path,
    tmp_path: Path,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "model"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "own.log"
    text.write_text("".join(f"2024-01-{n % 28 + 1:02} ERROR disk {n} is full on host {n * 7}\n" for n in range(4000)))
    for number, (model, options) in enumerate(((other, FREE), (llama, replace(FREE, corpus=(text,))))):
        folder = tmp_path / str(number)
        folder.mkdir()
        shutil.copy(kept, folder / kept.name)
        calls.clear()
        plan(model, options, folder, tmp_path / f"{number}.json")
        assert calls["Alone.kl"] == TRIED and len(list(folder.glob("*.json"))) == 2
    monkeypatch.setattr("collapse.passes.shrink_task.surroundings", lambda: {"code": "other"})
    calls.clear()
    plan(llama, FREE, kept.parent, tmp_path / "code.json")
    assert calls["Alone.kl"] == TRIED


def damage(change: Callable[[dict], object], *, sign: bool = True) -> Callable[[bytes], bytes]:
    """Return what changes a file's JSON; signed, its checksum fits again."""

    def changed(raw: bytes) -> bytes:
        body = json.loads(raw)
        checksum = body.pop("checksum")
        change(body)
        return dumps(body | {"checksum": digest(body) if sign else checksum}).encode()

    return changed


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut short": (lambda raw: raw[: len(raw) // 2], "not valid JSON"),
    "another's": (lambda raw: b'{"a": 1}', "its format is None"),
    "a changed number": (damage(lambda body: body["kl"].update(x=[0.0]), sign=False), "its checksum is wrong"),
    "a later format": (damage(lambda body: body.update(format="collapse-search/2")), "its format is"),
    "another search's": (damage(lambda body: body["made_for"].update(layout="native")), "made for something else"),
    "ids of no token": (damage(lambda body: body["written"][0].insert(0, -1)), "written"),
    "losses of nothing": (
        damage(lambda body: next(iter(body["losses"].values()))[0].update(tokens=-1)), "these are no losses|losses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line_and_stays(
    name: str,
    llama: Path,
    kept: Path,
    tmp_path: Path,
) -> None:
    change, reason = DAMAGED[name]
    file = tmp_path / kept.name
    file.write_bytes(change(kept.read_bytes()))
    made_for, before = json.loads(kept.read_bytes())["made_for"], file.read_bytes()
    with pytest.raises(CollapseError, match=reason) as caught, remembering(tmp_path, made_for):
        pytest.fail("it was opened")
    assert "\n" not in str(caught.value) and file.read_bytes() == before


# The memory itself.

UNITS = Units("neurons", 2, 24, (), "", None, 3, None)  # type: ignore[arg-type]
LOSS = SequenceLoss(tokens=3, text_bytes=9, source_nll=1.5, nll=1.75, kl=0.1, flips=1, confident=2, confident_flips=0)


def nothing() -> list:
    raise AssertionError("it was measured again")


def test_what_is_kept_is_read_back_as_it_was(tmp_path: Path) -> None:
    with remembering(tmp_path, {"a": 1}) as memory:
        assert memory.kl(Shape((1,)), lambda: [0.1 + 0.2]) == (0.1 + 0.2,)
        assert memory.losses(Shape((1,)), lambda: [LOSS]) == [LOSS]
        assert memory.shares(Shape((1,)), lambda: {"params": 1 / 3}) == {"params": 1 / 3}
        assert list(memory.steps(lambda known: iter([Step((1,), 0.5), Step((0, 1), 0.7)]))) != []
    with remembering(tmp_path, {"a": 1}) as memory:
        assert memory.kl(Shape((1,)), nothing) == (0.1 + 0.2,) and memory.losses(Shape((1,)), nothing) == [LOSS]
        assert type(memory.losses(Shape((1,)), nothing)[0].tokens) is int
        assert memory.shares(Shape((1,)), nothing) == {"params": 1 / 3}
        assert list(memory.steps(lambda known: iter([Step((), 0.0)] * (len(known) != 2)))) == [
            Step((1,), 0.5),
            Step((0, 1), 0.7),
        ]
        assert memory.kl(Shape((2,)), lambda: [9.0]) == (9.0,), "another shape is measured"


def test_figures_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    with remembering(tmp_path, {}) as memory:
        assert memory.kl("x", lambda: [math.inf]) == (math.inf,)
        assert memory.kl("x", lambda: [1.0]) == (1.0,)
        lost = replace(LOSS, nll=math.inf)
        assert memory.losses("x", lambda: [lost]) == [lost] and memory.losses("x", lambda: [LOSS]) == [LOSS]


def test_a_second_search_at_the_same_time_measures_for_itself(tmp_path: Path) -> None:
    with remembering(tmp_path, {}) as first, remembering(tmp_path, {}) as second:
        first.kl("x", lambda: [1.0])
        assert second.kl("x", lambda: [2.0]) == (2.0,)
    with remembering(tmp_path, {}) as third:
        assert third.kl("x", nothing) == (1.0,)


def test_a_folder_that_cannot_be_made_keeps_nothing_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with remembering(tmp_path / "file" / "cache", {}) as memory:
        assert memory.kl("x", lambda: [1.0]) == (1.0,)
    with remembering(None, {}) as memory:
        assert memory.kl("x", lambda: [1.0]) == (1.0,)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: store.Content) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    with remembering(tmp_path, {}) as memory:
        assert memory.kl("x", lambda: [1.0]) == (1.0,) == memory.kl("x", nothing)


def test_keys_tell_shapes_apart_and_refuse_what_they_do_not_know() -> None:
    other = replace(UNITS, block=3)
    shapes = [Shape(), Shape((1,)), Shape((), {"neurons": 1}), Uneven(kept={UNITS: 3}), Uneven(kept={other: 3})]
    shapes.append(Uneven(kept={replace(UNITS, reader="shared"): 3}))  # others of the same block, as a second MLP's
    keys = [key_of(shape) for shape in shapes]
    assert len(set(keys)) == len(keys)
    assert key_of(Uneven(kept={UNITS: 3, other: 2})) == key_of(Uneven(kept={other: 2, UNITS: 3}))
    assert key_of(Uneven(kept={UNITS: 3})) == '["Uneven",[],[],[[["neurons",2,24,""],3]],[]]'
    with pytest.raises(TypeError, match="Tensor cannot be a key"):
        key_of({"a": torch.zeros(1)})
    assert len(sizes_of(UNITS)) == len(FRACTIONS)
    assert Content(made_for={}).format == "collapse-search/1" and Memory.empty().kl("x", lambda: [1.0]) == (1.0,)


# The command line.


def test_the_command_keeps_by_default_and_not_if_told_so(
    llama: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[Path | None] = []
    monkeypatch.setattr("collapse.pipeline.make_plan", lambda *a, **o: folders.append(a[2].cache) or sys.exit(0))
    monkeypatch.setenv("COLLAPSE_CACHE", str(tmp_path))
    for given in ((), ("--cache", tmp_path / "own"), ("--no-cache",)):
        assert command("plan", llama, *given).code == 0
    assert folders == [tmp_path / "search", tmp_path / "own", None]
    found = command("plan", llama, "--no-cache", "--cache", tmp_path)
    assert found.code == 2 and "--cache: is where to keep what --no-cache says not to keep; leave one out" in found.err


def test_steps_that_are_no_numbers_are_not_kept(tmp_path: Path) -> None:
    steps = [Step((1,), 0.5), Step((1, 2), math.nan), Step((1, 2, 3), 0.7)]
    with remembering(tmp_path, {}) as memory:
        assert list(memory.steps(lambda known: iter(steps))) == steps
    with remembering(tmp_path, {}) as memory:
        assert list(memory.steps(lambda known: iter(()))) == steps[:1]


def test_a_user_without_a_home_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("COLLAPSE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert _cache(None, False) is None and _cache(tmp_path, False) == tmp_path
