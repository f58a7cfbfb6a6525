"""The free layout: the graph, the files, the reloaded model and module surgery by hand are one function."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DummyLayer

import collapse
from collapse import pipeline
from collapse.analysis.config_cost import cost_of_config
from collapse.audit import audit
from collapse.errors import UnsupportedError
from collapse.manifest import load_manifest
from collapse.probe import probe
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.runtime.graph import load_graph
from collapse.verify import verify
from tests.architectures import tiny_model, weights_of
from tests.free_layouts import SCHEMA, WIDE, WIDTH, Case, attention, map_of, mlp, put
from tests.replacing import replacing
from tests.tiny import export, vocabulary

KINDS = tuple(WIDE)
CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def ids_of(seed: int, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 48, (2, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids: torch.Tensor, held=None) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, cache=held, use_cache=held is not None).logits


def reloaded(root: Path):
    model, info = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def same_everywhere(case: Case, model, out: Path, ids: torch.Tensor) -> torch.Tensor:
    """Compare the reloaded model with the rewritten graph, whole and through the cache, and with itself saved again."""
    plan, mask = case.plan(), torch.ones_like(ids)
    graph = rewrite_program(case.program, plan, case.source.config)
    weights = rewrite_weights(case.program, weights_of(case.model), plan, values=case.given())
    whole = logits(model, ids)
    torch.testing.assert_close(graph.run(weights, ids, mask)[0], whole, **CLOSE)
    first, grown = graph.run(weights, ids[:, :7], mask[:, :7])
    second, _ = graph.run(weights, ids[:, 7:], mask, grown)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **CLOSE)
    for held in (DynamicCache(config=model.config), DynamicCache()):
        pieces = [logits(model, ids[:, :7], held), *(logits(model, ids[:, n : n + 1], held) for n in range(7, 11))]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
    assert torch.equal(model.generate(ids, **GREEDY), model.generate(ids, use_cache=False, **GREEDY))
    model.save_pretrained(out / "again")
    assert torch.equal(logits(reloaded(out / "again"), ids), whole)
    assert (
        json.loads((out / "again/config.json").read_text())["sites"]
        == json.loads((out / "config.json").read_text())["sites"]
    )
    return whole


@pytest.mark.parametrize("by", ["zero", "constant", "linear", "low-rank"])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_b01_a_map_stands_in_for_attention_and_mlp_wherever(kind: str, place: int, by: str, tmp_path: Path) -> None:
    case, maps = Case(kind, tmp_path), {}
    for site, several in ((attention(kind, place), 2), (mlp(kind, (place + 2) % 4), None)):
        maps[site] = (map_of(by, len(case.rewrites)), several)
        case.map(site, by)
    out = export(case.source, case.plan(), tmp_path / "out", values=case.given()).root
    model, ids = reloaded(out), ids_of(place)
    whole = same_everywhere(case, model, out, ids)
    by_hand = tiny_model(kind, **WIDE[kind])
    for site, (tensors, several) in maps.items():
        put(by_hand, site, tensors, several)
    torch.testing.assert_close(logits(by_hand, ids), whole, **CLOSE)
    cache = model(ids, use_cache=True).cache
    assert [isinstance(layer, DummyLayer) for layer in cache.layers] == [n == place for n in range(4)]


@pytest.mark.parametrize("kind", KINDS)
def test_first_and_last_attention_gone_at_once(kind: str, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    for block in (0, 1, 3):
        case.map(attention(kind, block), "linear")
    out = export(case.source, case.plan(), tmp_path / "out", values=case.given()).root
    same_everywhere(case, reloaded(out), out, ids_of(5))


@pytest.mark.parametrize("kind", KINDS)
def test_maps_follow_their_block_to_its_new_number(kind: str, tmp_path: Path) -> None:
    case, ids = Case(kind, tmp_path), ids_of(6)
    case.map(attention(kind, 2), "linear")
    case.map(mlp(kind, 3), "low-rank")
    case.narrow("neurons", 1, range(5))
    case.drop(0)
    out = export(case.source, case.plan(), tmp_path / "out", values=case.given()).root
    model = reloaded(out)
    same_everywhere(case, model, out, ids)
    layers = [isinstance(layer, DummyLayer) for layer in model(ids, use_cache=True).cache.layers]
    assert layers == [False, True, False]


def test_a_smaller_vocabulary_goes_with_it(tmp_path: Path) -> None:
    case, ids = Case("llama", tmp_path), ids_of(8) % 40
    case.map(attention("llama", 0), "constant")
    table = "model.embed_tokens.weight"
    case.rewrites.append(vocabulary(range(40), table, size=48, config={"vocab_size": 40}))
    plan = case.plan()
    out = export(case.source, plan, tmp_path / "out", values=case.given()).root
    found = verify(out, case.source, plan=plan, static_only=True)
    assert not found.failures and any(check.name == "token ids" and check.passed for check in found.checks)
    put(case.model, attention("llama", 0), map_of("constant", 0), 2)
    torch.testing.assert_close(logits(reloaded(out), ids), logits(case.model, ids)[..., :40], **CLOSE)
    assert json.loads((out / "config.json").read_text())["base"]["vocab_size"] == 40


def mixture(case: Case) -> torch.Tensor:
    """Put everything that the free layout can say into one plan; return the bias that it adds."""
    case.map("model.layers.0.self_attn", "low-rank")
    case.narrow("neurons", 0, range(0, 24, 3))
    case.narrow("neurons", 3, range(5, 24))
    case.narrow("kv-groups", 3, [1])
    case.map("model.layers.2.mlp", "constant")
    case.map("model.layers.2.post_attention_layernorm", "zero")  # which nothing reads then
    bias = torch.linspace(-1, 1, WIDTH)
    case.bias("model.layers.3.mlp.down_proj", bias)
    case.bias("model.layers.3.self_attn.o_proj", bias.flip(0).contiguous())
    case.drop(1)
    return bias


def test_b02_a_mixture_with_dropped_blocks_is_verified(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    bias = mixture(case)
    norm = {"model.layers.2.input_layernorm.weight": torch.linspace(0.5, 1.5, WIDTH)}
    case.rewrites.append(replacing(norm))
    case.values |= norm
    result = pipeline.export(case.source.root, tmp_path / "out", plan=case.plan(), values=case.given())
    assert result.report.verified.status == "verified"
    model, ids = collapse.load(tmp_path / "out"), ids_of(3, 7)
    assert [layer.mlp.gate_proj.out_features for layer in (model.model.layers[0], model.model.layers[2])] == [8, 19]
    assert model.model.layers[2].self_attn.k_proj.out_features == 4 and len(model.model.layers) == 3
    by_hand = tiny_model("llama", **WIDE["llama"])
    layers = by_hand.model.layers
    put(by_hand, "model.layers.0.self_attn", map_of("low-rank", 0), 2)
    put(by_hand, "model.layers.2.mlp", {"bias": case.values["model.layers.2.mlp.bias"]}, None)
    with torch.no_grad():
        layers[0].mlp.down_proj.weight[:, [n for n in range(24) if n % 3]] = 0
        layers[3].mlp.down_proj.weight[:, :5] = 0
        layers[3].self_attn.o_proj.weight[:, :8] = 0
        layers[3].mlp.down_proj.bias = torch.nn.Parameter(bias)
        layers[3].self_attn.o_proj.bias = torch.nn.Parameter(bias.flip(0))
        layers[2].input_layernorm.weight.copy_(norm["model.layers.2.input_layernorm.weight"])
    del layers[1]
    by_hand.config.num_hidden_layers = 3
    torch.testing.assert_close(logits(model, ids), logits(by_hand, ids), **CLOSE)
    assert torch.equal(model.generate(ids, **GREEDY), model.generate(ids, use_cache=False, **GREEDY))
    for graph in (load_graph(tmp_path / "out"), load_graph(tmp_path / "out", case.source.root)):
        assert torch.equal(graph.generate(ids, 8), model.generate(ids, **GREEDY))
    found = audit(tmp_path / "out", case.source)
    assert found.status == "clean" and found.figures["rows_searched"] > 50
    manifest = load_manifest(tmp_path / "out")
    added = 3 * WIDTH * 2 + 3 * WIDTH
    assert manifest.replaced.parameters == added + WIDTH
    assert manifest.kept.parameters == sum(p.numel() for p in model.parameters())
    source = sum(p.numel() for p in case.model.parameters())
    assert manifest.erased.parameters == source + added - manifest.kept.parameters
    assert result.report.after.params == manifest.kept.parameters
    counted = cost_of_config(AutoConfig.from_pretrained(tmp_path / "out"), prompt=SCHEMA.workload.prompt).cost
    assert result.report.after.decode_flops_per_token == counted.decode_flops_per_token
    assert result.report.after.prefill_flops == counted.prefill_flops
    assert result.report.after.kv_bytes_per_token == 4 * (2 * 8 + 2 * 4)  # block 2 keeps two groups, block 3 one


def test_the_probe_says_that_what_a_map_stands_in_for_is_erased(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    case.map(attention("llama", 1), "linear")
    out = export(case.source, case.plan(), tmp_path / "out", values=case.given()).root
    assert probe(out, "*.1.self_attn").status == "ERASED"
    assert probe(out, "*.2.self_attn").status == "ACTIVE"


def test_the_plan_is_two_files_and_says_its_layout(tmp_path: Path, command) -> None:
    from collapse.rewrite.values import save_plan

    case = Case("llama", tmp_path)
    mixture(case)
    save_plan(case.plan(), case.given(), tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["layout"] == "free"
    found = command("export", case.source.root, "--plan", tmp_path / "plan.json", "-o", tmp_path / "out")
    assert found.code == 0, found.err
    found = command("verify", tmp_path / "out", "--source", case.source.root)
    assert found.code == 0, found.err


def test_plain_transformers_refuses_it_by_name(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    case.map(attention("llama", 1), "zero")
    out = export(case.source, case.plan(), tmp_path / "out").root
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(out)!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        found.returncode == 1 and "has model type `collapse_free`" in found.stderr.splitlines()[-9:][0] + found.stderr
    )
    again = subprocess.run([sys.executable, "-c", f"import collapse.models; {code}"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    with pytest.raises(UnsupportedError, match="is in the free layout already"):
        pipeline.make_plan(out, "log")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_it_compiles_into_one_graph_as_the_source_does(kind: str, tmp_path: Path) -> None:
    case, ids = Case(kind, tmp_path), ids_of(9)
    case.map(attention(kind, 0), "linear")
    case.map(mlp(kind, 1), "low-rank")
    case.narrow("neurons", 2, range(7))
    model = reloaded(export(case.source, case.plan(), tmp_path / "out", values=case.given()).root)
    for one in (case.model, model):
        torch._dynamo.reset()
        assert torch._dynamo.explain(one)(ids, use_cache=False).graph_break_count == 0
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), **CLOSE)
    held, plain = (DynamicCache(config=model.config) for _ in range(2))
    for start, stop in ((0, 9), (9, 10), (10, 11)):
        now, wanted = logits(compiled, ids[:, start:stop], held), logits(model, ids[:, start:stop], plain)
        torch.testing.assert_close(now, wanted, **CLOSE)
    torch._dynamo.reset()


def test_a_static_cache_and_another_attention_kernel(tmp_path: Path) -> None:
    case, ids = Case("gemma3_text", tmp_path), ids_of(4)
    case.map(attention("gemma3_text", 0), "linear")
    out = export(case.source, case.plan(), tmp_path / "out", values=case.given()).root
    model, wanted = reloaded(out), None
    for options in ({"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}, {}):
        found = model.generate(ids, **GREEDY, **options)
        assert wanted is None or torch.equal(found, wanted)
        wanted = found
    whole = logits(model, ids)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model, ids), whole, **CLOSE)
    eager = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", dtype=torch.float32)
    assert torch.equal(logits(eager, ids), logits(model, ids))


def test_a_config_is_read_and_written_alike(tmp_path: Path) -> None:
    case = Case("gpt2", tmp_path)
    case.map(attention("gpt2", 2), "constant")
    out = export(case.source, case.plan(), tmp_path / "out", values=case.given()).root
    config = AutoConfig.from_pretrained(out)
    assert config.model_type == "gpt2" and config.n_layer == 4 and type(config).__name__ == "FreeGPT2Config"
    config.save_pretrained(tmp_path / "again")
    values = json.loads((tmp_path / "again/config.json").read_text())
    assert values["model_type"] == "collapse_free" and values["base"]["model_type"] == "gpt2"
    assert values["sites"] == [
        {"site": "transformer.h.2.attn", "by": "constant", "outputs": 2, "shapes": {"bias": [16]}}
    ]
    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert again.to_dict() | {"_name_or_path": ""} == config.to_dict() | {"_name_or_path": ""}
