"""Pipeline parallelism on torch.distributed.pipelining: stages hold their own layers, a schedule runs them.

All pipeline ranks of a data rank read the same batch, so that only hidden states and their gradients travel: masks,
positions and labels are there already. Shapes are known beforehand and never exchanged.
"""

from collections.abc import Callable
from copy import copy
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward

from models.config import ModelConfig
from models.decoder import Decoder
from parallel.balance import padded_length
from parallel.clock import Clock, Recording
from parallel.config import Config, ParallelismConfig
from parallel.context import Batch, document_ids
from parallel.layout import Layout, microbatch_count
from parallel.order import SCHEDULES, order
from parallel.precision import DTYPES
from parallel.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from parallel.sharded import local
from parallel.stages import SINGLE, rank_of, split_layers, splits_backward, stage_count, stages_of
from parallel.zero import add_to_sums, before_microbatch


def build_decoder(model: ModelConfig, parallelism: ParallelismConfig, pp_rank: int) -> Decoder:
    """The layers of one pipeline rank, of all its stages together; without a pipeline, the whole decoder."""
    split, mine = split_layers(model, parallelism), stages_of(pp_rank, parallelism)
    layers = [layer for stage in mine for layer in split[stage]]
    return Decoder(model, layers, first=0 in mine, last=len(split) - 1 in mine)


def build_parts(decoder: Decoder, parallelism: ParallelismConfig, pp_rank: int) -> dict[int, Decoder]:
    """The stages of one pipeline rank by their number, sharing the modules of its decoder."""
    split, mine = split_layers(decoder.config, parallelism), stages_of(pp_rank, parallelism)
    if len(mine) == 1:
        return {mine[0]: decoder}
    last = len(split) - 1
    parts = {stage: decoder.part(split[stage], stage == 0, stage == last) for stage in mine}
    if decoder.config.tie_word_embeddings and {0, last} <= parts.keys():
        # As on two ranks, each stage has a tied embedding of its own: FSDP2 gives a parameter to one group.
        parts[last].model.embed_tokens = _copied(parts[0].model.embed_tokens)
        parts[last].tie_weights()
        decoder.lm_head = None
    return parts


def _copied(module: Any) -> Any:
    """A module of the same kind, hooks and sizes, with parameters of its own."""
    other = copy(module)
    other._parameters = {name: nn.Parameter(value.detach().clone()) for name, value in module._parameters.items()}
    return other


