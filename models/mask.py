"""Who sees whom, as blocks of queries and keys: causal, within a sliding window, within a packed document.

What a process holds of a sequence is a list of pieces, ranges of places in the whole sequence; the same description
serves one process, a key/value cache, and ranks that hold parts. Cut at the borders of pieces and documents, every mask
is made of two kinds of block: causal squares, in which each query stands on its own key, and rectangles, whose keys all
come before their queries. A window cuts either to a band. What no query sees is in no block.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Pieces = tuple[range, ...]
"""What is held of one sequence, in the order in which it is held."""
Held = Sequence[Pieces]
"""The pieces of each sequence of a microbatch, or one item where they are the same in all."""
Documents = Sequence[tuple[int, ...]]
"""The places at which documents begin, 0 first, for each sequence, or one item where they are the same in all."""

ALL_ROWS = slice(None)
WHOLE: Documents = ((0,),)
"""No packed documents: every sequence is one."""


@dataclass(frozen=True)
class Block:
    """Contiguous queries and keys, as indices into what is held; query i of it sees key j of it where
    0 <= i + shift - j < window.
    """

    rows: slice
    queries: slice
    key_rows: slice
    keys: slice
    shift: int
    """Place of the first query minus that of the first key: 0 for a square, at least the number of keys otherwise."""
    window: int | None
    """None where the window hides nothing of the block."""

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key it sees there are, in one sequence."""
        queries, keys = self.size
        if self.window is None:
            return queries * (queries + 1) // 2 if self.shift == 0 else queries * keys
        return sum(min(i + self.shift, keys - 1) - max(i + self.shift - self.window + 1, 0) + 1 for i in range(queries))

    def allowed(self, device: torch.device) -> Tensor:
        """The block as a bool tensor (queries, keys)."""
        queries, keys = self.size
        distance = torch.arange(queries, device=device).unsqueeze(-1) + self.shift - torch.arange(keys, device=device)
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)

    def tiles(self, length: int) -> Iterator["Block"]:
        """The block without most of what is hidden: at most `length` queries at a time, each time with their keys."""
        queries, keys = self.size
        for first in range(0, queries, length):
            last = min(first + length, queries)
            oldest = 0 if self.window is None else max(first + self.shift - self.window + 1, 0)
            newest = min(last + self.shift, keys)
            yield Block(
                self.rows,
                slice(self.queries.start + first, self.queries.start + last),
                self.key_rows,
                slice(self.keys.start + oldest, self.keys.start + newest),
                self.shift + first - oldest,
                self.window,
            )


@dataclass(frozen=True)
class AttentionMask:
    """The blocks of a microbatch: squares, which hold every query once where keys are its own, and rectangles."""

    squares: tuple[Block, ...]
    rectangles: tuple[Block, ...]

    @property
    def plain(self) -> bool:
        """Whether it is causal attention of whole sequences and nothing else."""
        squares = self.squares
        return not self.rectangles and len(squares) == 1 and squares[0].rows == ALL_ROWS and squares[0].window is None

    @staticmethod
    def of_sequence(
        queries: int, keys: int, window: int | None = None, document_ids: Tensor | np.ndarray | None = None
    ) -> "AttentionMask":
        """The mask of the last `queries` of `keys` tokens; where there are fewer queries, the rest are in a cache.

        `document_ids` is int64 (batch, keys), equal for tokens of one document, or None.
        """
        documents = WHOLE if document_ids is None else document_starts(document_ids)
        return see([(range(keys - queries, keys),)], [(range(keys),)], documents, window)


def document_starts(document_ids: Tensor | np.ndarray) -> Documents:
    """Where documents begin, of int64 (batch, seq) that is equal for the neighbours of one document.

    Read on the host: ids that lie on a GPU make it wait.
    """
    ids = document_ids.cpu().numpy() if isinstance(document_ids, Tensor) else document_ids
    begins = np.diff(ids, prepend=ids[:, :1] - 1) != 0
    return as_one([tuple(np.flatnonzero(row).tolist()) for row in begins])


