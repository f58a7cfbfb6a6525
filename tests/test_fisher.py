"""What an error costs: against the closed form, against the KL divergence itself, and in which units go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from collapse import Options
from collapse.budget import parse_budgets
from collapse.pipeline import make_plan
from collapse.plan import Narrow
from collapse.search.alone import readings
from collapse.search.fisher import DAMPING, Fisher, factor_of, information, silent
from collapse.search.least_squares import Weighing, eliminate, normal_equations, plain, pulled
from collapse.search.sweep import Sweep
from collapse.search.trials import Trials
from tests import peer_models
from tests.architectures import tiny_model
from tests.test_shrink import LOG, source_of

WIDTH, WORDS = 4, 6


class Bigram(nn.Module):
    """Logits are a product of what `write` makes of a token's embedding; `unread` writes what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.write, self.unread = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        written = self.write(self.embedding(input_ids))
        self.unread(written)
        return SimpleNamespace(logits=self.head(written))


class Normed(Bigram):
    """The same with a norm of what is written, of what `write` reads, or of the sum of both."""

    def __init__(self, norm: nn.Module, where: Literal["behind", "before", "sum"]) -> None:
        super().__init__()
        self.norm, self.where = norm, where

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        given = self.embedding(input_ids)
        written = self.write(self.norm(given) if self.where == "before" else given)
        if self.where != "before":
            written = self.norm(written + given if self.where == "sum" else written)
        return SimpleNamespace(logits=self.head(written))


def closed_form(model: Bigram, ids: Tensor) -> Tensor:
    """Return E[W^T (diag p - p p^T) W], the Fisher information of what goes into a softmax of W y."""
    p = model(ids, use_cache=False).logits.flatten(0, -2).softmax(-1)
    spread = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(0)
    head = model.head.weight
    return (head.T @ spread @ head).detach()


def test_information_is_that_of_the_closed_form() -> None:
    model = Bigram()
    ids = torch.arange(WORDS).repeat(64, 200 // WORDS)
    found = information(model, ["write", "unread"], ids, 0)
    expected = closed_form(model, ids)
    assert found.keys() == {"write"}  # no logit depends on the other
    assert (found["write"].information - expected).norm() < 0.03 * expected.norm()  # 12,672 labels were drawn
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not model.write._forward_hooks and not model.embedding._forward_hooks


def test_half_of_it_is_the_divergence_of_a_small_error() -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    path = "model.layers.1.mlp.down_proj"
    ids = torch.randint(0, 32, (256, 24))
    found = information(model, [path], ids, 0)[path].information
    likely, unlikely = (torch.linalg.eigh(found).eigenvectors[:, n] for n in (-1, 0))
    with torch.no_grad():
        before = model(ids).logits.log_softmax(-1)
        for error in (0.02 * likely, 0.02 * unlikely):
            hook = model.get_submodule(path).register_forward_hook(lambda *call, error=error: call[-1] + error)
            after = model(ids).logits.log_softmax(-1)
            hook.remove()
            kl = float((before.exp() * (before - after)).sum(-1).mean())
            assert kl == pytest.approx(float(error @ found @ error) / 2, rel=0.1)


def test_a_factor_gives_the_damped_metric_by_its_mean() -> None:
    some = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    factor = factor_of(some)
    assert factor is not None
    assert torch.allclose(factor @ factor.T, some / 3 + DAMPING * torch.eye(2), atol=1e-6)


NORMS = (nn.RMSNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH))


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_behind_a_norm_errors_count_by_the_size_of_what_is_written(norm: nn.Module) -> None:
    """Of a smaller embedding the norm gives the same, gradients are larger, and the relative ones as they were."""
    model, ids = Normed(norm, "behind"), torch.arange(WORDS)[None]
    before = information(model, ["write"], ids, 0)["write"]
    with torch.no_grad():
        model.embedding.weight *= 3
    after = information(model, ["write"], ids, 0)["write"]
    assert before.normed and after.normed
    torch.testing.assert_close(9 * after.information, before.information, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(after.relative, before.relative, rtol=1e-3, atol=1e-5)
    weighing = Fisher(model, ["write"], ids, silent).weighing("write")  # type: ignore[arg-type]
    assert weighing.relative and weighing.factor is not None
    assert torch.equal(weighing.factor, factor_of(after.relative))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["before", "sum"])
