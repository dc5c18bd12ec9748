"""Attention of single blocks with the log-sum-exp of their scores, forward and backward, by device.

A backward kernel takes the output and log-sum-exp of *all* blocks that a query sees, not of this one alone: then its
result is this block's share of the whole gradient (FlashAttention, Dao et al., 2022, arXiv:2205.14135, algorithm 4),
and blocks may come in any order and from anywhere.

    CPU                                     aten's flash kernel for CPUs; a window's bands as additive masks of tiles
    GPU, bfloat16 or float16, heads of      FlashAttention through aten, with its window; all squares of a microbatch in
    8 to 256 channels in steps of 8         one call of packed sequences
    GPU, anything else                      plain products of tiles

Queries are (batch, heads, queries, head_dim), keys and values (batch, key_value_heads, keys, head_dim).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from models.mask import Block

Forward = list[tuple[Tensor, Tensor]]
"""Per block, output (rows, heads, queries, head_dim) and log-sum-exp (rows, heads, queries)."""
Backward = list[tuple[Tensor, Tensor, Tensor]]
"""Per block, gradients of its queries, keys and values."""

_TILE = 1024


class Kernel(Protocol):
    """How a device works on blocks."""

    def calls(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        """The blocks in lists that one call takes."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block]) -> Forward: ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, blocks: list[Block]
    ) -> Backward: ...


def kernel_for(query: Tensor) -> Kernel:
    """The kernel for a query tensor's device, type and head size."""
    if query.device.type == "cpu":
        return CpuFlash()
    size = query.shape[-1]
    if query.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256:
        return GpuFlash()
    return Math()


class CpuFlash:
    """aten's flash attention for CPUs, in float64 too; key/value heads may be fewer than query heads."""

    def calls(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        for block in blocks:
            for part in [block] if block.window is None else block.tiles(_TILE):
                yield [part]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block]) -> Forward:
        (block,) = blocks
        tensors = of_queries(query, block), of_keys(key, block), of_keys(value, block)
        causal, bias = _masking(block, query)
        return [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, attn_mask=bias)]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, blocks: list[Block]
    ) -> Backward:
        (block,) = blocks
        keys = of_keys(key, block), of_keys(value, block)
        causal, bias = _masking(block, query)
        grad, query, out, lse = (of_queries(x, block) for x in (grad, query, out, lse))
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return [backward(grad, query, *keys, out, lse, 0.0, causal, attn_mask=bias)]


def _masking(block: Block, query: Tensor) -> tuple[bool, Tensor | None]:
    """Whether a block is a plain causal square, and otherwise what is added to its scores."""
    if block.window is None:
        return block.shift == 0, None
    allowed = block.allowed(query.device)
    return False, torch.zeros(allowed.shape, dtype=query.dtype, device=query.device).masked_fill_(~allowed, -math.inf)


class Math:
    """Softmax written out, for what has no fused kernel: one tile of queries against its keys at a time."""

    def calls(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        for block in blocks:
            for tile in block.tiles(_TILE):
                yield [tile]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block]) -> Forward:
        (block,) = blocks
        query = of_queries(query, block)
        copies = query.shape[1] // key.shape[1]
        scores = self._scores(query, key, block)
        lse = scores.logsumexp(-1)
        probabilities = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
        return [(probabilities @ of_keys(value, block).repeat_interleave(copies, 1), lse)]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, blocks: list[Block]
    ) -> Backward:
        (block,) = blocks
        grad, query, out, lse = (of_queries(x, block) for x in (grad, query, out, lse))
        copies, scale = query.shape[1] // key.shape[1], 1.0 / math.sqrt(query.shape[-1])
        keys, values = (of_keys(x, block).repeat_interleave(copies, 1) for x in (key, value))
        probabilities = (self._scores(query, key, block) - lse.unsqueeze(-1)).exp()
        share = grad @ values.mT - (grad * out).sum(-1, keepdim=True)
        scores_grad = (probabilities * share * scale).to(query.dtype)
        value_grad, key_grad = probabilities.to(grad.dtype).mT @ grad, scores_grad.mT @ query
        return [(scores_grad @ keys, _sum_copies(key_grad, copies), _sum_copies(value_grad, copies))]

    @staticmethod
    def _scores(query: Tensor, key: Tensor, block: Block) -> Tensor:
        keys = of_keys(key, block).repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = query @ keys.mT / math.sqrt(query.shape[-1])
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if block.shift < block.size[1] - 1 or block.window is not None:
            scores = scores.masked_fill(~block.allowed(query.device), -math.inf)
        return scores


