"""Quantised checkpoints: which tensors of the files are one weight, and how they can be cut without dequantising."""

from collapse.quantised.cuts import Cut
from collapse.quantised.groups import Group, Quantisation, Stored, quantisation
from collapse.quantised.scheme import FIELD, Scheme, scheme_of, weight_of

__all__ = ["FIELD", "Cut", "Group", "Quantisation", "Scheme", "Stored", "quantisation", "scheme_of", "weight_of"]
