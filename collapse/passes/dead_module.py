"""Short-circuit modules whose replacement leaves the logits within tolerance on every in-schema sequence.

The pass knows modules by what they do on the schema's text, never by name. Whether the checkpoint's own
layout can say that a module is absent is the architecture's to declare: see `collapse.models`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from collapse.analysis.activation import Activation, profile
from collapse.analysis.influence import SAME, JointEffect, Tolerance, joint_effect, single_effects
from collapse.analysis.position_entropy import fit_threshold, prefix_entropy
from collapse.analysis.stand_in import StandIn
from collapse.certify.bounds import clopper_pearson
from collapse.passes.base import Context, Proposal
from collapse.plan import Evidence, Replacement, ShortCircuit, Skipped

DELTA = 0.05
NEAR = 1e-3  # an output this small beside the residual stream is worth an exact measurement


@dataclass(frozen=True)
class DeadModule:
    """The pass; see `propose_dead`."""

    name: str = "dead-module"
    tolerance: Tolerance = SAME
    near: float = NEAR

    def propose(self, context: Context) -> Proposal:
        """Propose short-circuiting what does nothing on the schema's text."""
        return propose_dead(context, self)


@dataclass(frozen=True)
class _Candidate:
    site: str
    by: Replacement
    constant: torch.Tensor | None
    figures: dict[str, float | int | str]

    @property
    def stand_in(self) -> StandIn:
        return StandIn(self.site, self.by, self.constant)


def propose_dead(context: Context, options: DeadModule) -> Proposal:
    """Rank modules by a profile on calibration text, measure the contenders' effect on the logits exactly, and
    check the survivors together on held-out text, which chose nothing."""
    model, _ = context.loaded
    sites = candidate_sites(model)
    calibration = context.sequences.calibration
    if not calibration:
        return _nothing(options.name, "there is no text to run, so no module can be observed")
    advance = _progress(context, "profiling modules", len(calibration))
    activations = profile(model, sites, calibration, advance, lambda a: _contender(a, options.near) is None)
    contenders = outermost([c for a in activations.values() if (c := _contender(a, options.near)) is not None])
    advance = _progress(context, "measuring contenders", len(calibration))
    worst = single_effects(model, [c.stand_in for c in contenders], calibration, options.tolerance, advance)
    dead = [c for c, excess in zip(contenders, worst, strict=True) if excess <= 0]
    near_misses = [_near_miss(options.name, a) for a in _closest(context.config, activations, contenders)]
    expressible = [c for c in dead if native_switch(context.config, c.site)]
    stuck = [_stuck(options.name, c) for c in dead if c not in expressible]
    alive = [_alive(options.name, c) for c in contenders if c not in dead]
    rewrites, refused = _certify(context, model, expressible, options)
    return Proposal(tuple(rewrites), (*stuck, *alive, *refused, *near_misses))


def candidate_sites(model: nn.Module) -> list[str]:
    """Return the modules that hold parameters and lie inside a repeated block, outermost first.

    Whole models, embeddings and heads are no candidates: without them there is no language model.
    """
    sites = []
    for path, module in model.named_modules():
        inside = re.search(r"\.\d+(\.|$)", path)
        if inside and not isinstance(module, nn.ModuleList) and any(True for _ in module.parameters()):
            sites.append(path)
    return sites


