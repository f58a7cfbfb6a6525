"""report.json: what an export did, in figures. Everything else in the report is drawn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from collapse.canonical import dumps
from collapse.errors import CollapseError
from collapse.plan import (
    AddBias,
    Evidence,
    Grade,
    Plan,
    Record,
    Replace,
    Skipped,
    StandIn,
    first_problem,
    is_free,
)
from collapse.report.folding import fold
from collapse.report.speed import DecodeSpeed
from collapse.schema import Workload
from collapse.search_path import SearchPath
from collapse.verdict import Check, Status, Verdict

if TYPE_CHECKING:  # a report is read and drawn without torch
    from collapse.analysis.flops import Cost
    from collapse.program import Program

State = Literal["kept", "narrowed", "removed"]


class Figures(Record):
    """The figures of `collapse.analysis.flops.Cost`, of a model or of one module."""

    params: int = 0
    bytes: int = 0
    prefill_flops: int = 0
    prefill_flops_causal: int = 0
    decode_flops_per_token: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes_per_decode_token: int = 0

    @classmethod
    def of(cls, cost: Cost) -> Figures:
        """Return the figures of a cost, without its modules."""
        return cls(**cost.figures())

    def __bool__(self) -> bool:
        return any(self.model_dump().values())


class Source(Record):
    """The source checkpoint: a name that is no path of this machine, and the digest of its files."""

    name: str
    digest: str
    model_type: str


class Applied(Record):
    """One rewrite of the plan, as the report shows it.

    `replaced` are the tensors that it gives computed data, added ones included; the field is there only where there
    are any.
    """

    pass_name: str = Field(alias="pass")
    site: str
    kind: str
    grade: Grade
    evidence: Evidence
    replaced: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_empty(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = whole(self)
        return found if self.replaced else {name: value for name, value in found.items() if name != "replaced"}


class Verified(Record):
    """What the verifier found, or `not-run` for a plan that has not been carried out."""

    status: Status | Literal["not-run"]
    checks: tuple[Check, ...] = ()


class Module(Record):
    """One module, or `count` equal ones of consecutive layers; the figures are those of one of them."""

    path: str
    type: str
    count: int = 1
    before: Figures
    after: Figures

    @property
    def state(self) -> State:
        """Removed: nothing of it is left. Narrowed: some figure is smaller."""
        if self.before and not self.after:
            return "removed"
        before, after = self.before.model_dump(), self.after.model_dump()
        return "narrowed" if any(after[name] < before[name] for name in before) else "kept"


class TensorParallel(Record):
    """Sizes up to 64 that divide the attention heads, the KV heads and the vocabulary, before and after."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class GraphFigures(Record):
    """What edits of the graph save beyond the checkpoint, for `collapse.load_graph` alone.

    FLOPs are executed ones of a prefill of the workload's prompt and of a decode step; nodes are calls.
    """

    prefill_flops_before: int
    prefill_flops_after: int
    decode_flops_before: int
    decode_flops_after: int
    nodes_before: int
    nodes_after: int
    table_bytes: int


