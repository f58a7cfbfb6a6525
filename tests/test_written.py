"""Text that the source writes, to fit to: where it begins, what may be in it, and that it is written once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GenerationConfig, LlamaConfig

from collapse.errors import CollapseError, UnsupportedError
from collapse.passes.base import Context
from collapse.passes.shrink_task import _with_written
from collapse.search.memory import Memory, remembering
from collapse.search.written import BEGUN, LEAST, TOGETHER, can_write, together, written
from tests.healing import drawn_windows, source_model

MODEL = source_model()


def write(windows: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return written(MODEL, windows, lambda done, of: None, seed)


@settings(max_examples=10, deadline=None)
@given(count=st.integers(0, 5), length=st.integers(2, 40), seed=st.integers(0, 3))
def test_it_begins_as_the_text_does_and_is_as_long(count: int, length: int, seed: int) -> None:
    windows = drawn_windows(8, seed=seed)[:count].repeat(1, 3)[:, :length]
    found = write(windows, seed)
    assert found.shape == windows.shape and found.dtype == windows.dtype
    begun = min(BEGUN, length - 1)
    assert torch.equal(found[:, :begun], windows[:, :begun])


def test_every_token_is_one_that_the_model_might_say_there() -> None:
    found = write(drawn_windows(6).repeat(1, 3)[:, :48])
    with torch.no_grad():
        said = MODEL(input_ids=found, use_cache=False).logits.softmax(-1)[:, BEGUN - 1 : -1]
    drawn = said.gather(-1, found[:, BEGUN:, None])[..., 0]
    assert bool((drawn >= (LEAST - 1e-6) * said.amax(-1)).all())


def test_a_text_does_not_end_before_its_length() -> None:
    config = MODEL.generation_config
    before, config.eos_token_id = config.eos_token_id, list(range(0, MODEL.config.vocab_size, 2))
    try:
        found = write(drawn_windows(4).repeat(1, 3)[:, :48])
    finally:
        config.eos_token_id = before
    assert found.shape == (4, 48)


OWN_FIELDS: list[dict[str, object]] = [
    {"use_cache": False}, {"repetition_penalty": 50.0}, {"num_beams": 2}, {"suppress_tokens": [1, 2, 3]},
    {"num_return_sequences": 2}, {"stop_strings": ["a"]}, {"return_dict_in_generate": True}, {"max_time": 1e-9},
    {"typical_p": 0.5}, {"token_healing": True}, {"cache_implementation": "quantized"},
]  # fmt: skip


@pytest.mark.parametrize("fields", [*OWN_FIELDS, None], ids=lambda fields: next(iter(fields)) if fields else "none")
def test_what_generation_config_says_does_not_matter(fields: dict[str, object] | None) -> None:
    windows = drawn_windows(2).repeat(1, 3)[:, : BEGUN + 6]
    plain, before = write(windows), MODEL.generation_config
    lengths: list[int] = []
    hook = MODEL.get_input_embeddings().register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    own = None if fields is None else GenerationConfig()
    for name, value in (fields or {}).items():
        setattr(own, name, value)  # a file may say what the constructor refuses
    MODEL.generation_config = own
    try:
        assert torch.equal(write(windows), plain)
        assert MODEL.generation_config is own
    finally:
        hook.remove()
        MODEL.generation_config = before
    assert lengths == [BEGUN, *[1] * 5], "each token is read once"


def test_a_model_that_cannot_write_says_why_and_is_fitted_to_the_corpus_alone() -> None:
    model, windows = source_model(), drawn_windows(4).repeat(1, 3)[:, :20]
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM: cannot write text to fit to \(probability"):
        written(model, windows, lambda done, of: None)
    context = cast(Context, SimpleNamespace(progress=lambda what, done, of: None))
    fitting, (reason,) = _with_written(context, model, windows, Memory.empty(), "neurons")
    assert torch.equal(fitting, windows)
    assert (reason.pass_name, reason.site) == ("neurons", "model")
    assert reason.reason.startswith("fitted to the corpus alone: LlamaForCausalLM: cannot write text")
    more, none = _with_written(context, MODEL, windows, Memory.empty(), "neurons")
    assert more.shape == (6, 20) and torch.equal(more[:4], windows) and none == ()


def test_one_seed_gives_one_text_and_leaves_the_generator_alone() -> None:
    windows = drawn_windows(TOGETHER + 2).repeat(1, 3)[:, : BEGUN + 4]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = write(windows)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(write(windows), first)
    assert not torch.equal(write(windows, seed=1), first)


@pytest.mark.parametrize(
    ("layers", "width", "weights", "expected"),
    [
        (2, 64, 1 << 20, TOGETHER),  # 0.25 MiB a sequence
        (30, 576, 540 << 20, 30),  # 34 MiB in 1 GiB
        (32, 4096, 25 << 30, 25),  # 256 MiB in a quarter of 25 GiB
        (80, 8192, 1 << 30, 1),
    ],
)
def test_caches_take_a_gibibyte_or_a_quarter_of_the_weights(
    layers: int, width: int, weights: int, expected: int
) -> None:
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=width)
    assert together(config, weights, 256) == expected


def test_only_a_model_that_generates_can_write() -> None:
    assert can_write(MODEL) and not can_write(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_it_is_written_once_and_kept(tmp_path: Path) -> None:
    ids, shape = [[1, 2], [3, 4]], (2, 2)
    with remembering(tmp_path, {"source": "a"}) as memory:
        assert memory.written(shape, 6, lambda: ids) == ids
    with remembering(tmp_path, {"source": "a"}) as memory:
        assert memory.written(shape, 6, lambda: [[5]]) == ids
    assert Memory.empty().written((1, 1), 6, lambda: [[5]]) == [[5]]


def test_kept_text_of_another_shape_or_of_other_ids_is_refused(tmp_path: Path) -> None:
    with remembering(tmp_path, {"source": "a"}) as memory:
        memory.written((2, 2), 6, lambda: [[1, 2], [3, 4]])
    for shape, ids in (((3, 2), 6), ((2, 3), 6), ((2, 2), 4)):
        with remembering(tmp_path, {"source": "a"}) as memory, pytest.raises(CollapseError, match="another shape"):
            memory.written(shape, ids, lambda: [[5]])
