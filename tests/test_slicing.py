"""The rule table: what commutes with taking rows is pushed through and keeps its values, what mixes rows is not."""

from __future__ import annotations

import pytest
import torch

from collapse.analysis import row_rules, slicing
from collapse.analysis.call_sizes import Shapes
from collapse.analysis.flop_rules import op_name
from collapse.analysis.last_rows import last_rows
from collapse.rewrite.last_token import last_token
from tests.small_programs import WIDTH, ids_and_mask, small_program

F = torch.nn.functional
WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))


def heads(x):
    return x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).reshape(x.shape[0], -1, WIDTH)


def attention(x, mask, **options):
    return merged(F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **options))


def masked_attention(x, mask):
    allowed = (mask[:, None, None, :] > 0).expand(-1, 1, x.shape[1], -1)
    return attention(x, mask, attn_mask=allowed)


def by_hand(x, mask):
    scores = (heads(x) @ heads(x).transpose(-1, -2)).softmax(-1)
    return merged(scores @ heads(x))


def batched(x, mask):
    q = heads(x).reshape(-1, x.shape[1], 4)
    scores = torch.baddbmm(torch.zeros(1, 1, 1), q, q.transpose(1, 2), alpha=0.5).softmax(-1)
    return merged(torch.bmm(scores, q).view(x.shape[0], 2, x.shape[1], 4))


def flattened(x, mask):
    return torch.addmm(WEIGHT[0], x.view(-1, WIDTH), WEIGHT).view(x.shape[0], x.shape[1], WIDTH)


def split_up(x, mask):
    left, right = x.split(4, dim=-1)
    top, low = x.chunk(2, -1)
    return torch.cat([F.silu(left) * right, top + low], -1)


COMMUTES = {
    "linear": lambda x, mask: F.linear(x, WEIGHT, WEIGHT[0]),
    "pointwise": lambda x, mask: torch.where(x > 0, x * WEIGHT[0], x.tanh() + 1),
    "layer norm": lambda x, mask: F.layer_norm(x, [WIDTH], WEIGHT[0]),
    "rms norm by hand": lambda x, mask: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "reduced": lambda x, mask: x * x.sum(-1).unsqueeze(-1),
    "softmax over channels": lambda x, mask: x.softmax(-1),
    "cumsum over channels": lambda x, mask: x.cumsum(-1),
    "masked attention": masked_attention,
    "attention": attention,
    "attention by hand": by_hand,
    "batched products": batched,
    "flattened rows": flattened,
    "split, chunk and cat": split_up,
    "stack and select": lambda x, mask: torch.stack([x, x * 2], 1)[:, 1] + torch.stack([x, -x])[0],
    "select": lambda x, mask: x.view(x.shape[0], x.shape[1], 2, 4).select(2, 1).repeat_interleave(1, 0) @ WEIGHT[:4],
    "permute and expand": lambda x, mask: x.permute(2, 0, 1).permute(1, 2, 0).expand(x.shape[0], x.shape[1], WIDTH),
    "added in place": lambda x, mask: (x * 2).add_(x),
}

MIXES = {
    "cumsum": lambda x, mask: x.cumsum(1),
    "softmax": lambda x, mask: x.softmax(1),
    "flip": lambda x, mask: x.flip(1),
    "roll": lambda x, mask: x.roll(1, 1),
    "causal attention": lambda x, mask: attention(x, mask, is_causal=True),
    "norm over positions": lambda x, mask: x - x.mean(1, keepdim=True),
    "cat": lambda x, mask: torch.cat([x[:, 1:], x[:, :1]], 1),
    "sort": lambda x, mask: x.sort(1).values,
    "rows as keys": lambda x, mask: (x @ x.transpose(1, 2)).transpose(1, 2) @ x,
}


def pushed(program):
    return {op_name(node) for node in last_rows(program.graph.graph, Shapes(program))}


@pytest.mark.parametrize("name", COMMUTES)
def test_a_slice_goes_through_what_commutes_with_it_and_keeps_the_values(name):
    program, weights = small_program(COMMUTES[name])
    narrowed = last_token(program)
    ids, mask = ids_and_mask()
    whole, last = (one.run(weights, ids, mask)[0] for one in (program, narrowed))
    torch.testing.assert_close(last, whole[:, -1:], rtol=1.3e-6, atol=1e-5)
    assert last.shape == (3, 1, WIDTH)


@pytest.mark.parametrize("name", ["linear", "layer norm", "rms norm by hand", "flattened rows", "split, chunk and cat",
                                  "stack and select"])  # fmt: skip
def test_a_slice_goes_all_the_way_to_the_token_ids(name):
    program, _ = small_program(COMMUTES[name])
    assert "aten.embedding" in pushed(program)


@pytest.mark.parametrize(("name", "through"), [
    ("masked attention", "aten.scaled_dot_product_attention"), ("attention by hand", "aten.softmax"),
    ("batched products", "aten.baddbmm"), ("flattened rows", "aten.addmm"), ("select", "aten.matmul"),
])  # fmt: skip
def test_a_slice_goes_through(name, through):
    assert through in pushed(small_program(COMMUTES[name])[0])


@pytest.mark.parametrize("name", MIXES)
def test_a_slice_stops_at_what_mixes_positions(name):
    program, weights = small_program(MIXES[name])
    assert "aten.embedding" not in pushed(program)
    ids, mask = ids_and_mask()
    whole, last = (one.run(weights, ids, mask)[0] for one in (program, last_token(program)))
    torch.testing.assert_close(last, whole[:, -1:], rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "operator"), [("cumsum", "aten.cumsum"), ("flip", "aten.flip"), ("roll", "aten.roll")]
)
def test_a_rule_that_is_wrong_shows_in_the_values(monkeypatch, name, operator):
    program, weights = small_program(MIXES[name])
    monkeypatch.setattr(slicing, "RULES", {**slicing.RULES, operator: row_rules.aligned})
    assert "aten.embedding" in pushed(program)
    ids, mask = ids_and_mask()
    whole, last = (one.run(weights, ids, mask)[0] for one in (program, last_token(program)))
    assert float((last - whole[:, -1:]).abs().max()) > 1e-2


def test_dropout_that_is_on_stops_a_slice():
    program, _ = small_program(lambda x, mask: F.dropout(x, 0.5, True))
    assert pushed(program) == set()


def test_a_value_that_is_read_later_is_not_written_out_of_place():
    def body(x, mask):
        kept = x * 2
        view = kept[:, :, :4]
        kept.add_(1)
        return torch.cat([kept[:, :, 4:], view], -1)

    program, weights = small_program(body)
    ids, mask = ids_and_mask()
    whole, last = (one.run(weights, ids, mask)[0] for one in (program, last_token(program)))
    assert torch.equal(last, whole[:, -1:])
