"""Large checkpoints without a model: the files of a Llama of any size, and a plan that drops half of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from collapse.checkpoint import Checkpoint
from collapse.plan import Axis, DropLayers, Evidence, IndexSet, Narrow, Plan
from collapse.rewrite.layout import Shard, header, index, shards
from collapse.rewrite.tensors import OutputTensor
from collapse.schema import InputSchema

BLOCK = 1 << 26  # bytes of the pseudo-random block that is written over and over
EVIDENCE = Evidence(grade="measured", claim="it is for measuring", method="by hand")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama in bfloat16 with an untied head."""

    layers: int
    hidden: int = 4096
    intermediate: int = 5632
    heads: int = 32
    groups: int = 8
    vocabulary: int = 128_256

    @property
    def config(self) -> dict[str, object]:
        """The config.json of the model."""
        return {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads, "num_key_value_heads": self.groups, "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
        }  # fmt: skip

    def tensors(self) -> Iterator[OutputTensor]:
        """Yield name and shape of every tensor."""
        keys = self.hidden * self.groups // self.heads
        layer = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        yield OutputTensor("model.embed_tokens.weight", "BF16", (self.vocabulary, self.hidden), None)
        for number in range(self.layers):
            for name, shape in layer.items():
                yield OutputTensor(f"model.layers.{number}.{name}.weight", "BF16", shape, None)
        yield OutputTensor("model.norm.weight", "BF16", (self.hidden,), None)
        yield OutputTensor("lm_head.weight", "BF16", (self.vocabulary, self.hidden), None)


def shape_of(size: int) -> Shape:
    """Return the smallest shape whose weights take at least `size` bytes."""
    one, two = (sum(2 * prod(t.shape) for t in Shape(layers).tensors()) for layers in (1, 2))
    return Shape(layers=max(2, 1 - (one - size) // (two - one)))


def write_checkpoint(folder: Path, shape: Shape, *, shard_size: int, sparse: bool = False) -> Checkpoint:
    """Write the checkpoint; with `sparse` its files are holes of the right size, which take no room."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
    files = shards(tuple(shape.tensors()), shard_size)
    block = b"" if sparse else random.Random(0).randbytes(BLOCK)
    for shard in files:
        _write(folder / shard.file, shard, block)
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_bytes(index(files))
    return Checkpoint.open(folder)


def _write(path: Path, shard: Shard, block: bytes) -> None:
    left = sum(tensor.nbytes for tensor in shard.tensors)
    with path.open("wb") as stream:
        stream.write(header(shard.tensors))
        if not block:
            stream.truncate(stream.tell() + left)
        while block and left:
            left -= stream.write(block[:left])


def half_plan(shape: Shape) -> Plan:
    """Return a plan that drops every other layer and a random half of the vocabulary, of any source."""
    kept = IndexSet.of(range(0, shape.layers, 2))
    rows = IndexSet.of(random.Random(0).sample(range(shape.vocabulary), shape.vocabulary // 2))
    dropped = DropLayers(
        **{"pass": "by-hand"}, site="model.layers", evidence=EVIDENCE, prefix="model.layers.", size=shape.layers,
        kept=kept, config={"num_hidden_layers": len(kept)},
        tensors=tuple(t.name for t in shape.tensors() if _layer(t.name) not in {None, *kept}),
    )  # fmt: skip
    narrow = Narrow(
        **{"pass": "by-hand"}, site="vocabulary", evidence=EVIDENCE, size=shape.vocabulary, kept=rows,
        relabels="tokens", config={"vocab_size": len(rows)},
        axes=tuple(Axis(tensor=name, dim=0) for name in ("model.embed_tokens.weight", "lm_head.weight")),
    )  # fmt: skip
    schema = InputSchema(type="log")
    return Plan(
        source="", model_type="llama", input_schema=schema.to_json(), schema_digest=schema.digest,
        rewrites=(dropped, narrow),
    )  # fmt: skip


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None
