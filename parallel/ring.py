"""Ring attention: each rank's keys and values visit every rank that has a query for them.

In step s a rank works on what comes from the rank s before it, while that of step s + 1 is on its way. Blocks come
straight from their owner, not from hand to hand: as many bytes, but what no query of a rank sees is never sent to it.
Under a causal mask that is a quarter of all keys, with a window or packed documents most. The backward pass asks for
the keys and values again and sends each share of their gradients straight back to the owner, who sums them up in
float32. A rank holds its own part and room for five messages, whatever the length of the whole and the size of the
ring.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from models.attention import Gradients, Partial, zeros_of
from models.mask import AttentionMask, Block, Documents, Held, as_one, document_at, of_row, see
from parallel.collectives import exchange

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Parcel:
    """Tokens of a rank that another needs, as slices of what it holds: of each sequence, or of the first where they
    are the same in all.
    """

    rows: tuple[Slices, ...]

    @property
    def packed(self) -> bool:
        """Whether rows differ, so that they travel end to end as one."""
        return len(self.rows) > 1

    @property
    def empty(self) -> bool:
        return not any(self.rows)

    def shape(self, key: Tensor) -> tuple[int, ...]:
        """Of the message, for keys (batch, heads, seq, head_dim): (2, rows, tokens, heads, head_dim)."""
        tokens = sum(part.stop - part.start for row in self.rows for part in row)
        batch, heads, _, size = key.shape
        return 2, 1 if self.packed else batch, tokens, heads, size

    def fill(self, message: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy the tokens' keys and values into a message."""
        for there, here in self._pairs(message, key, value):
            there.copy_(here)

    def add(self, message: Tensor, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add gradients that came back in a message to where the tokens are."""
        for there, here in self._pairs(message, key_grad, value_grad):
            here.add_(there)

    def _pairs(self, message: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of a message, and where its tokens are held."""
        for packed, x in zip(message, (key, value), strict=True):
            first = 0
            for part in self._parts(x):
                yield packed[:, first : first + part.shape[1]], part
                first += part.shape[1]

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        """The slices of x (batch, heads, seq, head_dim), each a view (rows, tokens, heads, head_dim)."""
        for number, row in enumerate(self.rows):
            rows = x[number : number + 1] if self.packed else x
            for part in row:
                yield rows[:, :, part].transpose(1, 2)


@dataclass(frozen=True)
class Hop:
    """A step of the ring: what goes to the rank `distance` ahead, what comes from the rank as far behind."""

    distance: int
    send: Parcel
    receive: Parcel
    blocks: tuple[Block, ...]
    """This rank's queries on the keys that come."""


@dataclass(frozen=True)
class RingMask:
    """The mask of a rank's queries on its own keys, and the hops that bring it the others'."""

    own: AttentionMask
    hops: tuple[Hop, ...]

    @staticmethod
    def build(held: list[Held], rank: int, documents: Documents, window: int | None) -> "RingMask":
        """From what every rank of the ring holds."""
        hops = []
        for distance in range(1, len(held)):
            ahead, behind = held[(rank + distance) % len(held)], held[(rank - distance) % len(held)]
            send, _ = needed(held[rank], ahead, documents, window)
            receive, keys = needed(behind, held[rank], documents, window)
            blocks = () if receive.empty else see(held[rank], keys, documents, window, receive.packed).rectangles
            hops.append(Hop(distance, send, receive, blocks))
        return RingMask(see(held[rank], held[rank], documents, window), tuple(hops))


def needed(keys: Held, queries: Held, documents: Documents, window: int | None) -> tuple[Parcel, Held]:
    """What a rank that holds `queries` sees of `keys`, another's: as slices of them, and as places.

    A query piece sees of its first token's document what lies before it, and every piece of keys up to its end: of each
    key piece the end is needed, from the first token that any query reaches back to.
    """
    rows, places = [], []
    for row in range(max(len(keys), len(queries), len(documents))):
        theirs, starts = of_row(keys, row), of_row(documents, row)
        oldest: dict[int, int] = {}
        begins = sorted((piece.start, number) for number, piece in enumerate(theirs))
        for query in of_row(queries, row):
            first = document_at(starts, query.start)
            first = first if window is None else max(first, query.start - window + 1)
            number = bisect_right(begins, (query.start, len(theirs))) - 1
            while number >= 0 and theirs[begins[number][1]].stop > first:
                index = begins[number][1]
                oldest[index] = min(max(first, theirs[index].start), oldest.get(index, theirs[index].stop))
                number -= 1
        slices, seen, at = [], [], 0
        for index, piece in enumerate(theirs):
            if index in oldest:
                slices.append(slice(at + oldest[index] - piece.start, at + len(piece)))
                seen.append(range(oldest[index], piece.stop))
            at += len(piece)
        rows.append(tuple(slices))
        places.append(tuple(seen))
    return Parcel(tuple(as_one(rows))), as_one(places)


def attend_in_ring(query: Tensor, key: Tensor, value: Tensor, mask: RingMask, group: ProcessGroup) -> Tensor:
    """Attention of this rank's queries (batch, heads, seq, head_dim) on the keys and values of the group's ranks."""
    return _Ring.apply(query, key, value, mask, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: RingMask, group: ProcessGroup) -> Tensor:
        incoming = _Incoming(key, value, mask, group)
        partial = Partial(query, key, value, mask.own)
        for hop, keys, values in incoming:
            partial.add(keys, values, hop.blocks)
        out = partial.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, partial.lse)
        ctx.mask, ctx.group = mask, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, lse = ctx.saved_tensors
        own = ctx.mask.own
        incoming, returning = _Incoming(key, value, ctx.mask, ctx.group), _Returning(key, ctx.group)
        gradients = Gradients(query, grads[0], out, lse)
        key_grad, value_grad = zeros_of(key), zeros_of(value)
        gradients.add(key, value, (*own.squares, *own.rectangles), key_grad, value_grad)
        for hop, keys, values in incoming:
            share = zeros_of(keys), zeros_of(values)
            gradients.add(keys, values, hop.blocks, *share)
            returning.add_to(key_grad, value_grad)
            returning.start(hop, *share)
        returning.add_to(key_grad, value_grad)
        return gradients.query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


