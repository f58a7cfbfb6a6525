"""The influence of every site on the logits: estimated for all, measured exactly for those that matter least."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from collapse.analysis.block_runs import BlockRuns
from collapse.analysis.exact_cost import HAVE_MEANS, Loss, Reference, cost_of, means_of
from collapse.analysis.first_order import Estimate, sweep
from collapse.analysis.influence_store import Store
from collapse.analysis.sites import KINDS, RANGES, Group, Kind, Places, Site, sites_of
from collapse.errors import UnsupportedError
from collapse.plan import Skipped

By = Literal["zero", "mean"]
CONTENDERS = 8  # sites of each kind that are measured exactly unless more are asked for
LOGITS = 1 << 25  # in one batch
WINDOWS = 4  # in one batch: more are no faster, and are repeated when a run goes on
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        kinds: of sites to report.
        exact: how many of each kind to measure, those with the lowest estimate of the KL divergence; None for all.
        by: what stands in for a site that is measured: nothing (`zero`), or its mean on the same text.
        ranges: in how many sites the neurons of one feed-forward are divided, by their rank.
        seed: of the labels that are drawn for the estimates.
    """

    kinds: tuple[Kind, ...] = KINDS
    exact: int | None = CONTENDERS
    by: tuple[By, ...] = ("zero",)
    ranges: int = RANGES
    seed: int = 0


@dataclass(frozen=True)
class SiteInfluence:
    """One site: its estimate, and by what stands in for it what that was measured to cost."""

    site: Site
    estimate: Estimate
    losses: Mapping[By, Loss] = field(default_factory=dict)

    @property
    def kl(self) -> float | None:
        """The least measured KL divergence a token, nats; None where none was measured."""
        return min((loss.kl for loss in self.losses.values()), default=None)


@dataclass(frozen=True)
class Influence:
    """Facts about the sites of one model on one text. `tokens` is the length of the text; `skipped` was left alone."""

    sites: tuple[SiteInfluence, ...]
    tokens: int
    skipped: tuple[Skipped, ...] = ()

    def __getitem__(self, name: str) -> SiteInfluence:
        """Return the site called `name`."""
        return next(one for one in self.sites if one.site.name == name)

    def of(self, kind: Kind) -> tuple[SiteInfluence, ...]:
        """Return the sites of one kind, in the model's order."""
        return tuple(one for one in self.sites if one.site.group.kind == kind)


def influence_of(
    load_model: Callable[[], nn.Module],
    places: Places,
    batches: Sequence[Tensor],
    settings: Settings,
    store: Store,
    progress: Progress,
) -> Influence:
    """Estimate and measure the sites of `places` on batches of token ids, [windows, tokens] each.

    What `store` has already is not done again, and where it has all the model is not loaded. Raises `UnsupportedError`
    for a model whose blocks do not hand on a stream.
    """
    content, tokens = store.content, sum(ids.numel() for ids in batches)
    if not content.estimates:
        _estimate(load_model(), places, batches, settings, store, progress)
    sites = _checked_sites(places, settings, store, len(batches))
    shown = [site for site in sites if site.group.kind in settings.kinds]
    wanted = [(site, by) for site in _contenders(shown, content.estimates, settings.exact) for by in settings.by]
    tasks = [(site, by) for site, by in wanted if by == "zero" or site.group.kind in HAVE_MEANS]
    if any(len(store.batches(by, site.name)) < len(batches) for site, by in tasks):
        _measure(load_model(), places, batches, tasks, store, progress)
    losses: dict[str, dict[By, Loss]] = {}
    for site, by in tasks:
        found = store.batches(by, site.name)
        losses.setdefault(site.name, {})[by] = Loss.of(found[number] for number in range(len(batches)))
    facts = (SiteInfluence(site, content.estimates[site.name], losses.get(site.name, {})) for site in shown)
    return Influence(tuple(facts), tokens, tuple(one for one in places.skipped if one.pass_name in settings.kinds))


