"""Drop rows of learned position tables that no input within the schema's length bound can reach."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import fx
from transformers import PreTrainedConfig

from collapse.analysis.tables import last_row, position_tables
from collapse.errors import UnsupportedError
from collapse.passes.base import Context, Proposal
from collapse.plan import Axis, Evidence, IndexSet, Narrow, Skipped
from collapse.program import Program
from collapse.trace import meta_model


@dataclass(frozen=True)
class Positions:
    """The pass; see `propose_positions`."""

    name: str = "positions"

    def propose(self, context: Context) -> Proposal:
        """Propose keeping the position rows that `max_tokens` can reach."""
        return propose_positions(context, self.name)


def propose_positions(context: Context, name: str) -> Proposal:
    """Find learned position tables in the graph, measure the last row in use, and narrow to it."""
    tables = position_tables(context.program)
    if not tables:
        reason = "the graph looks up no learned position table"
        return Proposal(skipped=(Skipped(pass_name=name, site="positions", reason=reason),))
    bound = context.schema.max_tokens
    if bound is None:
        reason = "the schema gives no max_tokens, so every position can occur"
        return Proposal(skipped=tuple(Skipped(pass_name=name, site=table, reason=reason) for table in tables))
    proposals = [_propose_table(context, name, table, index, bound) for table, index in sorted(tables.items())]
    return Proposal(
        tuple(p for p in proposals if isinstance(p, Narrow)), tuple(p for p in proposals if isinstance(p, Skipped))
    )


def _propose_table(context: Context, name: str, table: str, index: fx.Node, bound: int) -> Narrow | Skipped:
    rows = context.program.shapes[table][0]
    needed = last_row(context.program, index, bound) + 1
    if needed >= rows:
        reason = f"inputs of {bound} tokens reach row {needed - 1} of {rows}: every row can occur"
        return Skipped(pass_name=name, site=table, reason=reason)
    config = _config_edit(context.config, context.program, table, rows, needed)
    if config is None:
        reason = "no field of the config says the number of rows, so plain transformers could not load fewer"
        return Skipped(pass_name=name, site=table, reason=reason)
    evidence = Evidence(
        grade="proved",
        claim=f"no input of at most {bound} tokens reads a row of {table} from {needed} on",
        method="the index computation, cut out of the traced graph, evaluated at the longest allowed length",
        figures={"max_tokens": bound, "last_row": needed - 1, "rows": rows},
    )
    kept = IndexSet(runs=((0, needed),))
    axes = tuple(Axis(tensor=tensor, dim=0) for tensor in context.file_names(table))
    return Narrow(
        pass_name=name,
        site=table,
        evidence=evidence,
        axes=axes,
        size=rows,
        kept=kept,
        relabels="positions",
        config=config,
    )


def _config_edit(
    config: PreTrainedConfig, program: Program, table: str, rows: int, needed: int
) -> dict[str, int] | None:
    """Find the config field that sets the table's rows, by building the model with that field changed."""
    for field, value in config.to_dict().items():
        offset = rows - value if type(value) is int else -1
        if not 0 <= offset <= 8 or needed - offset < 1:
            continue
        changed = copy.deepcopy(config)
        setattr(changed, field, needed - offset)
        if _only_table_changed(changed, program, table, needed):
            return {field: needed - offset}
    return None


def _only_table_changed(config: PreTrainedConfig, program: Program, table: str, needed: int) -> bool:
    try:
        parameters = dict(meta_model(config).named_parameters(remove_duplicate=False))
    except UnsupportedError:
        return False
    for name, parameter in parameters.items():
        before = program.shapes.get(name)
        expected = (needed, *before[1:]) if before and name == table else before
        if tuple(parameter.shape) != expected:
            return False
    return True
