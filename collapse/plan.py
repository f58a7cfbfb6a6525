"""The plan: ordered rewrites with their evidence. The only thing that passes between deciding and doing.

A plan is data, not code: it can be read in a pull request, compared, and applied on another machine.
It has one digest; two plans with the same digest collapse the same source to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from collapse.canonical import digest, dumps
from collapse.errors import PlanError

Grade = Literal["proved", "certified", "measured"]
Stage = Literal["fuse", "short-circuit", "erase"]
Replacement = Literal["zero", "identity", "constant"]
GraphEdit = Literal["next-token", "fold-constants"]
Layout = Literal["native", "free"]
Map = Literal["zero", "constant", "linear", "low-rank"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PARTS: Mapping[Map, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "zero": ((), ()), "constant": (("bias",), ()), "linear": (("weight",), ("bias",)),
    "low-rank": (("down", "up"), ("bias",)),
}  # fmt: skip  # of each map: the tensors that it has, and those that it may have


class Record(BaseModel):
    """Base of everything that crosses a file boundary: frozen, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Evidence(Record):
    """Why a rewrite is allowed.

    `proved` follows from graph and schema, and the logits are equal. `certified` is a statistical bound on
    data that chose nothing. `measured` is a loss that was measured and promises nothing.
    """

    grade: Grade
    claim: str = Field(description="one sentence that can be true or false")
    method: str = Field(description="how the claim was reached")
    figures: dict[str, float | int | str] = Field(default_factory=dict)