def _checked_sites(places: Places, settings: Settings, store: Store, batches: int) -> list[Site]:
    """Return all sites; refuses a store that is not about just these and the batches."""
    content, names = store.content, {group.key: group.size for group in places.groups if group.kind == "neurons"}
    if {key: sorted(order) for key, order in content.orders.items()} != {k: [*range(n)] for k, n in names.items()}:
        raise store.refused("it ranks other neurons")
    sites = [
        site for group in places.groups for site in sites_of(group, content.orders.get(group.key, ()), settings.ranges)
    ]
    known = {site.name for site in sites}
    measured = [(site, number) for found in content.sums.values() for site, sums in found.items() for number in sums]
    if content.estimates.keys() != known or any(s not in known or not 0 <= n < batches for s, n in measured):
        raise store.refused("it is about other sites")
    return sites


def _contenders(sites: Sequence[Site], estimates: Mapping[str, Estimate], count: int | None) -> list[Site]:
    """Return of each kind the `count` sites with the lowest estimate, in the model's order."""
    if count is None:
        return list(sites)
    chosen: set[str] = set()
    for kind in KINDS:
        names = [site.name for site in sites if site.group.kind == kind]
        chosen |= set(sorted(names, key=lambda name: estimates[name].fisher)[:count])
    return [site for site in sites if site.name in chosen]


def _estimate(
    model: nn.Module,
    places: Places,
    batches: Sequence[Tensor],
    settings: Settings,
    store: Store,
    progress: Progress,
) -> None:
    """Gather all groups in one sweep, so that asking for another kind later costs nothing."""
    found = sweep(
        model, places.groups, batches, settings.seed, lambda done, total: progress("estimating sites", done, total)
    )
    for group in places.groups:
        gathered = found[group.key]
        if group.kind == "neurons":
            store.content.orders[group.key] = gathered.order()
        for site in sites_of(group, store.content.orders.get(group.key, ()), settings.ranges):
            store.content.estimates[site.name] = gathered.estimate(site)
    store.save()


def _measure(
    model: nn.Module,
    places: Places,
    batches: Sequence[Tensor],
    tasks: Sequence[tuple[Site, By]],
    store: Store,
    progress: Progress,
) -> None:
    """Measure what is not in the store yet, batch by batch: only one batch's states are ever held."""
    runs = BlockRuns(model, places.blocks)
    means = _means(model, tasks, batches)
    done, total = 0, len(batches) * len(tasks)
    for number, ids in enumerate(batches):
        left = [(site, by) for site, by in tasks if number not in store.batches(by, site.name)]
        done += len(tasks) - len(left)
        reference = Reference.of(runs, ids) if left else None
        for site, by in left:
            assert reference is not None
            mean = means[site.group.key] if by == "mean" else None
            store.batches(by, site.name)[number] = cost_of(runs, reference, site, mean)
            store.save()
            done += 1
            progress("measuring sites", done, total)


def _means(model: nn.Module, tasks: Sequence[tuple[Site, By]], batches: Sequence[Tensor]) -> dict[str, Tensor]:
    groups: dict[str, Group] = {site.group.key: site.group for site, by in tasks if by == "mean"}
    return means_of(model, list(groups.values()), batches) if groups else {}


def check_settings(kinds: Sequence[str], by: Sequence[str]) -> tuple[tuple[Kind, ...], tuple[By, ...]]:
    """Return kinds and stand-ins as they are called here; raises `UnsupportedError` for one that there is not."""
    for name, known in [*((kind, KINDS) for kind in kinds), *((one, get_args(By)) for one in by)]:
        if name not in known:
            raise UnsupportedError(f"there is no {name!r}", where="--sites", fix=f"choose among {', '.join(known)}")
    return tuple(kind for kind in KINDS if kind in kinds), tuple(one for one in get_args(By) if one in by)


def batches_of(windows: Tensor, vocabulary: int) -> tuple[Tensor, ...]:
    """Split windows, [windows, tokens]: the logits of a batch have at most `LOGITS` numbers, or are of one window."""
    return torch.split(windows, max(1, min(WINDOWS, LOGITS // (windows.shape[1] * vocabulary))))
