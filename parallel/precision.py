"""Floating-point types of a run, as torch knows them."""

import torch

from parallel.config import FloatType

DTYPES = {
    FloatType.float64: torch.float64,
    FloatType.float32: torch.float32,
    FloatType.bfloat16: torch.bfloat16,
}
