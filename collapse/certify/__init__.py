"""Statistical certificates: how much a plan loses at most, from held-out text that chose nothing."""

from collapse.certify.certificate import Bound, Certificate, certify, learn_then_test
from collapse.certify.losses import SequenceLoss, sequence_loss
from collapse.certify.metrics import METRICS, Design

__all__ = [
    "METRICS",
    "Bound",
    "Certificate",
    "Design",
    "SequenceLoss",
    "certify",
    "learn_then_test",
    "sequence_loss",
]
