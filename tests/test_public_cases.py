"""Reported faults of tools that do this job: vocabulary, graph, figures; the number is that of the collected case."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_tokenizers import encode, tokenizer_data
from transformers import AutoModelForCausalLM, PreTrainedModel

from collapse.analysis.flops import cost, matrix_work
from collapse.analysis.reachability import remove_dead_nodes
from collapse.analysis.second_opinion import second_opinion
from collapse.analysis.sizes import Call
from collapse.analysis.token_use import Samples, token_use
from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError, CollapseError, OutputError, PlanError, UnsupportedError
from collapse.plan import IndexSet
from collapse.program import Program
from collapse.report.data import common_sizes
from collapse.rewrite.copying import copy_graph
from collapse.rewrite.tokenizer import narrow_side_files
from collapse.schema import InputSchema
from collapse.tokenizer import TokenizerFile
from collapse.trace import meta_model, trace
from collapse.verify.compare import Continuation, compare_greedy
from tests.architectures import tiny_config, tiny_model
from tests.tiny import CONTEXT, erase, export, listing, plan_for, samples, tiny_llama, vocabulary

EMBEDDING = "model.embed_tokens.weight"
KEPT = [0, 1, 2, *range(5, 40), 63]
DEAD = torch.arange(1.0, 6.0)
PROMPT = 21


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "source", extra={"old.bias": DEAD})


@pytest.fixture(scope="module")
def collapsed(llama: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    plan = plan_for(llama, erase("old.bias"), vocabulary(KEPT, EMBEDDING))
    return export(llama, plan, tmp_path_factory.mktemp("out") / "out")


@pytest.fixture(scope="module")
def program() -> Program:
    """A trace at fixed sizes, which takes a fraction of the time of a dynamic one."""
    return trace(tiny_config("llama", num_hidden_layers=1), dynamic=False, batch=1, new=17, past=36)


@pytest.fixture(autouse=True)
def source_untouched(llama: Checkpoint) -> Iterator[None]:
    before = listing(llama.root)
    yield
    assert listing(llama.root) == before


def loaded(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint.root, dtype=dtype, output_loading_info=True)
    assert not (info["missing_keys"] or info["mismatched_keys"])
    return model.eval()


# --- Vocabulary. ---------------------------------------------------------------------------------------


def specials_at_the_end() -> dict[str, Any]:
    """A tokenizer of 400 tokens whose <eos> and <pad> have the last ids, as a model's own added tokens do."""
    text = json.dumps(tokenizer_data("byte-level"))
    data: dict[str, Any] = json.loads(text)
    data["model"]["vocab"] = {token: (number - 2) % 400 for token, number in data["model"]["vocab"].items()}
    for entry in data["added_tokens"]:
        entry["id"] = (entry["id"] - 2) % 400
    for entry in data["post_processor"]["special_tokens"].values():
        entry["ids"] = [(number - 2) % 400 for number in entry["ids"]]
    data["padding"]["pad_id"] = (data["padding"]["pad_id"] - 2) % 400
    return data


def unmerged(data: dict[str, Any], count: int) -> list[int]:
    """The last ids of tokens that are merged and of which no other token is merged."""
    parts = {part for pair in data["model"]["merges"] for part in pair}
    merged = {left + right for left, right in data["model"]["merges"]} - parts
    return sorted(data["model"]["vocab"][token] for token in merged)[-count:]


def test_b05_ids_named_elsewhere_follow_the_trim_and_trimming_twice_is_trimming_once() -> None:
    data = specials_at_the_end()
    decoder = {str(entry["id"]): {"content": entry["content"]} for entry in data["added_tokens"]}
    values = {
        "tokenizer.json": data,
        "config.json": {"vocab_size": 400, "eos_token_id": 398, "pad_token_id": 399},
        "tokenizer_config.json": {"added_tokens_decoder": decoder, "eos_token": "<eos>"},
    }
    files = {name: json.dumps(value).encode() for name, value in values.items()}
    first, second = unmerged(data, 9)[:4], unmerged(data, 9)[4:]
    rest = [number for number in range(400) if number not in first]
    once = narrow_side_files(files, IndexSet.of(n for n in rest if n not in second), 400)
    step = narrow_side_files(files, IndexSet.of(rest), 400)
    left = IndexSet.of(new for new, old in enumerate(rest) if old not in second)
    twice = narrow_side_files(step, left, 396)
    assert {name: json.loads(raw) for name, raw in twice.items()} == {n: json.loads(raw) for n, raw in once.items()}
    tokenizer = json.loads(once["tokenizer.json"])
    assert (tokenizer["padding"]["pad_id"], tokenizer["post_processor"]["special_tokens"]["<eos>"]["ids"]) == (
        390,
        [389],
    )
    assert {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]} == {"<eos>": 389, "<pad>": 390}
    assert list(json.loads(once["tokenizer_config.json"])["added_tokens_decoder"]) == ["389", "390"]
    assert json.loads(once["config.json"]) == {"vocab_size": 391, "eos_token_id": 389, "pad_token_id": 390}
    ids = encode(once["tokenizer.json"], "the cat ate naïve façade 3434 \u4e2d", special=True)
    assert ids[-1] == 389 and max(ids) < 391


