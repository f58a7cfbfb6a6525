"""What a refuted output is blamed on: the one wrong rewrite of several, a tensor, or a config edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from collapse.checkpoint import Checkpoint
from collapse.errors import RefutedError
from collapse.pipeline import refuted
from collapse.plan import Plan, Specialise
from collapse.progress import Stopwatch
from collapse.source_model import source_weights
from collapse.trace import load_config, trace
from collapse.verdict import Blamed, Verdict
from collapse.verify import verify, with_blame
from collapse.verify.dynamic import dynamic_checks
from tests.exported import EMBEDDING, KEPT, SMALL, WEIGHTS
from tests.tiny import PROVED, erase, export, plan_for, samples, vocabulary

IDS = samples(KEPT, 20, 9)


@pytest.fixture(scope="module")
def origin(llama: Checkpoint):
    return trace(load_config(llama)), source_weights(llama, Stopwatch(quiet=True))


def switch(site: str, **config: object) -> Specialise:
    return Specialise(**{"pass": "test"}, site=site, evidence=PROVED, config=config)


def judged(llama: Checkpoint, out: Path, plan: Plan, origin, ids=IDS) -> Verdict:
    return with_blame(verify(out, llama, samples=ids, plan=plan, settings=SMALL), out, llama, ids, origin)


def test_of_several_rewrites_only_the_wrong_one_is_named(llama: Checkpoint, tmp_path: Path, origin) -> None:
    right = (erase("old.bias"), vocabulary(KEPT, EMBEDDING), switch("use_cache", use_cache=True))
    plan = plan_for(llama, *right[:2], switch("rms_norm_eps", rms_norm_eps=0.01), right[2])
    verdict = judged(llama, export(llama, plan, tmp_path / "out").root, plan, origin)
    assert verdict.status == "refuted"
    assert [(found.pass_name, found.site) for found in verdict.blamed] == [("test", "rms_norm_eps")]
    assert verdict.blamed[0].reason.startswith(
        "with its config edits (rms_norm_eps = 0.01) transformers moves a logit by"
    )


def test_a_row_that_is_used_is_blamed_on_the_rewrite_that_drops_it(llama: Checkpoint, tmp_path: Path, origin) -> None:
    plan = plan_for(llama, erase("old.bias"), vocabulary(KEPT, EMBEDDING))
    verdict = judged(llama, export(llama, plan, tmp_path / "out").root, plan, origin, [[5, 6], [7, 41, 8]])
    assert [(found.site, found.reason) for found in verdict.blamed] == [
        ("vocabulary", "alone, in the graph, it has no row for token 41")
    ]


def test_a_tensor_that_is_not_what_the_graph_reads_is_named(llama: Checkpoint, out: Path, plan: Plan, origin) -> None:
    tensors = load_file(out / WEIGHTS)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    checks, example = dynamic_checks(out, llama, plan, IDS, settings=SMALL)
    verdict = with_blame(Verdict(checks=checks, counterexample=example), out, llama, IDS, origin)
    assert [(found.pass_name, found.site) for found in verdict.blamed] == [("writer", "model.norm.weight")]


def test_a_field_of_config_json_that_the_plan_does_not_make_is_named(llama, out: Path, plan: Plan, origin) -> None:
    config = json.loads((out / "config.json").read_bytes()) | {"hidden_act": "gelu"}
    (out / "config.json").write_text(json.dumps(config))
    checks, example = dynamic_checks(out, llama, plan, IDS, settings=SMALL)
    verdict = with_blame(Verdict(checks=checks, counterexample=example), out, llama, IDS, origin)
    assert [found.site for found in verdict.blamed] == ["config.json: hidden_act"]
    assert verdict.blamed[0].reason == "hidden_act is gelu, plan and source make it silu"


def test_what_was_verified_or_the_files_refute_asks_for_no_trace(llama: Checkpoint, out: Path, plan: Plan) -> None:
    def never():
        raise AssertionError

    right = verify(out, llama, samples=IDS, plan=plan, settings=SMALL)
    assert with_blame(right, out, llama, IDS, never) == right and right.status == "verified"
    (out / "stray.bin").write_bytes(b"x")
    wrong = verify(out, llama, samples=IDS, plan=plan, settings=SMALL)
    assert with_blame(wrong, out, llama, IDS, never) == wrong and wrong.status == "refuted"


def test_a_wrong_row_that_no_logit_shows_is_found_and_named(llama: Checkpoint, tmp_path: Path, origin) -> None:
    plan = plan_for(llama, erase("old.bias"))
    out = export(llama, plan, tmp_path / "out").root
    tensors = load_file(out / WEIGHTS)
    tensors["model.embed_tokens.weight"][50] *= 1 + 1e-6
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    few = samples([1, 2, 3], 20, 9)
    checks, example = dynamic_checks(out, llama, plan, few, reference=origin, settings=SMALL)
    assert {check.name for check in checks if not check.passed} == {"graph: weights"}
    verdict = with_blame(Verdict(checks=checks, counterexample=example), out, llama, few, origin)
    assert [found.site for found in verdict.blamed] == ["model.embed_tokens.weight"]


def test_a_search_that_breaks_does_not_hide_the_refutation(llama: Checkpoint, out: Path, plan: Plan) -> None:
    edited = json.loads((out / "config.json").read_bytes()) | {"hidden_act": "gelu"}
    (out / "config.json").write_text(json.dumps(edited))
    checks, example = dynamic_checks(out, llama, plan, IDS, settings=SMALL)
    verdict = with_blame(Verdict(checks=checks, counterexample=example), out, llama, IDS, (None, {}))
    assert (verdict.status, [found.pass_name for found in verdict.blamed]) == ("refuted", ["blame"])


def test_the_error_and_the_saved_counterexample_name_the_site(llama: Checkpoint, tmp_path: Path, out: Path) -> None:
    failed = verify(out, llama, samples=[[7, 41]], settings=SMALL)
    blamed = Blamed(pass_name="vocabulary", site="vocabulary", reason="it has no row for token 41")
    error = refuted(failed.model_copy(update={"blamed": (blamed,)}), tmp_path / "OUT")
    assert isinstance(error, RefutedError)
    assert "vocabulary (vocabulary): it has no row for token 41" in str(error)
    saved = json.loads((tmp_path / "OUT.refuted.json").read_bytes())
    assert saved["blamed"] == [
        {"pass_name": "vocabulary", "site": "vocabulary", "reason": "it has no row for token 41"}
    ]
