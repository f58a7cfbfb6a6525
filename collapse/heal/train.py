"""The distillation: gradient steps on domain text, a multiplier that holds other text, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from collapse.heal.losses import divergence, stream_distance
from collapse.heal.pair import Pair, divergences, run
from collapse.heal.settings import Settings

Progress = Callable[[int, int], None]
Figures = dict[str, float | int | str]
Weights = dict[str, Tensor]
CHECKED, MOST_CHECKED = 16, 16  # one window in so many is not trained on, up to so many
MARGIN = 0.1  # the divergence on protected text is steered that far below its bound, since it moves around that
TOGETHER = 2  # windows in one forward pass
BETAS = (0.9, 0.95)  # of AdamW: a healing has tens of steps, too few for a memory of a thousand


@dataclass(frozen=True)
class Texts:
    """Windows of token ids [n, length]: to train on, to decide on when to stop, and the same of protected text."""

    train: Tensor
    check: Tensor
    protect: Tensor
    protect_check: Tensor


@dataclass(frozen=True)
class Healed:
    """The trained parameters by the student's state-dict names, none where the student is better as it was."""

    weights: Mapping[str, Tensor]
    figures: Figures


def divide(windows: Tensor, protected: Tensor) -> Texts:
    """Keep one window in 16, but no more than 16 of each kind and at least one of two, from being trained on."""
    return Texts(*_divided(windows), *_divided(protected))


