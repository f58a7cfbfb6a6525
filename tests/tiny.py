"""Tiny checkpoints with random weights, and plans written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from collapse.checkpoint import Checkpoint
from collapse.erase import write_checkpoint
from collapse.manifest import write_manifest
from collapse.plan import Axis, Erase, Evidence, IndexSet, Narrow, Plan
from collapse.rewrite.layout import index, shards
from collapse.rewrite.tensors import OutputTensor
from collapse.schema import InputSchema
from collapse.staging import staged

VOCABULARY = 64
CONTEXT = 48
PROVED = Evidence(grade="proved", claim="it is so", method="by hand")


def tiny_llama(
    folder: Path,
    *,
    tied: bool = True,
    shard_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, torch.Tensor] | None = None,
    both_names: bool = False,
) -> Checkpoint:
    """Write a two-layer Llama; `extra` tensors are claimed by no module, `both_names` writes the tied head too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=tied, initializer_range=0.5,
        bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )  # fmt: skip
    return _write(folder, LlamaForCausalLM(config), shard_size, dtype, extra or {}, both_names)


def tiny_gpt2(folder: Path, *, extra: Mapping[str, torch.Tensor] | None = None) -> Checkpoint:
    """Write a two-layer GPT-2, with learned positions and a tied head."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _write(folder, GPT2LMHeadModel(config), None, torch.float32, extra or {}, False)


def plan_for(checkpoint: Checkpoint, *rewrites: Any, **fields: Any) -> Plan:
    """Return a plan of the given rewrites for `checkpoint`."""
    schema = InputSchema(type="log", tokens=tuple(range(VOCABULARY)))
    whole = {
        "source": checkpoint.digest,
        "model_type": checkpoint.model_type,
        "schema": schema.to_json(),
        "schema_digest": schema.digest,
        "rewrites": rewrites,
    }
    return Plan(**(whole | fields))


def erase(*tensors: str, **fields: Any) -> Erase:
    """Return the erasure of `tensors`."""
    return Erase(**({"pass": "unread-weights", "site": tensors[0], "evidence": PROVED, "tensors": tensors} | fields))


def vocabulary(kept: Iterable[int], *tensors: str, **fields: Any) -> Narrow:
    """Return the narrowing of the token tables `tensors`."""
    rows = IndexSet.of(kept)
    whole = {
        "pass": "vocabulary", "site": "vocabulary", "evidence": PROVED, "size": VOCABULARY, "kept": rows,
        "relabels": "tokens", "axes": tuple(Axis(tensor=name, dim=0) for name in tensors),
        "config": {"vocab_size": len(rows)},
    }  # fmt: skip
    return Narrow(**(whole | fields))


def positions(count: int, tensor: str = "transformer.wpe.weight") -> Narrow:
    """Return the narrowing of a GPT-2 position table to its first `count` rows."""
    return Narrow(
        **{"pass": "positions"}, site=tensor, evidence=PROVED, size=CONTEXT, kept=IndexSet.of(range(count)),
        relabels="positions", axes=(Axis(tensor=tensor, dim=0),), config={"n_positions": count},
    )  # fmt: skip


def export(source: Checkpoint, plan: Plan, output: Path, force: bool = False, **options: Any) -> Checkpoint:
    """Collapse `source` into `output`, without verifying."""
    with staged(output, force, source.root) as stage:
        write_checkpoint(source, plan, stage.folder, **options)
        write_manifest(stage.folder, source, plan)
        stage.publish()
    return Checkpoint.open(output)


def samples(kept: Iterable[int], *lengths: int) -> list[list[int]]:
    """Return one sequence of each length over `kept`."""
    ids = list(kept)
    return [
        [ids[(7 * place + 3 * row + place * place) % len(ids)] for place in range(n)] for row, n in enumerate(lengths)
    ]


def state(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every tensor."""
    return {name: (info.dtype, info.shape, checkpoint.read_bytes(name)) for name, info in checkpoint.tensors.items()}


def listing(folder: Path) -> dict[str, bytes]:
    """Return every file below `folder` with its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _write(
    folder: Path,
    model: PreTrainedModel,
    shard_size: int | None,
    dtype: torch.dtype,
    extra: Mapping[str, torch.Tensor],
    both_names: bool,
) -> Checkpoint:
    folder.mkdir(parents=True)
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tied = set() if both_names else set(model.all_tied_weights_keys)
    tensors = {k: v.to(dtype).clone().contiguous() for k, v in model.state_dict().items() if k not in tied}
    tensors |= {name: tensor.clone() for name, tensor in extra.items()}
    if shard_size is None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        _write_shards(folder, tensors, shard_size)
    return Checkpoint.open(folder)


def _write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], size: int) -> None:
    described = [OutputTensor(name, "F32", tuple(tensor.shape), None) for name, tensor in tensors.items()]
    files = shards(described, size)
    for shard in files:
        part = {tensor.name: tensors[tensor.name] for tensor in shard.tensors}
        save_file(part, folder / shard.file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_bytes(index(files))
