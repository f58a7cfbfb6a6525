"""Computed weights under verification: equal to the rewritten graph, never to the source, and wrong ones named."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse import export as run_export
from collapse.audit import audit
from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.manifest import load_manifest, write_manifest
from collapse.naming import naming_of
from collapse.options import Options
from collapse.passes import Context, Proposal
from collapse.plan import Axis, Evidence, IndexSet, Narrow, Plan, Specialise
from collapse.progress import Stopwatch
from collapse.rewrite.computed import replaced_names
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.rewrite.values import Values, load_values
from collapse.runtime.graph import load_graph
from collapse.source_model import source_weights
from collapse.trace import load_config, meta_model, trace
from collapse.verdict import Verdict
from collapse.verify import verify, with_blame
from collapse.verify.computed import exact_graph
from collapse.verify.dynamic import Rewritten, dynamic_checks
from tests.architectures import tiny_config
from tests.audit_cases import dropped
from tests.exported import EMBEDDING, KEPT, SMALL, WEIGHTS, check, details
from tests.replacing import MEASURED, drawn, replacing, values_in
from tests.tiny import PROVED, erase, export, plan_for, samples, tiny_llama, vocabulary

DOWN = "model.layers.1.mlp.down_proj.weight"
IDS = samples(KEPT, 20, 9)
NEXT = Specialise(**{"pass": "last-token"}, site="graph", evidence=PROVED, graph="next-token")


@pytest.fixture(scope="module")
def origin(llama: Checkpoint):
    return trace(load_config(llama)), source_weights(llama, Stopwatch(quiet=True))


@pytest.fixture(scope="module")
def new(llama: Checkpoint) -> dict[str, torch.Tensor]:
    return drawn(llama, DOWN, "model.norm.weight")


@pytest.fixture(scope="module")
def values(new, tmp_path_factory: pytest.TempPathFactory) -> Values:
    return values_in(tmp_path_factory.mktemp("values") / "plan.safetensors", new)


def reference(origin, plan: Plan, values: Values, config) -> Rewritten:
    program, weights = origin
    exact = exact_graph(program, weights, plan, config)
    return Rewritten(
        rewrite_program(program, plan, config),
        rewrite_weights(program, weights, plan, config, values=values),
        None,
        exact,
    )


def judged(llama: Checkpoint, out: Path, plan: Plan, values: Values, origin, ids=IDS) -> Verdict:
    pair = partial(reference, origin, plan, values, llama.config)
    verdict = verify(out, llama, samples=ids, program=pair, plan=plan, settings=SMALL)
    return with_blame(verdict, out, llama, ids, origin)


def small(llama: Checkpoint, *rewrites) -> Plan:
    return plan_for(llama, erase("old.bias"), vocabulary(KEPT, EMBEDDING), *rewrites)


# What is right is accepted, and nothing is said of the source.


def test_an_output_is_compared_with_the_graph_and_with_the_exact_part_of_its_plan(
    llama: Checkpoint, new, values: Values, origin, tmp_path: Path
) -> None:
    plan = small(llama, replacing(new), dropped(llama, 0))
    plan = plan.model_copy(update={"rewrites": plan.rewrites[:3]})
    out = export(llama, plan, tmp_path / "out", values=values).root
    verdict = judged(llama, out, plan, values, origin)
    assert verdict.status == "verified", details(verdict)
    names = {found.name for found in verdict.checks}
    assert names >= {"graph: prefill", "graph: cache", "graph: left padding", "graph: greedy", "graph: weights"}
    assert not {name for name in names if name.startswith(("logits:", "graph and source:", "greedy"))}
    assert check(verdict, "exact rewrites").figures["max_abs_diff"] < 1e-5
    assert check(verdict, "replaced tensors").figures == {"replaced": 2}
    distance = check(verdict, "distance to the source")
    assert float(distance.figures["max_abs_diff"]) > 0.1 and distance.detail.startswith("nothing is claimed")
    figures = check(verdict, "graph: prefill").figures
    assert figures["max_abs_diff"] < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tied_embedding_in_half_precision_under_a_smaller_vocabulary(dtype, origin, tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", dtype=dtype)
    new = {EMBEDDING: drawn(source, EMBEDDING)[EMBEDDING][: len(KEPT)].clone(), **drawn(source, DOWN)}
    held = values_in(tmp_path / "values", new)
    plan = plan_for(source, vocabulary(KEPT, EMBEDDING), replacing(new))
    out = export(source, plan, tmp_path / "out", values=held).root
    own = (origin[0], source_weights(source, Stopwatch(quiet=True)))
    verdict = judged(source, out, plan, held, own)
    assert verdict.status == "verified", details(verdict)
    rewritten = reference(own, plan, held, source.config).weights
    assert torch.equal(rewritten[EMBEDDING], new[EMBEDDING].float())
    assert rewritten["lm_head.weight"] is rewritten[EMBEDDING]


def test_neurons_cut_and_refitted_and_a_dropped_layer(llama: Checkpoint, origin, tmp_path: Path) -> None:
    kept = list(range(0, 48, 3))
    parts = {"gate": 0, "up": 0, "down": 1}
    axes = tuple(
        Axis(tensor=f"model.layers.{layer}.mlp.{part}_proj.weight", dim=dim)
        for layer in range(2)
        for part, dim in parts.items()
    )
    narrow = Narrow(
        **{"pass": "neurons"}, site="model.layers.1.mlp", evidence=MEASURED, size=48, kept=IndexSet.of(kept),
        relabels="channels", axes=axes, config={"intermediate_size": len(kept)},
    )  # fmt: skip
    new = {DOWN: drawn(llama, DOWN)[DOWN][:, kept].contiguous()}
    drop = dropped(llama, 0).model_copy(update={"evidence": MEASURED})
    plan = small(llama, drop, narrow, replacing(new))
    held = values_in(tmp_path / "values", new)
    out = export(llama, plan, tmp_path / "out", values=held).root
    verdict = verify(out, llama, samples=IDS, plan=plan, settings=SMALL)
    assert verdict.status == "verified", details(verdict)
    assert check(verdict, "graph: prefill").passed and check(verdict, "graph: weights").passed
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, new[DOWN])


def test_a_tolerance_in_the_evidence_is_a_claim_about_the_source(llama: Checkpoint, origin, tmp_path: Path) -> None:
    new = {DOWN: load_file(llama.root / WEIGHTS)[DOWN] * (1 + 1e-4)}
    values = values_in(tmp_path / "values", new)
    for tolerance, status in ((0.01, "verified"), (1e-6, "refuted")):
        evidence = Evidence(grade="measured", claim="c", method="m", figures={"tolerance": tolerance})
        plan = plan_for(llama, replacing(new, evidence=evidence))
        out = export(llama, plan, tmp_path / status, values=values).root
        verdict = judged(llama, out, plan, values, origin)
        assert verdict.status == status, details(verdict)
        assert check(verdict, "graph and source: prefill").passed == (status == "verified")
    assert [(found.pass_name, found.site) for found in verdict.blamed] == [("refit", DOWN)]
    assert "farther from the source than the evidence allows" in verdict.blamed[0].reason


# What is wrong is refuted by name.


@pytest.fixture
def wrong(llama: Checkpoint, new, values: Values, tmp_path: Path) -> tuple[Path, Plan]:
    """An output with one wrong element in a replaced tensor, and a manifest that fits it."""
    plan = small(llama, replacing(new))
    out = export(llama, plan, tmp_path / "out", values=values).root
    tensors = load_file(out / WEIGHTS)
    tensors[DOWN][3, 5] += 0.25
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    write_manifest(out, llama, plan)
    return out, plan


def test_a_wrong_byte_is_refuted_by_the_files(llama: Checkpoint, wrong, values: Values, origin) -> None:
    out, _ = wrong
    verdict = verify(out, llama, static_only=True)
    said = f"replaced tensors: {WEIGHTS}: {DOWN}: has other data than those that the plan computed"
    assert details(verdict) == said
    for found in (audit(out), audit(out, llama)):
        assert [(one.rule, one.file) for one in found.findings] == [("tensor-values", WEIGHTS)]
        assert found.findings[0].offset == Checkpoint.open(out).tensors[DOWN].start


def test_a_wrong_byte_is_refuted_by_running_and_named(llama: Checkpoint, wrong, values: Values, origin) -> None:
    out, plan = wrong
    pair = reference(origin, plan, values, llama.config)
    checks, example = dynamic_checks(out, llama, plan, IDS, reference=pair, settings=SMALL)
    assert {one.name for one in checks if not one.passed} >= {"graph: weights", "graph: prefill"}
    verdict = with_blame(Verdict(checks=checks, counterexample=example), out, llama, IDS, origin)
    assert [(found.pass_name, found.site) for found in verdict.blamed] == [("writer", DOWN)]
    checks, _ = dynamic_checks(out, llama, plan, IDS, settings=SMALL)
    assert [one.name for one in checks if not one.passed] == ["graph"] and DOWN in checks[-1].detail


def test_a_wrong_tensor_beside_the_computed_ones_is_named(
    llama: Checkpoint, new, values: Values, origin, tmp_path: Path
) -> None:
    plan = small(llama, replacing(new))
    out = export(llama, plan, tmp_path / "out", values=values).root
    tensors, other = load_file(out / WEIGHTS), "model.layers.0.mlp.up_proj.weight"
    tensors[other][3, 5] += 0.25
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    pair = reference(origin, plan, values, llama.config)
    checks, example = dynamic_checks(out, llama, plan, IDS, reference=pair, settings=SMALL)
    verdict = with_blame(Verdict(checks=checks, counterexample=example), out, llama, IDS, origin)
    assert [(found.pass_name, found.site) for found in verdict.blamed] == [("writer", other)]


def test_a_wrong_proved_rewrite_does_not_hide_behind_computed_weights(
    llama: Checkpoint, new, values: Values, origin, tmp_path: Path
) -> None:
    live = dropped(llama, 0)
    plan = small(llama, replacing(new), live)
    out = export(llama, plan, tmp_path / "out", values=values).root
    verdict = judged(llama, out, plan, values, origin)
    assert [found.name for found in verdict.failures] == ["exact rewrites"]
    assert [(found.pass_name, found.site) for found in verdict.blamed] == [("layers", live.site)]


def test_old_data_of_a_replaced_tensor_are_searched_for(llama: Checkpoint, new, values: Values, tmp_path: Path) -> None:
    plan = small(llama, replacing(new))
    out = export(llama, plan, tmp_path / "out", values=values).root
    clean = audit(out, llama)
    assert clean.status == "clean" and clean.figures["rows_searched"] >= 32
    (out / "notes.txt").write_bytes(llama.read_bytes(DOWN)[192:384])
    write_manifest(out, llama, plan)
    hit = next(found for found in audit(out, llama).findings if found.rule == "erased-bytes")
    assert (hit.file, hit.offset) == ("notes.txt", 0)
    assert hit.what == f"holds the bytes of row 1 of {DOWN}, which the plan replaces"
    tensors = load_file(out / WEIGHTS)
    tensors[DOWN] = load_file(llama.root / WEIGHTS)[DOWN]
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    assert {"tensor-values", "erased-bytes"} <= {found.rule for found in audit(out, llama).findings}


def test_rows_that_the_computation_leaves_as_they_were_are_no_finding(llama: Checkpoint, tmp_path: Path) -> None:
    new = {DOWN: load_file(llama.root / WEIGHTS)[DOWN].clone()}
    new[DOWN][4] = 0.5
    plan = plan_for(llama, replacing(new))
    out = export(llama, plan, tmp_path / "out", values=values_in(tmp_path / "values", new)).root
    assert audit(out, llama).status == "clean"


@pytest.mark.parametrize("missing", ["tensor", "values"])
def test_weights_in_memory_need_the_values(llama: Checkpoint, new, values: Values, origin, missing: str) -> None:
    plan = plan_for(llama, replacing(new))
    given = None if missing == "values" else Values(values.root, {DOWN: values.tensors[DOWN]})
    with pytest.raises(PlanError, match="no values are given"):
        rewrite_weights(*origin, plan, values=given)


def test_tensors_that_the_model_does_not_take_as_they_are_cannot_be_replaced(llama: Checkpoint, origin) -> None:
    plan = plan_for(llama, replacing(drawn(llama, "old.bias")))
    with pytest.raises(PlanError, match=r"old\.bias: cannot be replaced: the model has no such tensor"):
        rewrite_program(origin[0], plan)
    expert = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    mixtral = SimpleNamespace(naming=naming_of(meta_model(tiny_config("mixtral"))))
    with pytest.raises(PlanError, match=f"{expert}: cannot be replaced: it is only a part of a tensor of the model"):
        replaced_names(mixtral, plan_for(llama, replacing({expert: torch.ones(2)})))


# From end to end.


class Refit:
    """A pass that computes weights, as a refit would."""

    name = "refit"

    def propose(self, context: Context) -> Proposal:
        new = drawn(context.checkpoint, DOWN)
        return Proposal((replacing(new, site=DOWN.removesuffix(".weight")), NEXT), values=new)


def test_a_plan_with_values_goes_through_the_command_line(
    llama: Checkpoint, command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("collapse.pipeline.chosen_passes", lambda names: (Refit(),))
    schema = json.dumps(plan_for(llama).input_schema)
    path, out = tmp_path / "plan.json", tmp_path / "out"
    assert command("plan", llama.root, "--schema", schema, "-o", path).code == 0
    plan = Plan.load(path)
    assert load_values(plan, path) is not None and plan.rewrites[0].kind == "replace"
    done = command("export", llama.root, "--plan", path, "-o", out, "--prompts", 2)
    assert done.code == 0, done.err
    new = drawn(llama, DOWN)[DOWN]
    assert torch.equal(load_file(out / WEIGHTS)[DOWN], new)
    report = json.loads((out / "report.json").read_bytes())
    assert report["rewrites"][0]["replaced"] == [DOWN] and report["before"] == report["after"]
    assert "1 replaced tensors have computed data: the model is another function than its source." in report["notes"]
    checks = {found["name"]: found["passed"] for found in report["verified"]["checks"]}
    assert checks["graph: next token"] and checks["graph: next token, cache"] and checks["distance to the source"]
    assert f"computed data for `{DOWN}`" in (out / "REPORT.md").read_text()
    again = run_export(llama.root, tmp_path / "again", json.loads(schema), Options(prompts=2))
    assert (again.output / WEIGHTS).read_bytes() == (out / WEIGHTS).read_bytes()
    assert again.plan.digest == plan.digest == load_manifest(out).plan_digest

    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(IDS))
    assert command("verify", out, "--source", llama.root, "--plan", path, "--ids", ids).code == 0
    assert command("audit", out, "--source", llama.root).code == 0
    tokens = torch.tensor(IDS[:1])
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(out)(tokens).logits[:, -1:]
    found = load_graph(out, llama.root).prefill(tokens).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
