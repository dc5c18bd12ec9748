"""The gradient norm of the whole model, clipping by it, and what happens when it is not finite."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class NonFiniteGradientError(RuntimeError):
    """A gradient holds NaN or infinity. Raised before the update, so the weights are those of the step before."""


@dataclass(frozen=True)
class ClipResult:
    """Scalars on the device: the norm before clipping, and the factor that every gradient was multiplied by."""

    norm: Tensor
    factor: Tensor


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together, each parameter counted once, accumulated in float32 or better: a scalar."""
    squares = [_accumulable(parameter.grad).square().sum() for parameter in parameters if parameter.grad is not None]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float | None) -> ClipResult:
    """Scale all gradients by min(1, limit / norm); a limit of None scales nothing and still gives the norm.

    Raises NonFiniteGradientError, naming the parameters, before anything was changed.
    """
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    if not torch.isfinite(norm):
        raise NonFiniteGradientError(_describe(model))
    if limit is None:
        return ClipResult(norm, torch.ones_like(norm))
    factor = (limit / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return ClipResult(norm, factor)


def _accumulable(gradient: Tensor) -> Tensor:
    return gradient if gradient.dtype == torch.float64 else gradient.float()


def _describe(model: nn.Module) -> str:
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
    ]
    shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    where = f"in {shown}" if bad else "in the sum of squares only (finite, but too large to square)"
    return (
        f"the gradient is not finite {where}; the weights were not updated. Lower optimizer.lr, look at the data of "
        f"this step, or find the operation with debug=anomaly."
    )
