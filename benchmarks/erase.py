"""`scripts/bench erase`: writing half of a large checkpoint, against `cp` of the bytes that stay.

Each run is a process of its own. Both sides end with an fsync of every file; who goes first changes from round to
round. `read` is how an export finds its source, whose digest has just been taken: in the page cache, as far as it
fits there. `unread` is one that nobody has read since the machine was started. Both sides begin alike. The time is
that of staging, writing and publishing; the digests of the source, which a plan needs, and of the output as it is
read back are timed apart. Memory is the highest resident size of the process as the kernel has it (VmHWM), shared
libraries included: no weight file is ever mapped, so nothing is to be taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from benchmarks.results import ROOT
from benchmarks.synthetic import half_plan, shape_of, write_checkpoint
from collapse import erase
from collapse.canonical import dumps
from collapse.checkpoint import Checkpoint
from collapse.disk import uncache_file
from collapse.errors import CollapseError
from collapse.hashing import file_digests
from collapse.plan import Plan, Record
from collapse.staging import staged

REPORT = ROOT / "reports" / "bench-erase.json"
TOUCHED = 14 << 30  # bytes
NEEDED = 2.1  # times the size of the source: half of it is written, and copied


class Round(Record):
    """One round: wall and processor seconds of the writer and of `cp` for the same bytes, and the writer's memory.

    `load` is the system's before the round; `warm` says that both sources were read before.
    """

    erase_seconds: float
    copy_seconds: float
    erase_cpu_seconds: float
    copy_cpu_seconds: float
    peak_bytes: int
    load: float
    warm: bool

    @property
    def ratio(self) -> float:
        """Throughput of the writer over that of `cp`."""
        return self.copy_seconds / self.erase_seconds


class Summary(Record):
    """All rounds and their medians; `ratio` and the speeds are those with a source that was read before."""

    source_bytes: int
    written_bytes: int
    shards: int
    rounds: tuple[Round, ...]
    erase_bytes_per_second: float
    copy_bytes_per_second: float
    ratio: float
    ratio_unread: float
    peak_bytes: int
    source_digest_seconds: float
    output_digest_seconds: float
    machine: dict[str, str | int]


def child(source: Path, plan: Path, output: Path) -> None:
    """Write and publish in this process, and print seconds and peak memory as JSON."""
    checkpoint, wanted = Checkpoint.open(source), Plan.load(plan)
    start, cpu = time.perf_counter(), time.process_time()
    with staged(output, source=source) as staging:
        erase.write_checkpoint(checkpoint, wanted, staging.folder)
        staging.publish()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - cpu, "peak": peak_bytes()}))


def peak_bytes() -> int:
    """Return the peak of this process; `getrusage` would count what its parent had when it was forked."""
    status = Path("/proc/self/status")
    if not status.is_file():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def run_erase(source: Path, plan: Path, output: Path, warm: bool = False) -> dict[str, float]:
    """Return `seconds`, `cpu` seconds and `peak` bytes of one run of the writer."""
    prepare(source, warm)
    command = [sys.executable, "-P", "-m", "benchmarks.erase", str(source), str(plan), str(output)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise CollapseError(f"the writer ended with status {done.returncode}", where=str(output))
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run_copy(source: Path, output: Path, warm: bool) -> tuple[float, float]:
    """Return the wall and processor seconds that `cp` takes for the files of `source`, fsync included."""
    prepare(source, warm)
    start, cpu = time.perf_counter(), _cpu_of_children()
    subprocess.run(["cp", "-r", str(source), str(output)], check=True)
    subprocess.run(["sync", *map(str, output.iterdir()), str(output)], check=True)
    return time.perf_counter() - start, _cpu_of_children() - cpu


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepare(folder: Path, warm: bool) -> None:
    """Put the files out of the page cache and, for a warm start, read all of them."""
    forget(folder)
    if warm:
        file_digests(sorted(folder.iterdir()))


def forget(folder: Path) -> None:
    """Put all files of the bench out of the page cache; nothing waits to be written when the clock starts.

    What is left there from other runs would have to make room meanwhile, for one side more than for the other. Then use
    and free memory as the page cache soon will: a virtual machine's free memory may have gone back to its host, and
    whoever runs first would pay for all of it.
    """
    os.sync()
    for path in folder.parent.rglob("*"):
        if path.is_file():
            uncache_file(path)
    touched = b"\1" * min(TOUCHED, psutil.virtual_memory().available * 3 // 4)
    del touched


def one_round(source: Path, plan: Path, kept: Path, scratch: Path, erase_first: bool, warm: bool) -> Round:
    """Run the writer and `cp` of its earlier output `kept`, in one order or the other."""
    output, copy = scratch / "output", scratch / "copy"
    load = os.getloadavg()[0]
    copied = (0.0, 0.0)
    if not erase_first:
        copied = run_copy(kept, copy, warm)
        shutil.rmtree(copy)
    erased = run_erase(source, plan, output, warm)
    if file_digests(sorted(output.iterdir())) != file_digests(sorted(kept.iterdir())):
        raise CollapseError("two runs wrote different bytes", where=str(output))
    shutil.rmtree(output)
    if erase_first:
        copied = run_copy(kept, copy, warm)
        shutil.rmtree(copy)
    return Round(
        erase_seconds=erased["seconds"],
        copy_seconds=copied[0],
        erase_cpu_seconds=erased["cpu"],
        copy_cpu_seconds=copied[1],
        peak_bytes=int(erased["peak"]),
        load=load,
        warm=warm,
    )


def measure(scratch: Path, size: int, rounds: int) -> Summary:
    """Make the source in `scratch`, and run all rounds."""
    shape = shape_of(size)
    source = write_checkpoint(scratch / "source", shape, shard_size=erase.MAX_SHARD_SIZE)
    half_plan(shape).save(scratch / "plan.json")
    kept = scratch / "kept"
    run_erase(source.root, scratch / "plan.json", kept)
    written = sum(path.stat().st_size for path in kept.iterdir())
    found = tuple(
        one_round(source.root, scratch / "plan.json", kept, scratch, number % 2 == 0, warm)
        for warm in (True, False)
        for number in range(rounds)
    )
    read, unread = ([one for one in found if one.warm == warm] for warm in (True, False))
    forget(source.root)
    start = time.perf_counter()
    assert source.digest
    digest_seconds = time.perf_counter() - start
    start = time.perf_counter()
    file_digests(sorted(kept.iterdir()))
    return Summary(
        source_bytes=source.weight_bytes,
        written_bytes=written,
        shards=len(source.weight_files),
        rounds=found,
        erase_bytes_per_second=written / median(one.erase_seconds for one in read),
        copy_bytes_per_second=written / median(one.copy_seconds for one in read),
        ratio=median(one.ratio for one in read),
        ratio_unread=median(one.ratio for one in unread),
        peak_bytes=max(one.peak_bytes for one in found),
        source_digest_seconds=digest_seconds,
        output_digest_seconds=time.perf_counter() - start,
        machine={
            "cpus": os.cpu_count() or 0,
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
    )


def show(summary: Summary) -> str:
    """Return the summary as text."""
    lines = [f"{summary.written_bytes / 1e9:.2f} of {summary.source_bytes / 1e9:.2f} GB written"]
    lines += [
        f"  {'read' if one.warm else 'unread'}, round {number}: {one.erase_seconds:6.1f} s, "
        f"cp {one.copy_seconds:6.1f} s, ratio {one.ratio:.2f}, "
        f"processor {one.erase_cpu_seconds:.1f} s, cp {one.copy_cpu_seconds:.1f} s, "
        f"peak {one.peak_bytes / 1e6:.0f} MB, load {one.load:.1f}"
        for number, one in enumerate(summary.rounds, start=1)
    ]
    speeds = f"{summary.erase_bytes_per_second / 1e6:.0f} MB/s, cp {summary.copy_bytes_per_second / 1e6:.0f} MB/s"
    lines.append(f"  median of a read source {speeds}, ratio {summary.ratio:.2f}; unread {summary.ratio_unread:.2f}")
    seconds = summary.source_digest_seconds, summary.output_digest_seconds
    lines.append("digest of the source: {:.1f} s, of the output: {:.1f} s".format(*seconds))
    return "\n".join(lines)


def fitting(size: int, scratch: Path) -> int:
    """Return `size`, or what fits on the disk of `scratch` where that is less, and say so."""
    room = int(shutil.disk_usage(scratch).free / NEEDED)
    if room < size:
        print(f"only {room / 1e9:.1f} GB fit here, not {size / 1e9:.1f}", file=sys.stderr)
    return min(size, room)


def main(arguments: Sequence[str]) -> int:
    """Run the rounds, print the summary and write it to `reports/bench-erase.json`."""
    parser = argparse.ArgumentParser(prog="scripts/bench erase", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=8.0, help="GB of the source")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", type=Path, default=REPORT, help="where the summary goes as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        size = fitting(int(options.size * 1e9), Path(folder))
        summary = measure(Path(folder), size, max(1, options.rounds))
    print(show(summary))
    options.report.write_text(dumps(summary.model_dump(mode="json")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    child(*map(Path, sys.argv[1:]))
