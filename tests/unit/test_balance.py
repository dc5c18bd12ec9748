"""Context ranks have equal tokens and equal work, and between them attend to every pair exactly once."""

import random
from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from models.mask import Block, Documents, Held, Pieces, see
from parallel.balance import by_document, length_multiple, padded_length, portion, zig_zag
from parallel.config import ContextMethod, ParallelismConfig
from parallel.context import _held
from parallel.ring import Hop, RingMask


def _work(held: list[Pieces], starts: tuple[int, ...], length: int, window: int | None = None) -> list[int]:
    """Pairs that each rank attends to, counted block by block over all keys."""
    masks = [see([pieces], [(range(length),)], [starts], window) for pieces in held]
    return [sum(block.pairs for block in (*mask.squares, *mask.rectangles)) for mask in masks]


def _excess(work: list[int]) -> float:
    return max(work) * len(work) / sum(work) - 1.0


def _whole_once(held: list[Pieces], length: int) -> None:
    assert sorted(place for pieces in held for piece in pieces for place in piece) == list(range(length))
    assert {sum(map(len, pieces)) for pieces in held} == {length // len(held)}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("pieces", [1, 7, 1024])
def test_given_a_causal_mask_when_cut_zig_zag_then_all_ranks_have_the_same_tokens_and_the_same_pairs(
    ranks: int, pieces: int
) -> None:
    length = 2 * ranks * pieces
    held = zig_zag(length, ranks)
    _whole_once(held, length)
    assert len(set(_work(held, (0,), length))) == 1


def _documents(draw: random.Random, length: int, mean: int) -> tuple[int, ...]:
    starts = [0]
    while starts[-1] < length:
        starts.append(starts[-1] + 1 + int(draw.expovariate(1 / mean)))
    return tuple(starts[:-1])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mean", [60, 500, 3000, 20_000])
@pytest.mark.parametrize("window", [None, 512])
def test_given_packed_documents_when_dealt_out_then_tokens_are_equal_and_pairs_within_two_percent(
    ranks: int, mean: int, window: int | None
) -> None:
    draw = random.Random(mean * ranks)
    for _ in range(3):
        length = 8192
        starts = _documents(draw, length, mean)
        held = by_document(starts, length, ranks, window)
        _whole_once(held, length)
        assert _excess(_work(held, starts, length, window)) < 0.02


def test_given_many_short_documents_when_dealt_out_then_few_are_cut() -> None:
    starts = tuple(range(0, 8192, 128))
    held = by_document(starts, 8192, 8, None)
    assert all(piece.start % 128 == 0 and piece.stop % 128 == 0 for pieces in held for piece in pieces)
    hops = RingMask.build([[pieces] for pieces in held], 0, [starts], None).hops
    assert all(hop.send.empty and hop.receive.empty and not hop.blocks for hop in hops)


def test_given_one_long_document_among_short_ones_when_dealt_out_then_only_it_is_cut() -> None:
    starts = (0, *range(4096, 8192, 64))
    held = by_document(starts, 8192, 4, None)
    borders = {place for pieces in held for piece in pieces for place in (piece.start, piece.stop)}
    assert all(place < 4096 or place % 64 == 0 for place in borders)
    assert _excess(_work(held, starts, 8192)) < 0.02


@pytest.mark.parametrize("length", [24, 48])
@pytest.mark.parametrize("starts", [tuple(range(24)), (0, 1), (0, 23), (0, 5, 6, 7, 8, 9), (0, 12)], ids=str)
def test_given_awkward_documents_when_dealt_out_then_every_token_is_held_once(
    starts: tuple[int, ...], length: int
) -> None:
    for ranks in (2, 3, 4, 8):
        _whole_once(by_document(starts, length, ranks, None), length)


def _places(pieces: Pieces) -> list[int]:
    return [place for piece in pieces for place in piece]


def _sees(blocks: tuple[Block, ...], row: int, queries: list[int], keys: list[int]) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for block in blocks:
        if row in range(*block.rows.indices(row + 1)):
            for i, j in block.allowed(torch.device("cpu")).nonzero().tolist():
                pairs[queries[block.queries.start + i], keys[block.keys.start + j]] += 1
    return pairs


def _received(hop: Hop, held: Held, row: int) -> tuple[list[int], list[int]]:
    """Places of the keys that a hop brings, as its blocks index them, and those of one sequence among them."""
    chosen = [
        [_places(held[number])[index] for part in hop.receive.rows[number] for index in range(part.start, part.stop)]
        if hop.receive.packed
        else [_places(held[number])[index] for part in hop.receive.rows[0] for index in range(part.start, part.stop)]
        for number in range(len(held))
    ]
    return ([place for places in chosen for place in places] if hop.receive.packed else chosen[row]), chosen[row]


def test_given_any_pieces_when_blocks_go_round_then_each_pair_is_attended_to_once_and_nothing_is_sent_in_vain() -> None:
    draw = random.Random(1)
    for _ in range(60):
        ranks, rows, length = draw.randint(2, 5), draw.randint(1, 3), 24
        window = draw.choice([None, 1, 4, 11])
        documents: Documents = [_documents(draw, length, 7) for _ in range(rows)]
        held: list[list[Pieces]] = [[] for _ in range(ranks)]
        for _ in documents:
            bounds = [0, *sorted(draw.sample(range(1, length), draw.randint(ranks, 9))), length]
            pieces = [range(a, b) for a, b in pairwise(bounds)]
            draw.shuffle(pieces)
            for rank in range(ranks):
                held[rank].append(tuple(pieces[rank::ranks]))
        masks = [RingMask.build([*held], rank, documents, window) for rank in range(ranks)]
        for rank, mask in enumerate(masks):
            for hop in mask.hops:
                assert masks[(rank + hop.distance) % ranks].hops[hop.distance - 1].receive == hop.send
            for row, starts in enumerate(documents):
                own = _places(held[rank][row])
                pairs = _sees((*mask.own.squares, *mask.own.rectangles), row, own, own)
                for hop in mask.hops:
                    keys, here = _received(hop, held[(rank - hop.distance) % ranks], row)
                    seen = _sees(hop.blocks, row, own, keys)
                    assert {key for _, key in seen} == set(here)
                    pairs += seen
                first = [max(start for start in starts if start <= place) for place in range(length)]
                expected = {(q, k) for q in own for k in range(first[q], q + 1) if window is None or q - k < window}
                assert set(pairs) == expected
                assert set(pairs.values()) == {1}


METHODS: list[dict[str, Any]] = [
    {"cp": 4},
    {"cp": 3, "cp_method": ContextMethod.all_gather},
    {"cp": 4, "cp_method": ContextMethod.ulysses},
    {"cp": 8, "cp_method": ContextMethod.ulysses_ring, "cp_ulysses": 2},
    {"cp": 6, "cp_method": ContextMethod.ulysses_ring, "cp_ulysses": 3, "tp": 4, "sequence_parallel": True},
]


@pytest.mark.parametrize("settings", METHODS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_given_a_method_when_a_sequence_is_cut_then_parts_are_equal_and_ring_groups_hold_what_their_members_do(
    settings: dict[str, Any], packed: bool
) -> None:
    parallelism = ParallelismConfig(**settings)
    length = padded_length(50, parallelism)
    assert length % length_multiple(parallelism) == 0
    assert length - 50 < length_multiple(parallelism)
    ring, ulysses = {"ring": (4, 1), "all_gather": (3, 1), "ulysses": (1, 4)}.get(
        parallelism.cp_method, (parallelism.cp // (parallelism.cp_ulysses or 1), parallelism.cp_ulysses or 1)
    )
    documents: Documents = [(0, 7, 20), (0, 33)] if packed else [(0,)]
    parts = _held(documents, length, None, ring, ulysses)
    groups = _held(documents, length, None, ring, 1)
    for row in range(len(documents)):
        members: list[Held] = [item if len(item) > 1 else [*item, *item] for item in parts]
        _whole_once([item[row] for item in members], length)
        for number, group in enumerate(groups):
            joined = [p for item in members[number * ulysses : (number + 1) * ulysses] for p in _places(item[row])]
            assert joined == _places(group[min(row, len(group) - 1)])


def test_given_pieces_when_a_portion_is_taken_then_it_is_what_lies_between() -> None:
    pieces = (range(3, 7), range(20, 25), range(30, 31))
    everything = _places(pieces)
    for first in range(11):
        for last in range(first, 11):
            assert _places(portion(pieces, first, last)) == everything[first:last]
    assert list(accumulate(map(len, pieces))) == [4, 9, 10]
