"""What `validate` accepts runs, and is the same run as one process: small configs drawn over all axes at once.

The matrices elsewhere vary a few settings with the others fixed; here everything is drawn together.
"""

import random
from collections import Counter
from typing import Any

import pytest

from models.config import BalanceScope, DropOrder, MoEConfig, RouterScore
from parallel.config import Config, ContextMethod, MaskPattern, PipelineSchedule
from parallel.plan.validate import Severity, validate
from parallel.stages import SINGLE
from tests.distributed.cases import disagreeing_replicas, make_config, merged, reference, samples_read, worst_error
from tests.distributed.pool import Pool

RANKS = 8


def some_experts(draw: random.Random) -> MoEConfig:
    groups = draw.choice([1, 1, 2])
    capacity, chosen = draw.choice([None, None, 1.0, 1.5]), draw.choice([1, 2])
    return MoEConfig(
        num_experts=draw.choice([4, 8]),
        num_experts_per_tok=chosen,
        intermediate_size=draw.choice([12, 20]),
        shared_intermediate_size=draw.choice([0, 0, 12]),
        dense_layers=draw.choice([[], [], [0]]),
        score=draw.choice(list(RouterScore)),
        norm_topk_prob=chosen > 1 and draw.choice([True, False]),  # a router with one weight, 1, has no gradient
        num_groups=groups,
        top_groups=draw.choice([1, groups]),
        jitter=draw.choice([0.0, 0.0, 0.1]),
        capacity_factor=capacity,
        drop_order=DropOrder.probability if capacity is None else draw.choice(list(DropOrder)),
        balance_loss=draw.choice([0.0, 0.1]),
        balance_scope=draw.choice(list(BalanceScope)),
        z_loss=draw.choice([0.0, 0.01]),
        bias_update_rate=draw.choice([0.0, 0.02]),
    )


def drawn(draw: random.Random) -> tuple[Config, int]:
    """A config and its number of ranks, legal or not."""
    heads = draw.choice([2, 4, 8])
    model: dict[str, Any] = {
        "num_hidden_layers": draw.choice([2, 3, 4, 8]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([heads, heads // 2, 1]),
        "head_dim": 4,
        "vocab_size": draw.choice([64, 66]),
        "intermediate_size": draw.choice([48, 50]),
        "tie_word_embeddings": draw.random() < 0.3,
        "qk_norm": draw.random() < 0.3,
        "attention_bias": draw.random() < 0.3,
        "mlp_bias": draw.random() < 0.2,
        "sliding_window": draw.choice([None, None, 5]),
        "dropout": draw.choice([0.0, 0.0, 0.1]),
        "moe": some_experts(draw) if draw.random() < 0.5 else MoEConfig(),
    }
    micro = draw.choice([1, 2, 3])
    data: dict[str, Any] = {
        "seq_len": draw.choice([16, 24, 24, 21]),
        "micro_batch": micro,
        "document_len": draw.choice([0, 5, 9]),
        "document_mask": draw.random() < 0.6,
        "mask": draw.choice(list(MaskPattern)),
    }
    tp = draw.choice([1, 1, 2, 2, 4])
    parallelism: dict[str, Any] = {
        "tp": tp,
        "sequence_parallel": tp > 1 and draw.random() < 0.6,
        "loss_parallel": tp > 1 and draw.random() < 0.6,
        "pp": draw.choice([1, 2, 2, 2, 3, 4]),
        "pp_schedule": draw.choice([schedule for schedule in PipelineSchedule if schedule != "csv"]),
        "virtual_stages": draw.choice([1, 2]),
        "dp_shard": draw.choice([1, 1, 2, 2, 4]),
        "pp_split": draw.choice(["balanced", "even"]),
        "cp": draw.choice([1, 1, 1, 2, 2, 4]),
        "cp_method": draw.choice(list(ContextMethod)),
        "ep": draw.choice([1, 2, 2, 4]) if model["moe"].num_experts else 1,
        "etp": draw.choice([1, 2, 2]) if model["moe"].num_experts else 1,
        "dp_replicate": draw.choice([1, 1, 2]),
        "zero": draw.choice([0, 1, 2, 3]),
        "prefetch": draw.choice([0, 0, 1]),
        "recompute": draw.choice(["none", "none", "full", "full:2", "selective:attention", "selective:ops"]),
    }
    if parallelism["pp"] == 1:
        parallelism |= {"pp_schedule": PipelineSchedule["1f1b"], "virtual_stages": 1}
    elif parallelism["pp_schedule"] not in SINGLE:
        parallelism["virtual_stages"] = 2
    if parallelism["cp_method"] == ContextMethod.ulysses_ring:
        parallelism["cp_ulysses"] = 2
    dp = parallelism["dp_replicate"] * parallelism["dp_shard"]
    data["global_batch"] = micro * dp * draw.choice([1, 2, 3, 4])
    config = make_config(model, data, optimizer=draw.choice(["sgd", "adamw"]), **parallelism)
    return config, dp * parallelism["pp"] * parallelism["cp"] * parallelism["tp"]


def accepted(count: int, seed: int) -> list[tuple[Config, int]]:
    """So many configs that are not refused."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        config, world = drawn(draw)
        if 1 < world <= RANKS and all(problem.severity != Severity.error for problem in validate(config, world)):
            found.append((config, world))
    return found


def check(pool: Pool, config: Config, world: int) -> float:
    expected = reference(pool, config, 2)
    traces = pool.run(world, "tests.distributed.cases:train", config, 2)
    error, where = worst_error(expected, merged(traces))
    assert error < 1e-9, f"{error:.1e} in {where}: {config.model} {config.data}"
    assert merged(traces).initial == expected.initial
    assert samples_read(config, traces) == expected.samples
    assert disagreeing_replicas(traces) == []
    return error


@pytest.mark.parametrize("number", range(2))
def test_what_is_accepted_is_the_same_run(pool: Pool, number: int) -> None:
    check(pool, *accepted(2, seed=1)[number])


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_150_configs_that_are_accepted_are_the_same_run(pool: Pool) -> None:
    configs = accepted(150, seed=0)
    axes = Counter(
        axis
        for config, _ in configs
        for axis in ("tp", "pp", "cp", "ep", "etp", "dp_replicate")
        if getattr(config.parallelism, axis) > 1
    )
    errors, wrong = [], []
    for config, world in configs:
        try:
            errors.append(check(pool, config, world))
        except AssertionError as error:
            wrong.append(f"{world} ranks, {config.parallelism}: {error}"[:2000])
    print(f"{len(errors)} agree, the worst to {max(errors):.1e}; axes above 1: {dict(axes)}")
    assert wrong == []
    assert min(axes.values()) >= 10