def test_b08_every_id_of_config_and_generation_config_moves_or_the_trim_is_refused() -> None:
    files = {
        "config.json": b'{"vocab_size": 64, "text_config": {"vocab_size": 64, "eos_token_id": [60, 63]}}',
        "generation_config.json": b'{"eos_token_id": 63, "bad_words_ids": [[60], [1, 63]]}',
    }
    out = narrow_side_files(files, IndexSet.of([1, 2, 60, 63]), 64)
    assert json.loads(out["config.json"]) == {"vocab_size": 4, "text_config": {"vocab_size": 4, "eos_token_id": [2, 3]}}
    assert json.loads(out["generation_config.json"]) == {"eos_token_id": 3, "bad_words_ids": [[2], [0, 3]]}
    with pytest.raises(PlanError, match=r"text_config\.eos_token_id\S* names token 60"):
        narrow_side_files(files, IndexSet.of([1, 2, 63]), 64)


def test_b08_an_export_without_the_row_of_eos_is_refused_and_leaves_nothing(llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="eos_token_id names token 2"):
        export(llama, plan_for(llama, vocabulary([0, 1, *range(5, 40)], EMBEDDING)), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_no_byte_token_can_be_trimmed() -> None:
    data = tokenizer_data("byte-level")
    byte = TokenizerFile.from_bytes(json.dumps(data).encode()).byte_tokens[-1]
    kept = IndexSet.of(number for number in range(400) if number != data["model"]["vocab"][byte])
    with pytest.raises(PlanError, match="byte token"):
        narrow_side_files({"tokenizer.json": json.dumps(data).encode()}, kept, 400)


def test_padded_rows_are_not_tokens_and_go(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_data("byte-level")))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 512}')
    save_file({EMBEDDING: torch.zeros(512, 2)}, tmp_path / "model.safetensors")
    use = token_use(Checkpoint.open(tmp_path), InputSchema(type="log", charset="ascii"), Samples())
    assert (use.size, use.figures["padded_rows"]) == (512, 112)
    assert max(use.kept) < 400


# --- Graph and figures. --------------------------------------------------------------------------------


