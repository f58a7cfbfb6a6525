"""Write switches that the schema's bound on length decides as plain config: the model's own code then does less."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedConfig

from collapse.analysis.config_switches import Edit, Switch, length_switches, text_prefix
from collapse.analysis.config_values import config_values
from collapse.analysis.equivalence import Different, Equal, equal_under
from collapse.analysis.soft_cap import SoftCap, head_of, is_inert, largest_logit, soft_cap
from collapse.config_paths import with_edits
from collapse.errors import UnsupportedError
from collapse.passes.base import Context, Proposal
from collapse.plan import Evidence, Skipped
from collapse.plan import Specialise as Rewrite
from collapse.trace import quiet, trace

Figures = dict[str, float | int | str]
Attempt = Callable[[Edit], "Rewrite | Skipped"]


@dataclass(frozen=True)
class Specialise:
    """The pass; see `propose_specialisation`."""

    name: str = "specialise"

    def propose(self, context: Context) -> Proposal:
        """Propose the config edits that change nothing for inputs of the schema's length."""
        return propose_specialisation(context, self.name)


def propose_specialisation(context: Context, name: str) -> Proposal:
    """Try every switch of the config; an edit is taken if the edited model is proved to compute the same.

    Edits add up: each is proved together with those taken before it.
    """
    edits: Edit = {}
    rewrites: list[Rewrite] = []
    skipped: list[Skipped] = []
    attempts = [partial(_propose_switch, context, name, s) for s in _switches(context)] + _soft_caps(context, name)
    for attempt in attempts:
        outcome = attempt(edits)
        if isinstance(outcome, Skipped):
            skipped.append(outcome)
        else:
            rewrites.append(outcome)
            edits |= outcome.config
    if not attempts:
        skipped.append(Skipped(pass_name=name, site="config", reason="no switch of the config depends on the schema"))
    return Proposal(tuple(rewrites), tuple(skipped))


def _switches(context: Context) -> tuple[Switch, ...]:
    return length_switches(context.config, context.checkpoint.config)


def _propose_switch(context: Context, name: str, switch: Switch, before: Edit) -> Rewrite | Skipped:
    bound = context.schema.max_tokens
    figures: Figures = dict(switch.figures) | ({} if bound is None else {"max_tokens": bound})
    skip = partial(Skipped, pass_name=name, site=switch.site, figures=figures)
    if bound is None:
        return skip(reason=f"{switch.what}, and the schema gives no max_tokens")
    if bound > switch.reach:
        return skip(reason=f"{switch.what}, which inputs of {bound} tokens notice")
    if switch.obstacle:
        return skip(reason=switch.obstacle)
    outcome = _proved(context, switch.edits, before)
    if isinstance(outcome, str):
        return skip(reason=outcome)
    evidence = Evidence(
        grade="proved",
        claim=f"{switch.what}; in calls of at most {bound} tokens, padding included, that changes nothing",
        method="the traced graphs of both configs have the same value numbers, comparisons of positions being decided "
        "over all allowed lengths at once",
        figures=figures,
    )
    return Rewrite(pass_name=name, site=switch.site, evidence=evidence, config=outcome, max_tokens=bound)


def _soft_caps(context: Context, name: str) -> list[Attempt]:
    text, prefix = context.config.get_text_config(), text_prefix(context.config)
    attempts: list[Attempt] = []
    if getattr(text, "attn_logit_softcapping", None) is not None:
        attempts.append(partial(_skip_attention_cap, name, prefix, float(text.attn_logit_softcapping)))
    if getattr(text, "final_logit_softcapping", None) is not None:
        attempts.append(partial(_propose_final_cap, context, name, f"{prefix}final_logit_softcapping"))
    return attempts


def _skip_attention_cap(name: str, prefix: str, cap: float, before: Edit) -> Skipped:
    reason = "it moves attention scores, and no bound is known on what the layers that follow make of that"
    return Skipped(pass_name=name, site=f"{prefix}attn_logit_softcapping", reason=reason, figures={"cap": cap})


def _propose_final_cap(context: Context, name: str, site: str, before: Edit) -> Rewrite | Skipped:
    program = context.program
    capped = soft_cap(program)
    head = head_of(program, capped.logits) if capped else None
    bound = largest_logit(program, context.checkpoint, head) if head else None
    if capped is None or bound is None:
        reason = "the weights give no bound on the logits: they are no linear map of an RMSNorm, capped"
        return Skipped(pass_name=name, site=site, reason=reason)
    figures: Figures = {"largest_logit": bound, "cap": capped.cap}
    if not is_inert(bound, capped.cap):
        reason = f"logits are only known to stay under {bound:.3g}, where a cap of {capped.cap:g} moves them"
        return Skipped(pass_name=name, site=site, reason=reason, figures=figures)
    outcome = _proved(context, ({site: None},), before, capped)
    if isinstance(outcome, str):
        return Skipped(pass_name=name, site=site, reason=outcome, figures=figures)
    evidence = Evidence(
        grade="proved",
        claim=f"no logit exceeds {bound:.3g}, so that a cap of {capped.cap:g} moves none beyond fp32 tolerance",
        method="Cauchy-Schwarz on the final RMSNorm and the rows of the head; |x - c tanh(x/c)| <= |x|^3 / (3 c^2); "
        "but for the cap the traced graphs have the same value numbers",
        figures=figures,
    )
    return Rewrite(pass_name=name, site=site, evidence=evidence, config=outcome)


def _proved(context: Context, edits: tuple[Edit, ...], before: Edit, capped: SoftCap | None = None) -> Edit | str:
    """Return the first edit that the model's code accepts, if it is proved to change nothing, or why not."""
    reason = "the config has no way to say it"
    for edit in edits:
        try:
            outcome = _compared(context, before | edit, capped)
        except UnsupportedError as error:
            reason = f"the edited config is not accepted ({error})"
            continue
        return edit if isinstance(outcome, Equal) else f"not proved to change nothing: {outcome.reason}"
    return reason


def _compared(context: Context, edits: Edit, capped: SoftCap | None) -> Equal | Different:
    """Trace the edited config and compare it with the source; a cap that was bounded is left out of the source."""
    config = edited_config(context.config, with_edits(context.checkpoint.config, edits))
    program = trace(config)
    if (program.shapes, program.tied) != (context.program.shapes, context.program.tied):
        return Different("the edited model has other tensors")
    return equal_under(
        context.program,
        program,
        max_tokens=context.schema.max_tokens,
        values=(config_values(context.config), config_values(config)),
        left_logits=capped.logits if capped else None,
    )


def edited_config(config: PreTrainedConfig, written: Mapping[str, object]) -> PreTrainedConfig:
    """Return what the class of `config` reads from a config.json that says `written`.

    Raises `UnsupportedError` where it refuses that.
    """
    try:
        with quiet():
            return type(config).from_dict(dict(written))
    except Exception as error:  # each class raises its own kinds
        raise UnsupportedError(" ".join(str(error).split())[:200], where="config.json") from None
