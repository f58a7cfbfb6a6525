from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from collapse.analysis.config_cost import ConfigCost, cost_of_config
from collapse.analysis.flops import Cost
from collapse.canonical import dumps
from collapse.cli_inspect import app, flops_data
from collapse.errors import CheckpointError, CollapseError
from collapse.plan import Evidence, Plan, ShortCircuit, Skipped
from collapse.report.data import Figures, GraphFigures, Report, build_report, common_sizes
from collapse.report.diff import check_comparable, load_side, load_sides, to_json, to_markdown
from collapse.report.folding import fold, unfold
from collapse.report.markdown import summary_lines
from collapse.report.markdown import to_markdown as report_markdown
from collapse.report.text import change, short
from collapse.schema import Workload
from collapse.verdict import Check, Verdict

KEYS = {
    "params", "bytes", "prefill_flops", "prefill_flops_causal", "decode_flops_per_token", "kv_bytes_per_token",
    "weight_bytes_per_decode_token",
}  # fmt: skip


def config(layers: int = 3) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        vocab_size=96, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def counted() -> ConfigCost:
    return cost_of_config(config(), prompt=21)


def without(cost: Cost, site: str) -> Cost:
    """Return the cost without a module, as a counter of the collapsed program would give it."""
    gone = cost.modules[site].figures()
    lost = {name: value - gone[name] for name, value in cost.figures().items()}
    modules = {path: part for path, part in cost.modules.items() if path != site and not path.startswith(f"{site}.")}
    return dataclasses.replace(cost, modules=modules, **lost)  # type: ignore[arg-type]


def plan(*sites: str) -> Plan:
    evidence = Evidence(grade="measured", claim="the logits hardly move", method="zeroed it", figures={"kl": 0.01234})
    rewrites = [
        ShortCircuit.model_validate(
            {"pass": "dead-module", "site": s, "evidence": evidence, "by": "zero", "tensors": ()}
        )
        for s in sites
    ]
    skipped = Skipped.model_validate({"pass": "positions", "site": "model", "reason": "no position table"})
    fields = {"source": "5" * 64, "model_type": "llama", "schema": {"type": "log"}, "schema_digest": "d"}
    return Plan.model_validate({**fields, "rewrites": rewrites, "skipped": [skipped]})


def report(counted: ConfigCost, *sites: str, verdict: Verdict | None = None) -> Report:
    after = counted.cost
    for site in sites:
        after = without(after, site)
    return build_report(
        plan(*sites), counted.cost, after, verdict, name="tiny", program=counted.prefill,
        workload=Workload(prompt=21), divided=((4, 2, 96), (4, 2, 96)),
    )  # fmt: skip


def test_report_has_the_promised_keys_and_survives_a_round_trip(counted: ConfigCost, tmp_path: Path) -> None:
    verdict = Verdict(checks=(Check(name="logits", passed=True, detail="equal"),))
    made = report(counted, "model.layers.2.mlp", verdict=verdict)
    content = made.to_json()
    assert {"source", "schema", "plan_digest", "before", "after", "rewrites", "skipped", "verified"} <= set(content)
    assert set(content["before"]) == set(content["after"]) == KEYS
    assert set(content["rewrites"][0]) == {"pass", "site", "kind", "grade", "evidence"}
    assert content["skipped"][0]["reason"] == "no position table"
    assert content["verified"]["status"] == "verified"
    made.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == made
    assert (tmp_path / "report.json").read_text() == dumps(json.loads(dumps(content)))


def test_the_diff_of_a_module_is_its_closed_form(counted: ConfigCost) -> None:
    made = report(counted, "model.layers.2.mlp")
    assert made.before.prefill_flops - made.after.prefill_flops == 21 * 2 * 3 * 48 * 80
    assert made.before.params - made.after.params == 3 * 48 * 80
    states = {item.path: item.state for item in made.modules}
    assert states["model.layers.2.mlp"] == states["model.layers.2.mlp.up_proj"] == "removed"
    assert states["model.layers.{0-1}"] == states["model.layers.2.self_attn"] == "kept"
    assert {item.path: item.count for item in made.modules}["model.layers.{0-1}.mlp"] == 2


def test_zero_savings_are_said_with_the_reason(counted: ConfigCost) -> None:
    made = report(counted)
    assert made.notes == ("Nothing was removed: every site was left: no position table.",)
    text = report_markdown(made)
    assert "**No parameter was removed.**" in text and "Nothing was removed: every site was left" in text
    assert text.count("| 0 % |") == 7


def test_savings_of_the_graph_alone_have_a_line_of_their_own(counted: ConfigCost) -> None:
    made = report(counted)
    assert "load_graph" not in report_markdown(made)
    figures = GraphFigures(
        prefill_flops_before=1000, prefill_flops_after=900, decode_flops_before=10, decode_flops_after=10,
        nodes_before=50, nodes_after=40, table_bytes=2048,
    )  # fmt: skip
    text = report_markdown(made.model_copy(update={"graph": figures}))
    (line,) = [line for line in text.splitlines() if "load_graph" in line]
    assert "900 FLOPs beside the 1,000" in line and "(-10.00 %)" in line and "40 calls beside 50" in line
    assert text.count("| 0 % |") == 7


