"""What the free layout refuses, and wrong outputs of it that the verifier refutes by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import collapse
from collapse import pipeline
from collapse.audit import audit
from collapse.checkpoint import Checkpoint
from collapse.errors import CheckpointError, PlanError, UnsupportedError
from collapse.manifest import write_manifest
from collapse.plan import AddBias, Added, Plan, Skipped, StandIn
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.verify import verify
from collapse.verify.dynamic import Rewritten, dynamic_checks
from tests.architectures import tiny_model, weights_of
from tests.exported import SMALL, details
from tests.free_layouts import WIDTH, Case, attention, map_of, mlp
from tests.replacing import MEASURED
from tests.tiny import PROVED, erase, export, plan_for, samples

IDS = samples(range(3, 48), 14, 9)
ATTENTION, MLP = attention("llama", 1), mlp("llama", 2)
WEIGHTS = "model.safetensors"


@pytest.fixture
def case(tmp_path: Path) -> Case:
    made = Case("llama", tmp_path)
    made.map(ATTENTION, "linear")
    made.map(MLP, "low-rank")
    made.narrow("neurons", 0, range(9))
    return made


@pytest.fixture
def out(case: Case, tmp_path: Path) -> Path:
    return export(case.source, case.plan(), tmp_path / "out", values=case.given()).root


def run(case: Case, out: Path):
    """Only the checks that run the model: the files' own digests are fitted to what was changed."""
    plan = case.plan()
    write_manifest(out, case.source, plan)
    pair = Rewritten(
        rewrite_program(case.program, plan, case.source.config),
        rewrite_weights(case.program, weights_of(case.model), plan, values=case.given()),
    )
    checks, _ = dynamic_checks(out, case.source, plan, IDS, reference=pair, settings=SMALL)
    return {check.name: check for check in checks if check.passed is False}


def in_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        tensors = load_file(out / WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / WEIGHTS, {"format": "pt"})

    return edit


def in_config(change: Callable[[list[dict]], object]) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        values = json.loads((out / "config.json").read_text())
        change(values["sites"])
        (out / "config.json").write_text(json.dumps(values))

    return edit


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{MLP}.down"], tensors[f"{MLP}.up"] = tensors[f"{MLP}.up"].T, tensors[f"{MLP}.down"].T


def to_site(place: str, number: int) -> Callable[[list[dict]], None]:
    return lambda sites: sites[number].update(site=place)


WRONG: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "down and up exchanged": (in_weights(swapped), "replaced tensors", "graph: weights"),
    "a transposed map": (
        in_weights(lambda t: t.update({f"{ATTENTION}.weight": t[f"{ATTENTION}.weight"].T})),
        "replaced tensors",
        "graph: prefill",
    ),
    "another byte": (
        in_weights(lambda t: t[f"{ATTENTION}.bias"].__setitem__(3, 2.0)), "replaced tensors", "graph: weights",
    ),
    "a map at another block": (in_config(to_site(attention("llama", 2), 1)), "side files", "load"),
    "another width": (in_config(lambda s: s[0]["config"].update(intermediate_size=10)), "side files", "load"),
    "neurons of another block": (in_config(to_site(mlp("llama", 3), 0)), "side files", "load"),
    "no bias": (in_config(lambda s: s[1]["shapes"].pop("bias")), "side files", "load"),
    "another form of value": (in_config(lambda s: s[1].update(outputs=None)), "side files", "load"),
    "an added tensor missing": (in_weights(lambda t: t.pop(f"{MLP}.up")), "tensors", "load"),
    "a tensor that went is back": (
        in_weights(lambda t: t.update({f"{MLP}.down_proj.weight": torch.ones(WIDTH, 24)})), "tensors", "load",
    ),
}  # fmt: skip


def test_what_was_not_changed_is_verified(case: Case, out: Path) -> None:
    assert run(case, out) == {}
    found = verify(out, case.source, samples=IDS, plan=case.plan(), settings=SMALL)
    assert found.status == "verified", details(found)
    assert audit(out, case.source).status == "clean"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_output_is_refuted_by_files_and_by_running(name: str, case: Case, out: Path) -> None:
    edit, static, dynamic = WRONG[name]
    edit(out)
    found = run(case, out)
    assert dynamic in found, found
    verdict = verify(out, case.source, samples=IDS, plan=case.plan(), settings=SMALL)
    assert static in {check.name for check in verdict.checks if check.passed is False}, details(verdict)
    assert audit(out, case.source).status != "clean"


