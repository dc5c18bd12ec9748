"""Which experts a token goes to, and the losses that keep experts busy alike.

Softmax top-k routing (Shazeer et al., 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088), sigmoid and group-limited
routing (DeepSeek-V3, arXiv:2412.19437). The load-balancing loss is that of Switch Transformers (Fedus et al., 2021,
arXiv:2101.03961, equation 4), the z-loss that of ST-MoE (Zoph et al., 2022, arXiv:2202.08906, equation 5), the bias
that of auxiliary-loss-free balancing (Wang et al., 2024, arXiv:2408.15664).

All of them count every token of a step, with or without a label.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from models.config import ModelConfig, MoEConfig, RouterScore


@dataclass(frozen=True)
class Decision:
    """What a router decides for T tokens, E experts, k of them per token; in float32 or better."""

    logits: Tensor
    """(T, E)"""
    probabilities: Tensor
    """(T, E), each row summing to 1."""
    experts: Tensor
    """int64 (T, k)"""
    weights: Tensor
    """(T, k): what the experts' results are multiplied by."""


class Router(nn.Module):
    """Scores tokens against experts; named `gate` in the layer, as in Hugging Face."""

    expert_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config.moe
        self.weight = nn.Parameter(torch.empty(config.moe.num_experts, config.hidden_size))
        bias = torch.zeros(config.moe.num_experts) if config.moe.bias_update_rate else None
        self.register_buffer("expert_bias", bias)

    def forward(self, x: Tensor) -> Decision:
        """Tokens (T, hidden) to their experts."""
        return self.decide(x, self.weight)

    def decide(self, x: Tensor, weight: Tensor) -> Decision:
        """`forward` with the weight that is here."""
        logits = F.linear(_precise(x), _precise(weight))
        if self.config.score == RouterScore.softmax:
            scores = probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
        experts = choose(scores.detach(), self.expert_bias, self.config)
        weights = scores.gather(-1, experts)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return Decision(logits, probabilities, experts, weights * self.config.routed_scaling_factor)


def choose(scores: Tensor, bias: Tensor | None, config: MoEConfig) -> Tensor:
    """The experts of each token: int64 (T, k), from scores (T, E). The bias (E,) is seen here and nowhere else."""
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        grouped = choice.unflatten(-1, (config.num_groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        groups = best.topk(config.top_groups, dim=-1).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, groups, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    return choice.topk(config.num_experts_per_tok, dim=-1).indices


@torch.no_grad()
def update_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move the bias (E,) once for a step whose experts were chosen `load` (E,) times: up where below the mean."""
    bias.add_(torch.sign(load.mean() - load).to(bias.dtype), alpha=rate)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=grads[0].dtype, device=grads[0].device)


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """x, with `loss` added to whatever loss x ends up in: the way of losses out of the middle of a model."""
    return _Attach.apply(x, loss)


def count(index: Tensor, size: int) -> Tensor:
    """How often each of 0 to size - 1 stands in an int64 tensor: int64 (size,), without waiting for the device."""
    flat = index.flatten()
    return torch.zeros(size, dtype=torch.int64, device=index.device).scatter_add_(0, flat, torch.ones_like(flat))


def on_host(counts: Tensor, even: list[int]) -> list[int]:
    """The numbers of an int64 tensor, for which the host waits; in a dry run, whose tensors have none, `even`."""
    return even if isinstance(counts, FakeTensor) else counts.tolist()


def place_within(group: Tensor) -> tuple[Tensor, Tensor]:
    """For int64 groups (N,): each element's number among those of its group, in order, and the sorting permutation."""
    order = group.argsort(stable=True)
    sorted_group = group[order]
    first = torch.searchsorted(sorted_group, sorted_group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first
    return place, order


def within_capacity(group: Tensor, probability: Tensor, position: Tensor, capacity: int, by_position: bool) -> Tensor:
    """Which assignments an expert has room for: bool (N,), the first `capacity` of each group.

    First are the most probable, of equals the earliest; or simply the earliest, by `position` in the sequence.
    """
    order = position.argsort(stable=True)
    if not by_position:
        order = order[probability[order].argsort(descending=True, stable=True)]
    place, _ = place_within(group[order])
    kept = torch.empty_like(place, dtype=torch.bool)
    kept[order] = place < capacity
    return kept


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
