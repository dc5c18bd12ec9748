"""Faults of tensor and data parallelism, losses, norms, seeds, dropout and recomputation."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from models.attention import Attention
from models.loss import WholeVocabulary
from parallel import collectives, gradients, sharded, step, tensor
from parallel.layout import Layout
from parallel.loss import VocabularyShard
from parallel.step import ParallelModel
from tests.distributed.faults.registry import fault


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
