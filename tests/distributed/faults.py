"""Faults planted by patching the product, for the parity tests to catch: each a context manager, by name.

They are the public bugs of this field (see SCENARIOS): a reduction left out, a division forgotten or doubled, a wrong
group, a mean per rank, a seed that depends on the rank.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models import attention
from models.attention import Attention
from models.loss import WholeVocabulary
from parallel import collectives, context, expert, gradients, ring, sharded, step, tensor
from parallel.context import Context
from parallel.expert import ExpertDispatch
from parallel.layout import AXES, Layout
from parallel.loss import VocabularyShard
from parallel.ring import Parcel, RingMask
from parallel.routing import RoutingBook
from parallel.step import ParallelModel

FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {}


def fault(function: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[object]]:
    """Register a fault under its function's name."""
    FAULTS[function.__name__] = contextmanager(function)
    return FAULTS[function.__name__]


def _own_piece(x: Tensor, group: Any) -> Tensor:
    return x.chunk(group.size(), dim=1)[group.rank()].contiguous()


@fault
def row_results_are_not_summed() -> Iterator[None]:
    with patch.object(collectives._Leave, "forward", staticmethod(_leave_without_sum)):
        yield


def _leave_without_sum(ctx: Any, x: Tensor, group: Any, sequence: bool) -> Tensor:
    ctx.group, ctx.sequence = group, sequence
    return _own_piece(x, group) if sequence else x.clone()


@fault
def input_gradients_are_not_summed() -> Iterator[None]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_own_piece(grad, ctx.group) if ctx.sequence else grad), None, None

    with patch.object(collectives._Enter, "backward", staticmethod(backward)):
        yield


@fault
def input_gradients_are_averaged() -> Iterator[None]:
    right = collectives._Enter.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return right(ctx, grad)[0] / ctx.group.size(), None, None

    with patch.object(collectives._Enter, "backward", staticmethod(backward)):
        yield


@fault
def output_gradients_are_summed_again() -> Iterator[None]:
    right = collectives._Leave.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return collectives.all_reduce(right(ctx, grad)[0], ctx.group), None, None

    with patch.object(collectives._Leave, "backward", staticmethod(backward)):
        yield


@fault
def partial_gradients_are_not_summed() -> Iterator[None]:
    with patch.object(step, "sum_partial_gradients", lambda *_: None):
        yield


@fault
def norm_gradients_are_taken_for_whole() -> Iterator[None]:
    right = tensor._Axis.hold_whole

    def hold_whole(self: Any, norm: Any, partial: bool) -> None:
        right(self, norm, False)

    with patch.object(tensor._Axis, "hold_whole", hold_whole):
        yield


@fault
def whole_gradients_are_summed_as_if_partial() -> Iterator[None]:
    right = tensor._Axis.hold_whole

    def hold_whole(self: Any, norm: Any, partial: bool) -> None:
        right(self, norm, True)

    with patch.object(tensor._Axis, "hold_whole", hold_whole):
        yield


@fault
def every_rank_adds_the_row_bias() -> Iterator[None]:
    def forward(self: Any, x: Tensor) -> Tensor:
        bias = tensor._local_bias(self)
        y = self.product(x, sharded.local(self.weight))
        return y if bias is None else y + bias * self.product.__self__.ranks

    with patch.object(tensor._RowLinear, "forward", forward):
        yield


@fault
def all_ranks_use_the_first_key_value_head() -> Iterator[None]:
    right = tensor._Linear.blocks

    def blocks(self: Any) -> Any:
        if self.rows is not None:
            self.rows = slice(0, self.rows.stop - self.rows.start)
        return right(self)

    with patch.object(tensor._Linear, "blocks", blocks):
        yield


@fault
def vocabulary_normaliser_is_local() -> Iterator[None]:
    with patch.object(VocabularyShard, "total", WholeVocabulary.total):
        yield


@fault
def vocabulary_maximum_is_local() -> Iterator[None]:
    with patch.object(VocabularyShard, "maximum", WholeVocabulary.maximum):
        yield


@fault
def labels_are_looked_up_a_row_too_far() -> Iterator[None]:
    right = VocabularyShard.__init__

    def init(self: Any, group: Any, rows: int) -> None:
        right(self, group, rows)
        self.first += 1

    with patch.object(VocabularyShard, "__init__", init):
        yield


@fault
def loss_is_a_mean_per_rank() -> Iterator[None]:
    right = step.forward_backward

    def forward_backward(model: ParallelModel, *arguments: Any) -> Any:
        with patch.object(ParallelModel, "sum_over_data", lambda _, x: x):
            return right(model, *arguments)

    with patch("tests.distributed.cases.forward_backward", forward_backward):
        yield


@fault
def loss_is_a_mean_per_microbatch() -> Iterator[None]:
    right = step.token_loss

    def token_loss(decoder: Any, batch: Any, config: Any, told: Any = None) -> Tensor:
        share = (batch["labels"] >= 0).sum().clamp_min(1) / (batch["labels"].numel() / 2)
        return right(decoder, batch, config, told) / share

    with patch.object(step, "token_loss", token_loss):
        yield


@fault
def gradients_are_averaged_over_data_ranks() -> Iterator[None]:
    names = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
    with patch.multiple(FSDPModule, **dict.fromkeys(names, lambda *_: None)):
        yield


@fault
def replicas_are_left_out_of_the_sum() -> Iterator[None]:
    right = step.shard

    def shard(decoder: Any, mesh: Any, *arguments: Any) -> None:
        right(decoder, mesh["dp_shard"], *arguments)

    with patch.object(step, "shard", shard):
        yield


