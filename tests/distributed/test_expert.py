"""Experts over ranks: every layout is the same run, dropped tokens, balancing losses and biases included."""

import gc
import time
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from models.config import BalanceScope, DropOrder, MoEConfig, RouterScore
from parallel import step
from parallel.config import Config
from parallel.expert import mixtures
from parallel.layout import resolve
from parallel.plan.validate import validate
from parallel.sharded import local
from parallel.step import forward_backward
from tests.distributed.cases import (
    Trace,
    build,
    disagreeing_replicas,
    make_config,
    merged,
    one_process,
    train,
    worst_error,
)
from tests.distributed.pool import Pool
from tests.distributed.thinned import thinned

SP = {"sequence_parallel": True, "loss_parallel": True}
BALANCED = {"balance_loss": 0.1, "z_loss": 0.01}


def config_of(moe: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **others: Any) -> Config:
    """Two layers of eight experts, two to a token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 20} | (moe or {})
    return make_config(model={"moe": MoEConfig(**experts)} | (model or {}), **others)


def crowd(decoder: torch.nn.Module, experts: int) -> None:
    """Let all tokens choose among the first experts, through the biases."""
    for mixture in mixtures(decoder):
        mixture.gate.expert_bias[:experts] = 10.0


def train_crowded(config: Config, experts: int | None) -> Trace:
    """Train for two steps, crowded on so many experts from the first."""
    right = step.initialise

    def initialise(decoder: torch.nn.Module, *arguments: Any) -> None:
        right(decoder, *arguments)
        if experts is not None:
            crowd(decoder, experts)

    with patch.object(step, "initialise", initialise):
        return train(config, 2)


REFERENCES: dict[str, Trace] = {}


def check(pool: Pool, world: int, config: Config, crowded: int | None = None) -> None:
    """A layout is the same run as one process, to 1e-9 in every gradient."""
    assert [problem.message for problem in validate(config, world) if problem.severity == "error"] == []
    alone = one_process(config)
    key = f"{alone} {crowded}"
    if key not in REFERENCES:
        REFERENCES[key] = pool.run(1, "tests.distributed.test_expert:train_crowded", alone, crowded)[0]
    traces = pool.run(world, "tests.distributed.test_expert:train_crowded", config, crowded)
    error, where = worst_error(REFERENCES[key], merged(traces))
    print(f"{error:.1e} ({where})")
    assert error < 1e-9, where
    assert merged(traces).initial == REFERENCES[key].initial
    assert disagreeing_replicas(traces) == []
    for trace in traces:
        assert all(torch.equal(a, b) for a, b in zip(trace.routing, traces[0].routing, strict=True))


PLAIN: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    *[(2, {"ep": 2, "zero": zero}) for zero in (0, 3)],
    (4, {"ep": 2, "zero": 1}),
    (4, {"ep": 4, "zero": 2}),
    (4, {"zero": 3}),
    (4, {"ep": 2, "zero": 3, "dp_replicate": 2}),
    (2, {"tp": 2}),
    (2, {"tp": 2, "ep": 2}),
    (2, {"tp": 2, "etp": 2} | SP),
    (4, {"tp": 2, "ep": 4, "zero": 3}),
    (4, {"tp": 2, "ep": 2, "etp": 2, "zero": 2} | SP),
    (4, {"tp": 4, "ep": 2, "etp": 2}),
    (4, {"tp": 2, "etp": 2, "zero": 3}),
    (8, {"ep": 8, "zero": 3, "data": {"global_batch": 16}}),
    (4, {"pp": 2, "ep": 2, "zero": 3}),
    (2, {"cp": 2, "ep": 2}),
    (4, {"cp": 2, "tp": 2, "ep": 4, "zero": 3} | SP),
    (4, {"cp": 2, "tp": 2, "ep": 2, "etp": 2}),
    (4, {"cp": 2, "cp_method": "ulysses", "ep": 2, "zero": 2}),
    (8, {"cp": 2, "pp": 2, "ep": 4, "zero": 1}),
    (4, {"pp": 2, "pp_schedule": "gpipe", "tp": 2, "ep": 2} | SP),
    (8, {"pp": 2, "tp": 2, "ep": 2, "etp": 2, "zero": 1} | SP),
]


@pytest.mark.parametrize(("world", "layout"), thinned(PLAIN, 3), ids=str)
def test_experts_over_ranks_are_the_same_run(pool: Pool, world: int, layout: dict[str, Any]) -> None:
    # What a mixture may have goes round with the case, so that each option meets several layouts.
    index = PLAIN.index((world, layout))
    options = (
        BALANCED | {"bias_update_rate": 0.02},
        {"score": RouterScore.sigmoid, "num_groups": 4, "top_groups": 2, "shared_intermediate_size": 12, "jitter": 0.1},
        BALANCED | {"capacity_factor": 1.0, "shared_intermediate_size": 12, "balance_scope": BalanceScope.sequence},
    )[index % 3]
    model = {"num_hidden_layers": 3}
    options |= {"dense_layers": [1]} if index % 2 else {}
    check(pool, world, config_of(options, model=model, optimizer=("sgd", "adamw")[index % 2], **layout))


SCOPES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"micro_batch": 1}),
    (1, {}, {"micro_batch": 8}),
    (2, {"ep": 2, "zero": 3}, {"micro_batch": 2}),
    (4, {"tp": 2, "ep": 4, "zero": 2}, {"micro_batch": 4}),
    (4, {"pp": 2, "tp": 2, "ep": 2} | SP, {"micro_batch": 2}),
    (4, {"cp": 2, "tp": 2, "ep": 4}, {"micro_batch": 2}),
    (2, {"pp": 2, "pp_schedule": "zbv_zero_bubble", "virtual_stages": 2}, {"micro_batch": 2}),
]


RECOMPUTE = ("none", "full", "selective:mlp")
# Each scope and each recomputation with every layout, not their product.
BALANCES = [
    # A split backward pass takes no recomputation.
    (*case, scope, "none" if "pp_schedule" in case[1] else RECOMPUTE[(i + j) % 3])
    for i, case in enumerate(SCOPES)
    for j, scope in enumerate(BalanceScope)
]


@pytest.mark.parametrize(("world", "layout", "data", "scope", "recompute"), thinned(BALANCES, 6), ids=str)
def test_balancing_is_the_same_for_every_layout_microbatch_count_and_recomputation(
    pool: Pool, world: int, layout: dict[str, Any], data: dict[str, Any], scope: BalanceScope, recompute: str
) -> None:
    moe = BALANCED | {"balance_scope": scope, "bias_update_rate": 0.02}
    check(pool, world, config_of(moe, model={"num_hidden_layers": 4}, data=data, recompute=recompute, **layout))


DROPS: list[tuple[int, dict[str, Any]]] = [
    (1, {"data": {"micro_batch": 1}}),
    (2, {"ep": 2, "zero": 3}),
    (2, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 2, "etp": 2} | SP),
    (4, {"tp": 4, "ep": 4, "data": {"micro_batch": 1}}),
    (4, {"pp": 2, "tp": 2, "etp": 2}),
    (4, {"cp": 2, "tp": 2, "ep": 4}),
]


@pytest.mark.parametrize("order", list(DropOrder))
@pytest.mark.parametrize(("world", "layout"), thinned(DROPS, 3), ids=str)
def test_a_full_expert_drops_the_same_tokens_in_every_layout(
    pool: Pool, world: int, layout: dict[str, Any], order: DropOrder
) -> None:
    check(pool, world, config_of({"capacity_factor": 0.75, "drop_order": order, "bias_update_rate": 0.02}, **layout))


# With one expert to a token the weight must not be made 1, or routers would learn nothing that could be compared.
UNEVEN: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "all tokens to one expert": (4, 1, {"num_experts_per_tok": 1, "norm_topk_prob": False}, {"ep": 4, "zero": 3}),
    "all tokens to one expert, widths split": (
        4,
        1,
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"tp": 2, "ep": 2, "etp": 2},
    ),
    "all tokens to one expert, dropped": (
        4,
        1,
        {"num_experts_per_tok": 1, "norm_topk_prob": False, "capacity_factor": 1.0},
        {"tp": 2, "ep": 4},
    ),
    "experts without a token": (4, 3, {}, {"tp": 2, "ep": 4, "zero": 1} | SP),
    "fewer tokens than ranks": (4, 3, {}, {"tp": 4, "ep": 4, "data": {"seq_len": 2, "micro_batch": 1}}),
    "fewer tokens than ranks, dropped": (
        4,
        3,
        {"capacity_factor": 2.0, "balance_loss": 0.1, "balance_scope": BalanceScope.sequence},
        {"tp": 4, "ep": 2, "etp": 2, "data": {"seq_len": 2, "micro_batch": 1}},
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_routing_is_exact(pool: Pool, name: str) -> None:
    world, crowded, moe, layout = UNEVEN[name]
    check(pool, world, config_of({"bias_update_rate": 0.02} | moe, **layout), crowded)


def legal_folds(tp: int, inner: int) -> list[tuple[int, int]]:
    """Every (ep, etp) with etp 1 or tp that fits the ranks of a stage."""
    return [(ep, etp) for ep in (1, 2, 4, 8) for etp in sorted({1, tp}) if inner % (ep * etp) == 0]


MATRIX = [
    (world, ep, etp, tp, sp, cp, pp, zero, factor)
    for world, tp, cp, pp, zero, factor in product((2, 4, 8), (1, 2), (1, 2), (1, 2), (0, 1, 2, 3), (None, 1.0))
    for sp in ((False, True) if tp > 1 else (False,))
    for ep, etp in legal_folds(tp, world // pp)
    if world % (tp * cp * pp) == 0 and (world > tp * pp or zero == 0)
]


@pytest.mark.long
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_matrix(pool: Pool, case: tuple[Any, ...]) -> None:
    world, ep, etp, tp, sp, cp, pp, zero, factor = case
    layout = {"ep": ep, "etp": etp, "tp": tp, "cp": cp, "pp": pp, "zero": zero} | (SP if sp else {})
    moe = BALANCED | {"bias_update_rate": 0.02, "capacity_factor": factor}
    data_ranks = world // (tp * cp * pp)
    data = {"global_batch": max(2 * data_ranks, 4), "micro_batch": 1}
    check(pool, world, config_of(moe, data=data, **layout))


def test_single_precision_agrees_to_1e_5_and_bfloat16_follows(pool: Pool) -> None:
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 5e-2)):
        traces = {}
        for world, layout in ((1, {}), (4, {"tp": 2, "ep": 2, "etp": 2, "zero": 3} | SP)):
            config = config_of(BALANCED, precision=precision, **layout)
            traces[world] = merged(pool.run(world, "tests.distributed.cases:train", config, 1))
            assert float(traces[world].routing[0][:, :8].sum()) == 2 * 8 * 16 * 2
        assert traces[4].norms[0] == pytest.approx(traces[1].norms[0], rel=tolerance)
        assert traces[4].losses[0] == pytest.approx(traces[1].losses[0], rel=tolerance)


def parameters_here(config: Config) -> dict[str, int]:
    """Elements of each parameter on this rank."""
    model, _ = build(config)
    return {name: local(parameter).numel() for name, parameter in model.decoder.named_parameters()}


def test_experts_are_really_dealt_out_with_more_shards_than_experts(pool: Pool) -> None:
    config = config_of({"num_experts": 2}, tp=2, zero=3, **SP)
    name = "model.layers.0.mlp.experts.up_proj.weight"
    assert resolve(config.parallelism, 8).expert_dp == 8
    for here in pool.run(8, "tests.distributed.test_expert:parameters_here", config):
        assert here[name] == 2 * 20 * 32 // 8


@pytest.mark.parametrize(
    "settings",
    [{"ep": 4, "zero": 3}, {"tp": 2, "ep": 4} | SP, {"ep": 4, "zero": 1, "moe": {"capacity_factor": 1.0}}],
    ids=str,
)
@pytest.mark.parametrize("nodes", thinned([2, 4]))
def test_an_exchange_in_two_hops_is_the_same_run(pool: Pool, nodes: int, settings: dict[str, Any]) -> None:
    moe = BALANCED | {"bias_update_rate": 0.02} | settings.get("moe", {})
    layout = {key: value for key, value in settings.items() if key != "moe"}
    check(pool, 4, config_of(moe, ep_nodes=nodes, **layout), None if "moe" in settings else 3)


def live_bytes(config: Config, steps: int) -> list[tuple[int, int]]:
    """Bytes of all tensors alive when a forward pass ends (the most there is) and after it, in steps 3 and last."""

    def counted() -> int:
        gc.collect()
        real = (torch.Tensor, torch.nn.Parameter, DTensor)
        tensors = [x for x in gc.get_objects() if type(x) in real and x.device.type == "cpu"]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in map(local, tensors)}
        return sum(storages.values())

    def alive() -> int:
        # gloo's threads let go of a collective's tensors a moment after it has ended, later on a busy machine.
        found = []
        for _ in range(3):
            time.sleep(0.05)
            found.append(counted())
        return min(found)

    model, batches = build(config)
    batch, found, during = batches[0], [], []
    for number in range(1, steps + 1):
        model.decoder.zero_grad()
        watched = number in (3, steps)
        handle = model.decoder.register_forward_hook(lambda *_: during.append(alive())) if watched else None
        forward_backward(model, batch, 0)  # the same step again: routing and sizes are the same too
        if handle is not None:
            handle.remove()
            found.append((max(during), alive()))
            during.clear()
    return found


@pytest.mark.parametrize("recompute", ["full", pytest.param("selective:mlp", marks=pytest.mark.long)])
def test_memory_does_not_grow_with_steps(recompute: str) -> None:
    # S-46
    config = config_of(BALANCED, ep=2, zero=3, recompute=recompute)
    fresh = Pool(2)  # in the workers of other cases there is what compiling has left
    try:
        for found in fresh.run(2, "tests.distributed.test_expert:live_bytes", config, 10):
            assert found[0] == found[1], found
    finally:
        fresh.close()
