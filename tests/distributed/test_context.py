"""Context parallelism is the same run as one process: every method, mask, mix of axes, and lengths that do not fit."""

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from models.loss import IGNORE
from parallel.config import Config, ContextMethod, MaskPattern
from parallel.layout import resolve
from parallel.plan.validate import Severity, validate
from recipes.data.windows import SyntheticWindows
from tests.distributed import cases
from tests.distributed.cases import Trace, disagreeing_replicas, make_config, merged, reference, worst_error
from tests.distributed.pool import Pool
from tests.distributed.thinned import thinned

TRAIN = "tests.distributed.cases:train"
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"document_mask": False}),
    "window": ({"sliding_window": 7}, {"document_mask": False}),
    "documents": ({}, {"document_len": 5}),
    "both": ({"sliding_window": 4}, {"document_len": 9}),
}
SIZES: dict[str, tuple[int, int]] = {"heads 8:8": (8, 8), "heads 8:2": (8, 2), "heads 8:1": (8, 1)}
RING, GATHER, ULYSSES = ContextMethod.ring, ContextMethod.all_gather, ContextMethod.ulysses
BOTH = {"cp_method": ContextMethod.ulysses_ring, "cp_ulysses": 2}


def settings(
    mask: str, heads: str, seq_len: int = 24, micro_batch: int = 1, count: int = 2, **parallelism: Any
) -> dict[str, Any]:
    """A config whose data ranks have `count` microbatches, every second sequence of a step without a single label."""
    model, data = MASKS[mask]
    attention, key_value = SIZES[heads]
    shape = {"num_attention_heads": attention, "num_key_value_heads": key_value, "hidden_size": 32, "head_dim": 4}
    sizes = {"seq_len": seq_len, "micro_batch": micro_batch, "global_batch": micro_batch * count}
    return {"model": shape | model, "data": sizes | data, **parallelism}


SP = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, settings("causal", "heads 8:2", cp=2)),
    (2, settings("both", "heads 8:8", 21, 3, cp=2, zero=3)),
    (3, settings("documents", "heads 8:1", 22, 3, cp=3)),
    (4, settings("causal", "heads 8:8", 30, 3, cp=4, zero=3)),
    (4, settings("documents", "heads 8:2", 32, 3, cp=4, zero=1)),
    (4, settings("both", "heads 8:2", 24, 1, cp=4, recompute="full", optimizer="adamw")),
    (8, settings("documents", "heads 8:1", 40, 1, cp=8)),
    (2, settings("causal", "heads 8:1", cp=2, cp_method=GATHER)),
    (3, settings("both", "heads 8:2", 20, 3, cp=3, cp_method=GATHER, zero=3)),
    (4, settings("documents", "heads 8:8", 33, 1, cp=4, cp_method=GATHER, recompute="selective:ops")),
    (2, settings("window", "heads 8:2", 23, 3, cp=2, cp_method=ULYSSES)),
    (4, settings("both", "heads 8:2", 24, 1, cp=4, cp_method=ULYSSES, zero=3)),
    (8, settings("documents", "heads 8:1", 24, 1, cp=8, cp_method=ULYSSES)),
    (4, settings("documents", "heads 8:1", 30, 3, cp=4, **BOTH)),
    (8, settings("both", "heads 8:2", 32, 1, cp=8, **BOTH, zero=3)),
    (4, settings("documents", "heads 8:2", 24, 3, cp=2, **SP)),
    (8, settings("both", "heads 8:8", 22, 1, cp=4, zero=3, **SP)),
    (4, settings("causal", "heads 8:1", 24, 1, cp=2, cp_method=ULYSSES, **SP)),
    (4, settings("window", "heads 8:2", 20, 1, cp=2, cp_method=GATHER, tp=2)),
    (4, settings("documents", "heads 8:2", 24, 1, 4, cp=2, zero=2)),
    (8, settings("documents", "heads 8:2", 22, 1, 8, cp=2, dp_replicate=2, zero=3)),
]


def _check(pool: Pool, world: int, config: Config, steps: int = 3) -> float:
    assert [problem for problem in validate(config, world) if problem.severity == Severity.error] == []
    expected = reference(pool, config, steps)
    traces = pool.run(world, TRAIN, config, steps)
    error, where = worst_error(expected, merged(traces))
    assert error < (1e-9 if config.precision.name == "fp64" else 1e-5), where
    assert traces[0].tokens == expected.tokens
    assert disagreeing_replicas(traces) == []
    return error