def as_one(rows: Sequence[T]) -> Sequence[T]:
    """One item where all are equal."""
    return rows[:1] if all(row == rows[0] for row in rows) else rows


def of_row(rows: Sequence[T], row: int) -> T:
    """The item of a sequence, of a list that may have one for all."""
    return rows[0] if len(rows) == 1 else rows[row]


def document_at(starts: tuple[int, ...], place: int) -> int:
    """Where the document of a place begins."""
    return starts[bisect_right(starts, place) - 1]


def length_of(pieces: Iterable[range]) -> int:
    """Tokens in pieces."""
    return sum(len(piece) for piece in pieces)


def see(queries: Held, keys: Held, documents: Documents, window: int | None, packed: bool = False) -> AttentionMask:
    """The mask of the queries held on the keys held.

    With `packed`, the keys of all sequences lie one after another in a single row, since their numbers differ.
    """
    rows = max(len(queries), len(keys), len(documents))
    squares: list[Block] = []
    rectangles: list[Block] = []
    base = 0
    for row in range(rows):
        own, theirs, starts = of_row(queries, row), of_row(keys, row), of_row(documents, row)
        here = ALL_ROWS if rows == 1 else slice(row, row + 1)
        for block in _blocks(own, theirs, starts, window, here, slice(0, 1) if packed else here, base):
            (rectangles if block.shift else squares).append(block)
        base += length_of(theirs) if packed else 0
    return AttentionMask(tuple(squares), tuple(rectangles))


def _blocks(
    queries: Pieces, keys: Pieces, starts: tuple[int, ...], window: int | None, rows: slice, key_rows: slice, base: int
) -> Iterator[Block]:
    query_at = 0
    for piece in queries:
        for run in _runs(piece, starts):
            first = document_at(starts, run.start)
            key_at = base
            for key_piece in keys:
                seen = range(max(key_piece.start, first), min(key_piece.stop, run.stop))
                for query_range, key_range in _without_overlap(run, seen):
                    block = _cut(query_range, key_range, window)
                    if block is not None:
                        (a, b), (c, d), shift, band = block
                        q, k = query_at - piece.start, key_at - key_piece.start
                        yield Block(rows, slice(a + q, b + q), key_rows, slice(c + k, d + k), shift, band)
                key_at += len(key_piece)
        query_at += len(piece)


def _runs(piece: range, starts: tuple[int, ...]) -> Iterator[range]:
    """A piece cut where documents begin."""
    number = bisect_right(starts, piece.start)
    first = piece.start
    while first < piece.stop:
        last = min(piece.stop, starts[number]) if number < len(starts) else piece.stop
        yield range(first, last)
        first, number = last, number + 1


def _without_overlap(queries: range, keys: range) -> Iterator[tuple[range, range]]:
    """Queries and keys as pairs of ranges that are equal (squares), or of which the keys come before the queries."""
    before = range(keys.start, min(keys.stop, queries.start))
    common = range(max(keys.start, queries.start), min(keys.stop, queries.stop))
    if len(before):
        yield queries, before
    if len(common):
        yield common, common
        after = range(common.stop, queries.stop)
        if len(after):
            yield after, common


def _cut(
    queries: range, keys: range, window: int | None
) -> tuple[tuple[int, int], tuple[int, int], int, int | None] | None:
    """The part of a block that a window leaves: bounds of queries and keys, the shift, and the window if it cuts."""
    if window is None or queries.stop - 1 - keys.start < window:
        return (queries.start, queries.stop), (keys.start, keys.stop), queries.start - keys.start, None
    oldest = max(keys.start, queries.start - window + 1)
    newest_query = min(queries.stop, keys.stop - 1 + window)
    if oldest >= keys.stop or newest_query <= queries.start:
        return None
    band = window if newest_query - 1 - oldest >= window else None
    return (queries.start, newest_query), (oldest, keys.stop), queries.start - oldest, band