def outermost(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Drop candidates that lie within another one."""
    sites = {c.site for c in candidates}
    return [c for c in candidates if not any(c.site.startswith(f"{site}.") for site in sites)]


def native_switch(config: PreTrainedConfig, site: str) -> dict[str, bool] | None:
    """Return the config edit that says natively that the module at `site` is absent, or None.

    A config class declares `collapse_switches`: module path with `{layer}` -> list field, one entry a layer.
    """
    for template, field in getattr(type(config), "collapse_switches", {}).items():
        pattern = re.escape(template).replace(re.escape("{layer}"), r"(\d+)")
        if found := re.fullmatch(pattern, site):
            return {f"{field}.{found.group(1)}": False}
    return None


def _contender(activation: Activation, near: float) -> _Candidate | None:
    by, distance = activation.nearest
    if distance > near * (activation.residual or 1.0):
        return None
    constant = activation.middle if by == "constant" else None
    figures: dict[str, float | int | str] = {
        "distance": distance,
        "residual_rms": activation.residual,
        "calls": activation.calls,
    }
    return _Candidate(activation.site, by, constant, figures)


def _certify(
    context: Context, model: nn.Module, dead: Sequence[_Candidate], options: DeadModule
) -> tuple[list[ShortCircuit], list[Skipped]]:
    """Check all survivors together on held-out text; a single violation there refuses all of them."""
    if not dead:
        return [], []
    held_out = context.sequences.held_out
    advance = _progress(context, "checking on held-out text", len(held_out))
    effect = joint_effect(model, [c.stand_in for c in dead], held_out, options.tolerance, advance)
    if effect.violations or not held_out:
        reason = (
            f"within tolerance on calibration text, but not on {effect.violations} of {effect.sequences} "
            "held-out sequences"
        )
        return [], [Skipped(pass_name=options.name, site=c.site, reason=reason, figures=c.figures) for c in dead]
    figures = _bound_figures(context, options, effect)
    threshold = None
    if context.stage == "fuse":
        threshold, fitted = _detector(context)
        figures |= fitted
    return [_rewrite(context, options.name, c, figures, threshold) for c in dead], []


def _detector(context: Context) -> tuple[float, dict[str, float | int | str]]:
    """Fit the threshold that tells the schema's text from prose by the highest entropy of any prefix."""
    regular, prose = context.sequences.calibration, context.load_contrast()
    peaks = [[float(prefix_entropy(ids).max()) for ids in side] for side in (regular, prose)]
    fitted = fit_threshold(*peaks)
    threshold = fitted.value if context.threshold is None else context.threshold
    return threshold, {
        "threshold_nats": threshold,
        "threshold_fitted_nats": fitted.value,
        "threshold_margin_nats": fitted.margin,
        "threshold_error": fitted.error,
    }


def _progress(context: Context, what: str, total: int) -> Callable[[int], None]:
    return lambda done: context.progress(what, done, total)


def _bound_figures(context: Context, options: DeadModule, effect: JointEffect) -> dict[str, float | int | str]:
    return {
        "tolerance": options.tolerance.atol,
        "relative_tolerance": options.tolerance.rtol,
        "calibration_sequences": len(context.sequences.calibration),
        "held_out_sequences": effect.sequences,
        "longest_sequence": max(map(len, context.sequences.held_out)),
        "held_out_violations": effect.violations,
        "largest_logit_difference": effect.largest,
        "share_violating_at_most": clopper_pearson(effect.violations, effect.sequences, DELTA),
        "delta": DELTA,
        "held_out_digest": context.sequences.digests["held_out"],
    }


def _rewrite(
    context: Context,
    name: str,
    candidate: _Candidate,
    figures: dict[str, float | int | str],
    threshold: float | None,
) -> ShortCircuit:
    prefix = f"{candidate.site}."
    tensors = tuple(sorted(tensor for tensor in context.checkpoint.tensors if tensor.startswith(prefix)))
    evidence = Evidence(
        grade="certified",
        claim=f"replacing {candidate.site} by {candidate.by} leaves every logit within tolerance on in-schema text "
        f"of up to {figures['longest_sequence']} tokens",
        method="exact comparison on held-out sequences; Clopper-Pearson bound on the share that would differ",
        figures={**candidate.figures, **figures},
    )
    constant = None if candidate.constant is None else tuple(candidate.constant.tolist())
    return ShortCircuit(
        pass_name=name,
        site=candidate.site,
        evidence=evidence,
        config={} if context.stage == "fuse" else dict(native_switch(context.config, candidate.site) or {}),
        by=candidate.by,
        constant=constant,
        tensors=tensors,
        stage=context.stage,
        placeholder=context.placeholder,
        threshold=threshold,
    )


def _nothing(name: str, reason: str) -> Proposal:
    return Proposal(skipped=(Skipped(pass_name=name, site="model", reason=reason),))


def _stuck(name: str, candidate: _Candidate) -> Skipped:
    reason = f"replacing it by {candidate.by} changes no logit, but the model's layout cannot leave this module out"
    return Skipped(pass_name=name, site=candidate.site, reason=reason, figures=candidate.figures)


def _alive(name: str, candidate: _Candidate) -> Skipped:
    reason = f"its output is near {candidate.by}, yet replacing it moves the logits beyond tolerance"
    return Skipped(pass_name=name, site=candidate.site, reason=reason, figures=candidate.figures)


def _near_miss(name: str, activation: Activation) -> Skipped:
    by, distance = activation.nearest
    figures: dict[str, float | int | str] = {"distance": distance, "rms": activation.rms, "calls": activation.calls}
    if activation.share is not None:
        figures["share_of_residual_stream"] = activation.share
    reason = f"alive: the closest replacement, {by}, is {distance:.3g} off its output"
    return Skipped(pass_name=name, site=activation.site, reason=reason, figures=figures)


def _closest(
    config: PreTrainedConfig, activations: Mapping[str, Activation], taken: Sequence[_Candidate], count: int = 5
) -> list[Activation]:
    """Return the modules that came closest to being dead, and every module that the layout could leave out."""
    sites = {c.site for c in taken}
    left = [a for s, a in activations.items() if s not in sites and not any(s.startswith(f"{t}.") for t in sites)]
    ranked = sorted(left, key=lambda a: (a.nearest[1], a.site))
    return [a for i, a in enumerate(ranked) if i < count or native_switch(config, a.site)]
