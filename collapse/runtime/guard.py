"""Refuse inputs outside the schema that a model was collapsed for, before its first module runs.

The check is a forward pre-hook of the whole model, so it sees each step of `generate` too. What passes through
the model is what it judges: the last token of a generation is never fed back, and text is known by its ids alone
(`charset` and `max_line_length` are for `InputSchema.check_text`). It reads values, so it stays outside compiled
graphs: under `torch.compile(model)` it runs before the graph, and in an exported program it has no part.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils.generic import TransformersKwargs

from collapse.checkpoint import Checkpoint
from collapse.errors import SchemaError
from collapse.plan import IndexSet, Narrow, Plan
from collapse.runtime.reliance import Clause, reliance
from collapse.schema import InputSchema, load_schema
from collapse.token_ids import ID_FILES, ids_in
from collapse.trace import CACHE_ARGUMENTS

OFF = 'or load with guard="off", which promises nothing'
FOREIGN = re.compile(
    r"pixel|image|video|audio|vision|visual|speech|^input_(features|values)|inputs_embeds|^encoder_|^features"
)
OLD = ("cache_position",)  # earlier transformers had it; this one ignores it
TYPE_IDS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "block_sequence_ids")


@dataclass(frozen=True)
class Guard:
    """What a collapsed model takes.

    Attributes:
        schema: the contract; its token ids are those of the source.
        rows: token ids below this have a row in the embedding.
        allowed: the ids that may occur, in the numbering of the collapsed model; None: all that have a row.
        kept: source ids of the rows, in their order, where the vocabulary was narrowed.
        arguments: the parameters of the model's forward, in their order.
        text_inputs: keywords that speak about token ids, or are switches.
        relied: for each clause, what the plan concluded from it.
    """

    schema: InputSchema
    rows: int
    allowed: frozenset[int] | None
    kept: IndexSet | None
    arguments: tuple[str, ...]
    text_inputs: frozenset[str]
    relied: Mapping[Clause, tuple[str, ...]]

    def refuse(self, clause: Clause, what: str, *, where: str, fix: str) -> SchemaError:
        """Return the error about `clause`, with what the plan concluded from it."""
        reasons = "; ".join(self.relied[clause])
        return SchemaError(f"{what} ({reasons})" if reasons else what, where=where, fix=fix)


def make_guard(plan: Plan, model: PreTrainedModel, root: Path) -> Guard:
    """Return the guard for `model`, loaded from the directory `root` that `plan` made."""
    schema = load_schema(plan.input_schema)
    rows = int(model.get_input_embeddings().weight.shape[0])
    tables = [rewrite for rewrite in plan.of_kind(Narrow) if rewrite.relabels == "tokens"]
    kept = tables[0].kept if tables else None
    arguments = tuple(inspect.signature(model.forward).parameters)
    known = {*arguments, *TransformersKwargs.__annotations__, *CACHE_ARGUMENTS, *TYPE_IDS, *OLD}
    text_inputs = frozenset(name for name in known if not FOREIGN.search(name))
    return Guard(schema, rows, _allowed(schema, kept, rows, root), kept, arguments, text_inputs, reliance(plan))


def _allowed(schema: InputSchema, kept: IndexSet | None, rows: int, root: Path) -> frozenset[int] | None:
    """Return the stated ids of inputs and outputs, renumbered, and the special ones; None where not stated.

    Outputs are fed back, so where they are given by charset or corpus every id can be an input.
    """
    output = schema.output
    if schema.tokens is None or output.charset is not None or output.corpus is not None:
        return None
    stated = {*schema.tokens, *(output.tokens or ())}
    if kept is not None:
        stated = {new for new, old in enumerate(kept) if old in stated}
    checkpoint = Checkpoint.open(root)
    named = {number for name in ID_FILES for _, number in ids_in(checkpoint.read_json(name) or {}, rows)}
    added = (checkpoint.read_json("tokenizer.json") or {}).get("added_tokens") or ()
    return frozenset(stated | named | {entry["id"] for entry in added if entry.get("special")})


def install(model: nn.Module, guard: Guard) -> RemovableHandle:
    """Check every call of `model` from now on, before its other hooks; the handle takes the check away."""
    return model.register_forward_pre_hook(partial(_before_forward, guard), prepend=True, with_kwargs=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(guard: Guard, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_exporting():  # tensors have no values then
        check(guard, args, kwargs)


def check(guard: Guard, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `SchemaError` if a call of the model with these arguments is outside the schema.

    Args:
        guard: from `make_guard`.
        args, kwargs: as given to the model: `input_ids` is `[batch, new]`, `attention_mask` `[batch, past + new]`
            or what `generate` makes of it for a static cache, the cache holds `past` tokens.
    """
    given = {**dict(zip(guard.arguments, args, strict=False)), **kwargs}
    _check_modality(guard, given)
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_meta:
        return
    past = _past(given)
    _check_length(guard, past, ids.shape[1])
    _check_positions(guard, given.get("position_ids"))
    visible = _visible(given.get("attention_mask"), past, ids.shape[1])
    padded = visible is not None and not bool(visible.all())
    if padded and visible is not None:
        _check_padding(guard, visible)
    _check_tokens(guard, ids, visible if padded else None)