@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_a_norm_elsewhere_changes_nothing(norm: nn.Module, where: Literal["before", "sum"]) -> None:
    model, ids = Normed(norm, where), torch.arange(WORDS)[None]
    weighing = Fisher(model, ["write"], ids, silent).weighing("write")  # type: ignore[arg-type]
    assert not weighing.relative
    expected = factor_of(information(model, ["write"], ids, 0)["write"].information)
    assert torch.equal(weighing.factor, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "readers", "normed"),
    [("gemma3_text", 6, True), ("gemma2", 4, True), ("olmo2", 4, True), ("llama", 6, False)],
)
def test_real_architectures_are_told_apart(kind: str, readers: int, normed: bool) -> None:
    model = tiny_model(kind)
    paths = [name for name, _ in model.named_modules() if name.endswith(("o_proj", "down_proj"))]
    fisher = Fisher(model, paths, torch.arange(3, 40)[None], silent)
    assert len(paths) == readers
    assert {fisher.weighing(path).relative for path in paths} == {normed}


def test_rows_count_by_the_size_of_what_is_written() -> None:
    inputs, outputs = torch.ones(2, 3), torch.tensor([[3.0, 3.0], [0.0, 0.0]])
    ((x, y),) = Weighing(relative=True).rows([(inputs, outputs)])
    torch.testing.assert_close(x, torch.tensor([[1 / 3] * 3, [1e3] * 3]))  # the floor is the root of a norm's epsilon
    torch.testing.assert_close(y, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    ((x, y),) = Weighing().rows([(inputs, outputs)])
    assert x is inputs and y is outputs


def test_sweeps_fit_with_the_rows_that_count_by_size() -> None:
    """The first feed-forward of a Gemma, whose input is the source's own, against the equations themselves."""
    source, parts, ids = peer_models.model("gemma3_text"), peer_models.structure("gemma3_text"), peer_models.ids()
    units = next(one for one in parts.units if one.kind == "neurons")
    ((_, pairs),) = readings(source, parts.layers, ids, {units.block: [units.reader]})
    weight = source.get_submodule(units.reader).weight.detach()
    found = {}
    for weighing in (Weighing(), Weighing(relative=True)):
        sweep = Sweep(source, parts.layers, parts.units, ids, metric=lambda _, weighing=weighing: weighing)
        swept = sweep.run({units: units.size - 4}, (), lambda done, of: None)
        normal = pulled(normal_equations(weighing.rows(pairs)), weight)
        kept = eliminate(normal, [[unit] for unit in range(units.size)], units.size - 4)
        assert swept.kept[units] == kept
        found[weighing.relative] = swept.weights[f"{units.reader}.weight"]
        torch.testing.assert_close(found[weighing.relative], normal.solve(torch.tensor(kept)).float())
    assert not torch.equal(found[True], found[False])


def test_trials_fit_with_the_rows_that_count_by_size() -> None:
    source, parts, ids = peer_models.model("gemma3_text"), peer_models.structure("gemma3_text"), peer_models.ids()
    costs = [
        Trials(source, parts.layers, parts.units, ids, ids, metric=lambda _, one=one: one).run(lambda done, of: None)
        for one in (Weighing(), Weighing(), Weighing(relative=True))
    ]
    assert costs[0] == costs[1]
    assert costs[0] != costs[2]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_is_no_metric_has_no_factor(value: float) -> None:
    assert factor_of(torch.full((3, 3), value)) is None


def fitted() -> tuple[Tensor, Tensor]:
    """Return inputs of equal size, and a weight whose last output is the largest and reads the first input alone."""
    weight = torch.zeros(3, 4)
    weight[:2] = torch.tensor([[0.1, 1.0, 0.5, 0.2], [0.0, 0.3, 1.0, 0.4]])
    weight[2, 0] = 5.0
    return torch.randn(4_000, 4, generator=torch.Generator().manual_seed(0)), weight


def test_a_unit_that_only_an_unseen_output_needs_goes_first() -> None:
    x, weight = fitted()
    normal = pulled(normal_equations([(x, x @ weight.T)]), weight)
    units = [[0], [1], [2], [3]]
    seen = torch.diag(torch.tensor([1.0, 1.0, 1e-3]))
    assert eliminate(normal, units, 3) == (0, 1, 2)
    assert eliminate(normal.seen_by(seen), units, 3) == (1, 2, 3)
    assert eliminate(normal.seen_by(None), units, 3) == eliminate(normal.seen_by(torch.eye(3)), units, 3)


def test_the_fit_is_the_same_in_every_metric() -> None:
    x, weight = fitted()
    normal = pulled(normal_equations([(x, x @ weight.T)]), weight)
    factor, kept = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)) + 3 * torch.eye(3), torch.arange(3)
    measured = normal.seen_by(factor).solve(kept)  # of outputs times L: L^T W
    assert torch.allclose(measured, factor.T.double() @ normal.solve(kept), atol=1e-9)


