"""Random numbers as a pure function of what they are for, never of who draws them or when.

A number is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) of a 64-bit key and a
128-bit counter. The key is a hash of (seed, name); the counter is the element's own index. Any rank can therefore
compute any part of a tensor, on any device, without a generator whose state would have to be kept, moved or restored:
initial weights and dropout masks are the same for every layout, under recomputation and after a resume.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_CHUNKS = {"cpu": 1 << 16}  # elements at a time: on a CPU the temporaries then stay in its cache
_CHUNK = 1 << 24

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def key_of(*parts: int | str) -> int:
    """A 64-bit key from e.g. (seed, parameter name): the first eight bytes of SHA-256, equal on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def philox(counter: Words, key: int) -> Words:
    """Philox4x32-10: four int64 tensors that hold 32-bit words, to four such tensors (shapes broadcast)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32
    for _ in range(10):
        # A 32 x 32 bit product can pass 2^63 and wrap; its 64 bits are still right, and the mask drops the sign.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(word: Tensor) -> Tensor:
    """A 32-bit word (int64 tensor) to float64 in (0, 1): the middle of its cell, never 0 and never 1."""
    return (word.double() + 0.5) * 2.0**-32


def normal_at(index: Tensor, key: int) -> Tensor:
    """Standard normal numbers (float64, shape of `index`) at the given int64 element indices, by Box-Muller."""
    zero = torch.zeros_like(index)
    w0, w1, w2, w3 = philox((index & _MASK, index >> 32, zero, zero), key)
    radius = torch.sqrt(-2.0 * torch.log(uniform(w0) + w1.double() * 2.0**-64))
    return radius * torch.cos(2.0 * math.pi * (uniform(w2) + w3.double() * 2.0**-64))


@torch.no_grad()
def fill_normal(
    out: Tensor,
    seed: int,
    name: str,
    std: float,
    shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> None:
    """Fill `out` with N(0, std) values that depend on (seed, name) alone.

    `out` may be a block of a larger tensor: `shape` is then the larger tensor's shape and `offset` the block's first
    index in each dimension. The values are those the larger tensor has there, whatever the blocks.
    """
    shape = tuple(out.shape) if shape is None else tuple(shape)
    offset = (0,) * out.dim() if offset is None else tuple(offset)
    key = key_of(seed, name)
    values = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    chunk = _CHUNKS.get(out.device.type, _CHUNK)
    for start in range(0, out.numel(), chunk):
        rest = torch.arange(start, min(start + chunk, out.numel()), device=out.device)
        index, stride = torch.zeros_like(rest), 1
        for dim in reversed(range(out.dim())):
            index += (rest % out.shape[dim] + offset[dim]) * stride
            rest //= out.shape[dim]
            stride *= shape[dim]
        values[start : start + chunk] = normal_at(index, key) * std
    out.copy_(values.view(out.shape))


def keep_mask(sample: Tensor, position: Tensor, channels: int, probability: float, key: int) -> Tensor:
    """Which elements dropout keeps: a bool tensor (..., channels), True with chance 1 - probability.

    `sample` and `position` (int64, equal shapes) say which token of the step a row is; `key` stands for
    (seed, step, place).
    """
    return _token_words(sample, position, channels, key) >= round(probability * 2**32)


def uniform_noise(sample: Tensor, position: Tensor, channels: int, key: int) -> Tensor:
    """Uniform numbers in (0, 1), float64 (..., channels), one row per token as in `keep_mask`."""
    return uniform(_token_words(sample, position, channels, key))


def _token_words(sample: Tensor, position: Tensor, channels: int, key: int) -> Tensor:
    group = torch.arange(-(-channels // 4), device=sample.device)
    words = philox((group, sample.unsqueeze(-1), position.unsqueeze(-1), torch.zeros_like(group)), key)
    return torch.stack(words, dim=-1).flatten(-2)[..., :channels]