def _check_modality(guard: Guard, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in guard.text_inputs or not _holds_data(value):
            continue
        if name == "inputs_embeds":
            what = "breaks modality text: of embeddings nobody can say which tokens they are"
        else:
            what = "breaks modality text: the model was collapsed for token ids alone"
        raise guard.refuse("modality", what, where=name, fix=f"give input_ids without it, {OFF}")


def _holds_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_data, value))
    return hasattr(value, "__array__")  # tensors, arrays and pictures have it; switches and caches do not


def _past(given: Mapping[str, Any]) -> int:
    """Return how many tokens the cache holds; where it does not count them, what the mask says."""
    cache = next((given[name] for name in CACHE_ARGUMENTS if given.get(name) is not None), None)
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # states of fixed size, as Mamba's
        mask, new = given.get("attention_mask"), given["input_ids"].shape[1]
        return max(mask.shape[1] - new, 0) if isinstance(mask, Tensor) and mask.dim() == 2 else 0


def _check_length(guard: Guard, past: int, new: int) -> None:
    limit = guard.schema.max_tokens
    if limit is not None and past + new > limit:
        what = f"{past + new} tokens ({past} in the cache, {new} new) break max_tokens {limit}"
        raise guard.refuse("max_tokens", what, where="input_ids", fix=f"shorten the input or generate less, {OFF}")


def _check_positions(guard: Guard, positions: Any) -> None:
    """Judge positions that the caller counts himself: they say how long the sequence is, however few tokens there are.

    `generate` gives padding the position 1, also where a sequence has one token.
    """
    limit = guard.schema.max_tokens
    if limit is None or not isinstance(positions, Tensor) or not positions.numel():
        return
    if (last := int(positions.max())) >= max(limit, 2):
        what = f"position {last} breaks max_tokens {limit}: the last one is {limit - 1}"
        raise guard.refuse("max_tokens", what, where="position_ids", fix=f"give smaller ones, {OFF}")


def _visible(mask: Any, past: int, new: int) -> Tensor | None:
    """Return which tokens are no padding, `[batch, tokens]`, the new ones last; None where the mask does not say.

    A mask per query, `[batch, heads, new, tokens]`, says it of the new tokens alone: padding is what no query
    sees. Older tokens may be out of sight for another reason, a sliding window.
    """
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention")
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] < new:
        return None
    if mask.dim() == 2:
        return mask[:, : past + new] != 0
    if mask.shape[-1] < past + new:  # a buffer that wraps around
        return None
    seen = mask[:, 0, :, past : past + new]
    seen = seen > torch.finfo(seen.dtype).min / 2 if seen.is_floating_point() else seen != 0
    return seen.any(dim=1)


def _check_padding(guard: Guard, visible: Tensor) -> None:
    """Judge a mask that has zeros."""
    allowed: Literal["none", "left"] = guard.schema.padding
    if allowed == "none":
        what, fix = "zeros break padding none", "give one length at a time without padding"
    elif bool((visible[:, :-1] & ~visible[:, 1:]).any()):
        what, fix = "zeros after a token break padding left", "pad on the left"
    else:
        return
    raise guard.refuse("padding", what, where="attention_mask", fix=f"{fix}, {OFF}")


def _check_tokens(guard: Guard, ids: Tensor, visible: Tensor | None) -> None:
    """Every id needs a row; those that are no padding must be allowed as well."""
    found = set(ids.flatten().tolist())
    if outside := [number for number in found if not 0 <= number < guard.rows]:
        what = f"token id {min(outside)} is outside the model's {guard.rows} ids"
        fix = "encode with the tokenizer that was written beside the model"
        raise guard.refuse("tokens", what, where=_place(ids, min(outside)), fix=fix)
    if guard.allowed is None or found <= guard.allowed:
        return
    if visible is not None:
        found = set(ids[visible[:, -ids.shape[1] :]].tolist())
    if outside := sorted(found - guard.allowed):
        source = "" if guard.kept is None else f" (id {list(guard.kept)[outside[0]]} of the source)"
        count = len(guard.schema.tokens or ())
        what = f"token id {outside[0]}{source} breaks tokens: it is not among the {count} ids of the schema"
        raise guard.refuse("tokens", what, where=_place(ids, outside[0]), fix=f"change the input, {OFF}")


def _place(ids: Tensor, number: int) -> str:
    row, column = (ids == number).nonzero()[0].tolist()
    return f"input_ids, row {row}, position {column}"
