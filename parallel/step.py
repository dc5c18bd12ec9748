"""One model under a layout, and one optimizer step of it: the only path there is, whatever the layout.

`parallelize` applies the axes in their order. `forward_backward` leaves every parameter's gradient of the whole step in
place, summed over microbatches and ranks and divided by the step's valid tokens.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.counts import parameter_shapes
from models.decoder import Decoder
from models.dropout import DropoutKey
from models.initialise import initialise
from parallel.balance import ring_and_ulysses
from parallel.collectives import all_reduce
from parallel.config import Config
from parallel.context import Context
from parallel.gradients import ClipResult, clip_gradients
from parallel.layout import AXES, Layout, mesh_layout
from parallel.loss import valid_tokens
from parallel.pipeline import Pipeline, build_parts, exchange_tied_gradients, tied_weight
from parallel.precision import DTYPES
from parallel.recompute import apply_recompute
from parallel.sharded import fill_block, whole
from parallel.tensor import split_tensors, sum_partial_gradients
from parallel.zero import before_microbatch, shard

Batch = dict[str, Tensor]


@dataclass
class ParallelModel:
    """A decoder that has been split over a mesh, and what a step of it needs to know."""

    decoder: Decoder
    """This rank's layers, all its pipeline stages together."""
    config: Config
    layout: Layout
    mesh: DeviceMesh
    partial: list[str] = field(default_factory=list)
    """Parameters whose gradients tp ranks must still sum."""
    pipeline: Pipeline | None = None
    context: Context | None = None

    def own_part(self, batch: Batch) -> Batch:
        """What this rank holds of its data rank's batch: everything without context parallelism."""
        return batch if self.context is None else self.context.cut(batch)

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Sum over all ranks that have tokens of their own, data and context ranks; the same on every rank."""
        for axis in ("dp_replicate", "dp_shard"):
            x = all_reduce(x, self.mesh.get_group(axis))
        return x

    def sum_of_parts(self, x: Tensor) -> Tensor:
        """Sum of what ranks have of losses: over data ranks, and over stages, of which only the last has any."""
        return self.sum_over_data(all_reduce(x, self.mesh.get_group("pp")))

    def whole_everywhere(self, name: str, of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """The whole of a parameter (or of its gradient: whatever `of` takes from it), on every rank.

        A collective over all ranks: those that hold the parameter put it together, other pipeline ranks are sent it.
        """
        parameter = dict(self.decoder.named_parameters()).get(name)
        if self.pipeline is None:
            assert parameter is not None
            return whole(of(parameter))
        owner = self.pipeline.owner(name)
        if parameter is not None:
            tensor = whole(of(parameter)).detach().clone()
        else:
            shape = parameter_shapes(self.config.model)[name]
            tensor = torch.empty(shape, dtype=DTYPES[self.config.precision.master], device=self.pipeline.device)
        dist.broadcast(tensor, group=self.pipeline.group, group_src=owner)
        return tensor

    def sequence_piece(self, length: int) -> slice:
        """Which of the `length` tokens of its part it holds between blocks: all without sequence parallelism."""
        if not self.config.parallelism.sequence_parallel:
            return slice(0, length)
        piece, rank = length // self.layout.tp, self.mesh.get_local_rank("tp")
        return slice(rank * piece, (rank + 1) * piece)


def make_mesh(config: Config, layout: Layout, device_type: str) -> DeviceMesh:
    """The DeviceMesh of a layout; torch.distributed must have been initialised."""
    grid = mesh_layout(layout, config.parallelism.zero)
    return init_device_mesh(device_type, tuple(getattr(grid, axis) for axis in AXES), mesh_dim_names=AXES)


def parallelize(
    decoder: Decoder, config: Config, layout: Layout, mesh: DeviceMesh, fake: FakeTensorMode | None = None
) -> ParallelModel:
    """Split this rank's decoder (`build_decoder`, on the meta device), then give it memory and initial values.

    The order of the axes stands here. Under `fake` (a dry run) there is no memory, and there are no values.
    """
    parallelism, precision = config.parallelism, config.precision
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    model = ParallelModel(decoder, config, layout, mesh)
    decoder.to(DTYPES[precision.master])
    if layout.tp > 1:
        model.partial = split_tensors(decoder, mesh["tp"], parallelism)
    apply_recompute(decoder, parallelism.recompute, keep_attention=ring_and_ulysses(parallelism)[0] == 1)
    parts = build_parts(decoder, parallelism, mesh.get_local_rank("pp"))
    for part in parts.values():
        if layout.dp * layout.cp > 1 or precision.compute != precision.master:
            # An axis of one rank would still cost FSDP2 a collective.
            axes = ("dp_replicate", "dp_shard") if mesh.size(AXES.index("dp_replicate")) > 1 else ("dp_shard",)
            shard(part, mesh[axes], parallelism, precision)
        with fake or nullcontext():
            part.to_empty(device="cpu" if parallelism.offload else device)
    decoder.tie_weights()
    if fake is None:
        initialise(decoder, config.model, config.seed, fill_block)
    if layout.cp > 1:
        model.context = Context(config, layout, dist.get_rank())
        for part in parts.values():
            model.context.install(part)
    if layout.pp > 1:
        model.pipeline = Pipeline(parts, config, layout, mesh.get_group("pp"), device)
    return model


def microbatches(batch: Batch, size: int) -> list[Batch]:
    """A data rank's batch in pieces of `size` sequences."""
    count = batch["tokens"].shape[0] // size
    return [{key: value[i * size : (i + 1) * size] for key, value in batch.items()} for i in range(count)]


