"""FLOPs and memory traffic of a model, counted node by node from its traced graph.

Two figures stand for prefill. "Executed" takes the whole attention square, which is what the kernels of this
library run; "causal" takes only pairs of a query and a key that is not later. For `q` new tokens after `p`
cached ones that is `q*p + q*(q+1)/2` pairs instead of `q*(p+q)`. Everything is for one sequence.

In closed form, for a Llama of `L` layers, width `d`, `h` heads and `g` KV heads of `s` channels each, a feed-
forward of `f` and `V` tokens: a token costs `2L(2*d*h*s + 2*d*g*s + 3*d*f)`, the head `2*d*V`, and attention
of `q` queries over `k` keys `4*L*h*s*q*k`. The head is counted once a prefill: `generate` asks it for the
last position only, although the traced graph computes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from torch import fx

from collapse.analysis.flop_rules import ATTENTION, PER_ROW, PRODUCTS, RULES, SOFTMAX, kind_of, op_name
from collapse.analysis.sizes import Call, shape_reader
from collapse.analysis.traffic import kv_bytes, parameter_bytes, parameter_counts, weight_reads
from collapse.program import Program

ShapeOfNode = Callable[[fx.Node], tuple[int, ...]]


@dataclass(frozen=True)
class Cost:
    """What one sequence costs; every count is a whole number.

    Attributes:
        prefill_flops: executed FLOPs of a prompt, whole attention square, head for the last position only.
        prefill_flops_causal: the same with the lower triangle of attention.
        decode_flops_per_token: executed FLOPs of one step whose token attends to as many tokens as the prompt
            has, itself included.
        kv_bytes_per_token: bytes by which the KV cache grows with each token.
        weight_bytes_per_decode_token: bytes of weights that such a step reads; of an embedding one row.
        params: number of parameters, tied ones once.
        bytes: bytes of parameters and saved buffers, tied ones once.
        modules: the same for every module path, children included; a tied tensor is in each that holds it.
    """

    prefill_flops: int = 0
    prefill_flops_causal: int = 0
    decode_flops_per_token: int = 0
    kv_bytes_per_token: int = 0
    weight_bytes_per_decode_token: int = 0
    params: int = 0
    bytes: int = 0
    modules: Mapping[str, Cost] = field(default_factory=dict)

    def figures(self) -> dict[str, int]:
        """Return the figures without the modules."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "modules"}


@dataclass(frozen=True)
class Work:
    """Matrix work of one node in one call. `is_head`: it computes logits, for `positions` positions a sequence."""

    node: str
    op: str
    module: str
    flops: int
    causal: int
    is_head: bool
    positions: int

    def for_last_position(self, *, causal: bool) -> int:
        """Return its FLOPs when logits are asked for at the last position only."""
        flops = self.causal if causal else self.flops
        return flops // self.positions if self.is_head else flops


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that the node was traced in; empty for the model itself."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def execution_order(program: Program) -> tuple[str, ...]:
    """Return the paths of all modules in the order in which the graph enters them."""
    seen: dict[str, None] = {}
    for node in program.graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        seen.update((str(path), None) for path, _ in stack.values() if path)
    return tuple(seen)


