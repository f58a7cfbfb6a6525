"""Logit soft-capping, `cap * tanh(x / cap)`, and how far it can move a logit, bounded from the weights.

The head reads what an RMSNorm gives: gain * y / rms(y), of which the second factor has a Euclidean norm of at most
sqrt(d). A logit is the product of that and a row of the head times the gain, so that it is at most sqrt(d) times the
norm of the row (Cauchy-Schwarz). And `|x - cap * tanh(x / cap)| <= |x|^3 / (3 cap^2)`, from tanh's series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import fx

from collapse.checkpoint import Checkpoint
from collapse.program import Program

aten = torch.ops.aten

ABSOLUTE, RELATIVE = 1e-5, 1.3e-6  # two fp32 logits count as equal within these, in verification too
ROUNDING = 1 + 1e-3  # how much rounding in fp32 may add to a norm over some thousand elements, and more
_ROWS = 4096  # rows of the head in memory at a time
_PASSED = frozenset({aten.slice.Tensor, aten.to.dtype, aten.type_as.default, aten.alias.default})


@dataclass(frozen=True)
class SoftCap:
    """A program's capped logits: the node before the cap, and the cap."""

    logits: fx.Node
    cap: float


@dataclass(frozen=True)
class Head:
    """What gives the logits: state-dict names of the head and of the norm's gain, which counts as `offset + gain`."""

    weight: str
    gain: str
    offset: float


def soft_cap(program: Program) -> SoftCap | None:
    """Return the soft-capping of the logits, or None where the graph has none."""
    logits = _logits(program)
    tanh = _operand(logits, aten.mul.Tensor)
    quotient = _operand(tanh, aten.tanh.default)
    inner = _operand(quotient, aten.div.Tensor)
    if inner is None or quotient is None:
        return None
    cap = logits.args[1]
    return SoftCap(inner, cap) if isinstance(cap, float) and cap > 0 and quotient.args[1] == cap else None


def head_of(program: Program, logits: fx.Node) -> Head | None:
    """Return the linear map and the RMSNorm before it that give `logits`; None where they are something else."""
    weights = {item.placeholder: item.target for item in program.inputs if item.role == "parameter"}
    linear = _passed(logits)
    if linear.target is not aten.linear.default or len(linear.args) != 2 or not isinstance(linear.args[1], fx.Node):
        return None
    product = _passed(linear.args[0])
    if product.target is not aten.mul.Tensor:
        return None
    for scale, normed in (product.args, product.args[::-1]):
        gain, offset = _gain(scale)
        if gain is not None and gain.name in weights and linear.args[1].name in weights and _is_normed(normed):
            return Head(weights[linear.args[1].name], weights[gain.name], offset)
    return None


def largest_logit(program: Program, checkpoint: Checkpoint, head: Head) -> float | None:
    """Return a bound on every |logit|, with the head read in pieces; None where the files lack the tensors."""
    files = {program.model_name(name): name for name in checkpoint.tensors if checkpoint.group(name) is None}
    names = [next((files[a] for a in program.aliases(n) if a in files), None) for n in (head.weight, head.gain)]
    infos = [checkpoint.tensors[name] for name in names if name is not None]
    if len(infos) < 2 or [i.shape for i in infos] != [program.shapes[n] for n in (head.weight, head.gain)]:
        return None
    table, gain = infos
    with safe_open(checkpoint.root / gain.file, framework="pt") as stream:
        scale = stream.get_tensor(gain.name).double() + head.offset
    largest = 0.0
    with safe_open(checkpoint.root / table.file, framework="pt") as stream:
        rows = stream.get_slice(table.name)
        for start in range(0, table.shape[0], _ROWS):
            norms = (rows[start : start + _ROWS].double() * scale).norm(dim=1)
            largest = max(largest, float(norms.max()))
    return largest * math.sqrt(table.shape[1]) * ROUNDING


def is_inert(bound: float, cap: float) -> bool:
    """Whether capping moves no logit of up to `bound` by more than half of what counts as equal.

    The other half is left to rounding. Excess over the tolerance is convex in |x|, so that the bound decides.
    """
    return bound**3 / (3 * cap**2) <= (ABSOLUTE + RELATIVE * bound) / 2


def _logits(program: Program) -> fx.Node:
    nodes: list[Any] = list(program.graph.graph.nodes)
    node = nodes[-1].args[0][0]
    assert isinstance(node, fx.Node)
    return node


def _operand(node: fx.Node | None, target: Any) -> fx.Node | None:
    """Return the first argument of `node` if it calls `target`."""
    if node is None or node.target is not target:
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _passed(node: Any) -> fx.Node:
    """Follow a value back through what takes positions from it or casts it within fp32."""
    while node.target in _PASSED and node.meta["val"].dtype is node.args[0].meta["val"].dtype is torch.float32:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def _gain(value: Any) -> tuple[fx.Node | None, float]:
    if not isinstance(value, fx.Node):
        return None, 0.0
    node = _passed(value)
    if node.target is aten.add.Tensor and node.args[1] in (1, 1.0) and isinstance(node.args[0], fx.Node):
        return _passed(node.args[0]), 1.0
    return (node, 0.0) if node.op == "placeholder" else (None, 0.0)


def _is_normed(value: Any) -> bool:
    """Whether a value is `y * rsqrt(mean(y ** 2, -1) + eps)` with an `eps` that is not negative."""
    if not isinstance(value, fx.Node):
        return False
    product = _passed(value)
    if product.target is not aten.mul.Tensor or not all(isinstance(argument, fx.Node) for argument in product.args):
        return False
    source, root = product.args
    shifted = _operand(root, aten.rsqrt.default)  # type: ignore[arg-type]
    mean = _operand(shifted, aten.add.Tensor)
    square = _operand(mean, aten.mean.dim)
    if shifted is None or mean is None or square is None:
        return False
    positive = isinstance(shifted.args[1], float) and shifted.args[1] >= 0
    over_last = mean.args[1:] == ([-1], True)
    return positive and over_last and square.target is aten.pow.Tensor_Scalar and square.args == (source, 2)
