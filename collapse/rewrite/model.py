"""The interpreter for a loaded transformers model: the plan applied in memory, without a file."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from collapse.auto import auto_class, config_from
from collapse.canonical import dumps
from collapse.checkpoint import Checkpoint
from collapse.errors import PlanError
from collapse.naming import naming_of
from collapse.plan import Plan
from collapse.program import Program
from collapse.quantised import FIELD
from collapse.rewrite.config import config_edits
from collapse.rewrite.graph import rewrite_weights
from collapse.rewrite.origin import origins
from collapse.rewrite.tensors import token_narrow
from collapse.rewrite.tokenizer import narrow_side_files
from collapse.rewrite.values import Values
from collapse.trace import meta_model, quiet

CONFIG = "config.json"


def collapsed_model(
    checkpoint: Checkpoint,
    program: Program,
    plan: Plan,
    weights: Mapping[str, torch.Tensor],
    values: Values | None = None,
) -> PreTrainedModel:
    """Return the collapsed model in evaluation mode: what loading the written checkpoint in fp32 gives.

    `program` is the source's; `weights` are its parameters and buffers under all their names, in fp32; `values` has the
    data of replaced tensors. Tensors that no rewrite changes may be shared with `weights`.

    Raises `PlanError` where the plan does not fit the model, or leaves a parameter without a value.
    """
    config = config_from(output_config(checkpoint, plan))
    rewritten = rewrite_weights(program, weights, plan, checkpoint.config, values=values)
    names = origins(naming_of(meta_model(config)), checkpoint, plan, program)
    state = {after: rewritten[before].detach() for after, (_, before) in names.items()}
    own = copy.deepcopy(config)  # loading writes its dtype into the config
    kind = auto_class(own)._model_mapping[type(own)]
    with quiet():
        options = {"dtype": torch.float32, "output_loading_info": True}
        model, keys = kind.from_pretrained(None, config=own, state_dict=state, **options)
    if keys["missing_keys"]:
        raise PlanError(
            "the collapsed model has no value for it", where=min(keys["missing_keys"]), fix="make a new plan"
        )
    found: PreTrainedModel = model.eval()
    return found


def output_config(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """Return the config.json of the output, token ids renumbered, without the way in which its weights are stored."""
    config, narrow = dict(checkpoint.config), token_narrow(plan)
    if narrow is not None:
        files = narrow_side_files({CONFIG: dumps(config).encode()}, narrow.kept, narrow.size)
        config = json.loads(files[CONFIG])
    edited = config_edits(config, plan)
    edited.pop(FIELD, None)
    return edited
