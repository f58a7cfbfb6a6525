"""Real values of the buffers that a config alone determines, such as rotary frequencies, without any weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from collapse.auto import auto_class
from collapse.program import Program
from collapse.trace import quiet


def config_values(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Return every tensor on the CPU that a model of `config` holds beside its parameters, by dotted name.

    Those are buffers, and plain attributes such as the second table of frequencies that LongRoPE makes when it first
    runs. Parameters stay on the meta device, so the model takes no memory to speak of.
    """
    with quiet(), torch.no_grad():
        with init_empty_weights(include_buffers=False):
            own = copy.deepcopy(config)  # building a model writes its dtype into the config
            model = auto_class(own).from_config(own, dtype=torch.float32, trust_remote_code=False)
        _make_late_tables(model)
    values = {name: buffer for name, buffer in model.named_buffers() if buffer.device.type != "meta"}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and value.device.type != "meta":
                values[f"{path}.{attribute}" if path else attribute] = value
    return values


def with_values(program: Program, config: PreTrainedConfig) -> Program:
    """Return the program of `config` with a value for each constant of which only the shape was traced.

    Without one the graph cannot run: the second table of LongRoPE is made when the model first runs, on any device.
    """
    if all(constant.device.type != "meta" for constant in _lifted(program).values()):
        return program
    values = config_values(config)
    known = {name: values[name] for name in _lifted(program) if name in values}
    return replace(program, constants={**program.constants, **known})


def _lifted(program: Program) -> dict[str, torch.Tensor]:
    """Return the constants that the graph takes as such; buffers are given to it with the weights."""
    return {item.target: program.constants[item.target] for item in program.inputs if item.role == "constant"}


def _make_late_tables(model: PreTrainedModel) -> None:
    """Run each rotary module of LongRoPE once, for a position of 0: it keeps its second table from then on."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.items() if isinstance(kind, dict) else [(None, kind)]
        for layer_type, name in kinds:
            if name == "longrope":
                arguments = {} if layer_type is None else {"layer_type": layer_type}
                module(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long), **arguments)
