"""Faults of mixtures of experts and expert parallelism."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from parallel import expert, gradients, step, tensor
from parallel.expert import ExpertDispatch
from parallel.layout import AXES
from parallel.routing import RoutingBook
from tests.distributed.faults.registry import fault


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
