"""Healing in the free layout: of widths of single blocks, of maps in place of modules, and of added biases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from collapse import Options, export
from collapse.audit import audit
from collapse.budget import parse_budgets
from collapse.certify.certificate import certify
from collapse.certify.losses import SequenceLoss, sequence_loss
from collapse.certify.metrics import Design
from collapse.checkpoint import Checkpoint
from collapse.corpus import builtin_corpus, split
from collapse.heal.propose import Healing, _with, heal_plan
from collapse.heal.settings import Settings
from collapse.heal.texts import encoder_of, starts
from collapse.heal.touched import touched, trainable
from collapse.manifest import load_manifest
from collapse.passes.shrink_task import HELD_OUT, MEASURED_EVERY
from collapse.pipeline import Result, prepare
from collapse.plan import AddBias, Evidence, Narrow, Plan, Replace, StandIn
from collapse.progress import Stopwatch
from collapse.rewrite.values import Values
from collapse.schema import load_schema
from collapse.sequences import text_bytes
from tests.architectures import save_tiny
from tests.command import Command
from tests.free_layouts import WIDTH, Case
from tests.replacing import values_in
from tests.test_export import LOG, save_tokenizer
from tests.tiny import PROVED

SIZES = dict(max_position_embeddings=256, bos_token_id=0, eos_token_id=1, vocab_size=900)
SETTINGS = Settings(tokens=20 * 4 * 64, rows=4, rate=3e-3)
SCHEMA = load_schema(LOG)
HEALED = Evidence(grade="measured", claim="healing changed it", method="distillation")
OPTIONS = Options(
    passes=("kv-groups", "neurons"), budgets=parse_budgets("kl<=0.3,params=-10%"), layout="free", heal=SETTINGS,
    prompts=2, new_tokens=4,
)  # fmt: skip


def mixed(root: Path) -> Case:
    """Return a plan with everything that the free layout can say, of a Llama of four blocks that reads text."""
    case = Case("llama", root, sizes=SIZES)
    save_tokenizer(root / "source")
    case.source = Checkpoint.open(root / "source")
    case.map("model.layers.0.self_attn", "low-rank")
    case.narrow("neurons", 1, range(0, 24, 3))
    case.map("model.layers.2.mlp", "linear")
    case.bias("model.layers.3.mlp.down_proj", torch.linspace(-1, 1, WIDTH))
    return case


@dataclass(frozen=True)
class Mixed:
    """A mixed plan, its healing, and what the export of that gave."""

    case: Case
    healing: Healing
    values: Values
    result: Result

    @property
    def plan(self) -> Plan:
        return self.healing.plan

    @property
    def before(self) -> Plan:
        return self.case.plan(schema=SCHEMA.to_json(), schema_digest=SCHEMA.digest)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    root = tmp_path_factory.mktemp("mixed")
    case = mixed(root)
    before = case.plan(schema=SCHEMA.to_json(), schema_digest=SCHEMA.digest)
    options = Options(prompts=2, new_tokens=4)
    context = prepare(case.source.root, SCHEMA, options, Stopwatch(quiet=True))
    healing = heal_plan(context, before, case.given(), SETTINGS)
    values = values_in(root / "healed.safetensors", {**case.values, **healing.values})
    result = export(case.source.root, root / "out", LOG, options, plan=healing.plan, values=values)
    return Mixed(case, healing, values, result)


MAPS = {"model.layers.0.self_attn.down", "model.layers.0.self_attn.up", "model.layers.2.mlp.weight",
        "model.layers.2.mlp.bias", "model.layers.3.mlp.down_proj.bias"}  # fmt: skip


def test_touched_are_maps_and_biases_their_neighbours_and_what_lost_channels(mixture: Mixed) -> None:
    source, plan = mixture.case.source, mixture.before
    left = {
        name for name in source.tensors if name.startswith(("model.layers.0.", "model.layers.2."))
        and not name.startswith(("model.layers.0.self_attn.", "model.layers.2.mlp."))
    }  # fmt: skip
    widths = {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    with_bias = {"model.layers.3.mlp.down_proj.weight"}
    assert touched(source, mixture.case.program, plan) == MAPS | left | widths | with_bias
    gone = {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    gone |= {f"model.layers.2.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert trainable(source, mixture.case.program, plan) == (set(source.tensors) | MAPS) - gone


def test_maps_and_biases_are_trained_in_their_place_in_the_plan(mixture: Mixed) -> None:
    (replaced,) = mixture.plan.of_kind(Replace)
    assert replaced.tensors.keys() == touched(mixture.case.source, mixture.case.program, mixture.before) - MAPS
    assert [one.site for one in mixture.plan.rewrites[:-1]] == [one.site for one in mixture.before.rewrites]
    before = [one for one in mixture.before.rewrites if isinstance(one, StandIn | AddBias)]
    after = [one for one in mixture.plan.rewrites if isinstance(one, StandIn | AddBias)]
    for old, new in zip(before, after, strict=True):
        assert new.evidence == replaced.evidence, "what is said of the data is said of the healed ones"
        assert new.added.keys() == old.added.keys()
        for part, added in new.added.items():
            assert added.sha256 == mixture.values.digest(f"{new.prefix}{part}") != old.added[part].sha256
    (narrow,) = mixture.plan.of_kind(Narrow)
    assert narrow == mixture.before.of_kind(Narrow)[0]


def test_the_healed_mixture_is_verified_audited_and_reloads_equal(mixture: Mixed) -> None:
    out = mixture.result.output
    assert out is not None and mixture.result.report.verified.status == "verified"
    assert audit(out, mixture.case.source).status == "clean"
    before, after = (load_file(root / "model.safetensors") for root in (mixture.case.source.root, out))
    trained = mixture.healing.values
    assert after.keys() & trained.keys() == trained.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, trained[name] if name in trained else before[name]), name


def test_the_divergence_falls_and_is_that_of_the_written_model(mixture: Mixed) -> None:
    figures = mixture.plan.of_kind(Replace)[0].evidence.figures
    assert figures["held_out_kl"] < 0.8 * figures["held_out_kl_before"]
    losses = list(losses_of(mixture.case.source.root, mixture.result.output, mixture.plan))[::MEASURED_EVERY]
    found = sum(one.kl for one in losses) / sum(one.tokens for one in losses)
    assert found == pytest.approx(figures["held_out_kl"], rel=1e-4)


def test_what_is_not_trained_stays_and_so_does_its_evidence(mixture: Mixed) -> None:
    norm = "model.layers.0.input_layernorm.weight"
    healed = _with(mixture.before, {norm: torch.ones(WIDTH)}, HEALED)
    assert healed.rewrites[:-1] == mixture.before.rewrites
    assert healed.rewrites[-1].tensors.keys() == {norm} and healed.rewrites[-1].evidence == HEALED
    bias = "model.layers.3.mlp.down_proj.bias"
    alone = _with(mixture.before, {bias: torch.zeros(WIDTH)}, HEALED)
    assert alone.rewrites[:-1] == mixture.before.rewrites[:-1] and alone.of_kind(Replace) == ()
    assert alone.rewrites[-1].evidence == HEALED and alone.rewrites[-1] != mixture.before.rewrites[-1]


def test_a_module_that_may_go_touches_nothing(mixture: Mixed) -> None:
    """A map that is proved to do nothing costs nothing, so there is nothing to heal around it."""
    site = "model.layers.1.post_attention_layernorm"
    norm = StandIn(
        **{"pass": "m"}, site=site, evidence=PROVED, by="zero", prefix=f"{site}.", tensors=(f"{site}.weight",)
    )
    plan = mixture.case.plan(rewrites=(norm,))
    assert touched(mixture.case.source, mixture.case.program, plan) == frozenset()


def losses_of(source: Path, output: Path | None, plan: Plan) -> Iterator[SequenceLoss]:
    """Yield what held-out sequences lose in a written model, from the files alone."""
    assert output is not None
    checkpoint = Checkpoint.open(source)
    windows = starts(split(builtin_corpus(SCHEMA), 0).held_out, encoder_of(checkpoint, plan), 64, HELD_OUT)
    models = [AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval() for root in (source, output)]
    size = text_bytes(checkpoint)
    for ids in windows:
        with torch.no_grad():
            p, q = (one(ids[None]).logits[0, :-1] for one in models)
        yield sequence_loss(p, q, ids[1:], text_bytes=size(ids[1:].tolist()))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_tiny("llama", tmp_path_factory.mktemp("source") / "tiny", num_hidden_layers=4, **SIZES)
    save_tokenizer(root)
    return root


@pytest.fixture(scope="module")
def widths(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return export(source, tmp_path_factory.mktemp("out") / "healed", LOG, OPTIONS)


def test_a_searched_free_layout_is_healed_and_its_certificate_is_of_the_healed_model(
    source: Path, widths: Result
) -> None:
    assert widths.output is not None and widths.report.verified.status == "verified"
    plan = load_manifest(widths.output).plan
    narrows = plan.of_kind(Narrow)
    assert plan.layout == "free" and any(one.local for one in narrows)
    (healed,) = plan.of_kind(Replace)
    readers = {f"model.layers.{n}.{part}.weight" for n in range(4) for part in ("mlp.down_proj", "self_attn.o_proj")}
    assert healed.tensors.keys() == readers | {axis.tensor for one in narrows for axis in one.axes}
    losses = list(losses_of(source, widths.output, plan))
    figures, rank = healed.evidence.figures, narrows[0].evidence.figures["rank"]
    design = Design(split=figures["split"], length=figures["length"])
    found = certify(losses, parse_budgets("kl<=0.3"), design, tries=rank * (rank + 1))
    assert figures["kl_at_most"] == pytest.approx(found.bounds[0].upper, rel=1e-3)
    assert healed.evidence.grade == found.to_evidence().grade == "certified"
    assert figures["held_out_kl"] < figures["held_out_kl_before"]
    assert figures["kl_estimate"] != narrows[0].evidence.figures["kl_estimate"], "that of the search is of its model"


# In bfloat16.


def test_plain_healing_says_that_it_was_in_fp32(widths: Result) -> None:
    (healed,) = widths.plan.of_kind(Replace)
    assert healed.evidence.figures["precision"] == "fp32" and "bfloat16" not in healed.evidence.method


def test_the_command_line_asks_for_bfloat16(source: Path, tmp_path: Path, command: Command) -> None:
    given = ("--schema", '{"type": "log", "max_tokens": 64}', "--budget", "params=-10%", "--pass", "neurons")
    found = command("plan", source, *given, "--heal", "20k", "--heal-bf16", "-o", tmp_path / "plan.json", "-q")
    assert found.code == 0, found.err
    (healed,) = Plan.load(tmp_path / "plan.json").of_kind(Replace)
    assert healed.evidence.figures["precision"] == "bf16" and "steps in bfloat16" in healed.evidence.method


def test_bfloat16_without_a_healing_is_one_line(source: Path, command: Command) -> None:
    found = command("plan", source, "--heal-bf16", "--budget", "params=-10%")
    assert found.code == 2 and len(found.err.strip().splitlines()) == 1
    assert "--heal-bf16: is about a healing, and none is asked for; add --heal" in found.err
