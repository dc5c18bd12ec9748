"""Context parallelism: every cp rank holds a part of each sequence, and attention reaches across the cut.

    ring          keys and values of other ranks come one rank at a time while those before are worked on; partial
                  results are merged by their log-sum-exp (Liu et al., 2023, arXiv:2310.01889)
    all_gather    the keys and values of all ranks are gathered, each rank keeps its queries (Grattafiori et al., 2024,
                  arXiv:2407.21783, section 3.3.2)
    ulysses       an all-to-all makes parts of the sequence into parts of the heads, and back (Jacobs et al., 2023,
                  arXiv:2309.14509)
    ulysses_ring  heads among neighbours, a ring of their groups (Fang and Zhao, 2024, arXiv:2405.07719)

Only key/value heads travel, never repeated for the query heads that share them. Labels are shifted before the sequence
is cut, and positions, dropout and documents go by places in the whole sequence. The ring itself is parallel/ring.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from models.attention import attend, attend_alone
from models.decoder import Decoder, DecoderLayer
from models.loss import IGNORE
from models.mask import WHOLE, Documents, Held, as_one, document_starts, see
from parallel.balance import held_in_ring, padded_length, portion, ring_and_ulysses
from parallel.collectives import deal_out, gather_sequence
from parallel.config import Config, ContextMethod
from parallel.layout import Layout
from parallel.ring import RingMask, attend_in_ring

Batch = dict[str, Tensor]


def document_ids(batch: Batch, config: Config) -> np.ndarray | None:
    """Which document each token is of, where attention is kept within documents: int64 (batch, seq), on the host.

    No tensor: FSDP2 moves those to the GPU before a forward pass, and the host, which reads them, would wait for it.
    """
    return batch["document_ids"].cpu().numpy() if config.data.document_mask else None


class Context:
    """One rank's place on the cp axis: what it holds of every sequence, and how its attention reaches the rest."""

    def __init__(self, config: Config, layout: Layout, rank: int) -> None:
        """`rank` is that in the world; a collective over all ranks, since groups are made."""
        self.config, self.layout = config, layout
        self.rank, self.ranks = layout.coordinates(rank)["cp"], layout.cp
        self.window, self.method = config.model.sliding_window, config.parallelism.cp_method
        self.ring_size, self.ulysses_size = ring_and_ulysses(config.parallelism)
        groups = layout.groups("cp").reshape(-1, self.ring_size, self.ulysses_size)
        self.ring = _group(groups.swapaxes(1, 2).reshape(-1, self.ring_size).tolist())
        self.ulysses = _group(groups.reshape(-1, self.ulysses_size).tolist())

    def install(self, decoder: Decoder) -> None:
        """Make a decoder, or a stage of one, work on this rank's part of sequences."""
        decoder.model.mask_of = self.mask_of
        for layer in decoder.model.layers.values():
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.attend = self.attend

    def cut(self, batch: Batch) -> Batch:
        """This rank's part of a batch of whole sequences (batch, seq): tokens, labels, positions and `places`.

        `document_ids` stay whole, on the host, since masks speak of the whole sequence. Sequences are filled up with
        tokens of no document, which have no label and which no other token sees.
        """
        length = batch["tokens"].shape[1]
        fill = padded_length(length, self.config.parallelism) - length
        result = dict(batch)
        documents = WHOLE
        if self.config.data.document_mask:
            ids = batch["document_ids"].cpu()
            filler = ids[:, -1:] + 1
            result["document_ids"] = torch.cat((ids, filler.expand(-1, fill)), dim=1)
            documents = document_starts(result["document_ids"])
        held = _held(documents, length + fill, self.window, self.ring_size, self.ulysses_size)[self.rank]
        rows = [torch.cat([torch.arange(p.start, p.stop) for p in pieces]) for pieces in held]
        places = torch.stack(rows).expand(len(batch["tokens"]), -1).to(batch["tokens"].device, non_blocking=True)
        for name, value in (("tokens", 0), ("labels", IGNORE), ("positions", 0)):
            result[name] = F.pad(batch[name], (0, fill), value=value).gather(1, places)
        result["places"] = places
        return result

    def mask_of(
        self, queries: int, keys: int, window: int | None, document_ids: Tensor | np.ndarray | None
    ) -> RingMask:
        """Who sees whom during attention, for a microbatch of which this rank holds so many tokens."""
        assert queries == keys, "a cache holds whole sequences"
        documents = WHOLE if document_ids is None else document_starts(document_ids)
        return _mask(
            tuple(documents), queries * self.ranks, window, self.ring_size, self.rank // self.ulysses_size, self.method
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: RingMask) -> Tensor:
        """Attention of this rank's queries (batch, heads, part of seq, head_dim) on the keys of all ranks."""
        if self.ulysses_size > 1:
            query, key, value = self._parts_to_heads(query, key, value)
        if self.ring_size == 1:
            out = attend_alone(query, key, value, mask.own)
        elif self.method == ContextMethod.all_gather:
            pairs = torch.cat((key, value)).transpose(1, 2)
            key, value = gather_sequence(pairs, self.ring).transpose(1, 2).chunk(2)
            out, _ = attend(query, key, value, mask.own)
        else:
            out = attend_in_ring(query, key, value, mask, self.ring)
        return deal_out(out, 2, 1, self.ulysses) if self.ulysses_size > 1 else out

    def _parts_to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """All tokens of the ulysses group, for this rank's share of the heads: one all-to-all for all three.

        With fewer key/value heads than ranks, each rank is sent the one that its query heads use.
        """
        ranks = self.ulysses_size
        copies = max(ranks // key.shape[1], 1)
        parts = [x.unflatten(1, (ranks, -1)) for x in (query, *(_copied(x, copies) for x in (key, value)))]
        mine = deal_out(torch.cat(parts, dim=2).flatten(1, 2), 1, 2, self.ulysses)
        return mine.split([part.shape[2] for part in parts], dim=1)


def _copied(x: Tensor, copies: int) -> Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def _group(members: list[list[int]]) -> ProcessGroup:
    """This rank's group of the given ones, each a list of ranks."""
    return dist.new_subgroups_by_enumeration(members)[0]


def _held(documents: Documents, length: int, window: int | None, ring: int, ulysses: int) -> list[Held]:
    """What each cp rank holds of each sequence, or of the first where all are cut alike."""
    whole = [held_in_ring(starts, length, window, ring) for starts in documents]
    part = length // (ring * ulysses)
    return [
        as_one([portion(pieces[place], number * part, (number + 1) * part) for pieces in whole])
        for place in range(ring)
        for number in range(ulysses)
    ]


@lru_cache(maxsize=64)
def _mask(
    documents: tuple[tuple[int, ...], ...], length: int, window: int | None, ring: int, rank: int, method: Any
) -> RingMask:
    held = _held(documents, length, window, ring, 1)
    if method == ContextMethod.all_gather:
        rows = range(max(len(item) for item in held))
        everything = as_one([tuple(p for item in held for p in item[row % len(item)]) for row in rows])
        return RingMask(see(held[rank], everything, documents, window), ())
    return RingMask.build(held, rank, documents, window)
