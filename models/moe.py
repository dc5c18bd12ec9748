"""A mixture of experts in place of the feed-forward: router, stacked experts, shared experts.

What is done in one process stands here; over ranks, `dispatch` is another object (parallel/expert.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import BalanceScope, DropOrder, ModelConfig
from models.dispatch import Dispatch
from models.dropout import DropoutKey
from models.feed_forward import FeedForward
from models.random import key_of, uniform_noise
from models.router import Decision, Router, attach, count, on_host, within_capacity


class RoutingStep:
    """What routers are told of a microbatch of a training step, and where they note what they did.

    Notes are written, not added, so that a forward pass that is repeated (recomputation) leaves the same. No dataclass:
    FSDP2 would hand its modules a copy whose tensors are in the compute type.
    """

    def __init__(
        self, notes: Tensor, microbatch: Tensor, tokens: int, load: Tensor | None = None, counting: bool = False
    ) -> None:
        self.notes = notes
        """float64 (microbatches of this rank, layers of the decoder, `note_columns`): each rank's part of sums."""
        self.microbatch = microbatch
        """int64 (1,): the row of the notes."""
        self.tokens = tokens
        """Tokens of the whole step, over all ranks and microbatches."""
        self.load = load
        """float64 (layers, experts): how often experts are chosen in the whole step, where that is known beforehand."""
        self.counting = counting
        """Whether this pass is only to find that out."""


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor | None, fused: bool) -> Tensor:
    """Each expert's weight on its own rows: rows (R, in) sorted by expert, weight (E, out, in), `counts` int64 (E,).

    Without counts, rows are (E, rows, in), as many for every expert. `fused` is one kernel that needs no host; the
    other way works in every precision.
    """
    if counts is None:
        return torch.bmm(rows, weight.transpose(1, 2))
    if fused:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    experts = len(counts)
    even = [len(rows) // experts + (expert < len(rows) % experts) for expert in range(experts)]
    parts = rows.split(on_host(counts, even))
    return torch.cat([F.linear(part, expert) for part, expert in zip(parts, weight.unbind(), strict=True)])


class ExpertLinear(nn.Module):
    """One linear map per expert, their weights stacked: (experts, out, in)."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        """`grouped_linear` with these weights."""
        return self.apply_weight(rows, self.weight, counts)

    def apply_weight(self, rows: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        """`forward` with the experts that are here."""
        aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # the kernel wants rows of 16 bytes each
        return grouped_linear(rows, weight, counts, fused=rows.is_cuda and rows.dtype == torch.bfloat16 and aligned)


class Experts(nn.Module):
    """Gated feed-forward blocks, one per expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
        self.gate_proj = ExpertLinear(experts, hidden, inner)
        self.up_proj = ExpertLinear(experts, hidden, inner)
        self.down_proj = ExpertLinear(experts, inner, hidden)

    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        """Rows sorted by expert, as in `grouped_linear`, to rows of the same shape."""
        return self.down_proj(F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts), counts)


