"""FLAP (An et al., AAAI 2024): drop the channels that fluctuate least, and add what they were on average as a bias."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from benchmarks.peers.calibration import Calibration
from benchmarks.peers.cut import Removal
from benchmarks.peers.moments import Moments
from benchmarks.peers.widths import Kept, adaptive, lost_columns, uniform, unit_scores
from collapse.errors import UnsupportedError
from collapse.search.units import Units


def fluctuation(weight: torch.Tensor, found: Moments) -> torch.Tensor:
    """Return by input channel j of a weight [out, in]: Var(X_j) * |W_j|^2 (the paper's WIFV metric)."""
    return found.variance * (weight.double() ** 2).sum(0)


def flap_uniform(calibration: Calibration, share: float) -> Removal:
    """UL-UM: the same share from every block, each metric compared within its module."""
    scores = {
        units: unit_scores(units, _metric(calibration, units), mean=True) for units in calibration.structure.units
    }
    return _removal("flap-ul", calibration, uniform(scores, share, target_of(calibration, share, bias=True)))


def flap_adaptive(calibration: Calibration, share: float) -> Removal:
    """AL-AM: metrics standardised within each module, then compared over all blocks, heads with neurons."""
    scores = {
        units: unit_scores(units, standardised(_metric(calibration, units)), mean=True)
        for units in calibration.structure.units
    }
    return _removal("flap", calibration, adaptive(scores, target_of(calibration, share, bias=True)))


def standardised(scores: torch.Tensor) -> torch.Tensor:
    """Return the scores with mean 0 and standard deviation 1."""
    return (scores - scores.mean()) / scores.std().clamp(min=torch.finfo(scores.dtype).tiny)


def target_of(calibration: Calibration, share: float, *, bias: bool) -> float:
    """Return how many parameters of units to take so that `share` of the decoder's goes, new biases included."""
    model, structure = calibration.model, calibration.structure
    target = share * structure.decoder_parameters(model)
    if bias:
        readers = (model.get_submodule(units.reader) for units in structure.units)
        target += sum(len(reader.weight) for reader in readers if reader.bias is None)
    return target


def reader_weight(model: PreTrainedModel, units: Units) -> torch.Tensor:
    """Return the weight [out, in] of what reads the units."""
    reader = model.get_submodule(units.reader)
    if not isinstance(reader, torch.nn.Linear):
        raise UnsupportedError("is no torch.nn.Linear", where=units.reader)
    return reader.weight.detach()


def _metric(calibration: Calibration, units: Units) -> torch.Tensor:
    return fluctuation(reader_weight(calibration.model, units), calibration.moments[units.reader])


def _removal(name: str, calibration: Calibration, kept: Kept) -> Removal:
    biases = {
        f"{units.reader}.bias": compensated_bias(calibration.model, units, columns, calibration.moments[units.reader])
        for units, columns in lost_columns(kept)
    }
    return Removal(name, kept=kept, weights=biases)


def compensated_bias(model: PreTrainedModel, units: Units, columns: torch.Tensor, found: Moments) -> torch.Tensor:
    """Return the reader's bias plus what the lost columns give on average: B = W[:, lost] E[X_lost]."""
    weight, bias = reader_weight(model, units), model.get_submodule(units.reader).bias
    added = (weight[:, columns].double() @ found.mean[columns]).float()
    return added if bias is None else bias.detach() + added
