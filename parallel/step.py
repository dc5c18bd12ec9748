"""One model under a layout, and one optimizer step of it: the only path there is, whatever the layout.

`parallelize` applies the axes in their order. `forward_backward` leaves every parameter's gradient of the whole step in
place, summed over microbatches and ranks and divided by the step's valid tokens.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.decoder import Decoder
from models.dropout import DropoutKey
from models.initialise import initialise
from parallel.collectives import all_reduce
from parallel.config import Config
from parallel.gradients import ClipResult, clip_gradients
from parallel.layout import AXES, Layout
from parallel.loss import valid_tokens
from parallel.precision import DTYPES
from parallel.recompute import apply_recompute
from parallel.sharded import fill_block
from parallel.tensor import split_tensors, sum_partial_gradients
from parallel.zero import before_microbatch, mesh_layout, shard

Batch = dict[str, Tensor]


@dataclass
class ParallelModel:
    """A decoder that has been split over a mesh, and what a step of it needs to know."""

    decoder: Decoder
    config: Config
    layout: Layout
    mesh: DeviceMesh
    partial: list[str] = field(default_factory=list)
    """Parameters whose gradients tp ranks must still sum."""

    def sum_over_data(self, x: Tensor) -> Tensor:
        """Sum over all data ranks, the same on every rank."""
        for axis in ("dp_replicate", "dp_shard"):
            x = all_reduce(x, self.mesh.get_group(axis))
        return x


def make_mesh(config: Config, layout: Layout, device_type: str) -> DeviceMesh:
    """The DeviceMesh of a layout; torch.distributed must have been initialised."""
    grid = mesh_layout(layout, config.parallelism.zero)
    return init_device_mesh(device_type, tuple(getattr(grid, axis) for axis in AXES), mesh_dim_names=AXES)


def parallelize(decoder: Decoder, config: Config, layout: Layout, mesh: DeviceMesh) -> ParallelModel:
    """Split a decoder that is on the meta device, then give it memory and initial values: the order of the axes."""
    parallelism, precision = config.parallelism, config.precision
    model = ParallelModel(decoder, config, layout, mesh)
    decoder.to(DTYPES[precision.master])
    if layout.tp > 1:
        model.partial = split_tensors(decoder, mesh["tp"], parallelism.sequence_parallel, parallelism.loss_parallel)
    apply_recompute(decoder, parallelism.recompute)
    if layout.dp > 1 or precision.compute != precision.master:
        # An axis of one rank would still cost FSDP2 a collective.
        axes = ("dp_replicate", "dp_shard") if mesh.size(AXES.index("dp_replicate")) > 1 else ("dp_shard",)
        shard(decoder, mesh[axes], parallelism, precision)
    decoder.to_empty(device="cpu" if parallelism.offload else mesh.device_type)
    decoder.tie_weights()
    initialise(decoder, config.model, config.seed, fill_block)
    return model


def microbatches(batch: Batch, size: int) -> list[Batch]:
    """A data rank's batch in pieces of `size` sequences."""
    count = batch["tokens"].shape[0] // size
    return [{key: value[i * size : (i + 1) * size] for key, value in batch.items()} for i in range(count)]


def token_loss(decoder: Decoder, batch: Batch, config: Config, key: DropoutKey | None = None) -> Tensor:
    """Sum of the token losses of a microbatch."""
    document_ids = batch["document_ids"] if config.data.document_mask else None
    return decoder(batch["tokens"], batch["positions"], document_ids, batch["labels"], key)


def dropout_key(config: Config, batch: Batch, step: int) -> DropoutKey | None:
    """What the dropout masks of a microbatch depend on; None where there is no dropout."""
    if config.model.dropout == 0.0:
        return None
    shape, device = batch["tokens"].shape, batch["tokens"].device
    position = torch.arange(shape[1], device=device).expand(shape)
    return DropoutKey(config.seed, step, batch["sample"].unsqueeze(-1).expand(shape), position)


def forward_backward(model: ParallelModel, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    """Forward and backward of all microbatches of step `step` (from 0), gradients left in place.

    Returns this data rank's part of the loss (the parts of all data ranks add up to the step's loss) and the number of
    valid tokens of the whole step.
    """
    config = model.config
    tokens = model.sum_over_data(valid_tokens(batch["labels"]))
    divisor = tokens.clamp_min(1)
    pieces = microbatches(batch, config.data.micro_batch)
    losses = []
    for index, piece in enumerate(pieces):
        before_microbatch(model.decoder, config.parallelism.zero, last=index == len(pieces) - 1)
        loss = token_loss(model.decoder, piece, config, dropout_key(config, piece, step)) / divisor
        loss.backward()
        losses.append(loss.detach())
    if model.partial:
        sum_partial_gradients(model.decoder, model.partial, model.mesh.get_group("tp"))
    return torch.stack(losses).sum(), tokens


def clip(model: ParallelModel) -> ClipResult:
    """Clip by the norm of the whole model."""
    return clip_gradients(model.decoder, model.config.trainer.gradient_clip, model.mesh)