@pytest.mark.parametrize(("world", "chosen"), thinned(CASES, 3), ids=str)
def test_context_parallelism_equals_one_process(pool: Pool, world: int, chosen: dict[str, Any]) -> None:
    print(f"{_check(pool, world, make_config(**chosen)):.1e}")


def _pipeline(schedule: str, virtual: int, **others: Any) -> dict[str, Any]:
    chosen = settings("documents", "heads 8:2", 22, count=4, **others)
    chosen["model"] |= {"num_hidden_layers": 4}
    return chosen | {"pp": 2, "pp_schedule": schedule, "virtual_stages": virtual}


PIPELINES: list[tuple[int, dict[str, Any]]] = [
    (4, _pipeline("1f1b", 1, cp=2)),
    (4, _pipeline("interleaved_1f1b", 2, cp=2, cp_method=GATHER, zero=3)),
    (4, _pipeline("interleaved_zero_bubble", 2, cp=2)),
    (4, _pipeline("zbv_zero_bubble", 2, cp=2, cp_method=ULYSSES)),
    (8, _pipeline("dualpipe_v", 2, cp=2, zero=3, **SP)),
    (8, _pipeline("1f1b", 1, cp=4, **BOTH, recompute="selective:attention")),
]


@pytest.mark.parametrize(("world", "chosen"), thinned(PIPELINES), ids=str)
def test_every_microbatch_of_a_pipeline_has_its_own_documents(
    pool: Pool, world: int, chosen: dict[str, Any]
) -> None:  # S-15
    print(f"{_check(pool, world, make_config(**chosen)):.1e}")


@pytest.mark.parametrize("method", [{}, {"cp_method": GATHER}, {"cp_method": ULYSSES}], ids=str)
def test_single_precision_agrees_to_1e_5(pool: Pool, method: dict[str, Any]) -> None:
    _check(pool, 2, make_config(precision="fp32", **settings("both", "heads 8:2", 30, 3, cp=2, **method)))


@pytest.mark.parametrize("layout", [{}, SP], ids=["cp4", "cp2 tp2"])
def test_dropout_goes_by_the_place_in_the_whole_sequence(pool: Pool, layout: dict[str, Any]) -> None:
    chosen = settings("documents", "heads 8:2", 22, cp=2 if layout else 4, recompute="full", **layout)
    chosen["model"] |= {"dropout": 0.2}
    _check(pool, 4, make_config(**chosen))


def without_labels(config: Config, places: list[int]) -> Trace:
    """A run in which the tokens at these places of every sequence have no label."""
    right = SyntheticWindows.sample

    def sample(self: SyntheticWindows, index: int, place: float) -> dict[str, np.ndarray]:
        result = right(self, index, place)
        result["labels"][places] = IGNORE
        return result

    with patch.object(SyntheticWindows, "sample", sample):
        return cases.train(config)


@pytest.mark.parametrize("method", [{}, {"cp_method": GATHER}, {"cp_method": ULYSSES}], ids=str)
def test_a_rank_without_a_single_label_is_no_trouble(pool: Pool, method: dict[str, Any]) -> None:
    chosen = settings("causal", "heads 8:8", cp=4, **method)  # S-09
    config = make_config(**chosen | {"data": chosen["data"] | {"mask": MaskPattern.uneven}})
    places = [*range(0, 6), *range(21, 24)]  # all of rank 0's, in either way of cutting, and of others some
    run = "tests.distributed.test_context:without_labels"
    expected = pool.run(1, run, cases.one_process(config), places)[0]
    error, where = worst_error(expected, merged(pool.run(4, run, config, places)))
    assert error < 1e-9, where


@pytest.mark.parametrize("mode", ["full", "selective:attention", "selective:ops"])
def test_recomputation_changes_no_bit(pool: Pool, mode: str) -> None:
    plain = make_config(**settings("both", "heads 8:2", 22, cp=2))
    again = replace(plain, parallelism=replace(plain.parallelism, recompute=mode))
    expected, found = (pool.run(2, TRAIN, config)[0] for config in (plain, again))
    for kept, made in zip(expected.gradients, found.gradients, strict=True):
        assert all(kept[name].equal(made[name]) for name in kept)


