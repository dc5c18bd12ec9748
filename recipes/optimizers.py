"""The optimizer and the learning-rate schedule of a config."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from models.errors import ConfigError
from parallel.config import (
    AdamWConfig,
    Config,
    DecayShape,
    MuonConfig,
    OptimizerConfig,
    ScheduleUnit,
    SGDConfig,
    schedule_total,
)

_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    """The optimizer over all parameters; decay only where the config wants it."""
    match config:
        case AdamWConfig():
            groups = _decay_groups(config, _trained(model))
            return AdamW(groups, lr=config.lr, betas=_pair(config.betas), eps=config.eps, fused=config.fused)
        case SGDConfig():
            groups = _decay_groups(config, _trained(model))
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
        case MuonConfig():
            return MuonWithAdamW(config, model)
    raise AssertionError(f"no optimizer for {type(config).__name__}")


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _decay_groups(config: OptimizerConfig, parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two parameter groups: matrices that decay; norms, biases and (unless asked) embeddings that do not."""

    def decays(name: str, parameter: nn.Parameter) -> bool:
        return parameter.dim() >= 2 and (config.decay_embeddings or not name.endswith(_EMBEDDINGS))

    decayed = [parameter for name, parameter in parameters.items() if decays(name, parameter)]
    kept = [parameter for name, parameter in parameters.items() if not decays(name, parameter)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class MuonWithAdamW(Optimizer):
    """torch's Muon for the matrices inside the layers and AdamW for the rest, as one optimizer to everyone outside.

    The two share this object's state and parameter groups, so that schedules and checkpoints see one optimizer.
    Raises ConfigError where this torch has no Muon.
    """

    def __init__(self, config: MuonConfig, model: nn.Module) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"optimizer=muon needs torch 2.9 or newer; this is {torch.__version__}.")
        named = _trained(model)
        matrices = {name: parameter for name, parameter in named.items() if ".layers." in name and parameter.dim() == 2}
        others = {name: parameter for name, parameter in named.items() if name not in matrices}
        self._muon = torch.optim.Muon(
            matrices.values(),
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            nesterov=config.nesterov,
        )
        groups = _decay_groups(config, others)
        self._adamw = AdamW(groups, lr=config.adamw_lr, betas=_pair(config.betas), eps=config.eps)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run the closure, then both optimizers."""
        with torch.enable_grad():
            result = closure() if closure is not None else None
        self._muon.step()
        self._adamw.step()
        return result


def make_schedule(config: Config, optimizer: Optimizer) -> LambdaLR:
    """The learning rate as a multiple of each group's own peak, per optimizer step."""
    tokens_per_step = config.data.global_batch * config.data.seq_len
    unit = tokens_per_step if config.scheduler.unit == ScheduleUnit.tokens else 1
    return LambdaLR(optimizer, lambda step: learning_rate_factor(config, step * unit, unit))


def learning_rate_factor(config: Config, done: float, unit: float = 1) -> float:
    """Learning rate over its peak after `done` steps or tokens, of which a step makes `unit`.

    The warm-up rises from 1/warmup at the first step, so that no step is lost at rate 0.
    """
    schedule, total = config.scheduler, schedule_total(config)
    if done < schedule.warmup:
        return min((done + unit) / schedule.warmup, 1.0)
    low = schedule.minimum_ratio
    if schedule.shape == DecayShape.constant:
        return 1.0
    stands_until = total - schedule.decay if schedule.shape == DecayShape.wsd else 0
    begin = max(schedule.warmup, stands_until)
    progress = min(max((done - begin) / max(total - begin, 1), 0.0), 1.0)
    if schedule.shape == DecayShape.cosine:
        return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return low + (1.0 - low) * (1.0 - progress)


def _pair(betas: list[float]) -> tuple[float, float]:
    return betas[0], betas[1]
