"""Trace a causal LM into one graph that serves prefill and decode, on the meta device: no weights needed.

The graph takes token ids, an attention mask, positions (where the model's forward takes them) and a KV cache
whose length may be zero, and returns logits and the grown cache. One program therefore stands for prefill (empty
cache), chunked prefill and decode alike, padded or not.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import transformers
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.exporters.exporter_dynamo import (
    DynamoConfig,
    DynamoExporter,
    register_cache_pytrees_for_model,
)
from transformers.exporters.utils import apply_patches

from collapse.auto import auto_class
from collapse.checkpoint import Checkpoint
from collapse.errors import UnsupportedError
from collapse.growing_rope import keep_original_frequencies
from collapse.naming import naming_of
from collapse.portable import portable
from collapse.program import CacheLeaf, Input, Measure, Program, Role

FAKE_TENSOR = "torch._subclasses.fake_tensor"  # it logs a traceback for every failed trace
KEPT_META = ("val", "nn_module_stack")  # stack traces and the like are half of a traced graph's memory
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the transformers config; raises `UnsupportedError` for an unknown `model_type`."""
    try:
        with quiet():
            return AutoConfig.from_pretrained(str(checkpoint.root), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a bad config
        raise UnsupportedError(_first_line(error), where="config.json", fix="give a model transformers knows") from None


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the causal LM of `config` on the meta device in fp32; raises `UnsupportedError` if there is none."""
    try:
        with quiet(), torch.device("meta"):
            own = copy.deepcopy(config)  # building a model writes its dtype into the config
            model = auto_class(own).from_config(own, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:
        reason = f"model_type {config.model_type!r} is no causal LM that transformers can build ({_first_line(error)})"
        raise UnsupportedError(reason, where="config.json", fix="give a decoder-only language model") from None
    return model.eval()


def trace(config: PreTrainedConfig, *, dynamic: bool = True, batch: int = 2, new: int = 3, past: int = 8) -> Program:
    """Trace the causal LM of `config`.

    A dynamic program runs with any batch, past and new length. A static one holds for just the sizes given,
    and takes a fraction of the time. A model whose rotary frequencies grow with the sequence is traced for its
    original length, which the program then names. Raises `UnsupportedError` where the exporter cannot trace the model.
    """
    model = meta_model(config)
    limit = keep_original_frequencies(model)
    register_cache_pytrees_for_model(model)
    try:
        # The cache of fake-tensor results costs more than it saves on symbolic shapes: 63 s -> 41 s on SmolLM2.
        uncached = torch._dynamo.config.patch(fake_tensor_cache_enabled=not dynamic)
        with quiet(), portable(), uncached, torch.no_grad():
            example = copy.deepcopy(model)  # a model that ran remembers tensors, here without values (longrope)
            cache_name, cache = _example_cache(example, batch, past)
            leaves = _leaf_shapes(example, cache_name)
            masked = past + new if any(leaf and "past" in leaf.shape for leaf in leaves) else new
            arguments: dict[str, Any] = {
                "input_ids": torch.ones(batch, new, dtype=torch.long, device="meta"),
                "attention_mask": torch.ones(batch, masked, dtype=torch.long, device="meta"),
            }
            if "position_ids" in inspect.signature(model.forward).parameters:
                arguments["position_ids"] = torch.ones(batch, new, dtype=torch.long, device="meta")
            if cache is not None:
                arguments[cache_name] = cache
            shapes = _dynamic_shapes(arguments, cache_name, leaves) if dynamic else None
            options = DynamoConfig(dynamic=dynamic, dynamic_shapes=shapes)
            exported = DynamoExporter().export(model, arguments, config=options).program
    except UnsupportedError:
        raise
    except Exception as error:
        reason = f"{type(model).__name__} cannot be traced ({_first_line(error)})"
        raise UnsupportedError(reason, where="trace", fix="report it with the config.json") from error
    program = _program(model, exported, tuple(leaf for leaf in leaves if leaf is not None), limit)
    if dynamic:
        _require_any_size(program, type(model).__name__)
    return program


def _require_any_size(program: Program, model: str) -> None:
    """Refuse a graph that holds for the example's sizes only: the model's code loops over them, say."""
    for item, measures in program.user_inputs():
        for size, measure in zip(program.placeholder(item.placeholder).meta["val"].shape, measures, strict=True):
            if isinstance(measure, str) and _is_fixed(size):
                only = f"its code makes the graph one for {measure} = {size} only"
                reason = f"{model} cannot be traced for every size ({only})"
                raise UnsupportedError(reason, where="trace", fix="report it with the config.json")


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    first, *rest = (line.strip() for line in text.splitlines())
    return f"{first} {rest[0]}"[:300] if first.endswith(":") and rest else first[:300]


def _is_fixed(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or bool(size.node.expr.is_number)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' warnings and loading bars, which are about their internals, for a while."""
    levels = {name: logging.getLogger(name).level for name in ("transformers", "torch.export", "torch.fx", FAKE_TENSOR)}
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


def cache_argument(model: PreTrainedModel) -> str | None:
    """Return the name under which the model's forward takes its cache."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def grown_cache(model: PreTrainedModel, batch: int, length: int) -> Any:
    """Run a model on meta tensors and return its cache, None where it has none.

    Under the exporter's patches a sliding layer keeps its whole past.
    """
    ids = torch.ones(batch, length, dtype=torch.long, device="meta")
    with apply_patches("dynamo"):
        output = model(input_ids=ids, use_cache=True)
    found = (getattr(output, name, None) for name in CACHE_ARGUMENTS)
    return next((cache for cache in found if cache is not None), None)


def _example_cache(model: PreTrainedModel, batch: int, past: int) -> tuple[str, Any]:
    """Return the argument's name and a cache of `past` tokens (0 is allowed), with meta tensors."""
    name = cache_argument(model)
    cache = grown_cache(model, batch, max(past, 1)) if name else None
    if cache is None or name is None:
        return name or "", None
    if past == 0:
        spec = pytree.tree_structure(cache)
        shapes = _leaf_shapes(model, name)
        emptied = [leaf.empty(batch).to("meta") if leaf else 0 for leaf in shapes]
        cache = pytree.tree_unflatten(emptied, spec)
    return name, cache


def _leaf_shapes(model: PreTrainedModel, name: str | None) -> list[CacheLeaf | None]:
    """Find which sizes of each cache tensor are the batch and the length, by growing caches of other sizes."""
    if not name:
        return []
    plain, wide, long = (
        pytree.tree_leaves(grown_cache(model, batch, length)) for batch, length in ((2, 8), (3, 8), (2, 9))
    )
    return [_leaf_shape(*versions) for versions in zip(plain, wide, long, strict=True)]


def _leaf_shape(plain: Any, wide: Any, long: Any) -> CacheLeaf | None:
    if not isinstance(plain, torch.Tensor):
        return None
    sizes: list[int | Measure] = []
    for size, wider, longer in zip(plain.shape, wide.shape, long.shape, strict=True):
        sizes.append("batch" if wider != size else "past" if longer != size else size)
    return CacheLeaf(tuple(sizes), plain.dtype)


def _dynamic_shapes(arguments: Mapping[str, Any], cache: str, leaves: Sequence[CacheLeaf | None]) -> dict[str, Any]:
    shapes: dict[str, Any] = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in arguments if name != cache}
    if cache in arguments:
        shapes[cache] = [
            leaf and {i: Dim.AUTO for i, s in enumerate(leaf.shape) if isinstance(s, str)} for leaf in leaves
        ]
    return shapes


