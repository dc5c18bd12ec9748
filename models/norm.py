"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, worked out in float32 or better."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) to (..., size), in the type of `x`."""
        precise = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        return (precise * scale).to(x.dtype) * self.weight
