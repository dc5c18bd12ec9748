"""Dropout whose masks are a function of (seed, step, place, sample, position), not of a generator's state."""

from dataclasses import dataclass

from torch import Tensor, nn

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


class Dropout(nn.Module):
    """Drops elements with a probability and scales the rest by 1 / (1 - probability); `place` names where it stands."""

    def __init__(self, probability: float, place: str) -> None:
        super().__init__()
        self.probability, self.place = probability, place

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        """(batch, seq, channels) to the same; without a key, nothing is dropped."""
        if key is None or self.probability == 0.0:
            return x
        mask_key = key_of(key.seed, key.step, self.place)
        keep = keep_mask(key.sample, key.position, x.shape[-1], self.probability, mask_key)
        return x * keep.to(x.dtype) / (1.0 - self.probability)