REFUSED: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "no size": (4, {"cp": 4, "cp_method": "ulysses_ring"}, ("parallelism.cp_ulysses=None", "cp=4", "cp_ulysses=2")),
    "size that does not divide": (
        4,
        {"cp": 4} | BOTH | {"cp_ulysses": 3},
        ("parallelism.cp_ulysses=3", "cp_ulysses=2"),
    ),
    "size as large as cp": (2, {"cp": 2} | BOTH, ("parallelism.cp_ulysses=2", "Write parallelism.cp_method=ring with")),
    "size without cp": (1, {} | BOTH, ("parallelism.cp_ulysses=2", "null")),
    "size of another method": (2, {"cp": 2, "cp_ulysses": 2}, ("parallelism.cp_ulysses=2", "cp_method=ring", "null")),
    "heads": (3, {"cp": 3, "cp_method": "ulysses"}, ("num_attention_heads=4", "3 ranks", "parallelism.cp=4 or 2")),
    "heads of a tp rank": (
        8,
        {"cp": 4, "tp": 2, "cp_method": "ulysses"},
        ("the 2 heads of a tp rank", "parallelism.cp=2", "cp_method=ring"),
    ),
    "key/value heads": (
        3,
        {"cp": 3, "cp_method": "ulysses", "model": {"num_attention_heads": 6, "num_key_value_heads": 2}},
        ("the 2 key/value heads", "3 ranks", "cp_method=ring"),
    ),
    "length": (
        3,
        {"cp": 3, "cp_padding": False, "data": {"seq_len": 16}},
        ("data.seq_len=16", "multiple of 6", "two pieces for each of 3", "data.seq_len=18 or 12", "cp_padding=true"),
    ),
    "length with sequence parallelism": (
        8,
        {"cp": 2, "cp_padding": False, "data": {"seq_len": 18, "global_batch": 8}} | SP | {"tp": 4},
        ("multiple of 8", "equal parts for 4 tp ranks", "16 or 24"),
    ),
    "short length": (4, {"cp": 4, "cp_padding": False, "data": {"seq_len": 3}}, ("Write data.seq_len=8, or",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    world, chosen, expected = REFUSED[name]  # S-26
    errors = [
        problem.message for problem in validate(make_config(**chosen), world) if problem.severity == Severity.error
    ]
    assert len(errors) == 1, errors
    for part in expected:
        assert part in errors[0]


def test_tokens_that_fill_sequences_up_are_counted() -> None:
    problem, decoding = validate(make_config(cp=3, data={"seq_len": 16}), 3)
    assert (problem.severity, decoding.rule) == (Severity.warning, "cp-decoding")
    for part in ("data.seq_len=16", "filled up to 18", "16 of 144 a step (11.1%)"):
        assert part in problem.message


METHODS: list[dict[str, Any]] = [{"cp_method": RING}, {"cp_method": GATHER}, {"cp_method": ULYSSES}, BOTH]


def _matrix() -> list[tuple[int, dict[str, Any]]]:
    """Every legal mix of the sizes that fit eight ranks."""
    result: list[tuple[int, dict[str, Any]]] = []
    axes = product(METHODS, (2, 3, 4, 8), MASKS, SIZES, (1, 2), (1, 2), (0, 3))
    for index, (method, cp, mask, heads, tp, pp, zero) in enumerate(axes):
        world = cp * tp * pp
        if world > 8:
            continue
        seq_len, micro_batch = (24, 22, 31)[index % 3], (1, 3)[index // 2 % 2]
        split = {"tp": tp, "sequence_parallel": tp > 1, "pp": pp, "cp": cp, "zero": zero}
        chosen = settings(mask, heads, seq_len, micro_batch, **split, **method)
        problems = validate(make_config(**chosen), resolve(make_config(**chosen).parallelism, world).world)
        if all(problem.severity != Severity.error for problem in problems):
            result.append((world, chosen))
    return result


@pytest.mark.long
@pytest.mark.parametrize("case", _matrix(), ids=str)
def test_the_whole_matrix_equals_one_process(pool: Pool, case: tuple[int, dict[str, Any]]) -> None:
    world, chosen = case
    print(f"{_check(pool, world, make_config(**chosen), steps=1):.1e}")
