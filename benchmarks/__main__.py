"""Dispatch `scripts/bench NAME ...` to the module of that name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from collapse.errors import CollapseError

COMMANDS = {
    "export": "stage times and peak memory of one export, as medians over several runs",
    "architectures": "run the architecture suite; write reports/architectures.json and docs/architectures.md",
    "faults": "plant faults and true removals in tiny models; write reports/faults.json and a table in docs/verify.md",
    "guard": "what the guard of a loaded model costs a decode step",
    "last-token": "wall time of a prefill as a graph, with logits of all positions and of the last one",
    "erase": "speed and memory of writing half of a large checkpoint, against cp",
    "peers": "what other one-shot methods lose at the same size; write reports/peers-MODEL.json and plots",
    "json": "whether finished models still write JSON with its brackets in balance; write reports/json-MODEL.json",
    "decode": "decode speed of finished models against their source, eager and compiled, in turns",
    "headline": "size, regret and certified bounds of a ladder of exports on held-out log systems, with plots",
    "scaling": "time and memory of a search as layers and corpus tokens grow, with plots",
    "fuzz": "damaged input for every reader of files from elsewhere, 20,000 by default",
    "collect": "add the report.json of finished exports to reports/results.json",
    "readme-table": "rewrite the table in README.md from reports/results.json",
}


def main(arguments: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status."""
    if not arguments or arguments[0] not in COMMANDS:
        wanted = not arguments or arguments[0] in {"-h", "--help"}
        print("usage: scripts/bench NAME [-h] ...\n", file=sys.stderr)
        print("\n".join(f"  {name:<16}{what}" for name, what in COMMANDS.items()), file=sys.stderr)
        return 0 if wanted else 2
    module = importlib.import_module(f"benchmarks.{arguments[0].replace('-', '_')}")
    try:
        return int(module.main(arguments[1:]))
    except CollapseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
