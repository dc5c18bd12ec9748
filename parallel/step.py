"""One model under a layout, and one optimizer step of it: the only path there is, whatever the layout.

`parallelize` applies the axes in their order. `forward_backward` leaves every parameter's gradient of the whole step in
place, summed over microbatches and ranks and divided by the step's valid tokens.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.counts import adapter_shapes, parameter_shapes
from models.decoder import Decoder
from models.dropout import DropoutKey
from models.initialise import initialise
from parallel.balance import ring_and_ulysses
from parallel.collectives import all_reduce
from parallel.compiled import compile_layers
from parallel.config import Config
from parallel.context import Batch, Context, document_ids
from parallel.expert import ExpertGroups, connect_experts, mixtures, split_experts
from parallel.gradients import ClipResult, clip_gradients
from parallel.layout import AXES, EXPERT_AXES, Layout, expert_mesh_sizes, mesh_layout
from parallel.loss import valid_tokens
from parallel.pipeline import Pipeline, build_parts, exchange_tied_gradients, tied_weight
from parallel.precision import DTYPES
from parallel.recompute import apply_recompute
from parallel.route import node_groups
from parallel.routing import RoutingBook
from parallel.sharded import fill_block, whole
from parallel.tensor import split_tensors, sum_partial_gradients
from parallel.zero import before_microbatch, shard


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
    expert_mesh: DeviceMesh | None = None
    """The ranks as experts see them; None for a dense decoder."""
    routing: RoutingBook | None = None
    """What routers did in the last step; None for a dense decoder."""

    def own_part(self, batch: Batch) -> Batch:
        """What this rank holds of its data rank's batch: everything without context parallelism."""
        return batch if self.context is None else self.context.cut(batch)

    def group(self, axis: str) -> ProcessGroup:
        """This rank's group along an axis of either mesh."""
        mesh = self.mesh if axis in AXES else self.expert_mesh
        assert mesh is not None
        return mesh.get_group(axis)

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
            tensor = whole(of(parameter)).detach().to(self.pipeline.device, copy=True)
        else:
            shape = (parameter_shapes(self.config.model) | adapter_shapes(self.config.model))[name]
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
    if config.model.moe.num_experts:
        sizes = tuple(expert_mesh_sizes(layout, parallelism.zero))
        model.expert_mesh = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=EXPERT_AXES)
        if layout.ep * layout.etp > 1:
            split_experts(decoder, model.expert_mesh["ep", "etp"])
        connect_experts(decoder, _expert_groups(model))
        model.routing = RoutingBook(config, layout, mixtures(decoder), device)
    if layout.tp > 1:
        model.partial = split_tensors(decoder, mesh["tp"], parallelism)
    parts = build_parts(decoder, parallelism, mesh.get_local_rank("pp"))
    for part in parts.values():
        # An axis of one rank would still cost FSDP2 a collective.
        copies = layout.dp_replicate * layout.expert_dp if config.model.moe.num_experts else 1
        if layout.dp * layout.cp > 1 or copies > 1 or precision.compute != precision.master:
            expert_mesh = None if model.expert_mesh is None else _data_axes(model.expert_mesh, "expert_dp")
            shard(part, _data_axes(mesh, "dp_shard"), expert_mesh, parallelism, precision)
        with fake or nullcontext():
            part.to_empty(device="cpu" if parallelism.offload else device)
            if parallelism.offload:  # routers' biases are no weights: they are used where tokens are
                _move_buffers(part, device)
        part.tie_weights()
    if fake is None:
        initialise(decoder, config.model, config.seed, fill_block)
    if layout.cp > 1:
        model.context = Context(config, layout, dist.get_rank())
        for part in parts.values():
            model.context.install(part)
    if config.trainer.compile and fake is None:
        plain = layout.cp == 1 and not config.data.document_mask and config.model.sliding_window is None
        compile_layers(decoder, device, plain)
    apply_recompute(decoder, parallelism.recompute, keep_attention=ring_and_ulysses(parallelism)[0] == 1)
    if layout.pp > 1:
        model.pipeline = Pipeline(parts, config, layout, mesh.get_group("pp"), device)
    return model


def _data_axes(mesh: DeviceMesh, split: str) -> DeviceMesh:
    return mesh["dp_replicate", split] if mesh["dp_replicate"].size() > 1 else mesh[split]