class IndexSet(Record):
    """A sorted set of row numbers, stored as half-open runs `[start, stop)` so that a plan stays readable."""

    runs: tuple[tuple[int, int], ...]

    @field_validator("runs")
    @classmethod
    def _ascending(cls, runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        end = -1
        for start, stop in runs:
            if start <= end or stop <= start:
                raise ValueError(f"runs must be non-empty, ascending and apart, got [{start}, {stop}) after {end}")
            end = stop
        return runs

    @classmethod
    def of(cls, indices: Iterable[int]) -> IndexSet:
        """Return the set of the given non-negative integers."""
        runs: list[list[int]] = []
        for index in sorted(set(indices)):
            if runs and runs[-1][1] == index:
                runs[-1][1] = index + 1
            else:
                runs.append([index, index + 1])
        return cls(runs=tuple((start, stop) for start, stop in runs))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        for start, stop in self.runs:
            yield from range(start, stop)

    def __contains__(self, index: int) -> bool:
        return any(start <= index < stop for start, stop in self.runs)


class Axis(Record):
    """One dimension of one checkpoint tensor."""

    tensor: str
    dim: int


class _Rewrite(Record):
    pass_name: str = Field(alias="pass")
    site: str = Field(description="the module path, tensor or axis that collapses")
    evidence: Evidence
    config: dict[str, Any] = Field(
        default_factory=dict, description="dotted config.json path -> the value that says so natively"
    )


class Erase(_Rewrite):
    """The named checkpoint tensors are not written; nothing reads them."""

    kind: Literal["erase"] = "erase"
    tensors: tuple[str, ...]


class ShortCircuit(_Rewrite):
    """The module at `site` is replaced by zero, by its input, or by a constant, and its tensors go.

    `constant` has the shape of the module's output without its batch and sequence dimensions.
    """

    kind: Literal["short-circuit"] = "short-circuit"
    by: Replacement
    constant: tuple[float, ...] | None = None
    tensors: tuple[str, ...]
    stage: Stage = "erase"
    placeholder: bool = False
    threshold: float | None = Field(default=None, description="fuse: the detector's threshold, in nats")


class Narrow(_Rewrite):
    """Of every axis in `axes`, all of the same `size`, only the rows in `kept` remain, in ascending order.

    `relabels` says what the row numbers are: token ids (inputs, tokenizer and config are renumbered too),
    positions, or channels (heads, neurons, experts), which nothing outside the named axes refers to.
    In the free layout `local` has the fields of the language model's config with which the module at `site`, alone,
    is built in the output; other blocks keep theirs.
    """

    kind: Literal["narrow"] = "narrow"
    axes: tuple[Axis, ...]
    size: int
    kept: IndexSet
    relabels: Literal["tokens", "positions", "channels"]
    local: dict[str, Any] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_empty(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = whole(self)
        return found if self.local else {name: value for name, value in found.items() if name != "local"}

    @property
    def dropped(self) -> int:
        """Number of rows that go."""
        return self.size - len(self.kept)


class DropLayers(_Rewrite):
    """Of the `size` blocks in the module list `site` only those in `kept` remain, renumbered from 0 in their order.

    A dropped block passes its input on, and its cache entries go. Names in the files are `prefix`, the block's
    number, a dot and the rest; `tensors` are those of the dropped blocks.
    """

    kind: Literal["drop-layers"] = "drop-layers"
    prefix: str
    size: int
    kept: IndexSet
    tensors: tuple[str, ...]


class Reroot(_Rewrite):
    """The model whose config stands under `config_root` becomes the whole checkpoint.

    The config of the output has the `fields` of that part of the source's (of the whole, where `config_root` is
    empty), then those of `inherits` that the whole has, then the edits of `config`, which are paths in the new config;
    other rewrites' paths are the source's. Tensors are renamed by the first pair of `names` whose left side begins
    their name, module paths in a quantization_config by those of `modules` too; `tensors` and `files` are left out.
    """

    kind: Literal["reroot"] = "reroot"
    config_root: str
    fields: tuple[str, ...]
    inherits: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...]
    modules: tuple[tuple[str, str], ...] = ()
    tensors: tuple[str, ...]
    files: tuple[str, ...] = ()


NOT_PROVED = "computed weights are certified or measured, never proved"


class Replace(_Rewrite):
    """The named tensors of the files get computed data, which stand in a values file beside the plan.

    `tensors` gives each, by the source's name, the SHA-256 (hex) of its new data: in the source's dtype, in the shape
    that the other rewrites leave. What is computed is never proved to do what the source does.
    """

    kind: Literal["replace"] = "replace"
    tensors: dict[str, Sha256] = Field(min_length=1)

    @field_validator("evidence")
    @classmethod
    def _not_proved(cls, evidence: Evidence) -> Evidence:
        if evidence.grade == "proved":
            raise ValueError(NOT_PROVED)
        return evidence


class Added(Record):
    """A tensor that the source does not have: the SHA-256 (hex) of its data, its dtype as in safetensors, its shape."""

    sha256: Sha256
    dtype: Literal["F64", "F32", "F16", "BF16"]
    shape: tuple[Annotated[int, Field(ge=1)], ...]


class _Adding(_Rewrite):
    """Gives the module `site` tensors that stand in the values file; `prefix` and the part's name are theirs there.

    `prefix` is what the names of the module's tensors in the source's files begin with.
    """

    prefix: str
    added: dict[str, Added] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _not_proved(self) -> Self:
        if self.added and self.evidence.grade == "proved":
            raise ValueError(NOT_PROVED)
        return self


class StandIn(_Adding):
    """In the free layout: the module at `site` gives a map of its own input `x`, and its tensors and cache go.

    `zero`: nothing. `constant`: `bias`, of shape [channels]. `linear`: `x @ weight.T + bias`, where `weight` has the
    shape [channels, channels] and `bias` may be missing. `low-rank`: `x @ down.T @ up.T + bias`, where `down` has the
    shape [rank, channels]. The module of the model gives a tuple of `outputs`, of which this is the first and None
    the others; where `outputs` is None it gives the tensor alone. `tensors` are all that the files have of the module.
    """

    kind: Literal["stand-in"] = "stand-in"
    by: Map
    outputs: int | None = Field(default=None, ge=1)
    tensors: tuple[str, ...]

    @model_validator(mode="after")
    def _has_parts(self) -> Self:
        needed, optional = PARTS[self.by]
        if set(needed) - self.added.keys() or self.added.keys() - {*needed, *optional}:
            raise ValueError(f"{self.by} takes the tensors {[*needed, *optional]}, not {sorted(self.added)}")
        shapes = {part: added.shape for part, added in self.added.items()}
        width = shapes.get("weight", shapes.get("up", shapes.get("bias", ())))[:1]
        wanted = {"bias": width, "weight": width * 2, "up": width + shapes.get("up", ())[1:]}
        wanted["down"] = wanted["up"][1:] + width
        wrong = [part for part, shape in shapes.items() if shape != wanted[part] or len(shape) != 1 + (part != "bias")]
        if wrong:
            raise ValueError(f"the shapes {shapes} do not make a map of as many channels")
        return self


class AddBias(_Adding):
    """In the free layout: the linear module at `site`, which has no bias, gets the one in `added`."""

    kind: Literal["add-bias"] = "add-bias"

    @model_validator(mode="after")
    def _one_bias(self) -> Self:
        if self.added.keys() != {"bias"} or len(self.added["bias"].shape) != 1:
            raise ValueError("adds one tensor, a bias of shape [channels]")
        return self


class Specialise(_Rewrite):
    """What the schema decides beside the weights: a config switch, or an edit of the graph alone.

    `next-token`: the graph gives logits of the last new position only. `fold-constants`: what the schema makes
    constant is folded, for sequences of at most `max_tokens`, where `unpadded` says that no request is padded.
    """

    kind: Literal["specialise"] = "specialise"
    graph: GraphEdit | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    unpadded: bool = False


Rewrite = Annotated[
    Erase | ShortCircuit | Narrow | DropLayers | Reroot | Replace | StandIn | AddBias | Specialise,
    Field(discriminator="kind"),
]


def is_free(rewrite: Rewrite) -> bool:
    """Whether only the free layout can say what the rewrite does."""
    return isinstance(rewrite, StandIn | AddBias) or bool(isinstance(rewrite, Narrow) and rewrite.local)


class Skipped(Record):
    """A site that a pass looked at and left, with the reason; reports list them as near misses."""

    pass_name: str = Field(alias="pass")
    site: str
    reason: str
    figures: dict[str, float | int | str] = Field(default_factory=dict)


class Plan(Record):
    """Ordered rewrites for one source under one schema.

    `source` is the digest of the source checkpoint's files, `schema_digest` that of the contract.
    `created_by` holds the versions that decided; they are part of the digest, since another version may
    decide otherwise. With the `free` layout blocks may have shapes and modules of their own, which plain transformers
    cannot load.
    """

    format: Literal["collapse-plan/1"] = "collapse-plan/1"
    source: str
    model_type: str
    input_schema: dict[str, Any] = Field(alias="schema")
    schema_digest: str
    stage: Stage = "erase"
    layout: Layout = "native"
    rewrites: tuple[Rewrite, ...]
    skipped: tuple[Skipped, ...] = ()
    created_by: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_layout(self) -> Self:
        free = [rewrite for rewrite in self.rewrites if is_free(rewrite)]
        if free and self.layout != "free":
            reason = f"{free[0].kind} of {free[0].pass_name} needs the free layout, the plan has the native one"
            raise PlanError(reason, where=free[0].site, fix="plan with --layout free")
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = whole(self)
        return found if self.layout == "free" else {name: value for name, value in found.items() if name != "layout"}

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the plan."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return self.model_dump(mode="json", by_alias=True)

    def save(self, path: Path) -> None:
        """Write the plan to `path` as canonical JSON."""
        path.write_text(dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan; raises `PlanError` with the field and what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise PlanError(f"cannot be read ({error.strerror})", where=str(path)) from error
        except ValidationError as error:
            raise PlanError(first_problem(error), where=str(path), fix="make a new one with `collapse plan`") from None

    def of_kind(self, kind: type[Any]) -> tuple[Any, ...]:
        """Return the rewrites of one kind, in order."""
        return tuple(rewrite for rewrite in self.rewrites if isinstance(rewrite, kind))


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a pydantic error as `field = value: what is allowed`."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "document"
    shown = repr(first.get("input"))
    return f"field {field} = {shown if len(shown) <= 80 else shown[:77] + '...'}: {first['msg'].lower()}"
