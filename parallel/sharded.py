"""Parameters split over ranks (DTensors): the block a rank holds, where it lies in the whole, the whole itself.

A parameter that is not split is an ordinary tensor and all of this is the identity for it.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.random import fill_normal
from parallel.layout import piece

# Gathering over two axes in turn is slower than over one; `whole` is for looking at values, not for training.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def block_parameter(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """A parameter that is this rank's block of `whole` (on the meta device), split over the axes of `mesh`."""
    shape, place = list(whole.shape), mesh.get_coordinate()
    assert place is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] = len(piece(shape[placement.dim], mesh.size(axis), place[axis]))
    block = torch.empty(shape, dtype=whole.dtype, device=whole.device)
    tensor = DTensor.from_local(block, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(tensor, requires_grad=whole.requires_grad)


def local(x: Tensor) -> Tensor:
    """The block of `x` that this rank holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def offset(x: Tensor) -> tuple[int, ...]:
    """Index of the block's first element in the whole."""
    if not isinstance(x, DTensor):
        return (0,) * x.dim()
    return tuple(compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1])


def whole(x: Tensor) -> Tensor:
    """The whole of `x`, on every rank: a collective over all ranks that hold a part of it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def split_axes(x: Tensor) -> tuple[str, ...]:
    """The mesh axes that `x` is split over (not those that it is replicated over)."""
    if not isinstance(x, DTensor):
        return ()
    names = x.device_mesh.mesh_dim_names
    assert names is not None
    return tuple(name for name, placement in zip(names, x.placements, strict=True) if not placement.is_replicate())


@torch.no_grad()
def fill_block(x: Tensor, seed: int, name: str, std: float) -> None:
    """Fill this rank's block with the values that the whole parameter has there."""
    block = local(x)
    if block.numel():
        fill_normal(block, seed, name, std, tuple(x.shape), offset(x))