class MixtureOfExperts(nn.Module):
    """Every token through the experts its router chooses, their results weighted and summed; shared experts added."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config.moe, layer
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.moe.shared_intermediate_size
        self.shared_experts = FeedForward(config, shared) if shared else None
        self.dispatch = Dispatch(config.moe.num_experts)

    def forward(self, x: Tensor, key: DropoutKey | None = None, routing: RoutingStep | None = None) -> Tensor:
        """(batch, seq, hidden) to (batch, seq, hidden). `key` and `routing` are given in training only.

        Without them nothing is dropped, noted or added to the loss.
        """
        dispatch = self.dispatch
        tokens = dispatch.own(x)
        decision = self.gate(tokens if key is None else self._jittered(tokens, key))
        weights, kept, slots = decision.weights, None, None
        if routing is not None and key is not None:
            capacity = self.config.capacity(dispatch.whole_length(x.shape[1]))
            if capacity is not None:
                kept = self._kept(decision, key, capacity)
                slots = min(dispatch.most_tokens(x.shape), x.shape[0] * capacity)
            weights = self._note_and_balance(decision, key, routing, x.shape[0], kept, slots)
        plan = dispatch.plan(decision.experts, kept, slots)
        flight = dispatch.start(tokens, plan)
        # While tokens travel to their experts.
        shared = None if self.shared_experts is None else self.shared_experts(x)
        rows, counts = dispatch.finish(flight, plan)
        results = dispatch.back(self.experts(rows, counts), plan).view(*weights.shape, x.shape[-1])
        y = (results * weights.unsqueeze(-1).to(results.dtype)).sum(1)
        y = dispatch.join(y, x.shape)
        return y if shared is None else y + shared

    def _jittered(self, tokens: Tensor, key: DropoutKey) -> Tensor:
        if self.config.jitter == 0.0:
            return tokens
        sample, position = (self.dispatch.own(index.unsqueeze(-1)).squeeze(-1) for index in (key.sample, key.position))
        place = key_of(key.seed, key.step, f"layers.{self.layer}.router")
        noise = uniform_noise(sample, position, tokens.shape[-1], place)
        return tokens * (1.0 + self.config.jitter * (2.0 * noise - 1.0)).to(tokens.dtype)

    def _sequence(self, key: DropoutKey) -> Tensor:
        """Which sequence of the microbatch each token belongs to: int64 (T,)."""
        index = torch.arange(len(key.sample), device=key.sample.device)
        return self.dispatch.own(index[:, None, None].expand(*key.sample.shape, 1)).squeeze(-1)

    @torch.no_grad()
    def _kept(self, decision: Decision, key: DropoutKey, capacity: int) -> Tensor:
        """Which assignments (T, k) find room: a matter of their sequence alone, wherever its tokens lie."""
        shape = decision.experts.shape
        group = self._sequence(key).unsqueeze(-1) * self.config.num_experts + decision.experts
        probability = decision.probabilities.gather(-1, decision.experts)
        position = self.dispatch.own(key.position.unsqueeze(-1)).expand(shape)
        columns = torch.stack([part.flatten().double() for part in (group, probability, position)], dim=-1)
        most = self.dispatch.most_tokens(key.sample.shape) * shape[-1]
        everyone, own = self.dispatch.gather_over_sequence(columns, most)
        group, probability, position = everyone.unbind(-1)
        by_position = self.config.drop_order == DropOrder.position
        return within_capacity(group.long(), probability, position, capacity, by_position)[own].view(shape)

    def _note_and_balance(
        self,
        decision: Decision,
        key: DropoutKey,
        routing: RoutingStep,
        sequences: int,
        kept: Tensor | None,
        slots: int | None,
    ) -> Tensor:
        """Write this rank's part of the notes; the weights, with the balancing losses attached.

        The load-balancing loss is E / tokens * sum over tokens and experts of share * probability, where share is the
        expert's part of all assignments in the token's sequence, microbatch or global batch: a mean of the loss over
        sequences or microbatches, or the loss of the whole step.
        """
        config, experts, weights = self.config, self.config.num_experts, decision.weights
        load = count(decision.experts, experts)
        z = decision.logits.logsumexp(-1).square().sum() / routing.tokens
        balance = torch.zeros_like(z)
        if config.balance_loss and not routing.counting:
            share = self._share(decision, key, routing, sequences, load)
            balance = experts / routing.tokens * (share * decision.probabilities).sum()
        for coefficient, loss in ((config.balance_loss, balance), (config.z_loss, z)):
            weights = attach(weights, coefficient * loss) if coefficient else weights
        with torch.no_grad():
            probabilities = decision.probabilities
            entropy = -(probabilities * probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()).sum()
            dropped = torch.zeros_like(z) if kept is None else (~kept).sum()
            sent = self.dispatch.rows_sent(load, slots)
            scalars = (balance, z, entropy, dropped, torch.zeros_like(z), sent)
            row = torch.cat((load, torch.stack([x.detach().double() for x in scalars])))
            routing.notes[:, self.layer].index_copy_(0, routing.microbatch, row.unsqueeze(0))
        return weights

    @torch.no_grad()
    def _share(self, decision: Decision, key: DropoutKey, routing: RoutingStep, sequences: int, load: Tensor) -> Tensor:
        """The load share of each expert as each token sees it: (T, E) or (1, E), rows summing to 1."""
        scope, experts = self.config.balance_scope, self.config.num_experts
        over: Callable[[Tensor], Tensor] = self.dispatch.total_over_sequence
        if scope == BalanceScope.sequence:
            sequence = self._sequence(key)
            load = count(sequence.unsqueeze(-1) * experts + decision.experts, sequences * experts)
            load = over(load).view(sequences, experts)[sequence]
        elif scope == BalanceScope.microbatch:
            load = over(load).unsqueeze(0)
        elif routing.load is not None:
            load = routing.load[self.layer].unsqueeze(0)
        else:
            load = self.dispatch.total_over_step(load).unsqueeze(0)
        share = load.to(decision.probabilities.dtype)
        return share / share.sum(-1, keepdim=True)
