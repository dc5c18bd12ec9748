"""Initial weights: a parameter's values are a function of (seed, its full name) alone."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.random import fill_normal

_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def initial_std(config: ModelConfig, name: str) -> float:
    """Standard deviation of a weight, over sqrt(2 layers) where it feeds the residual stream (GPT-2, section 2.3)."""
    if name.endswith(_INTO_RESIDUAL):
        return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    return config.initializer_range


@torch.no_grad()
def initialise(
    model: nn.Module,
    config: ModelConfig,
    seed: int,
    fill: Callable[[Tensor, int, str, float], None] = fill_normal,
) -> None:
    """Set every parameter in place: norms 1, biases 0, weights normal. `fill` writes a normal weight, sharded or whole.

    A stack over experts is filled as one tensor, so that a block of it has the same values wherever it lies.

    Raises AssertionError for a parameter this function has no rule for.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith((".bias", ".lora_B.weight")):  # so that an adapter at first adds nothing
            parameter.zero_()
        elif name.endswith(".lora_A.weight"):  # the variance that PEFT draws with
            fill(parameter, seed, name, 1 / math.sqrt(3 * parameter.shape[1]))
        else:
            assert parameter.dim() in (2, 3), f"no rule to initialise {name} of shape {tuple(parameter.shape)}"
            fill(parameter, seed, name, initial_std(config, name))
    for buffer in model.buffers():  # routers' biases
        buffer.zero_()