def test_a_missing_tensor_is_an_error_for_the_loader_too(case: Case, out: Path) -> None:
    in_weights(lambda tensors: tensors.pop(f"{MLP}.up"))(out)
    with pytest.raises(CheckpointError, match=rf"has no tensor {MLP}\.up"):
        AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        collapse.load(out)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"site": "model.layers.9.mlp", "by": "zero", "shapes": {}}, "the architecture has no such module"),
        ({"site": "model.layers.0.mlp", "by": "half", "shapes": {}}, "half is no map"),
        ({"site": "model.layers.0.mlp", "by": "linear", "shapes": {"bias": [16]}}, "linear is no map with the tensors"),
        ({"site": "model.layers.0.mlp", "bias": 16}, "the entry says nothing that can be done"),
        ({"site": "model.layers.0.mlp"}, "the entry says nothing that can be done"),
    ],
)
def test_an_entry_of_another_form_is_refused(entry: dict, message: str, case: Case, out: Path) -> None:
    in_config(lambda sites: sites.append(entry))(out)
    with pytest.raises(UnsupportedError, match=message):
        AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("values", [{}, {"base": {"model_type": "t5"}, "sites": []}, {"base": [], "sites": []}])
def test_a_config_without_a_known_base_is_refused(values: dict, case: Case, out: Path) -> None:
    (out / "config.json").write_text(json.dumps({"model_type": "collapse_free", **values}))
    with pytest.raises(UnsupportedError, match="has no base or no sites|is no causal LM of transformers"):
        AutoModelForCausalLM.from_pretrained(out)


# Plans that are refused.


def test_the_native_layout_cannot_say_it(case: Case, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=rf"{ATTENTION}: stand-in of map needs the free layout, the plan has the nat"):
        case.plan(layout="native")
    written = case.plan().to_json()
    del written["layout"]
    (tmp_path / "plan.json").write_text(json.dumps(written))
    with pytest.raises(PlanError, match="plan with --layout free"):
        Plan.load(tmp_path / "plan.json")
    native = plan_for(case.source, erase("model.norm.weight"))
    assert "layout" not in native.to_json()
    assert "local" not in case.narrow("neurons", 1, [4])[0].model_copy(update={"local": {}}).model_dump()


def test_the_layout_is_one_of_two(command, tmp_path: Path) -> None:
    found = command("plan", tmp_path, "--layout", "loose")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "unknown layout 'loose'; choose among native, free" in found.err


def added(*shape: int) -> Added:
    return Added(sha256="0" * 64, dtype="F32", shape=shape)


@pytest.mark.parametrize(
    ("by", "parts", "message"),
    [
        ("zero", {"bias": added(16)}, "zero takes the tensors"),
        ("constant", {}, "constant takes the tensors"),
        ("linear", {"bias": added(16)}, "linear takes the tensors"),
        ("linear", {"weight": added(16, 8)}, "do not make a map"),
        ("linear", {"weight": added(16, 16), "bias": added(8)}, "do not make a map"),
        ("low-rank", {"down": added(3, 16), "up": added(16, 4)}, "do not make a map"),
        ("low-rank", {"down": added(16, 3), "up": added(3, 16)}, None),
        ("low-rank", {"down": added(3, 16), "up": added(3, 16)}, "do not make a map"),
        ("constant", {"bias": added(4, 4)}, "do not make a map"),
    ],
)
def test_the_tensors_of_a_map_fit_it(by: str, parts: dict[str, Added], message: str | None) -> None:
    def made() -> StandIn:
        given = {"pass": "p", "site": "s", "evidence": MEASURED, "prefix": "s.", "tensors": ()}
        return StandIn(**given, by=by, added=parts)

    if message is None:
        assert made().added == parts
        return
    with pytest.raises(ValidationError, match=message):
        made()


def test_computed_maps_are_never_proved_and_a_bias_is_one_vector() -> None:
    given = {"pass": "p", "site": "s", "prefix": "s.", "tensors": ()}
    with pytest.raises(ValidationError, match="never proved"):
        StandIn(**given, by="constant", added={"bias": added(16)}, evidence=PROVED)
    assert StandIn(**given, by="zero", evidence=PROVED).added == {}
    del given["tensors"]
    for parts in ({}, {"bias": added(4, 4)}, {"weight": added(16)}):
        with pytest.raises(ValidationError, match="adds one tensor, a bias"):
            AddBias(**given, added=parts, evidence=MEASURED)