class GpuFlash:
    """FlashAttention of packed sequences: a call takes all squares at once, or one rectangle."""

    def calls(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        squares = [block for block in blocks if block.shift == 0]
        for window in {block.window for block in squares}:
            yield [block for block in squares if block.window == window]
        for block in blocks:
            if block.shift:
                yield from ([part] for part in _within_the_window(block))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block]) -> Forward:
        packed = (_pack(query, blocks, of_queries), *(_pack(x, blocks, of_keys) for x in (key, value)))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *packed, *_lengths(packed, blocks), 0.0, blocks[0].shift == 0, False, **_window(blocks[0])
        )
        parts = zip(_unpack(out, query, blocks, 0), _unpack(lse.T, query, blocks, 0), strict=True)
        return [(part, sums) for part, sums in parts]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, blocks: list[Block]
    ) -> Backward:
        packed = (_pack(query, blocks, of_queries), *(_pack(x, blocks, of_keys) for x in (key, value)))
        grad, out = (_pack(x, blocks, of_queries) for x in (grad, out))
        sums = _pack(lse.unsqueeze(-1), blocks, of_queries).squeeze(-1).T.contiguous()
        no_dropout = (
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            torch.zeros((), dtype=torch.uint64, device=query.device),
        )
        gradients = torch.ops.aten._flash_attention_backward(
            grad,
            *packed,
            out,
            sums,
            *_lengths(packed, blocks),
            0.0,
            blocks[0].shift == 0,
            *no_dropout,
            **_window(blocks[0]),
        )
        split = [_unpack(x, query, blocks, side) for x, side in zip(gradients, (0, 1, 1), strict=True)]
        return list(zip(*split, strict=True))


def _pack(x: Tensor, blocks: list[Block], part: Any) -> Tensor:
    """The blocks' parts of x (batch, heads, seq, channels) end to end: (tokens, heads, channels)."""
    return torch.cat([part(x, block).transpose(1, 2).flatten(0, 1) for block in blocks])


def _unpack(x: Tensor, query: Tensor, blocks: list[Block], side: int) -> Iterator[Tensor]:
    """`_pack` undone: (rows, heads, seq, channels) of each block, or without channels (rows, heads, seq)."""
    rows = [len(range(*block.rows.indices(query.shape[0]))) for block in blocks]
    sizes = [block.size[side] for block in blocks]
    for part, count in zip(x.split([a * b for a, b in zip(rows, sizes, strict=True)]), rows, strict=True):
        yield part.unflatten(0, (count, -1)).transpose(1, 2)


def _lengths(packed: tuple[Tensor, ...], blocks: list[Block]) -> tuple[Tensor, Tensor, int, int]:
    """Where the packed sequences begin (queries, keys), and the longest of each."""
    device, count = packed[0].device, packed[0].shape[0] // sum(block.size[0] for block in blocks)
    sizes = [[block.size[side] for block in blocks for _ in range(count)] for side in (0, 1)]
    begins = [torch.tensor([0, *size]).cumsum(0).to(device, torch.int32, non_blocking=True) for size in sizes]
    return begins[0], begins[1], max(sizes[0]), max(sizes[1])


def _within_the_window(block: Block) -> Iterator[Block]:
    """A rectangle as it is, or in two where FlashAttention would hide too much of it.

    A window without a causal diagonal gets a limit on the other side too, as many keys as there are: of more queries
    than that the first would not see the last keys (Dao-AILab/flash-attention issue 895). Those that see every key go
    by themselves, without a window; the others are fewer than the keys.
    """
    queries, keys = block.size
    if block.window is None or queries <= keys + 1:
        yield block
        return
    middle = block.queries.start + block.window - block.shift
    yield replace(block, queries=slice(block.queries.start, middle), window=None)
    yield replace(block, queries=slice(middle, block.queries.stop), shift=block.window)


def _window(block: Block) -> dict[str, int]:
    """The window as FlashAttention counts it: back from the diagonal that ends in the block's last corner."""
    if block.window is None:
        return {}
    queries, keys = block.size
    return {"window_size_left": keys - queries - block.shift + block.window - 1, "window_size_right": -1}


def _sum_copies(x: Tensor, copies: int) -> Tensor:
    return x.unflatten(1, (-1, copies)).sum(2)


def of_queries(x: Tensor, block: Block) -> Tensor:
    """A block's queries of (batch, heads, queries, ...)."""
    return x[block.rows, :, block.queries]


def of_keys(x: Tensor, block: Block) -> Tensor:
    """A block's keys of (batch, heads, keys, ...)."""
    return x[block.key_rows, :, block.keys]
