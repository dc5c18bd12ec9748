"""The gradient norm of the whole model, clipping by it, and what happens when it is not finite."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim import Optimizer

from models.errors import RunError
from parallel.collectives import all_reduce
from parallel.layout import AXES, EXPERT_AXES
from parallel.sharded import local, split_axes


class NonFiniteGradientError(RunError):
    """A gradient holds NaN or infinity. Raised before the update, so the weights are those of the step before."""


@dataclass(frozen=True)
class ClipResult:
    """Scalars on the device: the norm before clipping, and the factor that every gradient was multiplied by."""

    norm: Tensor
    factor: Tensor


GroupOf = Callable[[str], ProcessGroup]
"""The group of an axis by its name."""


def gradient_norm(model: nn.Module, group: GroupOf, counted_elsewhere: nn.Parameter | None = None) -> Tensor:
    """L2 norm of all gradients, each parameter counted once however it is split, in float32 or better: a scalar.

    Squares are summed per set of axes that parameters are split over; each axis then adds up, in one all-reduce, those
    sets that it is in, and at last pipeline ranks add up theirs. All ranks get the same bits. `counted_elsewhere` is a
    tied weight whose other holder counts it.
    """
    sums: dict[tuple[str, ...], Tensor] = {}
    for parameter in model.parameters():
        if parameter.grad is not None and parameter is not counted_elsewhere:
            axes = split_axes(parameter.grad)
            square = _precise(local(parameter.grad)).square().sum()
            sums[axes] = sums[axes] + square if axes in sums else square
    # Every rank holds the same parameters up to their splits, so that this order is the same everywhere.
    for axis in dict.fromkeys(AXES[1:] + EXPERT_AXES[1:]):
        split = [axes for axes in sums if axis in axes]
        if split:
            total = all_reduce(torch.stack([sums[axes] for axes in split]), group(axis))
            sums |= dict(zip(split, total, strict=True))
    return all_reduce(torch.stack(list(sums.values())).sum(), group("pp")).sqrt()


@torch.no_grad()
def clip_gradients(
    model: nn.Module, limit: float | None, group: GroupOf, counted_elsewhere: nn.Parameter | None = None
) -> ClipResult:
    """Scale all gradients by min(1, limit / norm); a limit of None scales nothing and still gives the norm.

    A norm that is not finite on any rank is NaN on all, and then nothing is scaled.
    """
    norm = gradient_norm(model, group, counted_elsewhere)
    bad = all_reduce((~torch.isfinite(norm)).float(), dist.group.WORLD, ReduceOp.MAX)
    norm = norm.where(bad == 0.0, float("nan"))
    if limit is None:
        return ClipResult(norm, torch.ones_like(norm))
    factor = (limit / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
    factor = factor.where(bad == 0.0, 1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradient.mul_(factor.to(gradient.dtype))
    return ClipResult(norm, factor)


@torch.no_grad()
def guard_update(model: nn.Module, optimizer: Optimizer, norm: Tensor) -> None:
    """See to it that no weight is updated with a gradient that is not finite; every rank has the same `norm`.

    On a CPU, or with an optimizer that has no fused kernel, raises NonFiniteGradientError at once. On a GPU asking
    would make the host wait at every step: there the fused kernel itself skips this update and all later ones, and
    `require_finite` raises at the next logging interval, with the weights as they were before the first bad step.
    """
    if norm.device.type == "cpu" or not optimizer.defaults.get("fused"):
        require_finite(model, float(norm))
        return
    bad = (~torch.isfinite(norm)).float()
    held: Tensor | None = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = bad if held is None else torch.maximum(held, bad)  # type: ignore[attr-defined]


def require_finite(model: nn.Module, norm: float, step: int | None = None) -> None:
    """Raise NonFiniteGradientError on every rank, naming parameters and ranks, for a norm that is not finite.

    `step` is given where the norm is that of an earlier step, whose gradients may be gone.
    """
    if not math.isfinite(norm):
        raise NonFiniteGradientError(_describe(model, step))


def _precise(gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype == torch.float64 else gradient.float()


def _describe(model: nn.Module, step: int | None) -> str:
    """Which parameters, on which ranks: every rank asks every other, since only some may hold the bad values."""
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    ]
    found: list[list[str]] = [bad]
    if dist.is_initialized():
        found = [[]] * dist.get_world_size()
        dist.all_gather_object(found, bad)
    lines = [f"rank {rank}: {_shorten(names)}" for rank, names in enumerate(found) if names]
    nothing = "no single element, but the sum of squares is too large" if step is None else "its gradients are gone"
    when = "" if step is None else f" of step {step}"
    return (
        f"the gradient{when} is not finite ({'; '.join(lines) or nothing}); the weights were not updated. Lower "
        f"optimizer.lr, look at the data of this step, or find the operation with debug=anomaly."
    )


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
