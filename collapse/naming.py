"""How transformers maps the names in weight files to the names of a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from collapse.errors import UnsupportedError
from collapse.quantised import Scheme, scheme_of, weight_of


@dataclass(frozen=True)
class Naming:
    """Names of a model's tensors, and transformers' own rules from a file's names to them.

    Attributes:
        known: state-dict names, persistent buffers included.
        prefix: what the model calls its base model; files saved from a base model lack it.
        renamings, converters: transformers' rules; a converter makes one tensor of several (experts, say).
        computed: last parts of the names of buffers that the model computes itself, whatever a file says.
        scheme: how the files are quantised; their weights then have other names, and companions.
    """

    known: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    renamings: tuple[WeightRenaming, ...] = ()
    converters: tuple[WeightConverter, ...] = ()
    computed: frozenset[str] = frozenset()
    scheme: Scheme | None = None

    def resolve(self, name: str) -> tuple[str | None, bool]:
        """Return the model's name for a file's tensor, None where no module claims it, and whether it is merged.

        A merged tensor is a part of the model's: its shape in the file is another. All tensors of a quantised weight
        get the name of the weight.
        """
        found = self._resolve(name)
        weight = weight_of(self.scheme, name) if self.scheme else name
        return self._resolve(weight) if found[0] is None and weight != name else found

    def _resolve(self, name: str) -> tuple[str | None, bool]:
        renamed, pattern = self._renamed(name, self.renamings, self.converters)
        if renamed not in self.known and name in self.known:
            renamed, pattern = self._renamed(name, (), ())
        return (renamed, pattern is not None) if renamed in self.known else (None, False)

    def _renamed(self, name: str, renamings: Any, converters: Any) -> tuple[str, str | None]:
        rules = copy.deepcopy((list(renamings), list(converters)))  # matching is noted on the rules themselves
        renamed, pattern = rename_source_key(name, *rules, self.prefix, dict(self.known))
        return str(renamed), pattern


def naming_of(model: PreTrainedModel) -> Naming:
    """Return the naming of a model, which may be on the meta device."""
    rules = get_model_conversion_mapping(model)
    saved = model.state_dict()
    return Naming(
        known=dict.fromkeys(saved, True),
        prefix=model.base_model_prefix,
        renamings=tuple(rule for rule in rules if isinstance(rule, WeightRenaming)),
        converters=tuple(rule for rule in rules if isinstance(rule, WeightConverter)),
        computed=frozenset(name.rpartition(".")[2] for name, _ in model.named_buffers() if name not in saved),
        scheme=_scheme(model),
    )


def _scheme(model: PreTrainedModel) -> Scheme | None:
    """A scheme that is not known is for the checkpoint to refuse: what a config costs can be counted all the same."""
    try:
        return scheme_of(model.config.to_dict())
    except UnsupportedError:
        return None
