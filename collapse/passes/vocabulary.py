"""`vocabulary`: keep the rows of the token tables that the schema's inputs and outputs can use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import getitem

from collapse.analysis.token_use import Declined, TokenUse, token_use
from collapse.auto import config_from
from collapse.passes.base import Context, Proposal
from collapse.plan import Axis, Narrow, Skipped
from collapse.token_ids import map_ids
from collapse.trace import meta_model

NAME = "vocabulary"


@dataclass(frozen=True)
class Vocabulary:
    """Narrows the input embedding and the output head to the token ids in use."""

    name: str = NAME

    def propose(self, context: Context) -> Proposal:
        """Find the token tables in the graph and the ids in use, and propose keeping just those rows."""
        use = token_use(context.checkpoint, context.schema, context.texts, context.output_texts)
        tables = context.token_tables
        if reason := _not_together(context, tables):
            return Proposal(skipped=(_skipped(tables[0], reason, {}),))
        rewrite, skipped = propose_vocabulary(use, tuple(Axis(tensor=t, dim=0) for t in tables), context.token_rows)
        if rewrite and not _loads_narrowed(context, rewrite):
            reason = (
                "config.json has no fields that give all token tables fewer rows, so transformers could not load them"
            )
            return Proposal(skipped=(_skipped(rewrite.site, reason, rewrite.evidence.figures),))
        return Proposal((rewrite,) if rewrite else (), (skipped,) if skipped else ())


def _not_together(context: Context, tables: tuple[str, ...]) -> str | None:
    """Return why the tables cannot be cut by one set of ids: each of them must have a row for every id."""
    for table in tables:
        group = context.checkpoint.group(table)
        cut = group.cuts[0] if group else None
        if isinstance(cut, str) or (cut is not None and cut.block > 1):
            why = cut if isinstance(cut, str) else f"{cut.block} of its rows share a scale or word"
            return f"{table} is quantised, and its rows cannot go one by one: {why}"
    rows = sorted({context.rows_of(table) for table in tables})
    return f"the token tables have different numbers of rows: {rows}" if len(rows) > 1 else None


def _loads_narrowed(context: Context, rewrite: Narrow) -> bool:
    """Whether a model built from the edited config has the kept rows in every token table, and is else the same."""
    new_ids = {old: new for new, old in enumerate(rewrite.kept)}
    edited = map_ids(dict(context.checkpoint.config), rewrite.size, lambda number, _: new_ids[number])
    for path, value in rewrite.config.items():
        *parents, last = path.split(".")
        reduce(getitem, parents, edited)[last] = value
    model = meta_model(config_from(edited))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters(remove_duplicate=False)}
    program = context.program
    tables = {alias for a in rewrite.axes for alias in program.aliases(program.model_name(a.tensor) or a.tensor)}
    for name, shape in shapes.items():
        before = program.shapes.get(name, ())
        if shape != ((len(rewrite.kept), *before[1:]) if name in tables else before):
            return False
    return True


def propose_vocabulary(
    use: TokenUse | Declined, axes: tuple[Axis, ...], size: int
) -> tuple[Narrow | None, Skipped | None]:
    """Return one `Narrow` over all token tables, or why the tables stay.

    `axes` are the vocabulary axes of the embedding and of the head (one, where they are tied), all with
    `size` rows.
    """
    site = axes[0].tensor if axes else "token table"
    if isinstance(use, Declined):
        return None, _skipped(site, use.reason, dict(use.figures))
    evidence = use.evidence
    if not axes:
        return None, _skipped(site, "no tensor is indexed by token ids", evidence.figures)
    if use.size != size:
        return None, _skipped(site, f"the tables have {size} rows, config.json says {use.size}", evidence.figures)
    if not len(use.kept):
        return None, _skipped(site, "no token is in use", evidence.figures)
    if len(use.kept) == size:
        return None, _skipped(site, "every row is in use", evidence.figures)
    rewrite = {
        "pass": NAME,
        "site": site,
        "evidence": evidence,
        "config": {where: len(use.kept) for where in use.size_fields},
        "axes": axes,
        "size": size,
        "kept": use.kept,
        "relabels": "tokens",
    }
    return Narrow.model_validate(rewrite), None


def _skipped(site: str, reason: str, figures: dict[str, float | int | str]) -> Skipped:
    return Skipped.model_validate({"pass": NAME, "site": site, "reason": reason, "figures": figures})