def _divided(windows: Tensor) -> tuple[Tensor, Tensor]:
    count = min(MOST_CHECKED, max(1, len(windows) // CHECKED)) if len(windows) > 1 else 0
    picked = torch.tensor([(2 * n + 1) * len(windows) // (2 * count) for n in range(count)], dtype=torch.long)
    rest = torch.ones(len(windows), dtype=torch.bool)
    rest[picked] = False
    return windows[rest], windows[picked]


def heal(pair: Pair, windows: Tensor, protected: Tensor, settings: Settings, progress: Progress) -> Healed:
    """Train the touched parameters of `pair.student`, in place, to say what the source says.

    `windows` and `protected` are ids [n, length]; of either some are kept from training. The loss of a step is the
    divergence on domain text, plus the distance of the residual streams, plus lambda times the divergence on protected
    text. Lambda follows the constraint that this divergence be no larger than before (dual ascent): it rises while the
    constraint is broken, and falls to 0 where it is slack.

    The weights kept are those of the look at unseen windows with the least divergence that also keeps the constraint
    there; where none is better than before, those before. Raises `UnsupportedError` for blocks without a stream.
    """
    course = _Course(pair, divide(windows, protected), settings, progress)
    course.run()
    return Healed(course.result(), course.figures())


@dataclass(frozen=True)
class _Look:
    """The divergences on windows that are not trained on; nan without protected text."""

    step: int
    kl: float
    protected: float


@dataclass
class _Course:
    """One run. `weights` are those of the best look so far; the first look is before any step."""

    pair: Pair
    texts: Texts
    settings: Settings
    progress: Progress
    multiplier: float = 1.0
    looks: list[_Look] = field(default_factory=list)
    best: _Look | None = None
    weights: Weights = field(default_factory=dict)

    def run(self) -> None:
        accelerator = Accelerator()
        trained = own_parameters(self.pair.student, self.pair.touched)
        for model in (self.pair.source, self.pair.student):
            model.to(accelerator.device)
        optimizer = torch.optim.AdamW(
            list(trained.values()), lr=self.settings.rate, betas=BETAS, weight_decay=0.0, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.settings.factor)
        student, optimizer, schedule, domain, other = accelerator.prepare(
            self.pair.student, optimizer, schedule, *self._loaders()
        )
        self._look(0, trained)
        due = {round(self.settings.steps * (n + 1) / self.settings.checks) for n in range(self.settings.checks)}
        for step, ids, held in zip(range(self.settings.steps), domain, other, strict=False):
            optimizer.zero_grad()
            for loss in self._losses(student, ids[0], held[0] if len(self.texts.protect) else None):
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(trained.values(), self.settings.clip)
            optimizer.step()
            schedule.step()
            self.progress(step + 1, self.settings.steps)
            if step + 1 in due and not self._look(step + 1, trained):
                break
        for name, tensor in trained.items():
            tensor.data.copy_(self.weights[name])

    def _loaders(self) -> Iterator[DataLoader[tuple[Tensor, ...]]]:
        steps, generator = self.settings.steps, torch.Generator().manual_seed(self.settings.seed)
        for windows, rows in ((self.texts.train, self.settings.rows), (self.texts.protect, 1)):
            rounds = -(-steps * rows // max(1, len(windows)))
            order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(rounds)])
            ids = windows[order[: steps * rows]] if len(windows) else torch.zeros(steps * rows, 0, dtype=torch.long)
            yield DataLoader(TensorDataset(ids), batch_size=rows)

    def _losses(self, student: nn.Module, ids: Tensor, held: Tensor | None) -> Iterator[Tensor]:
        """Yield the parts of a step's loss, one after another: together their logits would set the peak of memory."""
        for number, part in enumerate(torch.split(ids, TOGETHER)):
            with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.settings.bf16):
                loss = self._loss(student, part) * (len(part) / len(ids))
                if held is not None and number == 0:
                    loss = loss + self._penalty(student, held)
            yield loss

    def _loss(self, student: nn.Module, ids: Tensor) -> Tensor:
        pair, settings = self.pair, self.settings
        paths = pair.blocks if settings.hidden else ()
        theirs = [pair.source.get_submodule(path) for path, _ in paths]
        ours = [pair.student.get_submodule(path) for _, path in paths]
        with torch.no_grad():
            source = run(pair.source, ids, theirs)
        seen = run(student, ids, ours)
        loss = divergence(source.logits, seen.logits, settings.temperature).mean()
        if paths:
            loss = loss + settings.hidden * stream_distance(source.streams, seen.streams)
        return loss

    def _penalty(self, student: nn.Module, ids: Tensor) -> Tensor:
        """Return lambda times the divergence on protected text, and let lambda follow how far it is from its bound."""
        bound = self.looks[0].protected * (1 - MARGIN)
        with torch.set_grad_enabled(self.multiplier > 0):
            with torch.no_grad():
                source = run(self.pair.source, ids).logits
            found = divergence(source, run(student, ids).logits).mean()
        penalty = self.multiplier * found
        violation = (float(found.detach()) - bound) / max(bound, 1e-6)
        self.multiplier = max(0.0, self.multiplier + self.settings.protect_rate * min(violation, 10.0))
        return penalty

    def _look(self, step: int, trained: Mapping[str, Tensor]) -> bool:
        """Note the divergences at `step`, keep the weights if they are the best; False where they are no numbers."""
        source, student = self.pair.source, self.pair.student
        kl, protected = (
            float(divergences(source, student, windows.to(student.device)).mean())
            for windows in (self.texts.check, self.texts.protect_check)
        )
        look = _Look(step, kl, protected)
        self.looks.append(look)
        if step == 0 or self._is_better(look):
            self.best = look
            self.weights = {name: tensor.detach().clone() for name, tensor in trained.items()}
        return math.isfinite(kl)

    def _is_better(self, look: _Look) -> bool:
        held = not len(self.texts.protect_check) or look.protected <= self.looks[0].protected
        return held and self.best is not None and look.kl < self.best.kl

    def result(self) -> Weights:
        return self.weights if self.best is not None and self.best.step else {}

    def figures(self) -> Figures:
        """Return what was done and seen; nan is no figure."""
        first, best, settings = self.looks[0], self.best or self.looks[0], self.settings
        found: Figures = {
            "steps": settings.steps,
            "tokens": settings.steps * settings.rows * settings.length,
            "calibration_kl_before": first.kl,
            "calibration_kl": best.kl,
            "kept_step": best.step,
            "seed": settings.seed,
            "precision": "bf16" if settings.bf16 else "fp32",
        }
        if len(self.texts.protect_check):
            found |= {"protected_kl_before": first.protected, "protected_kl": best.protected}
            found["multiplier"] = self.multiplier
        return found


def own_parameters(model: nn.Module, names: frozenset[str]) -> dict[str, nn.Parameter]:
    """Give `model` parameters of its own under `names`, to be trained, and freeze all others.

    Parameters of other models that share tensors with it stay as they are. Returns them by name, tied ones once.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    known: dict[int, nn.Parameter] = {}
    for name in sorted(names):
        old = named[name]
        known.setdefault(id(old), nn.Parameter(old.detach().clone()))
    found: dict[str, nn.Parameter] = {}
    for name, old in named.items():
        path, _, leaf = name.rpartition(".")
        new = known.setdefault(id(old), nn.Parameter(old.detach(), requires_grad=False))
        setattr(model.get_submodule(path), leaf, new)
        if new.requires_grad and not any(new is other for other in found.values()):
            found[name] = new
    return found
