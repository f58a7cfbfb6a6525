"""`vocabulary`: keep the rows of the token tables that the schema's inputs and outputs can use."""

from __future__ import annotations

from dataclasses import dataclass

from collapse.analysis.token_use import Declined, TokenUse, token_use
from collapse.passes.base import Context, Proposal
from collapse.plan import Axis, Narrow, Skipped

NAME = "vocabulary"


@dataclass(frozen=True)
class Vocabulary:
    """Narrows the input embedding and the output head to the token ids in use."""

    name: str = NAME

    def propose(self, context: Context) -> Proposal:
        """Find the token tables in the graph and the ids in use, and propose keeping just those rows."""
        use = token_use(context.checkpoint, context.schema, context.texts, context.output_texts)
        tables = context.token_tables
        rewrite, skipped = propose_vocabulary(use, tuple(Axis(tensor=t, dim=0) for t in tables), context.token_rows)
        return Proposal((rewrite,) if rewrite else (), (skipped,) if skipped else ())


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
