"""The cache of measured influence: resumed after a kill, keyed by all that counts, never believed blindly."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import filelock
import pytest
from safetensors.torch import load_file, save_file

import collapse
from collapse.analysis import site_influence
from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.influence_store import opened
from collapse.analysis.site_influence import Influence, Settings
from collapse.canonical import digest, dumps
from collapse.errors import CollapseError, OutputError, UnsupportedError
from collapse.options import Options
from collapse.survey import influence
from tests.architectures import save_tiny
from tests.command import Command

SCHEMA = {"type": "text", "tokens": list(range(3, 48)), "max_tokens": 16, "workload": {"prompt": 8, "new": 8}}
SETTINGS = Settings(("layers", "sublayers"), exact=None)
TOKENS, BATCHES, SITES = 8 * 16, 2, 9  # three blocks with two sublayers each
KILLED_AFTER = 7  # files written: one of the estimates, six of measurements

KILLER = f"""
import os, signal, sys
from collapse.analysis import store
from tests.test_influence_cache import run
written = []
write = store._write
def dies(path, content):
    write(path, content)
    written.append(path)
    if len(written) == {KILLED_AFTER}:
        os.kill(os.getpid(), signal.SIGKILL)
store._write = dies
from pathlib import Path
run(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def run(model: Path, cache: Path, schema: dict[str, object] = SCHEMA, seed: int = 0, **more) -> Influence:
    """Measure all blocks and sublayers of a tiny model on drawn ids."""
    given = {"settings": SETTINGS, "tokens": TOKENS, **more}
    return influence(model, schema, Options(seed=seed), cache=cache, **given)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Influence, Path]:
    """A finished run and its cache's file."""
    cache = tmp_path_factory.mktemp("cache")
    found = run(model, cache)
    (file,) = cache.glob("*.json")
    return found, file


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run: `sweep`, and for each forward of the blocks `run`."""
    seen: list[str] = []

    def counted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **options: object) -> object:
            seen.append(name)
            return original(*arguments, **options)

        return wrapper

    monkeypatch.setattr(site_influence, "sweep", counted("sweep", site_influence.sweep))
    monkeypatch.setattr(BlockRuns, "run", counted("run", BlockRuns.run))
    return seen


def figures(found: Influence) -> list[object]:
    return [(one.site.name, asdict(one.estimate), {by: asdict(loss) for by, loss in one.losses.items()})
            for one in found.sites]  # fmt: skip


def test_a_killed_run_goes_on_where_it_was(
    model: Path, whole: tuple[Influence, Path], tmp_path: Path, forwards: list[str]
) -> None:
    root = Path(__file__).parent.parent
    killed = subprocess.run([sys.executable, "-c", KILLER, model, tmp_path], cwd=root, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    found = run(model, tmp_path)
    left = BATCHES * SITES - (KILLED_AFTER - 1)
    assert forwards == ["run"] * (1 + BATCHES + left), "a probe, the source of each batch, and what was left"
    assert figures(found) == figures(whole[0])
    (file,) = tmp_path.glob("*.json")
    assert file.read_bytes() == whole[1].read_bytes()


def test_the_same_again_runs_nothing_and_loads_no_model(
    model: Path, whole: tuple[Influence, Path], forwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapse.pipeline.load_source", lambda *_: pytest.fail("the model was loaded"))
    assert figures(run(model, whole[1].parent)) == figures(whole[0])
    few = run(model, whole[1].parent, settings=Settings(("sublayers",), exact=2))
    assert sum(bool(one.losses) for one in few.sites) == 2
    assert forwards == []


def test_another_kind_of_site_later_needs_no_other_sweep(model: Path, tmp_path: Path, forwards: list[str]) -> None:
    run(model, tmp_path, settings=Settings(("layers",), exact=0))
    assert forwards == ["sweep"]
    run(model, tmp_path, settings=Settings(("kv-groups",), exact=1))
    assert forwards == ["sweep", *["run"] * (1 + BATCHES + BATCHES)]


def test_a_first_run_takes_one_sweep_and_a_run_for_each_site_and_batch(
    model: Path, tmp_path: Path, forwards: list[str]
) -> None:
    run(model, tmp_path)
    assert forwards == ["sweep", *["run"] * (1 + BATCHES * (1 + SITES))]


def test_whatever_the_figures_depend_on_has_a_file_of_its_own(model: Path, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", rope_theta=5000.0)
    cache = tmp_path / "cache"
    quick = {"settings": Settings(("layers",), exact=0)}
    variants: list[Callable[[], object]] = [
        lambda: run(model, cache, **quick),
        lambda: run(model, cache, SCHEMA | {"tokens": list(range(3, 40))}, **quick),
        lambda: run(model, cache, seed=1, **quick),
        lambda: run(model, cache, **quick | {"tokens": TOKENS // 2}),
        lambda: run(model, cache, settings=Settings(("layers",), exact=0, ranges=5)),
        lambda: run(other, cache, **quick),
    ]
    for number, variant in enumerate(variants, 1):
        variant()
        assert len(list(cache.glob("*.json"))) == number
    run(model, cache, settings=Settings(("sublayers",), exact=0, by=("mean",)))
    assert len(list(cache.glob("*.json"))) == len(variants), "what is shown, and how, is no other measurement"


def test_other_versions_do_not_share_figures(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Settings(("layers",), exact=0)
    run(model, tmp_path, settings=quick)
    monkeypatch.setattr("collapse.survey.versions", lambda: {"torch": "0"})
    run(model, tmp_path, settings=quick)
    assert len(list(tmp_path.glob("*.json"))) == 2


def damage(change: Callable[[dict], object], *, sign: bool = True) -> Callable[[bytes], bytes]:
    """Return what changes a file's JSON; signed, its checksum fits again."""

    def changed(raw: bytes) -> bytes:
        body = json.loads(raw)
        checksum = body.pop("checksum")
        change(body)
        return dumps(body | {"checksum": digest(body) if sign else checksum}).encode()

    return changed


