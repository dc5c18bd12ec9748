"""The collectives, each a named function whose signature shows its group; and the pairs that autograd needs.

A group of one rank, or None, sends nothing.
"""

from collections.abc import Callable
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


def all_to_all(x: Tensor, split: int, join: int, group: ProcessGroup | None) -> Tensor:
    """x cut along `split`, a piece for each rank; what comes from the ranks is joined along `join` in their order."""
    if size_of(group) == 1:
        return x
    pieces = torch.stack(x.chunk(size_of(group), split))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return torch.cat(received.unbind(0), join)


Transfer = tuple[Tensor | None, int, Tensor | None, int]
"""A tensor to send and the rank in the group that gets it, a tensor to fill and the rank that it comes from."""


def exchange(transfer: Transfer, group: ProcessGroup, tag: int) -> list[dist.Work]:
    """Begin to send one tensor and to receive another, either of which may be None; wait for what is returned."""
    to_send, target, to_fill, source = transfer
    operations = []
    if to_send is not None:
        operations.append(dist.P2POp(dist.isend, to_send, group=group, group_peer=target, tag=tag))
    if to_fill is not None:
        operations.append(dist.P2POp(dist.irecv, to_fill, group=group, group_peer=source, tag=tag))
    return dist.batch_isend_irecv(operations) if operations else []


def all_gather_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """`all_gather` along the first dimension into a tensor that is there."""
    _all_gather(out, x, group=group)


def reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup | None) -> None:
    """`reduce_scatter` along the first dimension into a tensor that is there."""
    _reduce_scatter(out, x, group=group)


def begin_all_reduce(x: Tensor, group: ProcessGroup | None, op: Any = ReduceOp.SUM) -> Callable[[], Tensor]:
    """Start an all_reduce of x, which is given up to it; calling what is returned waits for the result."""
    work = dist.all_reduce(x, op=op, group=group, async_op=True)
    return lambda: _finished(work, x)


def begin_all_gather(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start an all_gather of the ranks' x along dimension 0; calling what is returned waits for the result."""
    result = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    work = _all_gather(result, x, group=group, async_op=True)
    return lambda: _finished(work, result)


def _finished(work: Any, result: Tensor) -> Tensor:
    if work is not None:
        work.wait()
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        # Contiguous, or else each product that follows would copy it, and keep its copy.
        return all_gather(x, 1, group).contiguous() if sequence else x.view_as(x)

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
        return (all_gather(grads[0], 1, ctx.group).contiguous() if ctx.sequence else grads[0]), None, None


@torch.compiler.disable
def enter_tensor_parallel(x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
    """Where every rank goes on with its own part of the weights: "f" of Megatron-LM (Shoeybi et al., 2019, figure 3).

    x (batch, seq, hidden) is the same on all ranks and stays so, and its gradients are summed; with `sequence`
    (Korthikanti et al., 2022, figure 5) every rank brings its piece of the sequence and all get the whole.
    """
    return _Enter.apply(x, group, sequence)


@torch.compiler.disable
def leave_tensor_parallel(x: Tensor, group: ProcessGroup, sequence: bool) -> Tensor:
    """Where the ranks' partial results are summed, "g" of the same figures; with `sequence` each keeps its piece."""
    return _Leave.apply(x, group, sequence)


@torch.compiler.disable
def gather_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' pieces of x (batch, seq, ...), one after another; gradients are summed and each rank gets its own."""
    return _Enter.apply(x, group, True)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: ProcessGroup) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return all_to_all(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grads[0], ctx.join, ctx.split, ctx.group), None, None, None


def deal_out(x: Tensor, split: int, join: int, group: ProcessGroup) -> Tensor:
    """`all_to_all` with its gradient, which goes the other way."""
    return _AllToAll.apply(x, split, join, group)
