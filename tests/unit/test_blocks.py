"""Attention by blocks: outputs, log-sum-exp and gradients are those of a plain softmax in float64, for every mask."""

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models import attention, kernels
from models.attention import attend
from models.kernels import CpuFlash, GpuFlash, Math
from models.mask import AttentionMask, Block, Held, document_starts, see

LENGTH = 48
ONE_SIDE: Held = [(range(LENGTH),)]
IDS = torch.tensor(
    [
        [0] * 12 + [1] * 24 + [2] * 12,  # borders on cuts at 12 and 36
        [0] * 11 + [1] * 2 + [2] * 34 + [3],  # before, after, and a document of one token
        list(range(LENGTH)),  # every token alone
    ]
)


def _by_hand(
    query: Tensor, key: Tensor, value: Tensor, query_places: Tensor, key_places: Tensor, ids: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Softmax over all scores at once; places are (batch, seq), ids those of the whole sequence."""
    copies = query.shape[1] // key.shape[1]
    distance = query_places.unsqueeze(-1) - key_places.unsqueeze(-2)
    allowed = (distance >= 0) & (distance < (window or LENGTH))
    allowed &= ids.gather(1, query_places).unsqueeze(-1) == ids.gather(1, key_places).unsqueeze(-2)
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~allowed.unsqueeze(1), -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _places(held: Held, batch: int) -> Tensor:
    rows = [[place for piece in pieces for place in piece] for pieces in held]
    return torch.tensor(rows if len(rows) == batch else rows * batch)


HELD: dict[str, tuple[Held, Held]] = {
    "whole": (ONE_SIDE, ONE_SIDE),
    "one token after a cache": ([(range(47, 48),)], ONE_SIDE),
    "some tokens after a cache": ([(range(30, 48),)], ONE_SIDE),
    "many tokens after a few": ([(range(4, 48),)], [(range(4), range(4, 48))]),
    "pieces on themselves": ([(range(6, 12), range(36, 42))], [(range(6, 12), range(36, 42))]),
    "pieces on everything in another order": (
        [(range(6, 12), range(36, 42))],
        [(range(12), range(36, 48), range(12, 24), range(24, 36))],
    ),
    "other pieces in each row": (
        [(range(3, 9), range(40, 41)), (range(0, 7),), (range(41, 48),)],
        [(range(48),), (range(24, 48), range(24)), (range(47), range(47, 48))],
    ),
}


def _packed_softmax(
    query: Tensor, key: Tensor, begins: tuple[Tensor, Tensor], causal: bool, left: int
) -> list[tuple[slice, slice, Tensor]]:
    """What FlashAttention does with packed sequences: the diagonal ends in the last corner, `left` counts back.

    Beside a limit on the left, none on the right is one of as many keys as the longest sequence has.
    """
    blocks, right = [], int(begins[1].diff().max())
    for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in begins), strict=True):
        distance = torch.arange(b - a).unsqueeze(-1) + (d - c) - (b - a) - torch.arange(d - c)
        allowed = torch.ones_like(distance, dtype=torch.bool) if left < 0 else (distance <= left) & (distance >= -right)
        blocks.append((slice(a, b), slice(c, d), allowed & (distance >= 0) if causal else allowed))
    return blocks


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, bq: Tensor, bk: Tensor, mq: int, mk: int, *rest: Any, **w: int):
    _, causal, _ = rest
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0], dtype=q.dtype)
    copies = q.shape[1] // k.shape[1]
    assert (mq, mk) == tuple(int(x.diff().max()) for x in (bq, bk))
    for a, b, allowed in _packed_softmax(q, k, (bq, bk), causal, w.get("window_size_left", -1)):
        scores = torch.einsum("qhc,khc->hqk", q[a], k[b].repeat_interleave(copies, 1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~allowed, -math.inf)
        lse[:, a] = scores.logsumexp(-1)
        out[a] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), v[b].repeat_interleave(copies, 1))
    return out, lse, None, None, None


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **w: int):
    bq, bk, _, _, _, causal, *_ = rest
    copies = q.shape[1] // k.shape[1]
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for a, b, allowed in _packed_softmax(q, k, (bq, bk), causal, w.get("window_size_left", -1)):
        keys, values = (x[b].repeat_interleave(copies, 1) for x in (k, v))
        scores = torch.einsum("qhc,khc->hqk", q[a], keys) / math.sqrt(q.shape[-1])
        p = (scores - lse[:, a].unsqueeze(-1)).exp().where(allowed, 0.0)
        delta = (grad[a] * out[a]).sum(-1).T.unsqueeze(-1)
        ds = p * (torch.einsum("qhc,khc->hqk", grad[a], values) - delta) / math.sqrt(q.shape[-1])
        gradients[0][a] += torch.einsum("hqk,khc->qhc", ds, keys)
        for x, y in ((1, torch.einsum("hqk,qhc->khc", ds, q[a])), (2, torch.einsum("hqk,qhc->khc", p, grad[a]))):
            gradients[x][b] += y.unflatten(1, (-1, copies)).sum(2)
    return gradients


KERNELS: dict[str, Any] = {"cpu flash": CpuFlash(), "gpu flash, emulated": GpuFlash(), "math": Math()}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 13, 40])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("held", HELD)
def test_given_any_mask_when_attended_by_blocks_then_values_and_gradients_are_those_of_a_plain_softmax(
    monkeypatch: pytest.MonkeyPatch, held: str, packed: bool, window: int | None, heads: tuple[int, int], kernel: str
) -> None:
    monkeypatch.setattr(attention, "kernel_for", lambda _: KERNELS[kernel])
    monkeypatch.setattr(kernels, "_TILE", 7)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _flash_backward)
    queries, keys = HELD[held]
    ids = IDS if packed else torch.zeros_like(IDS)
    mask = see(queries, keys, document_starts(ids), window)
    query_places, key_places = _places(queries, len(ids)), _places(keys, len(ids))
    draw = torch.Generator().manual_seed(0)
    shapes = [(heads[0], query_places.shape[1]), (heads[1], key_places.shape[1]), (heads[1], key_places.shape[1])]
    tensors = [
        torch.randn(len(ids), length, count, 8, generator=draw, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for count, length in shapes
    ]
    expected, expected_lse = _by_hand(*tensors, query_places, key_places, ids, window)
    out, lse = attend(*tensors, mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-12, atol=1e-12)
    grad = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    for ours, theirs in zip(*(torch.autograd.grad(x, tensors, grad) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_given_a_coarser_type_when_attended_then_it_agrees_roughly(dtype: torch.dtype, tolerance: float) -> None:
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(3, h, LENGTH, 16, generator=draw, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]
    coarse = [x.detach().to(dtype).requires_grad_() for x in exact]
    mask = see([(range(24), range(24, 48))], ONE_SIDE, document_starts(IDS), 9)
    expected, found = attend(*exact, mask)[0], attend(*coarse, mask)[0]
    assert found.dtype == dtype
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
    gradients = (torch.autograd.grad(x.sum(), y) for x, y in ((found, coarse), (expected, exact)))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


def test_given_random_pieces_and_documents_when_cut_into_blocks_then_each_allowed_pair_is_in_one_block() -> None:
    draw = random.Random(0)
    for _ in range(300):
        cuts = sorted({0, LENGTH, *(draw.randrange(LENGTH) for _ in range(draw.randrange(6)))})
        pieces = [range(a, b) for a, b in pairwise(cuts)]
        draw.shuffle(pieces)
        queries, keys = tuple(draw.sample(pieces, draw.randint(1, len(pieces)))), tuple(pieces)
        starts = tuple(sorted({0, *(draw.randrange(LENGTH) for _ in range(draw.randrange(9)))}))
        window = draw.choice([None, 1, 3, 10, 50])
        mask = see([queries], [keys], [starts], window)
        counted = torch.zeros(sum(map(len, queries)), LENGTH, dtype=torch.int64)
        for block in (*mask.squares, *mask.rectangles):
            for tile in block.tiles(draw.randint(1, 9)):
                assert bool(tile.allowed(counted.device).any(-1).all()), "a query that sees nothing has no softmax"
                counted[tile.queries, tile.keys] += tile.allowed(counted.device)
            assert block.pairs == int(block.allowed(counted.device).sum())
        q, k = _places([queries], 1)[0], _places([keys], 1)[0]
        document = torch.bucketize(torch.arange(LENGTH), torch.tensor(starts), right=True)
        distance = q.unsqueeze(-1) - k
        allowed = (distance >= 0) & (distance < (window or LENGTH)) & (document[q].unsqueeze(-1) == document[k])
        assert torch.equal(counted, allowed.long())


def test_given_a_long_window_when_tiled_then_what_is_worked_out_is_little_more_than_what_is_seen() -> None:
    (block,) = AttentionMask.of_sequence(4096, 4096, 512).squares
    worked_out = sum(math.prod(tile.size) for tile in block.tiles(256))
    assert worked_out < 1.6 * block.pairs
    assert isinstance(block, Block)