SUMS = {"positions": 1, "targets": 1, "confident": 0, "kl": 0.0, "nll": 0.0, "flips": 0, "confident_flips": 0}
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut short": (lambda raw: raw[: len(raw) // 2], "not valid JSON"),
    "empty": (lambda raw: b"", "not valid JSON"),
    "binary": (lambda raw: b"\x80\x04" + raw, "not valid JSON"),
    "a list": (lambda raw: b"[]", "not a JSON object"),
    "another's": (lambda raw: b'{"a": 1}', "its format is None"),
    "a later format": (damage(lambda body: body.update(format="collapse-influence/2")), "its format is"),
    "a changed number": (
        damage(lambda body: body["estimates"]["model.layers.0"].update(fisher=0.0), sign=False),
        "its checksum is wrong",
    ),
    "another run's": (damage(lambda body: body["made_for"].update(seed=5)), "it was made for something else"),
    "a site less": (damage(lambda body: body["estimates"].pop("model.layers.0")), "it is about other sites"),
    "a batch more": (
        damage(lambda body: body["sums"]["zero"].update({"model.layers.0": {"9": SUMS}})), "it is about other sites",
    ),
    "other neurons": (
        damage(lambda body: body["orders"]["neurons model.layers.0.mlp"].append(99)), "it ranks other neurons",
    ),
    "a missing field": (
        damage(lambda body: body["estimates"]["model.layers.0"].pop("fisher")),
        "estimates.model.layers.0.fisher",
    ),
    "an infinite number": (
        lambda raw: raw.replace(b'"fisher": ', b'"fisher": Infinity, "x": ', 1), "not JSON compliant",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_cache_is_refused_in_one_line(
    name: str, model: Path, whole: tuple[Influence, Path], tmp_path: Path
) -> None:
    change, reason = DAMAGED[name]
    file = tmp_path / whole[1].name
    file.write_bytes(change(whole[1].read_bytes()))
    before = file.read_bytes()
    with pytest.raises(CollapseError, match=reason) as caught:
        run(model, tmp_path)
    assert "\n" not in str(caught.value) and file.name in str(caught.value)
    assert file.read_bytes() == before


def test_a_cache_in_use_is_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path, {"a": 1}),
        pytest.raises(OutputError, match="another run measures the same"),
        opened(tmp_path, {"a": 1}),
    ):
        pytest.fail("two runs had it open")


def test_a_directory_in_the_cache_file_s_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{digest({'a': 1})[:32]}.json").mkdir()
    with pytest.raises(OutputError, match="no plain file"), opened(tmp_path, {"a": 1}):
        pytest.fail("it was opened")


def test_a_folder_that_cannot_be_made_is_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="the cache cannot be written"):
        run(model, tmp_path / "file" / "cache")
    with filelock.FileLock(tmp_path / "other.lock"):  # another's lock is no hindrance
        run(model, tmp_path, settings=Settings(("layers",), exact=0))


def test_a_model_whose_logits_are_not_finite_is_refused(model: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("inf")
    root = tmp_path / "model"
    shutil.copytree(model, root)
    save_file(weights, root / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match="logits are not all finite"):
        run(root, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.json"))


# The command line.


def test_the_command_prints_the_cheapest_sites_first(
    model: Path, whole: tuple[Influence, Path], command: Command
) -> None:
    common = ("influence", model, "-s", json.dumps(SCHEMA), "--tokens", TOKENS, "--cache", whole[1].parent)
    shown = command(*common, "--sites", "layers,sublayers", "--exact", "all")
    assert shown.code == 0, shown.err
    price = {one.site.name: one.kl / one.site.sizes.parameters for one in whole[0].sites}
    lines = [line.split()[0] for line in shown.out.splitlines() if line.startswith("model.")]
    assert lines == sorted(price, key=price.__getitem__)
    told = json.loads(command(*common, "--sites", "sublayers", "--exact", "all", "--json").out)
    assert told["tokens"] == TOKENS
    by_name = {one["name"]: one for one in told["sites"]}
    assert by_name.keys() == {one.site.name for one in whole[0].of("sublayers")}
    for one in whole[0].of("sublayers"):
        assert by_name[one.site.name]["exact"] == {"zero": asdict(one.losses["zero"])}
        assert by_name[one.site.name]["parameters"] == one.site.sizes.parameters
    estimated = command(*common, "--sites", "sublayers", "--exact", 0)
    fisher = {one.site.name: one.estimate.fisher for one in whole[0].of("sublayers")}
    lines = [line.split()[0] for line in estimated.out.splitlines() if line.startswith("model.")]
    assert lines == sorted(fisher, key=fisher.__getitem__)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--sites", "heads"), "there is no 'heads'"),
        (("--by", "median"), "there is no 'median'"),
        (("--exact", "many"), "'many' is no number of sites"),
        (("--exact", "-1"), "'-1' is no number of sites"),
        (("--generic", "--corpus", __file__), "generic text was asked for"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: tuple[str, ...], reason: str, model: Path, tmp_path: Path, command: Command
) -> None:
    found = command("influence", model, "--cache", tmp_path / "cache", *arguments)
    assert found.code == 2 and reason in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_it_is_there_for_python() -> None:
    assert collapse.influence is influence
