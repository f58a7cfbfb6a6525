"""The cost of a model that is given by its config alone: no weights, everything on the meta device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from collapse.analysis.flops import Cost, calls, cost, matrix_work
from collapse.analysis.sizes import Call, sizes_stand_out
from collapse.errors import CheckpointError, UnsupportedError
from collapse.portable import portable
from collapse.program import Program
from collapse.trace import CACHE_ARGUMENTS, cache_argument, meta_model, quiet, trace
from collapse.untrusted import check_config, read_json

POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
PRIMES = tuple(n for n in range(17, 400) if all(n % d for d in range(2, 20)) or n in (17, 19))


@dataclass(frozen=True)
class ConfigCost:
    """A cost with the programs it was counted on; `method` says which, in a sentence."""

    cost: Cost
    prefill: Program
    decode: Program
    method: str


def config_only(path: str | Path) -> PreTrainedConfig:
    """Read the config of a model directory, or a config.json, without asking for weights.

    Raises `CheckpointError` where there is none, and `UnsupportedError` where it asks for remote code or has a
    `model_type` that transformers does not know.
    """
    root = Path(path)
    file = root if root.is_file() else root / "config.json"
    if not file.is_file():
        raise CheckpointError("no config.json", where=str(path), fix="give the directory of a Hugging Face model")
    check_config(read_json(file), str(path))
    try:
        with quiet():
            return AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a bad config
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise UnsupportedError(reason, where=str(path), fix="give a model transformers knows") from None


def element_size(config: PreTrainedConfig) -> int:
    """Return the bytes of an element in the dtype that the config names; transformers' default is fp32."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize


def cost_of_config(
    config: PreTrainedConfig, *, prompt: int, element_bytes: Mapping[str, float] | float | None = None
) -> ConfigCost:
    """Count the cost of the causal LM of `config` for one sequence with `prompt` tokens.

    One trace serves both calls where torch's own counter, running the model at the true sizes, finds the same
    number of FLOPs; otherwise each call is traced at its true sizes.
    """
    stored = element_size(config) if element_bytes is None else element_bytes
    kv = float(element_size(config))
    shared = _shared_trace(config)
    if shared is not None and _confirmed(config, shared, prompt):
        found = cost(shared, prompt=prompt, element_bytes=stored, kv_element_bytes=kv)
        return ConfigCost(found, shared, shared, "one trace for both calls, confirmed by FlopCounterMode")
    prefill = trace(config, dynamic=False, batch=1, new=prompt, past=0)
    step = calls(prefill, prompt)[1]
    decode = trace(config, dynamic=False, batch=1, new=1, past=step.past)
    found = cost(prefill, prompt=prompt, element_bytes=stored, kv_element_bytes=kv, decode=decode)
    return ConfigCost(found, prefill, decode, "one trace for each call, at its sizes")


def _shared_trace(config: PreTrainedConfig) -> Program | None:
    """Trace with sizes that stand out from the model's own; None where there are none, or no growing cache."""
    sizes = _standing_out(config)
    if sizes is None:
        return None
    try:
        program = trace(config, dynamic=False, batch=1, new=sizes.new, past=sizes.past)
    except UnsupportedError:  # the true sizes may still be traceable; if not, that error is the one to show
        return None
    return program if any("past" in leaf.shape for leaf in program.cache) else None


def _standing_out(config: PreTrainedConfig) -> Call | None:
    model = meta_model(config)
    if cache_argument(model) not in {"past_key_values", "cache"}:
        return None
    dimensions = {size for tensor in model.state_dict().values() for size in tensor.shape}
    limit = min(
        (int(getattr(config, name, 0) or 0) for name in POSITION_LIMITS if getattr(config, name, 0)), default=10**9
    )
    for new, total in itertools.combinations(PRIMES, 2):
        call = Call(1, new, total - new)
        if total <= limit and sizes_stand_out(dimensions, call):
            return call
    return None


def _confirmed(config: PreTrainedConfig, program: Program, prompt: int) -> bool:
    """Whether the counts that `program` gives at the true sizes are those of torch's own counter."""
    model = meta_model(config)
    try:
        expected = [sum(work.flops for work in matrix_work(program, call)) for call in calls(program, prompt)]
        return expected == list(counted_by_torch(model, prompt))
    except (RuntimeError, TypeError, ValueError, AttributeError):  # the model's own code, run on meta tensors
        return False


def counted_by_torch(model: PreTrainedModel, prompt: int) -> Iterator[int]:
    """Yield what `FlopCounterMode` counts of `model`, on meta, in a prefill and in the decode step after it.

    The head is counted at every position. On meta tensors attention runs as two plain products, which the
    counter sees; grouped products, which it does not know, are given to it as a rule.
    """
    name = cache_argument(model) or ""
    with quiet(), portable(), torch.no_grad():
        cache = _cache_after(model, prompt - 1)
        for new, arguments in ((prompt, {"use_cache": True}), (1, {name: cache} if cache is not None else {})):
            ids = torch.ones(1, new, dtype=torch.long, device="meta")
            with FlopCounterMode(display=False, custom_mapping=_GROUPED) as counter:
                model(input_ids=ids, **arguments)
            yield counter.get_total_flops()


def _cache_after(model: PreTrainedModel, length: int) -> Any:
    if length == 0:
        return None
    output = model(input_ids=torch.ones(1, length, dtype=torch.long, device="meta"), use_cache=True)
    found = (getattr(output, name, None) for name in CACHE_ARGUMENTS)
    return next((cache for cache in found if cache is not None), None)


def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * int(left[0]) * int(left[1]) * int(right[2])


_GROUPED = {torch.ops.transformers.grouped_mm_fallback: _grouped_flops}