def token_loss(decoder: Decoder, batch: Batch, config: Config, key: DropoutKey | None = None) -> Tensor:
    """Sum of the token losses of a microbatch."""
    document_ids = batch["document_ids"] if config.data.document_mask else None
    return decoder(batch["tokens"], batch["positions"], document_ids, batch["labels"], key)


def dropout_key(model: ParallelModel, batch: Batch, step: int) -> DropoutKey | None:
    """What the dropout masks of a microbatch depend on; None where there is no dropout."""
    if model.config.model.dropout == 0.0:
        return None
    length = batch["labels"].shape[1]
    places = batch["places"] if "places" in batch else torch.arange(length, device=batch["labels"].device).unsqueeze(0)
    sample, position = batch["sample"].unsqueeze(-1), places[:, model.sequence_piece(length)]
    return DropoutKey(model.config.seed, step, *torch.broadcast_tensors(sample, position))


def forward_backward(model: ParallelModel, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    """Forward and backward of all microbatches of step `step` (from 0), gradients left in place.

    Returns this rank's part of the loss (see `sum_of_parts`) and the number of valid tokens of the whole step.
    """
    batch = model.own_part(batch)
    tokens = model.sum_over_data(valid_tokens(batch["labels"]))
    divisor = tokens.clamp_min(1)
    if model.pipeline is not None:
        loss = model.pipeline.forward_backward(batch, divisor, lambda piece: dropout_key(model, piece, step))
    else:
        loss = _one_after_another(model, batch, divisor, step)
    if model.partial:
        sum_partial_gradients(model.decoder, model.partial, model.mesh.get_group("tp"))
    if model.pipeline is not None:
        exchange_tied_gradients(model.decoder, model.pipeline)
    return loss, tokens


def _one_after_another(model: ParallelModel, batch: Batch, divisor: Tensor, step: int) -> Tensor:
    config = model.config
    pieces = microbatches(batch, config.data.micro_batch)
    losses = []
    for index, piece in enumerate(pieces):
        before_microbatch(model.decoder, config.parallelism.zero, last=index == len(pieces) - 1)
        loss = token_loss(model.decoder, piece, config, dropout_key(model, piece, step)) / divisor
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model: ParallelModel, batch: Batch) -> Tensor | None:
    """Sum of the token losses of this rank's part of a batch (`ParallelModel.own_part`).

    None on a rank that does not hold the last pipeline stage.
    """
    if model.pipeline is not None:
        return model.pipeline.evaluate(batch)
    return token_loss(model.decoder, batch, model.config)


def clip(model: ParallelModel) -> ClipResult:
    """Clip by the norm of the whole model."""
    counted_elsewhere = None
    if model.pipeline is not None and model.pipeline.holds_loss:
        counted_elsewhere = tied_weight(model.decoder, model.pipeline)
    return clip_gradients(model.decoder, model.config.trainer.gradient_clip, model.mesh, counted_elsewhere)
