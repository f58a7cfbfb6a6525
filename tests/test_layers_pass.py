"""The pass that drops blocks within a budget, on a tiny Llama of which one block does nothing and the others much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from collapse import Options, export
from collapse.budget import parse_budgets
from collapse.errors import PlanError
from collapse.manifest import load_manifest
from collapse.passes import PASSES, Proposal
from collapse.passes.shrink import Shrink
from collapse.pipeline import make_plan
from collapse.plan import DropLayers
from tests.architectures import save_tiny
from tests.command import Command
from tests.test_export import LOG, save_tokenizer

SIZES = dict(num_hidden_layers=4, vocab_size=900, max_position_embeddings=256)
IDLE = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", bos_token_id=0, eos_token_id=1, **SIZES)
    save_tokenizer(root)
    weights = load_file(root / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.{IDLE}.{name}.weight"].zero_()
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    return root


def plan_of(source: Path, budget: str) -> Proposal:
    options = Options(passes=("layers",), budgets=parse_budgets(budget))
    plan = make_plan(source, LOG, options).plan
    return Proposal(plan.rewrites, plan.skipped)


def dropped_by(proposal: Proposal) -> DropLayers:
    (found,) = proposal.rewrites
    assert isinstance(found, DropLayers)
    return found


def test_without_a_budget_nothing_is_looked_at() -> None:
    assert Shrink("layers").propose(context_without_budget()) == Proposal()
    assert "layers" in [one.name for one in PASSES]


def context_without_budget():  # no field of it but the budget may be read
    class Bare:
        budgets = ()

    return Bare()


def test_a_block_that_does_nothing_is_certified(source: Path) -> None:
    rewrite = dropped_by(plan_of(source, "kl<=0.01"))
    assert IDLE not in rewrite.kept and len(rewrite.kept) == 3
    assert rewrite.evidence.grade == "certified"
    assert rewrite.evidence.figures["kl_estimate"] == pytest.approx(0, abs=1e-6)
    assert 0 < rewrite.evidence.figures["kl_at_most"] <= 0.01
    assert rewrite.config == {"num_hidden_layers": 3}


def test_a_budget_that_no_text_of_this_size_can_certify_leaves_all_blocks(source: Path) -> None:
    proposal = plan_of(source, "kl<=0.000001")
    assert proposal.rewrites == ()
    (skipped,) = [one for one in proposal.skipped if one.pass_name == "layers"]
    assert "breaks the budget" in skipped.reason
    assert skipped.figures["dropped_blocks"] == 1


def test_a_size_is_reached_and_its_loss_only_measured(source: Path) -> None:
    rewrite = dropped_by(plan_of(source, "flops=-40%"))
    assert rewrite.evidence.grade == "measured"
    assert rewrite.evidence.figures["flops_share"] <= 0.6
    fewer = dropped_by(plan_of(source, "flops=-20%"))
    assert len(fewer.kept) > len(rewrite.kept) and IDLE not in fewer.kept
    assert rewrite.evidence.figures["kl"] > fewer.evidence.figures["kl"]


def test_a_size_out_of_reach_is_a_near_miss_with_the_figures(source: Path) -> None:
    proposal = plan_of(source, "params=-99%")
    assert proposal.rewrites == ()
    assert "cannot make it that small" in proposal.skipped[-1].reason


def test_the_export_is_a_plain_shorter_model_that_says_the_same(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = Options(passes=("layers", "vocabulary", "last-token"), budgets=parse_budgets("kl<=0.01"))
    result = export(source, out, LOG, options)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == len(model.model.layers) == 3
    assert result.report.verified.status == "verified"
    manifest = load_manifest(out)
    kept = list(next(one for one in manifest.plan.rewrites if one.kind == "narrow").kept)
    ids = torch.tensor([[kept[n] for n in (5, 9, 30, 12)]])
    new = torch.tensor([[5, 9, 30, 12]])
    original = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        expected, found = original(ids).logits[..., kept], model(new).logits
    assert torch.equal(expected, found)  # the block added exact zeros


def test_a_size_that_the_losses_do_not_allow_is_said_to_be_missed(source: Path) -> None:
    proposal = plan_of(source, "kl<=0.01,flops=-90%")
    assert dropped_by(proposal).evidence.grade == "certified"
    assert "before the sizes are reached" in proposal.skipped[-1].reason
    reached = plan_of(source, "kl<=0.01,flops=-20%")
    assert dropped_by(reached).evidence.figures["flops_share"] <= 0.8
    assert not any("before the sizes" in one.reason for one in reached.skipped)


def test_a_budget_without_its_pass_is_one_line(source: Path, command: Command) -> None:
    outcome = command("plan", source, "--budget", "kl<=0.01", "--pass", "vocabulary")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1 and "--pass layers" in outcome.err


@pytest.mark.parametrize("text", ["", "kl<=x", "speed=-10%", "params=+10%", "kl<=0.1,kl<=0.2"])
def test_a_bad_budget_is_one_line(source: Path, tmp_path: Path, command: Command, text: str) -> None:
    outcome = command("export", source, "--budget", text, "-o", tmp_path / "out")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1 and "budget" in outcome.err
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError):
        parse_budgets(text)