class Report(Record):
    """The content of report.json. Paths of the machine are not part of it, nor times but those of `decode_speed`."""

    format: Literal["collapse-report/1"] = "collapse-report/1"
    source: Source
    input_schema: dict[str, Any] = Field(alias="schema")
    plan_digest: str
    workload: Workload
    before: Figures
    after: Figures
    rewrites: tuple[Applied, ...]
    skipped: tuple[Skipped, ...]
    verified: Verified
    tensor_parallel: TensorParallel
    modules: tuple[Module, ...] = ()
    notes: tuple[str, ...] = ()
    unmet: tuple[str, ...] = Field(default=(), description="budgets that were not met, with the reasons")
    graph: GraphFigures | None = None
    decode_speed: DecodeSpeed | None = Field(default=None, description="where a budget asks for decode speed")
    search: SearchPath | None = Field(default=None, description="what a search under a budget went through")

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)

    def save(self, path: Path) -> None:
        """Write the report to `path` as canonical JSON."""
        path.write_text(dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a report; raises `CollapseError` with the field and what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise CollapseError(f"cannot be read ({error.strerror})", where=str(path)) from error
        except ValidationError as error:
            raise CollapseError(first_problem(error), where=str(path), fix="export again") from None


def build_report(
    plan: Plan,
    before: Cost,
    after: Cost,
    verdict: Verdict | None,
    *,
    name: str,
    program: Program,
    workload: Workload,
    divided: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Report:
    """Put a report together.

    Args:
        plan: what was decided.
        before: the cost of the source, counted on `program`.
        after: the cost of the collapsed program, from the same counter.
        verdict: what the verifier found; None where nothing was exported.
        name: how the source is called.
        program: the source's program, for the types and the order of modules.
        workload: the request that the figures are for.
        divided: heads, KV heads and vocabulary that tensor parallelism divides, before and after.
    """
    return Report.model_validate(
        {
            "source": Source(name=name, digest=plan.source, model_type=plan.model_type),
            "schema": plan.input_schema,
            "plan_digest": plan.digest,
            "workload": workload,
            "before": Figures.of(before),
            "after": Figures.of(after),
            "rewrites": [_applied(rewrite) for rewrite in plan.rewrites],
            "skipped": plan.skipped,
            "verified": _verified(verdict),
            "tensor_parallel": TensorParallel(before=common_sizes(divided[0]), after=common_sizes(divided[1])),
            "modules": modules_of(before, after, program),
            "notes": notes(plan, Figures.of(before), Figures.of(after)),
        }
    )


def _applied(rewrite: Any) -> dict[str, Any]:
    return {
        "pass": rewrite.pass_name, "site": rewrite.site, "kind": rewrite.kind,
        "grade": rewrite.evidence.grade, "evidence": rewrite.evidence,
        "replaced": _computed(rewrite),
    }  # fmt: skip


def _computed(rewrite: Any) -> tuple[str, ...]:
    """Return the tensors that a rewrite gives computed data, by the source's names or, of added ones, such as those."""
    if isinstance(rewrite, StandIn | AddBias):
        return tuple(f"{rewrite.prefix}{part}" for part in sorted(rewrite.added))
    return tuple(rewrite.tensors) if isinstance(rewrite, Replace) else ()


def _verified(verdict: Verdict | None) -> Verified:
    return Verified(status=verdict.status, checks=verdict.checks) if verdict else Verified(status="not-run")


def common_sizes(dimensions: Sequence[int], limit: int = 64) -> tuple[int, ...]:
    """Return the sizes from 1 to `limit` that divide every one of `dimensions`; none where there are none."""
    if not dimensions:
        return ()
    return tuple(size for size in range(1, limit + 1) if all(dimension % size == 0 for dimension in dimensions))


def modules_of(before: Cost, after: Cost, program: Program) -> tuple[Module, ...]:
    """Return every module that costs something, in the order in which it runs, equal layers folded."""
    from collapse.analysis.flops import execution_order

    order = {path: index for index, path in enumerate(execution_order(program))}
    costly = [path for path in before.modules if program.module_types.get(path) != "ModuleList"]
    paths = sorted(costly, key=lambda path: (order.get(path, len(order)), path))
    values = {path: _pair(path, before.modules, after.modules, program.module_types) for path in paths}
    return tuple(
        Module(path=item.path, type=item.value[0], count=item.count, before=item.value[1], after=item.value[2])
        for item in fold(values)
    )


def _pair(
    path: str, before: Mapping[str, Cost], after: Mapping[str, Cost], types: Mapping[str, str]
) -> tuple[str, Figures, Figures]:
    left = Figures.of(after[path]) if path in after else Figures()
    return types.get(path, ""), Figures.of(before[path]), left


def notes(plan: Plan, before: Figures, after: Figures) -> tuple[str, ...]:
    """Say in words what the figures alone might leave unclear, zero savings first of all."""
    found = []
    if not plan.rewrites:
        reasons = sorted({item.reason for item in plan.skipped})
        why = f"every site was left: {'; '.join(reasons)}" if reasons else "no pass proposed anything"
        found.append(f"Nothing was removed: {why}.")
    elif before == after:
        found.append("The figures are unchanged: the rewrites remove no tensor and no matrix work of the checkpoint.")
    elif before.prefill_flops == after.prefill_flops:
        found.append("No FLOP is saved: what went is looked up or never read, and takes part in no product.")
    if plan.rewrites and before.kv_bytes_per_token == after.kv_bytes_per_token:
        found.append("The KV cache is as large as before: no attention module went.")
    replaced = sum(len(rewrite.tensors) for rewrite in plan.of_kind(Replace))
    if replaced:
        found.append(f"{replaced} replaced tensors have computed data: the model is another function than its source.")
    if any(map(is_free, plan.rewrites)):
        maps = len(plan.of_kind(StandIn))
        with_maps = f", with maps in place of {maps} modules" if maps else ""
        found.append(
            f"The layout is free{with_maps}: `collapse.load` loads it, plain transformers without collapse does not."
        )
    found += [f"Not healed: {item.reason}." for item in plan.skipped if item.pass_name == "heal"]
    measured = sum(1 for rewrite in plan.rewrites if rewrite.evidence.grade == "measured")
    if measured:
        found.append(f"{measured} of {len(plan.rewrites)} rewrites are graded measured, which promises nothing.")
    return tuple(found)