class Pipeline:
    """This rank's stages and the schedule over them."""

    def __init__(
        self, parts: dict[int, Decoder], config: Config, layout: Layout, group: ProcessGroup, device: torch.device
    ) -> None:
        self.parts, self.config, self.group, self.device = parts, config, group, device
        self.last_stage = stage_count(config.parallelism) - 1
        self.length = padded_length(config.data.seq_len, config.parallelism) // layout.cp
        self.sequence_ranks = layout.tp if config.parallelism.sequence_parallel else 1
        self.hidden_shape = (
            config.data.micro_batch,
            self.length // self.sequence_ranks,
            config.model.hidden_size,
        )
        self._divisor = torch.ones((), device=device)
        self._told: Callable[[Batch], dict[str, Any]] = lambda _: {}
        self._documents: list[np.ndarray | None] = []
        self.microbatch = 0
        """Which microbatch's forward pass is under way."""
        self._clock = Clock(device)
        self.recording = Recording(self._clock)
        """When the actions of the last step ran."""
        microbatches = microbatch_count(config, layout)
        ends = [parts[number].model.embed_tokens for number in (0, self.last_stage) if number in parts]
        tied = config.model.tie_word_embeddings and len(ends) == 2
        self.tied_here = [cast(nn.Embedding, end).weight for end in ends] if tied else []
        """A tied embedding of the first and of the last stage, where this rank has both."""
        stages = [self._stage(number, part) for number, part in parts.items()]
        self.schedule = self._schedule(stages, microbatches)

    @property
    def holds_loss(self) -> bool:
        """Whether the last stage, which alone has the loss, is on this rank."""
        return self.last_stage in self.parts

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return rank_of(stage, self.config.parallelism)

    def owner(self, name: str) -> int:
        """A pipeline rank that holds a parameter, by its name."""
        if name.startswith("model.layers."):
            layer, split = int(name.split(".")[2]), split_layers(self.config.model, self.config.parallelism)
            return self.rank_of_stage(next(stage for stage, layers in enumerate(split) if layer in layers))
        return self.rank_of_stage(0 if "embed_tokens" in name else self.last_stage)

    def forward_backward(self, batch: Batch, divisor: Tensor, told: Callable[[Batch], dict[str, Any]]) -> Tensor:
        """All microbatches through the schedule; returns the sum of losses over `divisor`, 0 where there is no loss.

        `told` gives what the decoder is told of a microbatch besides: named arguments.
        """
        self._divisor, self._told = divisor, told
        ids, size = document_ids(batch, self.config), self.config.data.micro_batch
        firsts = range(0, len(batch["labels"]), size)
        self._documents = [None if ids is None else ids[first : first + size] for first in firsts]
        self._follow()
        self.recording = Recording(self._clock)
        inputs = (batch["tokens"],) if 0 in self.parts else ()
        losses: list[Tensor] = []
        target = batch["labels"] if self.holds_loss else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **_carried(batch))
        self.recording.stop()
        return torch.stack(losses).detach().sum() if self.holds_loss else divisor.new_zeros((), dtype=self._loss_dtype)

    @torch.no_grad()
    def forward(self, batch: Batch, told: Callable[[Batch], dict[str, Any]] = lambda _: {}) -> Tensor | None:
        """Sum of token losses of one microbatch of any length, on the rank that holds the loss; None elsewhere.

        Stages follow one another without a schedule: while the later ones work, the first go on to the next batch.
        """
        self._told, self._documents, self.microbatch = told, [document_ids(batch, self.config)], 0
        self._follow()
        x: Tensor | None = None
        for number, part in self.parts.items():
            if number == 0:
                x = batch["tokens"]
            elif number - 1 not in self.parts:
                sequences, length = batch["tokens"].shape
                shape = (sequences, length // self.sequence_ranks, self.hidden_shape[-1])
                x = torch.empty(shape, dtype=self._dtype, device=self.device)
                dist.recv(x, group=self.group, group_src=self.rank_of_stage(number - 1))
            assert x is not None
            x = part(x, **_carried(batch))
            if number != self.last_stage and number + 1 not in self.parts:
                dist.send(x.contiguous(), group=self.group, group_dst=self.rank_of_stage(number + 1))
        return x if self.holds_loss else None

    @torch.no_grad()
    def _follow(self) -> None:
        """Let the last stage's tied embedding be the first's, which alone is updated, saved and counted."""
        if self.tied_here:
            first, last = self.tied_here
            local(last).copy_(local(first))

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.config.precision.compute]

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if self._dtype == torch.float64 else torch.float32

    def _stage(self, number: int, part: Decoder) -> PipelineStage:
        part.register_forward_pre_hook(self._unpack, with_kwargs=True)
        part.register_forward_hook(lambda _, args, output: output.contiguous())  # what is sent must be
        hidden = torch.empty(self.hidden_shape, dtype=self._dtype, device="meta", requires_grad=True)
        tokens = torch.empty(self.hidden_shape[0], self.length, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=self._loss_dtype, device="meta", requires_grad=True)
        stage = _Stage(
            part,
            number,
            self.last_stage + 1,
            self.device,
            input_args=tokens if number == 0 else hidden,
            output_args=loss if number == self.last_stage else hidden,
            group=self.group,
        )
        stage.pipeline = self
        return stage

    def _unpack(self, _: nn.Module, args: tuple[Any, ...], carried: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a microbatch carries, as the arguments that the decoder takes."""
        named: dict[str, Any] = {"positions": carried["positions"], "labels": carried["labels"]}
        named["document_ids"] = self._documents[self.microbatch]
        return args, named | self._told(carried)

    def _schedule(self, stages: list[PipelineStage], microbatches: int) -> Any:
        parallelism = self.config.parallelism
        name = parallelism.pp_schedule
        schedule = getattr(schedules, SCHEDULES[name])(
            stages[0] if name in SINGLE else stages,
            microbatches,
            loss_fn=lambda loss, _: loss / self._divisor,
            scale_grads=False,
        )
        if name in ("csv", "dualpipe_v"):
            # DualPipeV's pairs are taken apart: nothing here runs the two at once, and what the first sends would wait.
            orders = enumerate(order(parallelism, microbatches))
            schedule._prepare_schedule_with_comms(
                {rank: [schedules._Action.from_str(str(action)) for action in actions] for rank, actions in orders}
            )
        if name not in SINGLE:
            _leave_gathering_to_fsdp(schedule)
        return schedule


def _leave_gathering_to_fsdp(schedule: Any) -> None:
    """Take out of a schedule that torch gathers and frees the weights of whole stages, at most three at a time.

    FSDP2's hooks do it layer by layer, and as `zero` says: with four stages on a rank torch would free what is to be
    kept, and gather it again for almost every microbatch; with ZeRO 3 it would begin with three whole stages.
    """
    orders = schedule.pipeline_order_with_comms
    for rank, actions in orders.items():
        gathering = (schedules.UNSHARD, schedules.RESHARD)
        orders[rank] = [action for action in actions if action.computation_type not in gathering]
    schedule.unsharded_stages = {stage.stage_index for stage in schedule._stages}  # it asks before it computes


class _Stage(PipelineStage):
    """torch's stage, which also notes when its actions run, and shares out gradients as training without a pipeline.

    By itself torch lets gradients stand whole until the stage's last backward pass and reduces them then: ZeRO 0 and 1.
    Schedules that split the backward pass are left at that, since they need the parameters of several microbatches at
    once; with the others FSDP2's own hooks reduce, layer by layer, while other stages still work.
    """

    pipeline: Pipeline

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.pipeline.microbatch = fwd_chunk_id
        with self.pipeline.recording.action(FORWARD, self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self.pipeline.recording.action(BACKWARD if full_backward else INPUT, self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward and isinstance(loss, Tensor):
            loss.detach_()  # the schedule keeps it to the end of the step, and with its graph what the stage received
        if bwd_chunk_id in self.bwd_cache:  # what is sent must be contiguous; a split pass leaves it as it comes
            kept = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in kept)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.pipeline.recording.action(WEIGHT, self.stage_index, bwd_chunk_id):
            result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            add_to_sums(self.submod)
        return result

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        parallelism = self.pipeline.config.parallelism
        if splits_backward(parallelism):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        before_microbatch(self.submod, parallelism.zero, last_backward)
        return stage_backward(**bwd_kwargs), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if splits_backward(self.pipeline.config.parallelism):
            super().perform_reduce_grad(grad_scale_factor)

    # torch makes a buffer for every microbatch of a step and keeps them all: with many microbatches that is more than
    # the activations. Here one is made when its message is asked for, and let go when it has been taken.

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            _let_go(infos)

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        infos = super()._create_grad_recv_info(act_send_info)
        _let_go(infos)
        return infos

    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if not info.is_root_arg:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        activations = super()._retrieve_recv_activations(fwd_chunk_id)
        _let_go(self.args_recv_info[fwd_chunk_id])
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Any, ...]:
        gradients = super()._retrieve_recv_grads(bwd_chunk_id)
        _let_go(self.grad_recv_info[bwd_chunk_id])
        return gradients

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        # All shapes are given, so the vote on whether they are can have one result only; the messages stay, since they
        # open NCCL's connections in a safe order. On a fake group, where nothing arrives, the vote would be lost.
        super()._warmup_backward_result(received_result)
        return torch.ones(1, dtype=torch.int32, device=self.device)


def _let_go(infos: tuple[Any, ...]) -> None:
    for info in infos:
        info.buffer = None


def exchange_tied_gradients(decoder: Decoder, pipeline: Pipeline) -> None:
    """Sum the gradients of a tied embedding over its two holders, the first and the last stage."""
    if pipeline.tied_here:
        first, last = pipeline.tied_here
        if first.grad is not None and last.grad is not None:
            local(first.grad).add_(local(last.grad))
        last.grad = None
        return
    weight = tied_weight(decoder, pipeline)
    if weight is None or weight.grad is None:
        return
    gradient = local(weight.grad)
    peer = pipeline.rank_of_stage(pipeline.last_stage if 0 in pipeline.parts else 0)
    theirs = torch.empty_like(gradient)
    operations = [
        dist.P2POp(dist.isend, gradient.contiguous(), group=pipeline.group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=pipeline.group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient.add_(theirs)


def tied_weight(decoder: Decoder, pipeline: Pipeline) -> nn.Parameter | None:
    """The tied embedding, where its two stages are on two ranks and this is one of them."""
    ends = (0 in pipeline.parts) + (pipeline.last_stage in pipeline.parts)
    if not decoder.config.tie_word_embeddings or ends != 1:
        return None
    assert decoder.model.embed_tokens is not None
    return cast(nn.Parameter, decoder.model.embed_tokens.weight)


def _carried(batch: Batch) -> Batch:
    """The part of a batch that every stage is given with each microbatch."""
    names = ("positions", "labels", "sample", "places")
    return {name: batch[name] for name in names if name in batch}
