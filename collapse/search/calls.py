"""Runs single blocks of a model as the model itself would call them, on a residual stream of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from collapse.analysis.stand_in import uncompiled
from collapse.errors import UnsupportedError

Call = Callable[[nn.Module, Tensor], Tensor]


class _Reached(Exception):
    """What was to be seen has been reached; what comes after it is not needed."""


def block_calls(model: nn.Module, blocks: Sequence[nn.Module], ids: Tensor) -> tuple[Tensor, list[Call]]:
    """Return the first block's input, [rows, tokens, hidden], and by block how the model calls it on `ids`.

    A call takes the block, or another in its place, and the residual stream that it is to see; it gives the next one.
    Raises `UnsupportedError` for a block that does not take the stream as its first argument and give it back.
    """
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def entered(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        if len(seen) == len(blocks):
            raise _Reached
        return args[0] if args else kwargs.get("hidden_states")

    for block in blocks:
        block.forward = entered
    try:
        with uncompiled(), torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except _Reached:
        pass
    finally:
        for block in blocks:
            del block.forward
    streams = [args[0] if args else kwargs.get("hidden_states") for args, kwargs in seen]
    if len(seen) < len(blocks) or not isinstance(streams[0], Tensor):
        raise UnsupportedError("does not take the residual stream", where=type(blocks[0]).__name__)
    return streams[0], [_call(*one) for one in seen]


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}

    def call(block: nn.Module, stream: Tensor) -> Tensor:
        with torch.no_grad():
            found = block(stream, *args[1:], **rest)
        after = found if isinstance(found, Tensor) else found[0]
        if not isinstance(after, Tensor) or after.shape != stream.shape:
            raise UnsupportedError("does not give the residual stream back", where=type(block).__name__)
        return after

    return call


@contextmanager
def watched(model: nn.Module, paths: Sequence[str]) -> Iterator[Mapping[str, list[tuple[Tensor, Tensor]]]]:
    """Record first input and first output of some modules, by path, each time that they are called in the context."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {path: [] for path in paths}

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = output if isinstance(output, Tensor) else output[0]
            found[path].append((_given(args, kwargs), first.clone()))  # a mixture may add to it in place

        return record

    hooks = [model.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True) for path in paths]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the first input of a module, which may be given by the name that transformers has for it."""
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def inputs_of(
    model: nn.Module, path: str, block: nn.Module, calls: Sequence[Call], streams: Sequence[Tensor]
) -> list[Tensor]:
    """Return what the module at `path` reads in each call of a block that holds it, and run no further than there."""
    found: list[Tensor] = []

    def entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(_given(args, kwargs))
        raise _Reached

    hook = model.get_submodule(path).register_forward_pre_hook(entered, with_kwargs=True)
    try:
        for call, stream in zip(calls, streams, strict=True):
            with suppress(_Reached):
                call(block, stream)
    finally:
        hook.remove()
    return found
