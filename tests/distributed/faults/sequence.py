"""Faults of context parallelism."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from models import attention
from parallel import collectives, context, ring, step
from parallel.context import Context
from parallel.ring import Parcel, RingMask
from parallel.step import ParallelModel
from tests.distributed.faults.registry import fault


@fault
def partial_attention_is_added_without_weights() -> Iterator[None]:
    def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        out.add_(more)
        lse.copy_(lse.logaddexp(more_lse))

    with patch.object(attention, "merge", merge):
        yield


@fault
def log_sum_exp_is_not_merged() -> Iterator[None]:
    right = attention.merge

    with patch.object(attention, "merge", lambda out, lse, *more: right(out, lse.clone(), *more)):
        yield


@fault
def the_ring_stops_a_hop_early() -> Iterator[None]:
    right = RingMask.build

    def build(*arguments: Any) -> RingMask:
        mask = right(*arguments)
        return RingMask(mask.own, mask.hops[:-1])

    context._mask.cache_clear()
    with patch.object(RingMask, "build", staticmethod(build)):
        yield
    context._mask.cache_clear()


@fault
def key_gradients_stay_where_they_were_made() -> Iterator[None]:
    with patch.object(Parcel, "add", lambda *_: None):
        yield


@fault
def gradients_of_keys_and_values_are_swapped_on_their_way() -> Iterator[None]:
    right = Parcel.add

    with patch.object(Parcel, "add", lambda self, message, *x: right(self, message.flip(0), *x)):
        yield


@fault
def key_gradients_go_to_the_next_rank() -> Iterator[None]:
    right = collectives._Enter.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return right(ctx, grad.roll(grad.shape[1] // ctx.group.size(), dims=1))

    with patch.object(collectives._Enter, "backward", staticmethod(backward)):
        yield


@fault
def heads_come_back_in_another_order() -> Iterator[None]:
    right = context.deal_out

    def deal_out(x: Tensor, split: int, join: int, group: Any) -> Tensor:
        y = right(x, split, join, group)
        return y if split == 1 else y.roll(1, dims=1)

    with patch.object(context, "deal_out", deal_out):
        yield


@fault
def copies_of_key_heads_are_dealt_out_in_turn() -> Iterator[None]:
    with patch.object(context, "_copied", lambda x, copies: x.repeat(1, copies, 1, 1)):
        yield


@fault
def context_gradients_are_not_summed() -> Iterator[None]:
    with patch.object(step, "shard", lambda *_: None):
        yield


@fault
def context_ranks_divide_by_their_own_tokens() -> Iterator[None]:
    right = step.forward_backward

    def forward_backward(model: ParallelModel, *arguments: Any) -> Any:
        with patch.object(ParallelModel, "sum_over_data", lambda _, x: x):
            return right(model, *arguments)

    with patch("tests.distributed.cases.forward_backward", forward_backward):
        yield


def _cut_wrongly(change: Callable[[Any, Any], Any]) -> AbstractContextManager[object]:
    right = Context.cut
    return patch.object(Context, "cut", lambda self, batch: change(batch, right(self, batch)))


@fault
def labels_are_shifted_after_the_cut() -> Iterator[None]:
    def change(whole: Any, part: Any) -> Any:
        following = part["tokens"].roll(-1, dims=1).where(part["labels"] >= 0, -100)
        following[:, -1] = -100
        return part | {"labels": following}

    with _cut_wrongly(change):
        yield


@fault
def positions_are_counted_in_the_part() -> Iterator[None]:
    with _cut_wrongly(lambda _, part: part | {"positions": part["places"].argsort(-1)}):
        yield


@fault
def dropout_goes_by_the_place_in_the_part() -> Iterator[None]:
    with _cut_wrongly(lambda _, part: part | {"places": part["places"].argsort(-1)}):
        yield


@fault
def tokens_that_fill_up_count() -> Iterator[None]:
    with patch.object(context, "IGNORE", 0):
        yield


def _masked_wrongly(change: Callable[..., Any]) -> AbstractContextManager[object]:
    right = Context.mask_of
    return patch.object(Context, "mask_of", lambda self, *arguments: right(self, *change(*arguments)))


@fault
def documents_end_where_the_part_does_not_know() -> Iterator[None]:
    def change(queries: int, keys: int, window: Any, ids: np.ndarray) -> Any:
        return queries, keys, window, np.where(ids == ids[:, :1], ids, ids[:, :1] + 1)

    with _masked_wrongly(change):
        yield


@fault
def the_window_ends_with_the_part() -> Iterator[None]:
    right = ring.needed

    def needed(keys: Any, queries: Any, documents: Any, window: Any) -> Any:
        return right(keys, queries, documents, min(window, 2))

    context._mask.cache_clear()
    with patch.object(ring, "needed", needed):
        yield
    context._mask.cache_clear()
