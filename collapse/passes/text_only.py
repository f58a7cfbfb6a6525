"""Make a multimodal checkpoint, whose schema has neither images nor audio, the text model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from collapse.analysis.config_values import config_values
from collapse.analysis.equivalence import Different, Equal, equal_under
from collapse.analysis.text_model import TextModel, config_root, text_models
from collapse.errors import PlanError, UnsupportedError
from collapse.naming import naming_of
from collapse.passes.base import Context, Proposal
from collapse.plan import Evidence, Reroot, Skipped
from collapse.quantised import FIELD
from collapse.rewrite.module_lists import require_same_modules, with_modules
from collapse.sequences import context_length
from collapse.token_ids import ID_FIELD
from collapse.trace import meta_model, trace

INHERITED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype", "transformers_version")
PROCESSOR = "processor_config.json"  # files of this ending tell how images and audio are prepared

Names = Mapping[str, str]


@dataclass(frozen=True)
class TextOnly:
    """The pass; see `propose_text_only`."""

    name: str = "text-only"

    def propose(self, context: Context) -> Proposal:
        """Propose re-rooting the checkpoint at its text model."""
        found = propose_text_only(context, self.name)
        return Proposal((found,)) if isinstance(found, Reroot) else Proposal(skipped=(found,))


def propose_text_only(context: Context, name: str) -> Reroot | Skipped:
    """Find a causal LM of transformers that computes what the model does of text, and prove that it does.

    The proof compares both traced programs. Towers and projectors are what the causal LM has no place for.
    """
    root = config_root(context.config)
    if root is None:
        return Skipped(pass_name=name, site="model", reason="the model is a text model")
    reason = "transformers has no causal LM with the text model's layout"
    bound = context.schema.max_tokens or context_length(dict(context.checkpoint.config))
    for model in text_models(context.config, context.program):
        verdict = _proved(context, model, bound)
        pairs = _prefixes(context, model)
        if isinstance(verdict, Equal) and pairs is not None:
            return _checked(context, _reroot(context, name, model, pairs, bound), model)
        where = f" ({verdict.node})" if isinstance(verdict, Different) and verdict.node else ""
        said = f"{verdict.reason}{where}" if isinstance(verdict, Different) else "its files cannot be named so"
        reason = f"{model.class_name} has its layout, but no proof that it computes the same: {said}"
    return Skipped(pass_name=name, site=root, reason=reason)


def _proved(context: Context, model: TextModel, bound: int | None) -> Equal | Different:
    try:
        program = trace(model.config)
        values = config_values(context.config), config_values(model.config)
    except UnsupportedError as error:
        return Different(str(error))
    unpadded = context.schema.padding == "none"
    renamed = {own: whole for own, whole in model.names.items() if own in program.shapes}
    return equal_under(context.program, program, max_tokens=bound, unpadded=unpadded, names=renamed, values=values)


def _prefixes(context: Context, model: TextModel) -> tuple[tuple[str, str], ...] | None:
    """Return how the files' names begin and how the causal LM's do; None where transformers would not find them so."""
    wanted = {whole: own for own, whole in model.names.items()}
    weights = {_weight(context, tensor) for tensor in context.checkpoint.tensors}
    resolved = {tensor: context.program.naming.resolve(tensor) for tensor in sorted(weights)}
    targets = {tensor: (wanted[whole], merged) for tensor, (whole, merged) in resolved.items() if whole in wanted}
    plain = {tensor: own for tensor, (own, merged) in targets.items() if not merged}
    if len(set(plain.values())) < len(
        plain
    ):  # one of two tensors of one name is no part of the model; which, is unsaid
        return None
    pairs = tuple(sorted({_pair(tensor, own) for tensor, own in plain.items()}, key=lambda pair: (-len(pair[0]), pair)))
    naming = naming_of(meta_model(model.config))
    for tensor, target in targets.items():
        left, right = next((pair for pair in pairs if tensor.startswith(pair[0])), ("", ""))
        if naming.resolve(right + tensor.removeprefix(left)) != target:
            return None
    return pairs


def _weight(context: Context, tensor: str) -> str:
    group = context.checkpoint.group(tensor)
    return tensor if group is None else group.weight


def _checked(context: Context, rewrite: Reroot, model: TextModel) -> Reroot | Skipped:
    """Decline where a quantization_config would speak of other modules than before, by their paths in the models."""
    config = context.checkpoint.config
    pairs = sorted({((whole.rpartition(".")[0],), (own.rpartition(".")[0],)) for own, whole in model.names.items()})
    try:
        require_same_modules(config, with_modules(config, (), (rewrite,)), pairs)
    except PlanError as error:
        return Skipped(pass_name=rewrite.pass_name, site=rewrite.site, reason=f"quantised: {error.where} {error.what}")
    return rewrite


def _module_pairs(model: TextModel) -> tuple[tuple[str, str], ...]:
    """Return how paths in the multimodal model begin, and how they do in the causal LM."""
    pairs = {_pair(whole, own) for own, whole in model.names.items()}
    return tuple(sorted(pairs, key=lambda pair: (-len(pair[0]), pair)))


def _pair(old: str, new: str) -> tuple[str, str]:
    """Return what stands before the longest common end, in whole parts, of two names."""
    ends = zip(reversed(old.split(".")), reversed(new.split(".")), strict=False)
    same = ".".join(reversed([part for part, _ in takewhile(lambda parts: parts[0] == parts[1], ends)]))
    return old.removesuffix(same), new.removesuffix(same)


def _reroot(
    context: Context, name: str, model: TextModel, pairs: tuple[tuple[str, str], ...], bound: int | None
) -> Reroot:
    checkpoint, text = context.checkpoint, frozenset(model.names.values())
    claimed = {tensor: context.program.model_name(tensor) for tensor in checkpoint.tensors}
    gone = tuple(sorted(tensor for tensor, whole in claimed.items() if whole is not None and whole not in text))
    infos = [checkpoint.tensors[tensor] for tensor in gone]
    lengths = {} if bound is None else {"max_tokens": bound}
    evidence = Evidence(
        grade="proved",
        claim=f"of text alone the model computes what {model.class_name} computes with the tensors that stay",
        method="the traced graphs of both, value-numbered together; what positions decide compared at every position",
        figures={"bytes": sum(info.nbytes for info in infos), "parameters": checkpoint.parameters(gone)} | lengths,
    )
    section = model.root if isinstance(checkpoint.config.get(model.root), dict) else ""
    given = checkpoint.config[section] if section else checkpoint.config
    edits = _edits(model, given)
    return Reroot(
        pass_name=name,
        site=model.root,
        evidence=evidence,
        config=edits,
        config_root=section,
        fields=tuple(sorted(set(given) & set(model.config.to_dict()) - set(edits))),
        inherits=INHERITED + ((FIELD,) if checkpoint.quantisation else ()),
        names=pairs,
        modules=_module_pairs(model) if checkpoint.quantisation else (),
        tensors=gone,
        files=tuple(file for file in checkpoint.side_files if file.endswith(PROCESSOR)),
    )


def _edits(model: TextModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the causal LM's config that the source's part does not say; token ids stay the source's."""
    unusual, full = model.config.to_diff_dict(), model.config.to_dict()
    wanted = {field: full[field] for field in full if field in given or field in unusual}
    edits = {field: value for field, value in wanted.items() if field not in given or given[field] != value}
    kept = {field: value for field, value in edits.items() if not ID_FIELD.search(field) and field not in _COUNTED}
    return kept | {"architectures": [model.class_name], "model_type": model.config.model_type}


_COUNTED = frozenset({"vocab_size", *INHERITED})
