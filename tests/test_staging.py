"""Where an output may go, and what is left when writing it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collapse import staging
from collapse.checkpoint import INDEX, Checkpoint
from collapse.erase import write_checkpoint
from collapse.errors import OutputError
from collapse.manifest import MANIFEST
from collapse.staging import staged
from tests.exported import EMBEDDING, KEPT
from tests.tiny import (
    erase,
    export,
    listing,
    plan_for,
    tiny_llama,
    vocabulary,
)


@pytest.fixture(autouse=True)
def source_untouched(llama: Checkpoint) -> Iterator[None]:
    before = listing(llama.root)
    yield
    assert listing(llama.root) == before


# Where it goes.


def test_the_output_appears_only_when_published(llama: Checkpoint, tmp_path: Path) -> None:
    with staged(tmp_path / "out", source=llama.root) as stage:
        write_checkpoint(llama, plan_for(llama), stage.folder)
        assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def test_new_parents_go_again_with_an_unpublished_output(llama: Checkpoint, tmp_path: Path) -> None:
    with staged(tmp_path / "a" / "b" / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
    export(llama, plan_for(llama), tmp_path / "a" / "b" / "out")
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["source", "source/inside", "."])
def test_the_source_is_never_overwritten(tmp_path: Path, where: str) -> None:
    source = tiny_llama(tmp_path / "source")
    before = listing(tmp_path)
    (tmp_path / "link").symlink_to(source.root)
    for output in (tmp_path / where, *([tmp_path / "link"] if where == "source" else [])):
        with pytest.raises(OutputError, match="overlaps the source"):
            export(source, plan_for(source), output, force=True)
    (tmp_path / "link").unlink()
    assert listing(tmp_path) == before


def test_nothing_is_written_through_a_link(llama: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    for name in ("link", "dangling"):
        with pytest.raises(OutputError, match="is a link to .*name the directory itself"):
            export(llama, plan_for(llama), tmp_path / name, force=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["dangling", "link", "other"]
    export(llama, plan_for(llama), tmp_path / "link" / "out")
    assert (tmp_path / "other" / "out" / MANIFEST).is_file(), "a link on the way is the user's own business"


@pytest.mark.parametrize("place", ["blobs", "snapshots/1234", "snapshots/5678", "out", "refs/a/b"])
def test_a_hub_cache_is_never_written_to(llama: Checkpoint, tmp_path: Path, place: str) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "1234").mkdir(parents=True)
    (tmp_path / "way").symlink_to(cache)
    for where in (cache / place, tmp_path / "way" / place):
        with pytest.raises(OutputError, match="lies in the hub cache of models--a--b"):
            export(llama, plan_for(llama), where, force=True)
    assert listing(cache) == {}


def test_the_source_is_known_by_what_it_is_and_not_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a bind mount, or on a file system that does not tell upper case from lower case."""
    source = tiny_llama(tmp_path / "source")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    monkeypatch.setattr(staging, "same_file", lambda left, right: {left, right} == {mounted, source.root})
    for place in (mounted, mounted / "inside"):
        with pytest.raises(OutputError, match="overlaps the source"):
            export(source, plan_for(source), place, force=True)


def test_an_output_whose_files_are_hard_links_to_the_source_is_replaced_without_touching_it(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source")
    out = export(source, plan_for(source), tmp_path / "out").root
    for name in ("model.safetensors", "config.json"):
        (out / name).unlink()
        (out / name).hardlink_to(source.root / name)
    before = listing(source.root)
    export(source, plan_for(source, vocabulary(KEPT, EMBEDDING)), out, force=True)
    assert listing(source.root) == before
    assert (source.root / "model.safetensors").stat().st_nlink == 1


def test_what_appears_under_the_name_meanwhile_is_not_replaced(llama: Checkpoint, tmp_path: Path) -> None:
    for force in (False, True):
        refused = pytest.raises(OutputError, match="exists and is not empty|no collapse.json of ours")
        with refused, staged(tmp_path / "out", force) as stage:
            write_checkpoint(llama, plan_for(llama), stage.folder)
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / "thesis.tex").write_text("years of work")
            stage.publish()
        assert listing(tmp_path) == {"out/thesis.tex": b"years of work"}
        (tmp_path / "out" / "thesis.tex").unlink()
        (tmp_path / "out").rmdir()


