"""The loss of a whole step: the sum of token losses over the number of valid tokens, wherever they are."""

from torch import Tensor

from models.loss import IGNORE


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels of the step count: an int64 scalar."""
    return (labels != IGNORE).sum()