def test_markdown_tells_evidence_near_misses_and_checks(counted: ConfigCost) -> None:
    checks = (
        Check(name="logits", passed=True, detail="equal"), Check(name="tokens", passed=False, detail="differ at 3"),
        Check(name="padding", passed=None, detail="no tokenizer"),
    )  # fmt: skip
    text = report_markdown(report(counted, "model.layers.1.mlp", "model.layers.2.mlp", verdict=Verdict(checks=checks)))
    assert "### short-circuit, 2 sites" in text and "**measured** by `dead-module`: The logits hardly move." in text
    assert "- `model.layers.1.mlp`: kl 0.01234" in text
    assert "- `positions` left `model`: no position table" in text
    assert "- passed: logits." in text and "- FAILED: tokens. Differ at 3." in text and "- not run: padding" in text
    assert "Tensor-parallel sizes that divide heads and vocabulary: 1, 2 before, 1, 2 after." in text
    assert "5" * 64 in text and "collapse export MODEL --plan" in text


def test_the_summary_has_one_line_for_what_is_said_of_many_sites(counted: ConfigCost) -> None:
    found = report(counted, "model.layers.1.mlp", "model.layers.2.mlp").rewrites
    said = "the logits hardly move"
    assert list(summary_lines(found)) == [f"measured: dead-module short-circuit model.layers.1.mlp and 1 more: {said}"]
    assert list(summary_lines(found[:1])) == [f"measured: dead-module short-circuit model.layers.1.mlp: {said}"]
    other = found[1].model_copy(update={"evidence": found[1].evidence.model_copy(update={"claim": "they do not"})})
    assert len(list(summary_lines((found[0], other)))) == 2


@pytest.mark.parametrize(("change_", "message"), [({"params": -1.5}, "params"), ({"surplus": 1}, "surplus")])
def test_a_damaged_report_is_refused(counted: ConfigCost, tmp_path: Path, change_: Any, message: str) -> None:
    content = report(counted).to_json()
    content["before"].update(change_)
    (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(CollapseError, match=message):
        Report.load(tmp_path / "report.json")


def test_diff_of_a_model_and_its_report(counted: ConfigCost, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    out.mkdir()
    config().save_pretrained(base)
    report(counted, "model.layers.2.mlp").save(out / "report.json")
    sides = load_sides(base, out)
    assert [side.prompt for side in sides] == [21, 21], "that of the report"
    assert load_sides(out, out, prompt=5) == (sides[1], sides[1]), "a report has its own"
    found = to_json(*sides)
    assert found["difference"]["prefill_flops"] == -21 * 2 * 3 * 48 * 80
    paths = [item["path"] for item in found["modules"]]
    assert paths[0] == "model.layers.2.mlp" and "model.layers.{0-1}.mlp" not in paths
    assert "| Parameters | " in to_markdown(*sides)
    assert "No figure differs." in to_markdown(sides[0], sides[0])
    with pytest.raises(CollapseError, match="counted for 21 prompt tokens"):
        check_comparable(sides[0], dataclasses.replace(sides[1], prompt=5))
    with pytest.raises(CollapseError, match="no model directory"):
        load_side(tmp_path / "absent", prompt=21)


def test_a_plan_holds_no_figures(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    with pytest.raises(CollapseError, match="field"):
        load_side(tmp_path / "plan.json", prompt=21)


layers = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=8)


@given(layers)
def test_folding_loses_nothing(kinds: list[str]) -> None:
    values = {f"h.{i}{rest}": kind + rest for i, kind in enumerate(kinds) for rest in ("", ".mlp")}
    folded = fold({"embed": "e", **values, "norm": "n"})
    restored = {path: item.value for item in folded for path in unfold(item.path)}
    assert restored == {"embed": "e", **values, "norm": "n"}
    assert sum(item.count for item in folded) == len(restored)
    runs = 1 + sum(left != right for left, right in itertools.pairwise(kinds))
    assert len(folded) == 2 + 2 * runs


def test_layers_that_differ_in_a_child_are_not_folded() -> None:
    values = {"h.0": 1, "h.0.mlp": 1, "h.1": 1, "h.1.mlp": 2, "h.2": 1, "h.2.mlp": 2}
    assert [item.path for item in fold(values)] == ["h.0", "h.0.mlp", "h.{1-2}", "h.{1-2}.mlp"]


def test_numbers_for_people() -> None:
    assert [short(n) for n in (0, 999, 1234567, 134515008, 70553706496, 999999)] == [
        "0", "999", "1.23 M", "135 M", "70.6 G", "1.00 M",
    ]  # fmt: skip
    assert (change(100, 100), change(200, 100), change(0, 5)) == ("0 %", "-50.00 %", "new")
    assert common_sizes((9, 3, 49152)) == (1, 3)
    assert common_sizes(()) == ()
    assert not Figures() and Figures(params=1)


def test_flops_command_prints_the_promised_json(tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["flops", str(tmp_path), "--prompt", "21", "--new", "3", "--thop", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert KEYS | {"modules"} <= set(data)
    assert done.stdout == dumps(data)
    decode = data["decode_flops_per_token"]
    step = 4 * 3 * 48
    assert data["request_flops"] == data["prefill_flops"] + (decode + step) + (decode + 2 * step)
    assert data["modules"]["lm_head"]["prefill_flops"] == 2 * 48 * 96
    unseen = 3 * 4 * 48 * 21**2
    assert data["thop"]["gaps"] == {"aten.scaled_dot_product_attention in LlamaAttention": unseen}
    assert data["thop"]["ours"] - data["thop"]["flops"] == unseen
    assert data["thop"]["ours"] == data["prefill_flops"] + 20 * 2 * 48 * 96, "thop runs the head at every position"


def test_trace_command_folds_equal_layers(tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["trace", str(tmp_path), "--prompt", "21"])
    assert done.exit_code == 0, done.output
    assert "layers.{0-2}" in done.stdout and "q_proj" in done.stdout and "whole model" in done.stdout


def test_flops_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        flops_data(str(tmp_path))