def _expert_groups(model: ParallelModel) -> ExpertGroups:
    parallelism, layout = model.config.parallelism, model.layout
    # The mesh takes context ranks for data ranks, so that it has no group of those that share sequences.
    cp = (dist.new_subgroups_by_enumeration(layout.groups("cp").tolist())[0],) if layout.cp > 1 else ()
    return ExpertGroups(
        ep=model.group("ep"),
        etp=model.group("etp"),
        tokens=model.group("tp") if layout.tp > 1 and not parallelism.sequence_parallel else None,
        sequence=(*cp, model.group("tp")),
        step=tuple(model.group(axis) for axis in AXES[1:]),
        nodes=node_groups(layout, parallelism.ep_nodes),
    )


def _move_buffers(part: nn.Module, device: torch.device) -> None:
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def microbatches(batch: Batch, size: int) -> list[Batch]:
    """A data rank's batch in pieces of `size` sequences."""
    count = batch["tokens"].shape[0] // size
    return [{key: value[i * size : (i + 1) * size] for key, value in batch.items()} for i in range(count)]


def token_loss(decoder: Decoder, batch: Batch, config: Config, told: dict[str, Any] | None = None) -> Tensor:
    """Sum of the token losses of a microbatch; `told` is what the decoder is told of it besides."""
    documents = document_ids(batch, config)
    return decoder(batch["tokens"], batch["positions"], documents, batch["labels"], **told or {})


def dropout_key(model: ParallelModel, batch: Batch, step: int) -> DropoutKey | None:
    """Which tokens of which step a microbatch is; None where neither dropout nor routing needs to know."""
    if model.config.model.dropout == 0.0 and model.routing is None:
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
    told = _what_is_told(model, batch, step)
    if model.pipeline is not None:
        loss = model.pipeline.forward_backward(batch, divisor, told)
    else:
        loss = _one_after_another(model, batch, divisor, told)
    if model.partial:
        sum_partial_gradients(model.decoder, model.partial, model.mesh.get_group("tp"))
    if model.pipeline is not None:
        exchange_tied_gradients(model.decoder, model.pipeline)
    if model.routing is not None:
        model.routing.close()
    return loss, tokens


Told = Callable[[Batch], dict[str, Any]]


def _what_is_told(model: ParallelModel, batch: Batch, step: int) -> Told:
    """For a microbatch: its dropout key, and what its routers are told.

    Routers that balance the global batch must know its load before the first backward pass: with several microbatches
    that takes one more forward pass of all of them.
    """
    routing = model.routing

    def told(piece: Batch) -> dict[str, Any]:
        key = dropout_key(model, piece, step)
        return {"dropout_key": key} if routing is None else {"dropout_key": key, "routing": routing.step_of(piece)}

    if routing is not None:
        routing.open(batch)
        if routing.must_count:
            with routing.counting(), torch.no_grad():
                for piece in microbatches(batch, model.config.data.micro_batch):
                    if model.pipeline is not None:
                        model.pipeline.forward(piece, told)
                    else:
                        token_loss(model.decoder, piece, model.config, told(piece))
    return told


def _one_after_another(model: ParallelModel, batch: Batch, divisor: Tensor, told: Told) -> Tensor:
    config = model.config
    pieces = microbatches(batch, config.data.micro_batch)
    losses = []
    for index, piece in enumerate(pieces):
        before_microbatch(model.decoder, config.parallelism.zero, last=index == len(pieces) - 1)
        loss = token_loss(model.decoder, piece, config, told(piece)) / divisor
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model: ParallelModel, batch: Batch) -> Tensor | None:
    """Sum of the token losses of this rank's part of a batch (`ParallelModel.own_part`).

    None on a rank that does not hold the last pipeline stage.
    """
    if model.pipeline is not None:
        return model.pipeline.forward(batch)
    return token_loss(model.decoder, batch, model.config)


def clip(model: ParallelModel) -> ClipResult:
    """Clip by the norm of the whole model."""
    counted_elsewhere = None
    if model.pipeline is not None and model.pipeline.holds_loss:
        counted_elsewhere = tied_weight(model.decoder, model.pipeline)
    return clip_gradients(model.decoder, model.config.trainer.gradient_clip, model.group, counted_elsewhere)