def test_a_model_without_a_way_back_has_no_metric_and_says_why() -> None:
    class OneWay(Bigram):
        def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
            with torch.no_grad():
                return super().forward(input_ids, use_cache)

    for model, reason in ((OneWay(), "does not require grad"), (broken(), "not all finite")):
        fisher = Fisher(model, ["write"], torch.zeros(1, 4, dtype=torch.long), silent)  # type: ignore[arg-type]
        assert fisher.weighing("write") == Weighing()
        assert fisher.reason is not None and reason in fisher.reason
    assert plain("write") == Weighing()


class Odd(Bigram):
    """Changes in place what `write` writes, a view of a product with its bias, and may have no way back for it."""

    def __init__(self, back: float = 1.0) -> None:
        super().__init__()
        self.write, self.back = nn.Linear(WIDTH, WIDTH), back

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        written = self.write(self.embedding(input_ids))
        written += 1.0
        written.register_hook(lambda gradient: gradient * self.back)
        return SimpleNamespace(logits=self.head(written))


def test_what_is_changed_in_place_has_its_gradients() -> None:
    model, ids = Odd(), torch.arange(WORDS).repeat(64, 200 // WORDS)
    expected = closed_form(model, ids)
    assert (information(model, ["write"], ids, 0)["write"].information - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("model", [Odd(float("nan")), Bigram()])
def test_one_reader_without_gradients_leaves_all_without_a_metric(model: Bigram) -> None:
    paths = ["write", "head"] if isinstance(model, Odd) else ["write", "unread"]
    fisher = Fisher(model, paths, torch.zeros(2, 4, dtype=torch.long), silent)  # type: ignore[arg-type]
    assert fisher.reason == "1 of 2 readers get no gradients"
    assert [fisher.weighing(path) for path in paths] == [Weighing()] * 2


def test_want_of_memory_is_no_reason_to_choose_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr("collapse.search.fisher.send_back", full)
    fisher = Fisher(Bigram(), ["write"], torch.zeros(1, 4, dtype=torch.long), silent)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="allocate"):
        fisher.weighing("write")


def test_an_error_in_the_progress_is_no_reason_to_choose_otherwise() -> None:
    def broken_bar(*_: object) -> None:
        raise RuntimeError("progress bar broke")

    fisher = Fisher(Bigram(), ["write"], torch.zeros(1, 4, dtype=torch.long), broken_bar)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="broke"):
        fisher.weighing("write")


def broken() -> Bigram:
    """Return a model whose logits are no numbers."""
    model = Bigram()
    nn.init.constant_(model.head.weight, float("nan"))
    return model


def test_a_search_chooses_by_the_metric_and_says_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both layouts: other neurons go without it, and only then is there a reason."""
    source = source_of("llama", tmp_path, num_hidden_layers=2)

    def told(layout: Literal["native", "free"]) -> tuple[set[tuple[int, ...]], list[str]]:
        options = Options(passes=("neurons",), budgets=parse_budgets("params=-1%"), layout=layout)
        plan = make_plan(source, LOG, options).plan
        return {tuple(one.kept) for one in plan.of_kind(Narrow)}, [one.reason for one in plan.skipped]

    layouts: tuple[Literal["native", "free"], ...] = ("native", "free")
    with_metric = [told(layout) for layout in layouts]

    def no_way_back(*_: object) -> None:
        raise RuntimeError("no way back")

    monkeypatch.setattr("collapse.search.fisher.send_back", no_way_back)
    for (kept, reasons), (plainly, why) in zip(with_metric, map(told, layouts), strict=True):
        assert kept and plainly and kept != plainly
        assert not any("no way back" in one for one in reasons)
        assert "what goes is chosen as if all that a reader writes counted alike: no way back" in why


def test_equal_seeds_give_equal_metrics() -> None:
    model, ids = Bigram(), torch.arange(WORDS).repeat(4, 2)
    first, again, other = (information(model, ["write"], ids, seed)["write"].information for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
