"""Floating point types by the names that safetensors has for them."""

from __future__ import annotations

import torch

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