def with_ancestors(module: str) -> tuple[str, ...]:
    """Return the path itself and those of all modules around it, without the model's own empty path."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[: end + 1]) for end in range(len(parts)))


def matrix_work(program: Program, call: Call) -> tuple[Work, ...]:
    """Count every node that does matrix work, in graph order.

    Raises `UnsupportedError` for an operator that may do such work and has no rule.
    """
    shape = shape_reader(program, call)
    nodes = [node for node in program.graph.graph.nodes if node.op in {"call_function", "call_method", "call_module"}]
    matrix = [node for node in nodes if kind_of(node) == "matrix"]
    heads, squares = head_nodes(program.graph.graph), _attention_products(matrix, nodes)
    return tuple(_work(node, shape, call, node in heads, node in squares) for node in matrix)


def cost(
    program: Program,
    *,
    prompt: int,
    element_bytes: Mapping[str, float] | float,
    kv_element_bytes: float | None = None,
    decode: Program | None = None,
) -> Cost:
    """Count what one sequence with a prompt of `prompt` tokens costs.

    Args:
        program: a dynamic program, or a static one traced for this prompt or with sizes that stand out.
        prompt: tokens of the prompt, at least 1.
        element_bytes: bytes of an element of each tensor by state-dict name, or of all of them.
        kv_element_bytes: bytes of an element of the KV cache; by default that of the largest tensor.
        decode: the program to count a decode step on, where it is not the same.
    """
    prefill, step = calls(program, prompt)
    sums: dict[str, dict[str, int]] = {"": {}}
    for work in matrix_work(program, prefill):
        _add(sums, [work.module], "prefill_flops", work.for_last_position(causal=False))
        _add(sums, [work.module], "prefill_flops_causal", work.for_last_position(causal=True))
    stepper = decode or program
    for work in matrix_work(stepper, step):
        _add(sums, [work.module], "decode_flops_per_token", work.flops)
    _add_memory(sums, stepper, step, element_bytes, kv_element_bytes)
    modules = {module: _cost(values) for module, values in sorted(sums.items()) if module}
    return _cost(sums[""], modules)


def calls(program: Program, prompt: int) -> tuple[Call, Call]:
    """Return the sizes of a prefill of `prompt` tokens, and of the decode step that attends to as many.

    A model whose cache does not grow has a state instead of a past.
    """
    grows = any("past" in leaf.shape for leaf in program.cache)
    return Call(1, prompt, 0), Call(1, 1, prompt - 1 if grows else 0)


def _add_memory(
    sums: dict[str, dict[str, int]],
    program: Program,
    step: Call,
    element_bytes: Mapping[str, float] | float,
    kv_element_bytes: float | None,
) -> None:
    for name, count in parameter_counts(program).items():
        _add(sums, _owners(program, name), "params", count)
    for name, count in parameter_bytes(program, element_bytes).items():
        _add(sums, _owners(program, name), "bytes", count)
    for name, count in weight_reads(program, shape_reader(program, step), element_bytes).items():
        _add(sums, _owners(program, name), "weight_bytes_per_decode_token", count)
    for node, count in kv_bytes(program, element_bytes, kv_element_bytes):
        _add(sums, [module_of(node)], "kv_bytes_per_token", count)


def _add(sums: dict[str, dict[str, int]], modules: Iterable[str], figure: str, count: int) -> None:
    """Add to the modules and all around them, to each once, and to the whole."""
    for path in dict.fromkeys(("", *(path for module in modules for path in with_ancestors(module)))):
        values = sums.setdefault(path, {})
        values[figure] = values.get(figure, 0) + count


def _cost(values: Mapping[str, int], modules: Mapping[str, Cost] | None = None) -> Cost:
    return replace(Cost(), modules=modules or {}, **values)


def _owners(program: Program, tensor: str) -> list[str]:
    """Return the modules that hold the tensor under any of its tied names."""
    return [name.rpartition(".")[0] for name in program.aliases(tensor)]


def _work(node: fx.Node, shape: ShapeOfNode, call: Call, is_head: bool, is_square: bool) -> Work:
    name = op_name(node)
    flops = 2 * RULES[name](node, shape)
    causal = flops
    if name in ATTENTION:
        causal = _causal(flops, shape(node.args[0])[-2], shape(node.args[1])[-2], call)  # type: ignore[arg-type]
    elif is_square:
        causal = _causal(flops, *_square(node, shape), call)
    rows = math.prod(shape(_rows_operand(node))[:-1]) if is_head else 0
    per_position = is_head and name in PER_ROW and rows == call.batch * call.new
    return Work(node.name, name, module_of(node), flops, causal, is_head, call.new if per_position else 1)


def _rows_operand(node: fx.Node) -> fx.Node:
    return node.args[1 if op_name(node) == "aten.addmm" else 0]  # type: ignore[return-value]


def _causal(flops: int, queries: int, keys: int, call: Call) -> int:
    """Keep the lower triangle: `queries` may be several heads' worth of `call.new` rows after one another."""
    if keys < call.new or queries % call.new:
        return flops
    pairs = call.new * (keys - call.new) + call.new * (call.new + 1) // 2
    return flops * pairs // (call.new * keys)


def _square(node: fx.Node, shape: ShapeOfNode) -> tuple[int, int]:
    """Return queries and keys of a product whose operand or result is the attention square."""
    first = 1 if op_name(node) == "aten.baddbmm" else 0
    left, right = shape(node.args[first]), shape(node.args[first + 1])  # type: ignore[arg-type]
    weighted_values = _comes_from_softmax(node.args[first])
    return left[-2], left[-1] if weighted_values else right[-1]


def head_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the matrix nodes that logits are computed from by cheap operators only."""
    output = next(node for node in graph.nodes if node.op == "output")
    return _matrix_behind([output.args[0][0]])


def _matrix_behind(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """Walk back through cheap operators to the matrix nodes before them."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    queue = [node for node in starts if isinstance(node, fx.Node)]
    while queue:
        node = queue.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if op_name(node) in RULES:
            found.add(node)
        else:
            queue.extend(node.all_input_nodes)
    return found


def _attention_products(matrix: list[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
    """Return products of two activations that give the scores of a softmax, or weight values by one."""
    products = [node for node in matrix if op_name(node) in PRODUCTS]
    if not products:
        return set()
    scores = _matrix_behind(source for node in nodes if op_name(node) in SOFTMAX for source in node.all_input_nodes)
    weighted = {n for n in products if _comes_from_softmax(n.args[1 if op_name(n) == "aten.baddbmm" else 0])}
    return weighted | (scores & set(products))


def _comes_from_softmax(node: object) -> bool:
    """Whether `node` is a softmax or follows one by operators with a single input: views, casts, dropout."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if op_name(node) in SOFTMAX:
            return True
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return False
