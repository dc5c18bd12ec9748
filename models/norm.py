"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, worked out in float32 or better, in x's type."""
    precise = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + eps)
    return (precise * scale).to(x.dtype) * weight


class RMSNorm(nn.Module):
    """`rms_norm` with a learned weight (size,)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to (..., size)."""
        return rms_norm(x, self.weight, self.eps)