def _program(
    model: PreTrainedModel, exported: ExportedProgram, cache: tuple[CacheLeaf, ...], limit: int | None
) -> Program:
    roles: Mapping[str, Role] = {
        "PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input",
    }  # fmt: skip
    inputs = tuple(
        Input(spec.arg.name, roles[spec.kind.name], spec.target or spec.arg.name)
        for spec in exported.graph_signature.input_specs
    )
    graph = exported.graph_module
    _settle(graph)
    outputs = _output_names(exported)
    groups = _tied_groups(model)
    return Program(
        graph=_logits_first(graph, outputs),
        inputs=inputs,
        outputs=("logits", *(f"cache.{i}" for i in range(len(cache)))),
        cache=cache,
        constants=dict(exported.constants),
        shapes={name: tuple(tensor.shape) for name, tensor in _state(model).items()},
        tied=groups,
        module_types={name: type(module).__name__ for name, module in model.named_modules()},
        naming=naming_of(model),
        max_tokens=limit,
    )


def _settle(graph: fx.GraphModule) -> None:
    """Turn the meta device of traced calls into the CPU, and drop asserts about metadata, which read nothing."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
            continue
        node.args = map_aggregate(node.args, _on_cpu)
        node.kwargs = map_aggregate(node.kwargs, _on_cpu)
        node.meta = {key: node.meta[key] for key in KEPT_META if key in node.meta}
    graph.recompile()


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _output_names(exported: ExportedProgram) -> list[str]:
    """Name every flat output by the field of the model's output that it belongs to."""
    spec = exported.call_spec.out_spec
    keys = list(spec.context) if isinstance(spec.context, list | tuple) else list(spec.context or ())
    return [str(key) for key, child in zip(keys, spec.children(), strict=True) for _ in range(child.num_leaves)]


def _logits_first(graph: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Keep logits and cache only, in this order; other outputs (router logits, say) are not asked for."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    flat = list(output.args[0])
    logits = [node for node, name in zip(flat, names, strict=True) if name == "logits"]
    cache = [n for n, name in zip(flat, names, strict=True) if name in CACHE_ARGUMENTS and isinstance(n, fx.Node)]
    output.args = ((*logits, *cache),)
    graph.recompile()
    return graph


def _state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    persistent = set(model.state_dict(keep_vars=True))
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent}
    return named


def _tied_groups(model: PreTrainedModel) -> tuple[tuple[str, ...], ...]:
    """Group names by the parameter object behind them: on the meta device there is no storage to compare."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(sorted(tuple(sorted(names)) for names in groups.values() if len(names) > 1))
