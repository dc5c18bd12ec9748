"""Asynchronous tensor parallelism: each product of matrices runs while the pieces that it needs are still on their way.

With sequence parallelism every block begins by gathering pieces of the sequence and ends by summing and dealing them
out. Cut into as many parts as there are ranks, product and transfer overlap (Wang et al., 2023, "Overlap communication
with dependent computation via decomposition", ASPLOS). The two operations are torch's, on symmetric memory: GPUs of one
node that reach one another's memory.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from models.errors import ConfigError


def open_symmetric_memory(mesh: DeviceMesh) -> None:
    """Prepare the ranks of the mesh for both operations. Raises ConfigError where there are no GPUs."""
    if mesh.device_type != "cuda":
        raise ConfigError(
            f"parallelism.async_tp=true works in the memory of GPUs; this run is on {mesh.device_type}. Write "
            f"parallelism.async_tp=false."
        )
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)


class _GatherMatmul(torch.autograd.Function):
    """Products of the whole sequence with several weights (rows, hidden), from pieces x (batch, seq / tp, hidden)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        whole, products = torch.ops.symm_mem.fused_all_gather_matmul(
            x, [weight.t() for weight in weights], 1, group.group_name
        )
        ctx.group = group
        ctx.save_for_backward(whole, *weights)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        of_x = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            torch.cat(grads, -1), torch.cat(weights), "sum", 1, ctx.group.group_name
        )
        return of_x, None, *(grad.flatten(0, 1).t() @ whole.flatten(0, 1) for grad in grads)


class _MatmulScatter(torch.autograd.Function):
    """This rank's piece (batch, seq / tp, hidden) of the ranks' summed products of y (batch, seq, columns)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(y, weight)
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(y, weight.t(), "sum", 1, group.group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        whole, (of_y,) = torch.ops.symm_mem.fused_all_gather_matmul(grads[0], [weight], 1, ctx.group.group_name)
        return of_y, whole.flatten(0, 1).t() @ y.flatten(0, 1), None


def gather_matmul(x: Tensor, weights: list[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    """x (batch, seq / tp, hidden) of all ranks times each weight (rows, hidden): (batch, seq, rows) each."""
    return cast(tuple[Tensor, ...], _GatherMatmul.apply(x, group, *weights))


def matmul_scatter(y: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """y (batch, seq, columns) times weight (hidden, columns), summed over ranks: a (batch, seq / tp, hidden) each."""
    return _MatmulScatter.apply(y, weight, group)
