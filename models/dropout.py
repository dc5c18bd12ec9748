"""Dropout whose masks are a function of (seed, step, place, sample, position), not of a generator's state."""

from dataclasses import dataclass

from torch import Tensor

from models.random import keep_mask, key_of


@dataclass(frozen=True)
class DropoutKey:
    """What the masks of one forward pass depend on; `sample` and `position` are int64 (batch, seq).

    `sample` is the sequence's index in the whole step's batch and `position` the token's place in its sequence, so
    that the mask of a token is the same whichever rank holds it.
    """

    seed: int
    step: int
    sample: Tensor
    position: Tensor


def dropout(x: Tensor, probability: float, place: str, key: DropoutKey | None) -> Tensor:
    """Drop elements of x (batch, seq, channels) and scale the rest by 1 / (1 - probability); without a key, nothing."""
    if key is None or probability == 0.0:
        return x
    keep = keep_mask(key.sample, key.position, x.shape[-1], probability, key_of(key.seed, key.step, place))
    return x * keep.to(x.dtype) / (1.0 - probability)
