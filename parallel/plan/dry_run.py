"""A step of one rank at its full world size, on a laptop: the very model, schedule and optimizer, without data.

A fake process group takes part in every collective and sends nothing; fake tensors have shapes and types but no
memory. What is seen is what the real step would do: every collective with its bytes, and every tensor from its making
to its end, so that the peak of memory is measured and not estimated. plan/memory.py and plan/traffic.py say the same by
formula, and tests hold the two against each other.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import InferenceMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from parallel.config import Config
from parallel.context import Batch
from parallel.expert import ExpertDispatch, mixtures
from parallel.layout import Layout
from parallel.pipeline import build_decoder
from parallel.plan.traffic import Traffic, ring_bytes
from parallel.sharded import local
from parallel.step import ParallelModel, clip, forward_backward, make_mesh, parallelize

OPERATIONS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::send": "send",
}
"""The collectives that are counted, by the name under which torch dispatches them."""
NOT_COUNTED = ("c10d::barrier", "c10d::recv_")
"""What carries nothing, and the other end of a send."""


@dataclass(frozen=True)
class DryRun:
    """What one rank's step came to, in bytes."""

    rank: int
    coordinates: dict[str, int]
    parameters: int
    """This rank's shards of the master weights."""
    gradients: int
    """Gradients as the optimizer gets them."""
    optimizer: int
    """What the optimizer keeps between steps."""
    peak: dict[str, int]
    """The moment of the step at which most is held, by kind; `parameters` and `optimizer` included."""
    traffic: list[Traffic]
    seconds: float

    @property
    def total(self) -> int:
        """The peak of everything."""
        return sum(self.peak.values())


class Ledger(TorchDispatchMode):
    """Adds up calls and bytes sent of every collective, by axis and operation."""

    def __init__(self, axes: dict[str, str]) -> None:
        """`axes` gives each process group's axis by the group's name."""
        super().__init__()
        self.axes = axes
        self.calls: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("c10d::") and name not in NOT_COUNTED:
            assert name in OPERATIONS, f"a collective that nobody counts: {name}"
            self._count(OPERATIONS[name], args)
        return function(*args, **(kwargs or {}))

    def _count(self, operation: str, args: Any) -> None:
        group = next(arg for arg in args if "ProcessGroup" in str(type(arg)) or "ProcessGroup" in str(arg))
        ranks = dist.ProcessGroup.unbox(group)
        if ranks.size() > 1:
            tensors = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)]
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            key = (self.axes.get(ranks.group_name, "world"), operation)
            self.calls[key] += 1
            uneven = operation == "all_to_all" and len(args[4]) > 0  # told what leaves the rank
            if uneven:
                size = args[1].numel() * args[1].element_size()
            self.sent[key] += size if uneven or operation == "send" else ring_bytes(operation, size, ranks.size())

    def rows(self) -> list[Traffic]:
        """What was counted."""
        return [Traffic(*key, self.calls[key], self.sent[key]) for key in self.calls]


