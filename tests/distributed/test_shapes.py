"""Shapes that do not divide, and options of the model that splitting must respect: exact, or refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from parallel.config import MaskPattern
from parallel.plan.problems import Severity
from parallel.plan.validate import validate
from tests.distributed.cases import disagreeing_replicas, make_config, merged, reference, worst_error
from tests.distributed.pool import Pool

TRAIN = "tests.distributed.cases:train"
EVERYTHING = {"qk_norm": True, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
SP = {"sequence_parallel": True, "loss_parallel": True}

EXACT: dict[str, tuple[int, dict[str, Any]]] = {
    "vocabulary 259 on 2": (2, {"tp": 2, "model": {"vocab_size": 259}}),
    "vocabulary 259 on 4": (4, {"tp": 4, "model": {"vocab_size": 259}} | SP),
    "vocabulary 2003 on 2": (2, {"tp": 2, "model": {"vocab_size": 2003}} | SP),
    "vocabulary 2003 on 4": (4, {"tp": 4, "model": {"vocab_size": 2003}}),
    "vocabulary 2003 on 3 data ranks": (3, {"zero": 3, "model": {"vocab_size": 2003}, "data": {"global_batch": 12}}),
    "a rank without a row of the vocabulary": (
        4,
        {"tp": 4, "model": {"vocab_size": 6}, "data": {"vocab_size": 6}} | SP,
    ),
    "feed-forward 50 on 4": (4, {"tp": 4, "model": {"intermediate_size": 50}} | SP),
    "one key/value head on 4": (4, {"tp": 4, "model": {"num_key_value_heads": 1} | EVERYTHING} | SP),
    "two key/value heads on 4": (4, {"tp": 4, "model": {"num_key_value_heads": 2} | EVERYTHING}),
    "two key/value heads on 4, split once more": (
        8,
        {"tp": 4, "zero": 3, "model": {"num_key_value_heads": 2} | EVERYTHING} | SP,
    ),
    "tied embeddings": (4, {"tp": 2, "zero": 3, "model": {"tie_word_embeddings": True}} | SP),
    "tied embeddings, whole": (2, {"zero": 0, "model": {"tie_word_embeddings": True} | EVERYTHING}),
    "sliding window": (2, {"tp": 2, "model": {"sliding_window": 5}} | SP),
    "plain causal": (2, {"tp": 2, "data": {"document_mask": False}} | SP),
    "dropout": (4, {"tp": 2, "zero": 2, "model": {"dropout": 0.1}} | SP),
    "dropout on whole sequences": (4, {"tp": 2, "zero": 1, "model": {"dropout": 0.1}}),
}


@pytest.mark.parametrize("name", EXACT)
def test_shape_is_exact(pool: Pool, name: str) -> None:
    world, settings = EXACT[name]
    config = make_config(**settings)
    assert [problem for problem in validate(config, world) if problem.severity == Severity.error] == []
    traces = pool.run(world, TRAIN, config)
    error, where = worst_error(reference(pool, config), merged(traces))
    print(f"{name}: {error:.1e} ({where})")
    assert error < 1e-9, where
    assert disagreeing_replicas(traces) == []


REFUSED: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "heads": (3, {"tp": 3, "data": {"seq_len": 15}}, ("parallelism.tp=3", "num_attention_heads=4", "tp=4 or 2")),
    "key/value heads": (
        6,
        {"tp": 6, "data": {"seq_len": 12}, "model": {"num_attention_heads": 12, "num_key_value_heads": 4}},
        ("parallelism.tp=6", "num_key_value_heads=4"),
    ),
    "sequence": (2, {"tp": 2, "data": {"seq_len": 15}} | SP, ("data.seq_len=15", "data.seq_len=16")),
    "vocabulary split twice": (
        4,
        {"tp": 2, "zero": 3, "model": {"vocab_size": 259}},
        ("model.vocab_size=259", "parallelism.tp=2", "260", "zero=0"),
    ),
    "sequence parallel alone": (1, {"sequence_parallel": True}, ("parallelism.sequence_parallel", "tp")),
    "zero 4": (2, {"zero": 4}, ("parallelism.zero=4",)),
    "world": (6, {"tp": 4}, ("tp=4", "6", "1.50")),
    "batch": (3, {"zero": 1}, ("global_batch=8", "micro_batch=2", "3 data", "6 or")),
    "recompute": (1, {"recompute": "full:0"}, ("parallelism.recompute=full:0", "selective:ops")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shape_is_refused_by_name(name: str) -> None:
    world, settings, expected = REFUSED[name]
    said = "\n".join(problem.message for problem in validate(make_config(**settings), world))
    for part in expected:
        assert part in said


RECOMPUTE = ("full", "full:2", "selective:attention", "selective:mlp", "selective:ops")


@pytest.mark.parametrize("layout", [(1, {}), (4, {"tp": 2, "zero": 3} | SP)], ids=["one process", "tp2 zero3"])
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_recomputation_changes_no_bit(pool: Pool, mode: str, layout: tuple[int, dict[str, Any]]) -> None:
    world, settings = layout
    plain = make_config(model={"dropout": 0.1}, **settings)
    again = replace(plain, parallelism=replace(plain.parallelism, recompute=mode))
    expected, found = (pool.run(world, TRAIN, config)[0] for config in (plain, again))
    for kept, made in zip(expected.gradients, found.gradients, strict=True):
        assert all(kept[name].equal(made[name]) for name in kept)


@pytest.mark.parametrize("layout", [(4, {"tp": 2, "zero": 3} | SP), (3, {"zero": 2, "data": {"global_batch": 12}})])
def test_single_precision_agrees_to_1e_5(pool: Pool, layout: tuple[int, dict[str, Any]]) -> None:
    world, settings = layout
    config = make_config(precision="fp32", **settings)
    error, where = worst_error(reference(pool, config), pool.run(world, TRAIN, config)[0])
    assert error < 1e-5, where


def test_bfloat16_norm_does_not_depend_on_the_split(pool: Pool) -> None:
    # S-02: gradients are summed and squared in float32, so only bfloat16 matrix products differ in their order.
    one = make_config(precision="bf16")
    expected = pool.run(1, TRAIN, one, 1)[0].norms[0]
    for world, settings in ((2, {"zero": 3}), (2, {"zero": 0}), (4, {"zero": 1})):
        found = pool.run(world, TRAIN, make_config(precision="bf16", **settings), 1)[0].norms[0]
        assert abs(found / expected - 1) < 1e-4


@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.long)])
def test_many_steps_of_every_zero_stage_are_the_same_run(pool: Pool, steps: int) -> None:
    # S-03: an error of scale that hides in one step shows in many.
    settings: dict[str, Any] = {"data": {"mask": MaskPattern.uneven, "global_batch": 4, "micro_batch": 1}}
    expected = pool.run(1, TRAIN, make_config(**settings), steps)[0]
    for zero in (0, 1, 2, 3):
        found = pool.run(2, TRAIN, make_config(zero=zero, **settings), steps)[0]
        error = max(float((expected.weights[name] - found.weights[name]).abs().max()) for name in expected.weights)
        assert error < 1e-9, f"zero={zero}"
