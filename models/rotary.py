"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and its scalings for longer contexts."""

import math

import torch
from torch import Tensor

from models.config import RopeConfig, RopeScaling


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device | None = None) -> tuple[Tensor, float]:
    """Angle per position of each pair of channels, float64 (head_dim / 2,), and the factor on cosine and sine.

    Sources: linear, Chen et al. 2023 (arXiv:2306.15595); Llama 3, Grattafiori et al. 2024 (arXiv:2407.21783) with the
    smoothing that Meta published; YaRN, Peng et al. 2023 (arXiv:2309.00071), equations 17 to 22.
    """
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    if rope.scaling == RopeScaling.none:
        return plain, 1.0
    stretched = plain / rope.factor
    if rope.scaling == RopeScaling.linear:
        return stretched, 1.0
    original = rope.original_max_position_embeddings
    if rope.scaling == RopeScaling.llama3:
        turns = original * plain / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0, 1)
        return kept * plain + (1 - kept) * stretched, 1.0

    def channel_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(channel_of(rope.beta_fast)), 0)
    high = min(math.ceil(channel_of(rope.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64, device=device) - low) / max(high - low, 1e-3)
    stretch = ramp.clamp(0, 1)
    factor = rope.attention_factor if rope.attention_factor is not None else 0.1 * math.log(rope.factor) + 1
    return stretch * stretched + (1 - stretch) * plain, factor


def rotary_tables(rope: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine for int64 `positions` (batch, seq): two tensors (batch, 1, seq, head_dim) of `dtype`.

    Angles are worked out in float64, since a position near 131,072 times a frequency near 1 has no exact float32 turn.
    """
    frequencies, factor = inverse_frequencies(rope, head_dim, positions.device)
    angles = positions.double().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys (batch, heads, seq, head_dim); channel i pairs with i + head_dim / 2, as in Hugging Face."""
    cosine, sine = tables
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