class WritesThroughViews(torch.nn.Module):
    """Updates a static cache, an argument and a part of a tensor in place; one write is for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, at, x)
        scratch = torch.zeros_like(x)
        torch.mul(x, 3, out=scratch)
        scratch[0].add_(1)
        x.copy_(x.flip(0))
        torch.ones_like(x).mul_(2)
        return self.cache.sum() + scratch


def test_b20_a_write_counts_as_a_use() -> None:
    x, at = torch.arange(1.0, 5.0).reshape(2, 2), torch.tensor([3, 1])
    exported = torch.export.export(WritesThroughViews(), (x.clone(), at), strict=False)
    graph = exported.graph_module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())
    module = torch.fx.GraphModule({}, graph)
    removed = remove_dead_nodes(module.graph)
    module.recompile()
    model, theirs, ours, cache = WritesThroughViews(), x.clone(), x.clone(), torch.zeros(4, 2)
    expected, found = model(theirs, at), module(cache, ours, at)
    assert torch.equal(found[-1] if isinstance(found, tuple) else found, expected)
    assert torch.equal(cache, model.cache)
    assert torch.equal(ours, theirs)
    assert removed and not any("mul_" in node.name for node in module.graph.nodes)


def test_b22_attention_on_the_cpu_is_counted_and_matrix_work_without_a_rule_is_an_error(program: Program) -> None:
    width, heads, kv_heads, size, inner, rows = 16, 4, 2, 4, 24, 48
    token = 2 * (2 * width * heads * size + 2 * width * kv_heads * size + 3 * width * inner)
    found = cost(program, prompt=PROMPT, element_bytes=4)
    square = 4 * heads * size
    assert found.prefill_flops == PROMPT * token + 2 * width * rows + square * PROMPT**2
    assert found.prefill_flops_causal == PROMPT * token + 2 * width * rows + square * PROMPT * (PROMPT + 1) // 2
    assert found.decode_flops_per_token == token + 2 * width * rows + square * PROMPT
    graph = copy_graph(program.graph)
    last = next(node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(last):
        table = next(node for node in graph.graph.nodes if node.op == "placeholder")
        stranger = graph.graph.call_function(torch.ops.aten._weight_int8pack_mm.default, (table, table, table))
    stranger.meta["val"] = torch.empty(3, 3, device="meta")
    unknown = program.with_graph(graph)
    with pytest.raises(UnsupportedError, match="_weight_int8pack_mm"):
        matrix_work(unknown, Call(1, PROMPT, 0))


def test_b23_a_second_count_leaves_no_trace_in_the_model_that_is_saved_next(tmp_path: Path, program: Program) -> None:
    def seen(model: PreTrainedModel) -> tuple[list[str], list[tuple[int, int, bool]]]:
        modules = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
        return [*model.state_dict(), *dict(model.named_buffers())], modules

    work = matrix_work(program, Call(1, PROMPT, 0))
    for model in (tiny_model("llama", num_hidden_layers=1), meta_model(tiny_config("llama", num_hidden_layers=1))):
        before = seen(model)
        assert second_opinion(model, work, prompt=PROMPT).macs > 0
        assert seen(model) == before
    real = tiny_model("llama", num_hidden_layers=1)
    second_opinion(real, work, prompt=PROMPT)
    real.save_pretrained(tmp_path)
    assert not any(b"total_ops" in raw or b"total_params" in raw for raw in listing(tmp_path).values())


def left_padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """The batch with each row's own positions, as `generate` gives them."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def test_b24_left_padded_batch_says_what_each_prompt_says_alone(llama: Checkpoint, collapsed: Checkpoint) -> None:
    new = {old: number for number, old in enumerate(KEPT)}
    old_rows = samples(KEPT, 3, 17, 8, 1, 30, 11, 5, 23)
    rows = [[new[token] for token in row] for row in old_rows]
    assert max(map(len, rows)) < CONTEXT
    model, source = loaded(collapsed), loaded(llama)
    with torch.no_grad():
        batched = model(**left_padded(rows)).logits
        before = source(**left_padded(old_rows)).logits[..., KEPT]
        for number, row in enumerate(rows):
            alone = model(torch.tensor([row])).logits[0]
            torch.testing.assert_close(batched[number, -len(row) :], alone, rtol=1.3e-6, atol=1e-5)
            own = batched[number, -len(row) :]
            torch.testing.assert_close(own, before[number, -len(row) :], rtol=1.3e-6, atol=1e-5)
        batch = left_padded(rows)
        batch["attention_mask"][3] = 0
        assert bool(torch.isfinite(model(**batch).logits).all())


def test_b24_half_precision_is_compared_at_the_same_shape_and_a_near_tie_is_no_refutation(
    llama: Checkpoint, collapsed: Checkpoint
) -> None:
    new = {old: number for number, old in enumerate(KEPT)}
    old_rows = samples(KEPT, 9, 4, 14)
    with torch.no_grad():
        found = loaded(collapsed, torch.bfloat16)(**left_padded([[new[t] for t in row] for row in old_rows])).logits
        expected = loaded(llama, torch.bfloat16)(**left_padded(old_rows)).logits[..., KEPT]
    mask = left_padded(old_rows)["attention_mask"].bool()
    torch.testing.assert_close(found[mask], expected[mask])
    margins = (9.0, 1e-6, 9.0)
    pair = (Continuation((1,), (4, 5, 6), margins), Continuation((1,), (0, 2, 0), margins))
    outcome, example = compare_greedy("greedy", [pair], [4, 5, 6], 1e-4)
    assert (outcome.passed, outcome.figures["near_ties"], example) == (True, 1, None)


def test_tensor_parallel_sizes_are_those_that_divide_heads_and_rows() -> None:
    assert common_sizes((32, 8, 128256)) == (1, 2, 4, 8)
    assert common_sizes((32, 8, 33001)) == (1,)
    assert common_sizes((9, 3, 49152)) == (1, 3)


def test_all_refusals_are_mistakes_that_the_command_line_shows_in_one_line() -> None:
    for kind in (CheckpointError, OutputError, PlanError, UnsupportedError):
        assert issubclass(kind, CollapseError) and kind("what\nis", fix="do this").exit_code == 2
        assert str(kind("what\nis", fix="do this")) == "what is; do this"