class _Incoming:
    """The keys and values of other ranks, hop by hop; while one is worked on, the next is on its way."""

    def __init__(self, key: Tensor, value: Tensor, mask: RingMask, group: ProcessGroup) -> None:
        self.key, self.value, self.mask, self.group = key, value, mask, group
        # Two to receive and one to send, for any number of hops: memory is the same for rings of any size.
        self.buffers = key.new_empty((3, 2 * key.numel()))
        self._start(0)

    def __iter__(self) -> Iterator[tuple[Hop, Tensor, Tensor]]:
        for number, hop in enumerate(self.mask.hops):
            message = self.message
            for work in self.under_way:
                work.wait()
            self._start(number + 1)
            keys, values = message.transpose(2, 3)
            yield hop, keys, values

    def _start(self, number: int) -> None:
        if number == len(self.mask.hops):
            self.under_way = []
            return
        hop = self.mask.hops[number]
        rank, ranks = self.group.rank(), self.group.size()
        self.message = _view(self.buffers[number % 2], hop.receive.shape(self.key))
        outgoing = _view(self.buffers[2], hop.send.shape(self.key))
        hop.send.fill(outgoing, self.key, self.value)
        sent, filled = (
            None if parcel.empty else x for parcel, x in ((hop.send, outgoing), (hop.receive, self.message))
        )
        transfer = sent, (rank + hop.distance) % ranks, filled, (rank - hop.distance) % ranks
        self.under_way = exchange(transfer, self.group, tag=2 * number)


class _Returning:
    """Shares of gradients on their way to the owners of keys and values, and this rank's own on theirs to it."""

    def __init__(self, key: Tensor, group: ProcessGroup) -> None:
        self.key, self.group = key, group
        self.buffers = key.new_empty((2, 2 * key.numel()))
        self.hop: Hop | None = None

    def start(self, hop: Hop, key_grad: Tensor, value_grad: Tensor) -> None:
        """Send the share in what a hop brought back to where it came from, and wait for that in what the hop took."""
        rank, ranks = self.group.rank(), self.group.size()
        outgoing = _view(self.buffers[0], hop.receive.shape(self.key))
        for part, grad in zip(outgoing, (key_grad, value_grad), strict=True):
            part.copy_(grad.transpose(1, 2))
        self.message = _view(self.buffers[1], hop.send.shape(self.key))
        sent, filled = (
            None if parcel.empty else x for parcel, x in ((hop.receive, outgoing), (hop.send, self.message))
        )
        transfer = sent, (rank - hop.distance) % ranks, filled, (rank + hop.distance) % ranks
        self.hop, self.under_way = hop, exchange(transfer, self.group, tag=2 * hop.distance + 1)

    def add_to(self, key_grad: Tensor, value_grad: Tensor) -> None:
        """Wait for what is on its way, and add it to the gradients of this rank's keys and values."""
        if self.hop is None:
            return
        for work in self.under_way:
            work.wait()
        self.hop.send.add(self.message, key_grad, value_grad)
        self.hop = None


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: torch.Size(shape).numel()].view(shape)
