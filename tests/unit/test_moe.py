"""Mixtures of experts against plain loops and losses written out: routing, capacity, balancing, every precision."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import BalanceScope, DropOrder, ModelConfig, MoEConfig, RouterScore, note_columns
from models.decoder import Decoder
from models.dropout import DropoutKey
from models.moe import MixtureOfExperts, RoutingStep, grouped_linear
from models.router import choose, update_bias
from tests.small import SMALL, random_decoder, random_tokens

MOE = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=24)
BATCH, LENGTH = 3, 16


def mixture(**changes: Any) -> MixtureOfExperts:
    """A mixture of random float64 weights large enough to matter."""
    block = MixtureOfExperts(replace(SMALL, moe=replace(MOE, **changes)), 0).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)
    return block


def hidden(seed: int = 1) -> Tensor:
    return torch.randn(BATCH, LENGTH, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def training(config: ModelConfig, batch: int = BATCH, length: int = LENGTH) -> tuple[DropoutKey, RoutingStep]:
    """What a decoder is told of the only microbatch of step 0."""
    places = torch.broadcast_tensors(torch.arange(batch).unsqueeze(-1), torch.arange(length).unsqueeze(0))
    notes = torch.zeros(1, config.num_hidden_layers, note_columns(config), dtype=torch.float64)
    return DropoutKey(0, 0, *places), RoutingStep(notes, torch.zeros(1, dtype=torch.int64), batch * length, None)


def by_hand(block: MixtureOfExperts, x: Tensor, kept: Tensor | None = None) -> Tensor:
    """The same, token by token and expert by expert."""
    config, decision = block.config, block.gate(x.flatten(0, 1))
    y = torch.zeros_like(x).flatten(0, 1)
    scores = decision.logits.softmax(-1) if config.score == RouterScore.softmax else decision.logits.sigmoid()
    for token, row in enumerate(x.flatten(0, 1)):
        experts = decision.experts[token]
        weights = scores[token, experts]
        if config.norm_topk_prob:
            weights = weights / weights.sum()
        for k, expert in enumerate(experts.tolist()):
            if kept is None or kept[token, k]:
                gate, up, down = (
                    getattr(block.experts, name).weight[expert] for name in ("gate_proj", "up_proj", "down_proj")
                )
                y[token] += config.routed_scaling_factor * weights[k] * (down @ (F.silu(gate @ row) * (up @ row)))
    y = y.view_as(x)
    return y if block.shared_experts is None else y + block.shared_experts(x)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 1},
        {"num_experts_per_tok": 8, "norm_topk_prob": False},
        {"score": RouterScore.sigmoid, "routed_scaling_factor": 2.5, "shared_intermediate_size": 16},
        {"score": RouterScore.sigmoid, "num_groups": 4, "top_groups": 2, "norm_topk_prob": False},
    ],
    ids=str,
)
def test_given_a_mixture_when_run_then_it_is_what_the_loop_over_tokens_gives(changes: dict[str, Any]) -> None:
    block, x = mixture(**changes), hidden()
    torch.testing.assert_close(block(x), by_hand(block, x), rtol=0, atol=1e-12)


def test_given_groups_when_chosen_then_experts_lie_in_the_best_groups_only() -> None:
    scores = torch.rand(200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config = replace(MOE, num_experts=12, num_groups=4, top_groups=2, num_experts_per_tok=3)
    experts = choose(scores, None, config)
    best = scores.unflatten(-1, (4, 3)).topk(2).values.sum(-1).topk(2).indices
    assert all(set((row // 3).tolist()) <= set(groups.tolist()) for row, groups in zip(experts, best, strict=True))
    for row, groups, score in zip(experts, best, scores, strict=True):
        allowed = [expert for expert in range(12) if expert // 3 in groups]
        assert set(row.tolist()) == set(sorted(allowed, key=lambda expert: -score[expert])[:3])


def test_given_a_bias_when_routed_then_it_moves_the_choice_and_not_the_weights() -> None:
    block, x = mixture(bias_update_rate=0.1), hidden()
    plain = block.gate(x.flatten(0, 1))
    block.gate.expert_bias[5] = 10.0
    biased = block.gate(x.flatten(0, 1))
    assert (biased.experts == 5).any(-1).all()
    assert not (plain.experts == 5).any(-1).all()
    assert torch.equal(plain.probabilities, biased.probabilities)
    expected = biased.probabilities.gather(-1, biased.experts)
    torch.testing.assert_close(biased.weights, expected / expected.sum(-1, keepdim=True))


def test_given_a_load_when_the_bias_is_updated_then_it_moves_by_the_rate_against_the_load() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, -1.0], dtype=torch.float64)
    update_bias(bias, torch.tensor([10.0, 0.0, 4.0, 2.0], dtype=torch.float64), 0.25)
    assert bias.tolist() == [0.25, 0.25, 0.0, -0.75]


@pytest.mark.parametrize("order", list(DropOrder))
@pytest.mark.parametrize("factor", [0.5, 1.0, 9.0])
def test_given_a_capacity_when_an_expert_is_full_then_it_drops_the_last_of_its_order(
    order: DropOrder, factor: float
) -> None:
    block, x = mixture(capacity_factor=factor, drop_order=order), hidden()
    capacity = block.config.capacity(LENGTH)
    assert capacity == min(-(-factor * LENGTH * 2 // 8), LENGTH)
    decision = block.gate(x.flatten(0, 1))
    kept = torch.zeros_like(decision.experts, dtype=torch.bool)
    for sequence in range(BATCH):
        for expert in range(8):
            places = [
                (decision.probabilities[token, expert].item(), token, k)
                for token in range(sequence * LENGTH, (sequence + 1) * LENGTH)
                for k in range(2)
                if decision.experts[token, k] == expert
            ]
            places.sort(key=(lambda p: -p[0]) if order == DropOrder.probability else (lambda p: p[1]))
            for _, token, k in places[:capacity]:
                kept[token, k] = True
    assert bool(kept.all()) == (factor == 9.0)
    key, routing = training(replace(SMALL, moe=block.config))
    torch.testing.assert_close(block(x, key, routing), by_hand(block, x, kept), rtol=0, atol=1e-12)
    assert routing.notes[0, 0, -3] == (~kept).sum()
    torch.testing.assert_close(block(x), by_hand(block, x), rtol=0, atol=1e-12)  # outside training nothing is dropped


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("counts", [[3, 0, 5, 8], [16, 0, 0, 0], [0, 0, 0, 0]], ids=str)
def test_given_one_kernel_for_all_experts_when_compared_then_it_is_the_loop(
    counts: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(s, generator=draw, dtype=dtype) for s in ((sum(counts), 16), (4, 32, 16)))
    found = []
    for fused in (False, True):
        a, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        y = grouped_linear(a, w, torch.tensor(counts), fused)
        (y * torch.arange(32, dtype=dtype)).sum().backward()
        found.append((y, a.grad, w.grad))
    for plain, fused_result in zip(*found, strict=True):
        torch.testing.assert_close(plain, fused_result, rtol=tolerance, atol=tolerance)


def loss_by_hand(decoder: Decoder, decisions: list[Any], scope: BalanceScope) -> Tensor:
    """The balancing losses of all layers from what their routers decided, written out."""
    config, total = decoder.config.moe, torch.zeros((), dtype=torch.float64)
    for decision in decisions:
        pieces = range(BATCH) if scope == BalanceScope.sequence else [slice(None)]
        chosen = decision.experts.view(BATCH, LENGTH, -1)
        probabilities = decision.logits.softmax(-1).view(BATCH, LENGTH, -1)
        for piece in pieces:
            share = F.one_hot(chosen[piece], 8).double().flatten(0, -2).mean(0)
            mean = probabilities[piece].flatten(0, -2).mean(0)
            total = total + config.balance_loss * 8 * (share * mean).sum() / len(pieces)
        total = total + config.z_loss * decision.logits.logsumexp(-1).square().mean()
    return total


@pytest.mark.parametrize("scope", list(BalanceScope))
@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_given_balancing_losses_when_differentiated_then_gradients_and_values_are_those_written_out(
    scope: BalanceScope, z_loss: float
) -> None:
    config = replace(SMALL, moe=replace(MOE, balance_loss=0.3, balance_scope=scope, z_loss=z_loss))
    tokens = random_tokens(config, BATCH, LENGTH)
    ours = random_decoder(config, torch.float64)
    key, routing = training(config)
    ours(tokens, labels=tokens, dropout_key=key, routing=routing).backward()
    plain, decisions = random_decoder(config, torch.float64), []
    for layer in plain.model.layers.values():
        layer.mlp.gate.register_forward_hook(lambda module, args, decision: decisions.append(decision))
    losses = plain(tokens, labels=tokens)
    extra = loss_by_hand(plain, decisions, scope)
    (losses + extra).backward()
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11, msg=name)
    notes = routing.notes.sum(0)
    assert float(0.3 * notes[:, -6].sum() + z_loss * notes[:, -5].sum()) == pytest.approx(extra.item(), abs=1e-12)
    for layer, decision in enumerate(decisions):
        assert notes[layer, :8].tolist() == F.one_hot(decision.experts, 8).sum((0, 1)).tolist()


def test_given_a_forward_pass_that_is_repeated_when_noted_then_the_notes_are_those_of_one() -> None:
    config = replace(SMALL, moe=replace(MOE, balance_loss=0.3))
    decoder, tokens = random_decoder(config, torch.float64), random_tokens(config, BATCH, LENGTH)
    key, routing = training(config)
    decoder(tokens, labels=tokens, dropout_key=key, routing=routing)
    once = routing.notes.clone()
    decoder(tokens, labels=tokens, dropout_key=key, routing=routing)
    assert torch.equal(once, routing.notes)
    assert once[0, :, :8].sum() == config.num_hidden_layers * BATCH * LENGTH * 2


def test_given_jitter_when_training_then_the_router_alone_sees_noise_within_its_bounds() -> None:
    block, x = mixture(jitter=0.1), hidden()
    key, routing = training(replace(SMALL, moe=block.config))
    seen: dict[str, Tensor] = {}
    block.gate.register_forward_pre_hook(lambda module, args: seen.__setitem__("router", args[0]))
    block.experts.register_forward_pre_hook(lambda module, args: seen.__setitem__("experts", args[0]))
    block(x, key, routing)
    ratio = seen["router"] / x.flatten(0, 1)
    assert 0.9 <= float(ratio.min()) < 0.91
    assert 1.09 < float(ratio.max()) <= 1.1
    rows = {tuple(row.tolist()) for row in x.flatten(0, 1)}
    assert all(tuple(row.tolist()) in rows for row in seen["experts"])
    block(x)
    assert torch.equal(seen["router"], x.flatten(0, 1))