def test_every_file_is_on_the_disk_before_the_name_is(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def placed(*given: Path) -> None:
        done.append("rename")
        rename(*given)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", placed)
    out = export(llama, plan_for(llama), tmp_path / "out", max_shard_size=30_000).root
    before, after = done[: done.index("rename")], done[done.index("rename") + 1 :]
    assert {path.name for path in out.iterdir()} < set(before)
    assert before[-1].startswith(".out.collapse-") and after == [tmp_path.name]


@pytest.mark.parametrize("exchange", [True, False])
def test_force_replaces_our_own_output_as_a_whole(
    llama: Checkpoint, tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda left, right: False)
    out = export(llama, plan_for(llama), tmp_path / "out", max_shard_size=9_000).root
    with pytest.raises(OutputError, match="exists and is not empty"):
        export(llama, plan_for(llama, erase("old.bias")), out)
    assert (out / INDEX).exists()
    export(llama, plan_for(llama, erase("old.bias")), out, force=True)
    assert {p.name for p in out.iterdir()} == {"config.json", "generation_config.json", MANIFEST, "model.safetensors"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_swap_puts_the_old_output_back(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out").root
    before = listing(out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target == out and not self.name.endswith(staging.ASIDE):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(staging, "_exchange", lambda left, right: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OutputError, match="cannot be put in place"):
        export(llama, plan_for(llama, erase("old.bias")), out, force=True)
    assert listing(tmp_path) == {f"out/{name}": raw for name, raw in before.items()}


@pytest.mark.parametrize("own", [True, False])
def test_force_never_deletes_somebody_elses_files(llama: Checkpoint, tmp_path: Path, own: bool) -> None:
    out = tmp_path / "out"
    if own:
        export(llama, plan_for(llama), out)
    else:
        out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    before = listing(tmp_path)
    with pytest.raises(OutputError, match=r"thesis\.tex" if own else "no collapse.json of ours"):
        export(llama, plan_for(llama), out, force=True)
    assert listing(tmp_path) == before


def test_a_file_in_the_way_is_refused_and_an_empty_directory_is_not(llama: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is no directory"):
        export(llama, plan_for(llama), tmp_path / "file", force=True)
    with pytest.raises(OutputError, match="cannot be created"):
        export(llama, plan_for(llama), tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    export(llama, plan_for(llama), tmp_path / "empty")


def test_leftovers_of_dead_runs_go_and_those_of_living_runs_stay(llama: Checkpoint, tmp_path: Path) -> None:
    dead, reused = tmp_path / ".out.collapse-999999999", tmp_path / f".out.collapse-{os.getppid()}"
    other = tmp_path / ".other.collapse-999999999"
    for folder in (dead, reused, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    with staged(tmp_path / "out") as alive:
        (alive.folder / "model.safetensors").write_bytes(b"half")
        staging.sweep(tmp_path / "out")
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([alive.folder.name, other.name])
    export(llama, plan_for(llama), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["out", other.name])


def test_an_output_that_a_killed_run_moved_aside_is_moved_back(llama: Checkpoint, tmp_path: Path) -> None:
    out = export(llama, plan_for(llama), tmp_path / "out").root
    before = listing(out)
    out.rename(tmp_path / f".out.collapse-{dead_pid()}.old")
    with staged(out, force=True):
        assert listing(out) == before


# Faults.

EXPORT = """
import sys
from pathlib import Path
from collapse.checkpoint import Checkpoint
from collapse.erase import write_checkpoint
from collapse.manifest import write_manifest
from collapse.plan import Plan
from collapse.staging import staged

source, plan = Checkpoint.open(sys.argv[1]), Plan.load(Path(sys.argv[2]))
with staged(Path(sys.argv[3]), True, source.root) as stage:
    write_checkpoint(source, plan, stage.folder, max_shard_size=int(sys.argv[4]), progress=PROGRESS)
    write_manifest(stage.folder, source, plan)
    stage.publish()
"""
NOTHING = "lambda count: None"
FAULTY = """
import os, resource, signal
from collapse.errors import CollapseError
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
writes = [0]
def die(count):
    writes[0] += 1
    if writes[0] == int(sys.argv[5]):
        os.kill(os.getpid(), int(sys.argv[6]))
"""


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def run_script(
    script: str, *arguments: object, cwd: Path | None = None, seed: str = "0"
) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", script.replace("PROGRESS", NOTHING), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("number", "write"),
    [(signal.SIGKILL, 1), (signal.SIGKILL, 23), (signal.SIGTERM, 4), (signal.SIGINT, 4)],
)
def test_a_killed_run_leaves_the_old_output_and_the_next_one_succeeds(
    llama: Checkpoint, tmp_path: Path, number: signal.Signals, write: int
) -> None:
    out = tmp_path / "out"
    before = listing(export(llama, plan_for(llama), out).root)
    plan = plan_for(llama, erase("old.bias"))
    plan.save(tmp_path / "plan.json")
    script = FAULTY + EXPORT.replace("PROGRESS", "die")
    run = run_script("import sys\n" + script, llama.root, tmp_path / "plan.json", out, 5_000, write, int(number))
    assert run.returncode != 0
    assert listing(out) == before
    leftovers = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert len(leftovers) == (1 if number == signal.SIGKILL else 0)
    export(llama, plan, out, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "plan.json"]
    assert "old.bias" not in Checkpoint.open(out).tensors


@pytest.mark.parametrize("limit", [0, 100, 20_000, 66_000])
def test_a_full_disk_is_one_line_and_leaves_nothing(llama: Checkpoint, tmp_path: Path, limit: int) -> None:
    plan_for(llama).save(tmp_path / "plan.json")
    body = "\n    ".join(EXPORT.splitlines())
    script = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"from collapse.errors import CollapseError\ntry:\n    {body}\nexcept CollapseError as error:\n"
        "    print(error, file=sys.stderr)\n    sys.exit(error.exit_code)\n"
    )
    run = run_script(script, llama.root, tmp_path / "plan.json", tmp_path / "out", 10**9)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert "cannot be written (File too large); make room" in run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("at", range(1, 60, 9))
def test_an_error_at_any_write_leaves_nothing(llama: Checkpoint, tmp_path: Path, code: int, at: int) -> None:
    count = 0

    def fail(size: int) -> None:
        nonlocal count
        count += 1
        if count == min(at, 22):
            raise OSError(code, os.strerror(code))

    with pytest.raises(OutputError, match="cannot be written"), staged(tmp_path / "out") as stage:
        write_checkpoint(llama, plan_for(llama), stage.folder, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_not_the_disks_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "out"):
        _ = 1 / 0
    with pytest.raises(FileNotFoundError), staged(tmp_path / "out"):
        (tmp_path / "absent").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_two_exports_are_byte_identical_from_any_directory_and_hash_seed(llama: Checkpoint, tmp_path: Path) -> None:
    plan = plan_for(llama, erase("old.bias"), vocabulary(KEPT, EMBEDDING))
    plan.save(tmp_path / "plan.json")
    first = listing(export(llama, plan, tmp_path / "first", max_shard_size=10_000).root)
    for seed, where in (("1", tmp_path), ("2", Path.cwd())):
        run = run_script(EXPORT, llama.root, tmp_path / "plan.json", tmp_path / seed, "10000", cwd=where, seed=seed)
        assert run.returncode == 0, run.stderr
        assert listing(tmp_path / seed) == first


def test_a_signal_whose_exception_was_dropped_still_stops_the_publication(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="143"), staged(tmp_path / "out") as stage:
        with contextlib.suppress(SystemExit):  # as in a finalizer
            signal.raise_signal(signal.SIGTERM)
        stage.publish()
    assert list(tmp_path.iterdir()) == []
