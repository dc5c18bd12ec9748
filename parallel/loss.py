"""The loss of a whole step: token losses over vocabularies that are split, and the number of tokens that count.

The loss is the sum of token losses divided by the valid tokens of the whole step, over data ranks and microbatches:
every valid token weighs the same, and nothing is averaged implicitly.
"""

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.functional import pad

from models.loss import IGNORE, WholeVocabulary
from parallel.collectives import all_gather, all_reduce, size_of
from parallel.layout import piece


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels of this rank count: an int64 scalar."""
    return (labels != IGNORE).sum()


class VocabularyShard(WholeVocabulary):
    """The rows of the output weight are dealt out over a group, and no rank ever has all logits of a token.

    Per chunk of tokens two all-reduces: of the maximum, and of the normaliser and the label's logit together.
    """

    def __init__(self, group: ProcessGroup, rows: int) -> None:
        self.group, self.rows = group, rows
        self.piece = len(piece(rows, size_of(group), 0))
        self.first = piece(rows, size_of(group), group.rank()).start

    def whole(self, own: Tensor) -> Tensor:
        padded = pad(own, (0, self.piece - own.shape[-1]))
        return all_gather(padded, -1, self.group)[..., : self.rows]

    def local(self, labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        column = labels - self.first
        here = (column >= 0) & (column < columns)
        return column.where(here, 0), here

    def maximum(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.group, ReduceOp.MAX)

    def total(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.group)


class GatheredVocabulary(WholeVocabulary):
    """The rows are dealt out, but each chunk's logits are gathered and every rank works out the whole loss."""

    def __init__(self, group: ProcessGroup, rows: int) -> None:
        self.shard = VocabularyShard(group, rows)

    def whole(self, own: Tensor) -> Tensor:
        return self.shard.whole(own)

    def logits(self, own: Tensor) -> Tensor:
        return self.shard.whole(own)

    def own(self, x: Tensor) -> Tensor:
        return x[..., self.shard.first : self.shard.first + self.shard.piece]
