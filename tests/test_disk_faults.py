"""Every call to the system that an export makes is hit: the disk fills, breaks, takes less, or the process dies."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from collapse.checkpoint import Checkpoint
from collapse.staging import sweep
from tests.exported import EMBEDDING, KEPT
from tests.fault_server import DONE, KINDS, REFUSED, Fault, Outcome, Server
from tests.tiny import erase, export, listing, plan_for, state, tiny_llama, vocabulary

SHARD_SIZE = 30_000
WRITERS = ("write", "fsync", "rename", "close")
OTHERS = ("read", "open")


@dataclass(frozen=True)
class Bench:
    """A source, an earlier output of it, and the process that replaces that output."""

    source: Checkpoint
    folder: Path
    output: Path
    old: dict[str, bytes]
    new: dict[str, bytes]
    server: Server

    def restore(self) -> None:
        """Put the earlier output back."""
        shutil.rmtree(self.output)
        shutil.copytree(self.folder / "old", self.output)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.output.parent.iterdir())


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    source = tiny_llama(folder / "source", extra={"old.bias": torch.arange(1.0, 6.0)})
    plan = plan_for(source, erase("old.bias"), vocabulary(KEPT, EMBEDDING))
    plan.save(folder / "plan.json")
    old = export(source, plan_for(source), folder / "old", max_shard_size=SHARD_SIZE)
    new = export(source, plan, folder / "new", max_shard_size=SHARD_SIZE)
    output = Path(shutil.copytree(old.root, folder / "outputs" / "out"))
    with Server(source.root, folder / "plan.json", output, SHARD_SIZE) as server:
        yield Bench(source, folder, output, listing(old.root), listing(new.root), server)


@pytest.fixture(autouse=True)
def source_untouched(bench: Bench) -> Iterator[None]:
    before = listing(bench.source.root)
    yield
    assert listing(bench.source.root) == before


def hit(bench: Bench, fault: Fault) -> Outcome:
    """Run one export with the fault, check what is left, and that the next run does its work."""
    bench.restore()
    found = bench.server.run(fault)
    now = listing(bench.output)
    reported_late = fault.group == "rename" and fault.kind == "short"
    killed = found.status == -9
    assert found.status in {DONE, REFUSED} or killed, (fault, found)
    assert now == bench.old or (now == bench.new and (found.status == DONE or killed or reported_late)), (fault, found)
    assert state(Checkpoint.open(bench.output))
    if found.status == REFUSED:
        assert "cannot be" in found.message and "\n" not in found.message, (fault, found)
    left = [name for name in bench.names() if name != "out"]
    assert all(name.startswith(".out.collapse-") for name in left) and (killed or not left), (fault, left)
    assert bench.server.run(Fault()).status == DONE
    assert listing(bench.output) == bench.new
    assert bench.names() == ["out"], "the next run removes what a killed one left"
    return found


def calls(bench: Bench, exchange: bool = True) -> dict[str, int]:
    bench.restore()
    found = bench.server.run(Fault(exchange=exchange))
    assert (found.status, listing(bench.output)) == (DONE, bench.new)
    return found.calls


@pytest.mark.parametrize("kind", KINDS)
def test_b13_a_fault_at_any_call_leaves_the_old_output_or_the_new_one(bench: Bench, kind: str) -> None:
    counted = calls(bench)
    faults = [Fault(group, at, kind) for group in WRITERS for at in range(1, counted[group] + 1)]
    faults += [Fault(group, at, kind) for group in OTHERS for at in range(1, counted[group] + 1, 3)]
    assert len(faults) >= 50, "four kinds make at least 200 runs"
    found = [hit(bench, fault) for fault in faults]
    expected = {"SIGKILL": -9, "ENOSPC": REFUSED, "EIO": REFUSED, "short": DONE}[kind]
    writes = [one.status for one, fault in zip(found, faults, strict=True) if fault.group == "write"]
    assert writes == [expected] * counted["write"], "a fault that nobody noticed was none"


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_exchange_in_the_kernel_a_killed_run_is_put_right_by_the_next(bench: Bench, kind: str) -> None:
    """Between two renames there is no output for a moment: the next run finds the old one and puts it back."""
    for at in range(1, calls(bench, exchange=False)["rename"] + 1):
        bench.restore()
        found = bench.server.run(Fault("rename", at, kind, exchange=False))
        assert found.status in {DONE, REFUSED, -9}, found
        sweep(bench.output)
        usual = bench.new if found.status == DONE else bench.old
        assert listing(bench.output) in ([bench.old, bench.new] if kind in {"SIGKILL", "short"} else [usual])
        assert bench.names() == ["out"]


def test_b13_a_process_killed_at_any_moment_leaves_the_old_output_or_the_new_one(bench: Bench) -> None:
    draw = random.Random(20)
    for _ in range(20):
        bench.restore()
        pause = draw.uniform(0, 0.1)
        found = bench.server.run(Fault(kill_after=pause))
        assert found.status in {DONE, -9}, found
        assert listing(bench.output) in (bench.old, bench.new), pause
        assert bench.server.run(Fault()).status == DONE
        assert (listing(bench.output), bench.names()) == (bench.new, ["out"])