def refused(case: Case, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        pipeline.export(case.source.root, tmp_path / "out", plan=case.plan(), values=case.given())
    assert not (tmp_path / "out").exists()


def test_without_any_attention_nothing_counts_the_tokens(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    for block in range(4):
        case.map(attention("llama", block), "zero")
    refused(case, "no attention would stay to tell how many tokens were seen", tmp_path)


def test_a_map_in_a_block_that_goes(case: Case, tmp_path: Path) -> None:
    case.drop(1)
    refused(case, rf"{ATTENTION}: stand-in of a module in a block that goes", tmp_path)


def test_a_module_goes_as_a_whole(case: Case, tmp_path: Path) -> None:
    whole: StandIn = case.rewrites[0]
    for tensors, message in (
        (whole.tensors[1:], rf"{ATTENTION}: the tensor {ATTENTION}\.\w+\.weight belongs to the module and stays"),
        ((*whole.tensors, "model.norm.weight"), "model.norm.weight goes, but does not belong to the module"),
        ((*whole.tensors, "model.layers.1.x"), "the checkpoint has no tensor model.layers.1.x"),
    ):
        case.rewrites[0] = whole.model_copy(update={"tensors": tensors})
        refused(case, message, tmp_path)


def test_a_site_that_the_graph_does_not_have(case: Case, tmp_path: Path) -> None:
    first: StandIn = case.rewrites[0]
    for site, message in (("model.layers.1.nothing", "the module is not in the graph"), ("model.layers.1", "twice")):
        case.rewrites[0] = first.model_copy(update={"site": site})
        if message == "twice":
            case.rewrites.append(first)
        refused(case, message, tmp_path)


def test_a_map_of_another_width(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    case.map(MLP, "linear", {"weight": torch.ones(8, 8)})
    refused(case, rf"{MLP}: weight has 8 channels, the module gives 16", tmp_path)


def test_a_bias_where_there_is_one_and_of_another_width(tmp_path: Path) -> None:
    case = Case("gpt2", tmp_path)
    found = collapse.analysis.sublayers.add_bias(
        case.program, case.source, "transformer.h.0.mlp.c_proj", torch.ones(16), MEASURED, "p"
    )
    assert isinstance(found, Skipped) and found.reason == "the files have 2 tensors of it, not its weight"
    case = Case("llama", tmp_path / "llama")
    case.bias("model.layers.0.mlp.down_proj", torch.ones(12))
    refused(case, "the bias has 12 channels, the module gives 16", tmp_path)
    case.rewrites.clear()
    case.bias("model.layers.0.mlp.down_proj", torch.ones(16))
    case.rewrites.append(case.rewrites[0])
    refused(case, r"model\.layers\.0\.mlp\.down_proj\.bias: the tensor is added twice", tmp_path)


def test_values_of_an_added_tensor_are_checked(case: Case, tmp_path: Path) -> None:
    name = f"{ATTENTION}.weight"
    for change, message in (
        ({name: case.values[name] + 1}, rf"{name}: the values have the SHA-256"),
        ({name: case.values[name].reshape(8, 32)}, rf"{name}: the values are F32 \[8, 32\], the output needs F32"),
    ):
        held, case.values = case.values, case.values | change
        refused(case, message, tmp_path)
        case.values = held
    del case.values[name]
    refused(case, rf"{name}: no values are given", tmp_path)


def test_narrowing_that_the_config_says_otherwise(case: Case, tmp_path: Path) -> None:
    case.rewrites[2] = case.rewrites[2].model_copy(update={"local": {"intermediate_size": 10}})
    refused(case, r"the edited config gives model\.layers\.0\.mlp\.\w+\.weight the shape", tmp_path)
    case.rewrites[2] = case.rewrites[2].model_copy(update={"local": {"intermediate_size": 9, "hidden_act": "relu"}})
    refused(case, "the edited config changes more than sizes", tmp_path)


def test_heads_whose_size_the_architecture_computes_are_declined(tmp_path: Path) -> None:
    from collapse.analysis.channels import channels_of, narrow_sites
    from collapse.trace import load_config

    case = Case("gpt2", tmp_path)
    (heads,) = [c for c in channels_of(case.program, case.source, "transformer.h.0") if c.kind == "kv-groups"]
    found = narrow_sites([(heads, [0])], case.program, load_config(case.source), MEASURED, "p")
    assert isinstance(found, Skipped) and found.site == "transformer.h.0.attn"
    assert found.reason.startswith("no edit of the config gives the module just its kept units")
    assert narrow_sites([(heads, [0, 1])], case.program, load_config(case.source), MEASURED, "p") == ()


def test_the_checkpoint_of_a_free_layout_can_be_opened(case: Case, out: Path) -> None:
    assert Checkpoint.open(out).model_type == "collapse_free"
    assert tiny_model("llama").config.model_type == "llama"
    assert map_of("zero") == {}