@fault
def only_the_last_microbatch_counts() -> Iterator[None]:
    right = step.microbatches

    with patch.object(step, "microbatches", lambda batch, size: right(batch, size)[-1:]):
        yield


@fault
def seed_depends_on_the_rank() -> Iterator[None]:
    right = step.initialise

    def initialise(decoder: Any, config: Any, seed: int, fill: Any) -> None:
        right(decoder, config, seed + dist.get_rank(), fill)

    with patch.object(step, "initialise", initialise):
        yield


@fault
def blocks_are_initialised_as_if_whole() -> Iterator[None]:
    with patch.object(sharded, "offset", lambda x: (0,) * x.dim()):
        yield


@fault
def all_data_ranks_read_the_same() -> Iterator[None]:
    with patch.object(Layout, "data_rank", lambda *_: 0):
        yield


@fault
def tensor_ranks_read_different_data() -> Iterator[None]:
    with patch.object(Layout, "data_rank", lambda self, rank: rank % self.dp):
        yield


@fault
def norm_is_local() -> Iterator[None]:
    with patch.object(gradients, "all_reduce", lambda x, *_: x):
        yield


@fault
def norm_counts_replicated_parameters_again() -> Iterator[None]:
    with patch.object(gradients, "split_axes", lambda x: ("dp_shard", "tp")):
        yield


@fault
def dropout_masks_restart_in_every_piece() -> Iterator[None]:
    right = ParallelModel.sequence_piece

    def sequence_piece(self: ParallelModel, length: int) -> slice:
        piece = right(self, length)
        return slice(0, piece.stop - piece.start)

    with patch.object(ParallelModel, "sequence_piece", sequence_piece):
        yield


@fault
def dropout_sees_samples_by_their_local_number() -> Iterator[None]:
    right = step.dropout_key

    def dropout_key(model: Any, batch: Any, number: int) -> Any:
        return right(model, batch | {"sample": batch["sample"] - batch["sample"][0]}, number)

    with patch.object(step, "dropout_key", dropout_key):
        yield


@fault
def recomputation_sees_other_keys() -> Iterator[None]:
    right = Attention.forward
    calls = {"count": 0}

    def forward(self: Any, x: Tensor, *arguments: Any) -> Tensor:
        calls["count"] += 1
        return right(self, x if calls["count"] % 3 else x * 1.001, *arguments)

    with patch.object(Attention, "forward", forward):
        yield


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
    def change(queries: int, keys: int, window: Any, ids: Tensor) -> Any:
        return queries, keys, window, ids.where(ids == ids[:, :1], ids[:, :1] + 1)

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


@fault
def tensor_ranks_all_route_the_same_tokens() -> Iterator[None]:
    right = step._expert_groups
    with patch.object(step, "_expert_groups", lambda model: replace(right(model), tokens=None)):
        yield


@fault
def router_gradients_are_taken_for_whole() -> Iterator[None]:
    right = tensor._Axis.place

    def place(self: Any, module: Any, kind: type, name: str, placement: Any, partial: bool = False) -> None:
        right(self, module, kind, name, placement, partial and kind is not tensor._Router)

    with patch.object(tensor._Axis, "place", place):
        yield


@fault
def input_gradients_of_routed_pieces_stay_where_they_are() -> Iterator[None]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = expert._pieces(grad, ctx.group, ctx.total)
        whole[: ctx.group.rank() * len(grad)] = 0.0
        return whole, None

    with patch.object(expert._Take, "backward", staticmethod(backward)):
        yield


@fault
def norm_leaves_out_experts_of_other_ranks() -> Iterator[None]:
    with patch.object(gradients, "EXPERT_AXES", AXES):
        yield


@fault
def expert_gradients_grow_with_the_ranks() -> Iterator[None]:
    right = expert._Flight.leave

    def leave(self: Any, x: Tensor, per_token: bool) -> None:
        right(self, x if per_token else x * self.dispatch.ranks, per_token)

    with patch.object(expert._Flight, "leave", leave):
        yield


@fault
def slices_of_an_expert_are_not_summed() -> Iterator[None]:
    def reduce_scatter_into(out: Tensor, x: Tensor, group: Any) -> None:
        out.copy_(x.chunk(group.size())[group.rank()])

    with patch.object(expert, "reduce_scatter_into", reduce_scatter_into):
        yield


@fault
def rows_are_taken_for_sorted_by_expert() -> Iterator[None]:
    right = expert._by_expert

    with patch.object(expert, "_by_expert", lambda *arguments: right(*arguments).sort().values):
        yield


@fault
def load_share_is_local() -> Iterator[None]:
    with patch.object(ExpertDispatch, "total_over_step", lambda _, x: x):
        yield


@fault
def load_share_is_that_of_the_microbatch() -> Iterator[None]:
    with patch.object(RoutingBook, "must_count", False):
        yield


@fault
def biases_follow_the_tokens_of_their_rank() -> Iterator[None]:
    with patch.object(RoutingBook, "_sum", lambda self: self._notes.sum(0)):
        yield


@fault
def biases_move_with_every_microbatch() -> Iterator[None]:
    right = RoutingBook.step_of

    def step_of(self: Any, batch: Any) -> Any:
        for mixture in self.mixtures:
            mixture.gate.expert_bias[0] += 0.02
        return right(self, batch)

    with patch.object(RoutingBook, "step_of", step_of):
        yield


@fault
def a_rank_drops_by_its_own_tokens() -> Iterator[None]:
    with patch.object(ExpertDispatch, "gather_over_sequence", lambda _, x, most: (x, slice(None))):
        yield
