"""Which rank holds what of a sequence under context parallelism: equal tokens on every rank, and equal work. No torch.

A rank holds pieces, ranges of places in the whole sequence. Work is counted in pairs of a query and a key that it sees.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm

from parallel.config import ContextMethod, ParallelismConfig

Pieces = tuple[range, ...]

TOLERANCE = 0.02
"""By how much the rank with the most work may be above the mean before one more document is cut."""


def ring_and_ulysses(parallelism: ParallelismConfig) -> tuple[int, int]:
    """How many ways the sequence stays cut during attention, and how many ways heads are dealt out; their product is
    cp. Ulysses ranks are neighbours: cp rank = ring rank * ulysses + ulysses rank.
    """
    if parallelism.cp == 1:
        return 1, 1
    if parallelism.cp_method == ContextMethod.ulysses:
        return 1, parallelism.cp
    if parallelism.cp_method == ContextMethod.ulysses_ring:
        assert parallelism.cp_ulysses is not None
        return parallelism.cp // parallelism.cp_ulysses, parallelism.cp_ulysses
    return parallelism.cp, 1


def length_multiple(parallelism: ParallelismConfig) -> int:
    """What the length of a sequence must be a multiple of, or is filled up to: two pieces for each rank of a ring, and
    with sequence parallelism equal parts of what a cp rank holds for its tp ranks.
    """
    if parallelism.cp == 1:
        return 1
    ring, _ = ring_and_ulysses(parallelism)
    sequence_ranks = parallelism.tp if parallelism.sequence_parallel else 1
    return lcm(2 * ring if ring > 1 else 1, parallelism.cp * sequence_ranks)


def padded_length(seq_len: int, parallelism: ParallelismConfig) -> int:
    """The length of a sequence with the tokens that fill it up."""
    multiple = length_multiple(parallelism)
    return -(-seq_len // multiple) * multiple


@lru_cache(maxsize=64)
def held_in_ring(starts: tuple[int, ...], length: int, window: int | None, ring: int) -> list[Pieces]:
    """What each ring rank (each group of ulysses ranks) holds of a sequence whose documents begin at `starts`."""
    if ring == 1:
        return [(range(length),)]
    if len(starts) == 1 and (window is None or window >= length):
        return zig_zag(length, ring)
    return by_document(starts, length, ring, window)


def zig_zag(length: int, ranks: int) -> list[Pieces]:
    """Of 2 * ranks equal pieces, rank r has number r and number 2 ranks - 1 - r, one early and one late: under a causal
    mask all then have equal work (Megatron-LM's and Zhu's balancing of ring attention). `length` must divide.
    """
    piece = length // (2 * ranks)
    bounds = [range(number * piece, (number + 1) * piece) for number in range(2 * ranks)]
    return [_joined([bounds[rank], bounds[2 * ranks - 1 - rank]]) for rank in range(ranks)]


def by_document(starts: tuple[int, ...], length: int, ranks: int, window: int | None) -> list[Pieces]:
    """Packed documents dealt out, so that as few of them as can be are cut and need other ranks' keys.

    The longest are cut over all ranks, zig-zag as far as a window lets work grow and evenly from there. The rest go
    whole to whoever has the least work and room for them. As many are cut as it takes to have every rank's work within
    `TOLERANCE` of the mean. `starts` are the places at which documents begin, 0 first.
    """
    documents = sorted((range(a, b) for a, b in pairwise((*starts, length)) if b > a), key=lambda d: (-len(d), d.start))
    best: tuple[float, list[Pieces]] | None = None
    count = 0
    while True:
        held, loads = _deal(documents, count, length // ranks, ranks, window)
        excess = max(loads) * ranks / sum(loads) - 1.0
        if best is None or excess < best[0]:
            best = excess, held
        if excess <= TOLERANCE or count == len(documents):
            return best[1]
        count = min(max(count + 1, count * 3 // 2), len(documents))


@dataclass(frozen=True)
class _Item:
    """Neighbouring tokens of the document that begins at `first`."""

    places: range
    first: int


def _deal(
    documents: list[range], cut: int, room: int, ranks: int, window: int | None
) -> tuple[list[Pieces], list[int]]:
    """What each rank holds, and its work, with the first `cut` documents zig-zag and the rest whole.

    What does not fit anywhere is split where room ends.
    """
    held: list[list[range]] = [[] for _ in range(ranks)]
    left, work = [room] * ranks, [0] * ranks
    items: list[tuple[int, int, _Item]] = []  # most work first

    def give(rank: int, item: _Item) -> None:
        if not len(item.places):
            return
        held[rank].append(item.places)
        left[rank] -= len(item.places)
        work[rank] += _work(item.places, item.first, window)

    def later(item: _Item) -> None:
        if len(item.places):
            heapq.heappush(items, (-_work(item.places, item.first, window), item.places.start, item))

    for document in documents[:cut]:
        first, middle = document.start, document.stop if window is None else min(document.start + window, document.stop)
        piece = (middle - first) // (2 * ranks)
        for rank, pieces in enumerate(zig_zag(2 * ranks * piece, ranks)):
            for part in pieces:
                give(rank, _Item(range(first + part.start, first + part.stop), first))
        later(_Item(range(first + 2 * ranks * piece, middle), first))
        # Past the first `window` tokens all have the same work.
        piece = (document.stop - middle) // ranks
        for rank in range(ranks):
            give(rank, _Item(range(middle + rank * piece, middle + (rank + 1) * piece), first))
        later(_Item(range(middle + ranks * piece, document.stop), first))
    for document in documents[cut:]:
        later(_Item(document, document.start))
    while items:
        _, _, item = heapq.heappop(items)
        places, fitting = item.places, [rank for rank in range(ranks) if left[rank] >= len(item.places)]
        if fitting:
            give(min(fitting, key=lambda rank: (work[rank], rank)), item)
            continue
        rank = max(range(ranks), key=lambda rank: left[rank])
        middle = places.start + left[rank]
        give(rank, _Item(range(places.start, middle), item.first))
        later(_Item(range(middle, places.stop), item.first))
    return [_joined(pieces) for pieces in held], work


def _joined(pieces: Sequence[range]) -> Pieces:
    """Pieces in the order of their places, neighbours made one."""
    joined: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if joined and joined[-1].stop == piece.start:
            joined[-1] = range(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def portion(pieces: Pieces, first: int, last: int) -> Pieces:
    """What lies between the `first` and `last` token of what pieces hold, in their order."""
    result, at = [], 0
    for piece in pieces:
        part = piece[max(first - at, 0) : max(last - at, 0)]
        if len(part):
            result.append(part)
        at += len(piece)
    return tuple(result)


def _work(places: range, first: int, window: int | None) -> int:
    """Pairs of the queries at `places`, of a document that begins at `first`: min(place - first + 1, window) each."""
    if not len(places):
        return 0
    a, b = places.start - first, places.stop - first
    if window is None or b <= window:
        return (b * (b + 1) - a * (a + 1)) // 2
    growing = range(a, max(a, window))
    return (growing.stop * (growing.stop + 1) - a * (a + 1)) // 2 + (b - growing.stop) * window