class MemoryLedger(TorchDispatchMode):
    """Follows every storage from its making to its end and keeps, by kind, what was held when it was most.

    What is not known to be anything else is an activation or a temporary.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.held: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self._total = self._most = 0
        self._known: Any = WeakIdKeyDictionary()
        self._decoder = decoder
        self._hooked: set[int] = set()
        self._in_loss = False
        self._reduces = False
        """Whether FSDP2 has laid out gradients to reduce them."""
        self._shadow = False
        """Whether DTensor is asking what shape the whole of a result would have: nothing that a rank holds."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch comes back here with the local tensors
        result = function(*args, **(kwargs or {}))
        if self._shadow:
            return result
        name = function.name()
        if name == "fsdp::split_with_sizes_copy":
            self._mark(kwargs["out"], "gathered")
        elif name == "fsdp::chunk_cat":
            self._mark(kwargs["out"], "communication")
        elif name == "fsdp::all_gather_copy_in":
            self._mark(args[1], "communication")
        copied = name in ("aten::_to_copy", "aten::add.Tensor") and self._kind(args[0]) == "gradients"
        reduced = self._reduces and name == "aten::empty.memory_format"  # where FSDP2 puts what it has reduced
        kind = "gradients" if copied or reduced else None
        self._reduces = name == "fsdp::chunk_cat" or (self._reduces and not reduced)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor, kind or ("loss" if self._in_loss else "activations"))
        return result

    def hold(self, tensors: Any, kind: str) -> None:
        """Count what was there before."""
        for tensor in tensors:
            self._see(local(tensor), kind)

    def _see(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        entry = _Entry(self, kind)
        self._known[storage] = entry
        entry.resize(storage.nbytes())

    def _kind(self, tensor: Any) -> str | None:
        entry = self._known.get(tensor.untyped_storage()) if isinstance(tensor, Tensor) else None
        return None if entry is None else entry.kind

    def _mark(self, tensors: Any, kind: str) -> None:
        for tensor in tree_leaves(tensors):
            entry = self._known.get(tensor.untyped_storage()) if isinstance(tensor, Tensor) else None
            if entry is not None:
                size = entry.size
                entry.resize(0)
                entry.kind = kind
                entry.resize(size)

    def change(self, kind: str, by: int) -> None:
        """So many bytes more of a kind are held."""
        self.held[kind] += by
        self._total += by
        if self._total > self._most:
            self._most, self.peak = self._total, dict(self.held)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what happens inside: also the storages that FSDP2 empties and fills, and gradients."""
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if (entry := self._known.get(storage)) is not None:
                entry.resize(size)
            return result

        def propagated(*args: Any) -> Any:
            self._shadow = True
            try:
                return propagate(*args)
            finally:
                self._shadow = False

        weights = PipelineStage.backward_weight_one_chunk

        def for_weights(stage: Any, *arguments: Any, **named: Any) -> None:
            weights(stage, *arguments, **named)
            self._mark(list(_gradients_of(stage.submod)), "gradients")  # no hook of a parameter's has seen them

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._before),
            nn.modules.module.register_module_forward_hook(self._after),
        ]
        with (
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagated),
            patch.object(PipelineStage, "backward_weight_one_chunk", for_weights),
            self,
        ):
            yield
        for hook in hooks:
            hook.remove()

    def _before(self, module: nn.Module, _: Any) -> None:
        self._in_loss |= module is getattr(self._decoder, "lm_head", None)

    def _after(self, module: nn.Module, *_: Any) -> None:
        """Only now are a module's parameters those that FSDP2 has gathered, whose gradients will be the whole ones."""
        self._in_loss &= module is not getattr(self._decoder, "lm_head", None)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(lambda p: self._mark(local(p.grad), "gradients"))
                if self._kind(local(parameter)) == "activations":
                    self._mark(local(parameter), "gathered")


def _gradients_of(stage: nn.Module) -> Iterator[Tensor]:
    """The gradients of a stage's whole parameters, also those that FSDP2 keeps beside the parameters."""
    yield from (local(parameter.grad) for parameter in stage.parameters() if parameter.grad is not None)
    for module in stage.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []:
            sums = (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)
            yield from (local(gradient) for gradient in sums if gradient is not None)


class _Entry:
    """A storage that is held; it ends when the storage does."""

    def __init__(self, ledger: MemoryLedger, kind: str) -> None:
        self.ledger, self.kind, self.size = ledger, kind, 0

    def resize(self, size: int) -> None:
        self.ledger.change(self.kind, size - self.size)
        self.size = size

    def __del__(self) -> None:
        self.resize(0)


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A process group of `world` ranks of which this process is one, and the only one there is."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(config: Config, layout: Layout, rank: int, make_optimizer: Callable[[Any, nn.Module], Optimizer]) -> DryRun:
    """One training step of `rank`; raises whatever the real step would raise.

    Where documents end is known from data only: a sequence is taken as one document, with which attention costs most.
    """
    started = time.perf_counter()
    config = replace(config, data=replace(config.data, document_mask=False))
    with fake_world(rank, layout.world):
        mesh = make_mesh(config, layout, "cpu")
        with torch.device("meta"):
            decoder = build_decoder(config.model, config.parallelism, layout.coordinates(rank)["pp"])
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = parallelize(decoder, config, layout, mesh, mode)
        if model.pipeline is not None:
            _skip_vote(model.pipeline.schedule)
        with mode:
            batch = _batch(config, layout)
            optimizer = make_optimizer(config.optimizer, decoder)
            parameters = list(decoder.parameters())
            memory, ledger = MemoryLedger(decoder), Ledger(group_axes(model))
            memory.hold(parameters, "parameters")
            with memory.watching(), ledger:
                forward_backward(model, batch, 0)
            rows = ledger.rows()
            with memory.watching():
                clip(model)
            gradients = _bytes(parameter.grad for parameter in parameters if parameter.grad is not None)
            optimizer.step()
        state = _bytes(value for entry in optimizer.state.values() for value in tree_leaves(entry))
    peak = memory.peak | {"optimizer": state}
    coordinates = layout.coordinates(rank)
    seconds = time.perf_counter() - started
    return DryRun(rank, coordinates, _bytes(parameters), gradients, state, peak, rows, seconds)


def _bytes(tensors: Any) -> int:
    return sum(local(t).numel() * t.element_size() for t in tensors if isinstance(t, Tensor) and t.dim())


def _batch(config: Config, layout: Layout) -> Batch:
    sequences = config.data.global_batch // layout.dp
    shape = (sequences, config.data.seq_len)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "positions", "document_ids", "labels")}
    return batch | {"sample": torch.zeros(sequences, dtype=torch.int64)}


def group_axes(model: ParallelModel) -> dict[str, str]:
    """The axis of every process group of a model, by the group's name; an axis over all ranks may be `world`."""
    mesh, experts = model.mesh, model.expert_mesh
    groups: list[tuple[dist.ProcessGroup, str]] = []
    if experts is not None:
        names = {"dp_replicate": "expert_replicate", "expert_dp": "expert_dp", "ep": "ep", "etp": "etp"}
        groups += [(experts.get_group(axis), name) for axis, name in names.items()]
        dispatches = [block.dispatch for block in mixtures(model.decoder)]
        connected = [dispatch.groups for dispatch in dispatches if isinstance(dispatch, ExpertDispatch)]
        groups += [(group, "cp") for each in connected for group in each.sequence[:-1]]
    groups += [(mesh.get_group(axis), axis) for axis in mesh.mesh_dim_names or ()]
    if model.context is not None:
        groups += [(group, "cp") for group in (model.context.ring, model.context.ulysses) if group is not None]
    if experts is not None:
        groups.append((dist.distributed_c10d._get_default_group(), "world"))  # see traffic.by_group
    return {str(group.group_name): axis for group, axis in groups}


def _skip_vote(schedule: Any) -> None:
    """Before its first step a schedule lets stages vote on whether shapes are known; ours are, and a fake vote is void.

    Private: `_warmup_p2p` and `_inference_mode` of torch.distributed.pipelining 2.13.
    """

    def known(stages: Any, *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = known
