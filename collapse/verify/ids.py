"""Checks that the token ids in the output's config files name the tokens that the source's named.

Logits do not depend on them, so running the model cannot tell; generation would stop at another token, or pad with it.
A plan's config edits are no excuse: no rewrite may choose another token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collapse.checkpoint import Checkpoint
from collapse.free_layout import BASE, is_free_config
from collapse.plan import Plan, Reroot
from collapse.rewrite.tensors import token_narrow
from collapse.token_ids import ID_FILES, ids_in, vocab_size


def id_problems(output: Path, source: Checkpoint, plan: Plan) -> Iterator[str]:
    """Yield a line for each id field that both have and whose token is not the source's."""
    narrow = token_narrow(plan)
    rows = narrow.size if narrow else vocab_size(source.config)
    new_ids = {old: new for new, old in enumerate(narrow.kept)} if narrow else None
    for name in ID_FILES:
        before, after = _ids(source.root / name, rows), _ids(output / name, len(narrow.kept) if narrow else rows)
        for rooted in plan.of_kind(Reroot) if name == "config.json" else ():
            root = f"{rooted.config_root}."
            inner = {path.removeprefix(root): ids for path, ids in before.items() if path.startswith(root)}
            before = inner | {path: ids for path, ids in before.items() if path in rooted.inherits}
        for path in before.keys() & after.keys():
            wanted = before[path] if new_ids is None else [new_ids.get(old) for old in before[path]]
            if after[path] != wanted:
                yield f"{name}: {path} is {_shown(after[path])}, the source's token is {_shown(wanted)} there"


def _ids(path: Path, rows: int) -> dict[str, list[int]]:
    """Return the ids of every field of a JSON file, in their order; empty where there is no such file."""
    found: dict[str, list[int]] = {}
    if path.is_file():
        values = json.loads(path.read_bytes())
        for field, number in ids_in(values[BASE] if is_free_config(values) else values, rows):
            found.setdefault(field, []).append(number)
    return found


def _shown(ids: list[Any]) -> str:
    return ", ".join(map(str, ids))
