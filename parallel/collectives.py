"""The collectives, each a named function whose signature shows its group; and the pairs that autograd needs.

A group of one rank, or None, sends nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

# torch 2.13 renames these two; the old names warn there, the new ones are missing before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def size_of(group: ProcessGroup | None) -> int:
    """Ranks in a group; None is a group of one."""
    return 1 if group is None else group.size()


def all_reduce(x: Tensor, group: ProcessGroup | None, op: Any = ReduceOp.SUM) -> Tensor:
    """Sum (or `op`) of the ranks' x, the same on every rank; x itself is left as it is."""
    if size_of(group) == 1:
        return x
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=group)
    return result


def all_gather(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """The ranks' x (equal shapes), one after another along `dim`."""
    ranks = size_of(group)
    if ranks == 1:
        return x
    front = x.movedim(dim, 0).contiguous()
    result = front.new_empty((ranks * front.shape[0], *front.shape[1:]))
    _all_gather(result, front, group=group)
    return result.movedim(0, dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
    """This rank's slice along `dim` of the sum of the ranks' x; `dim` must divide by the ranks."""
    ranks = size_of(group)
    if ranks == 1:
        return x
    front = x.movedim(dim, 0).contiguous()
    result = front.new_empty((front.shape[0] // ranks, *front.shape[1:]))
    _reduce_scatter(result, front, group=group)
    return result.movedim(0, dim)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return all_gather(x, 1, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0]
        return (reduce_scatter(grad, 1, ctx.group) if ctx.sequence else all_reduce(grad, ctx.group)), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return reduce_scatter(x, 1, group) if sequence else all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (all_gather(grads[0], 1, ctx.group) if ctx.sequence else grads[0]), None, None


def enter_tensor_parallel(x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
    """Where every rank goes on with its own part of the weights: "f" of Megatron-LM (Shoeybi et al., 2019, figure 3).

    x (batch, seq, hidden) is the same on all ranks and stays so, and its gradients are summed; with `sequence`
    (Korthikanti et al., 2022, figure 5) every rank brings its piece of the sequence and all get the whole.
    """
    return _Enter.apply(x, group, sequence)


def leave_tensor_parallel(x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
    """Where the ranks' partial results are summed, "g" of the same figures; with `sequence` each keeps its piece."""
    return _Leave.apply(x, group, sequence)
