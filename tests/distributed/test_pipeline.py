"""Pipelines: every schedule is the same run as one process, and every layer exists exactly once."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from parallel.config import PipelineSchedule
from parallel.plan.validate import Severity, validate
from tests.distributed.cases import (
    disagreeing_replicas,
    make_config,
    merged,
    reference,
    relative,
    samples_read,
    worst_error,
)
from tests.distributed.pool import Pool
from tests.distributed.thinned import thinned

TRAIN = "tests.distributed.cases:train"


def settings(schedule: str, pp: int, virtual: int, microbatches: int, **others: Any) -> dict[str, Any]:
    """A pipeline over 8 layers whose data ranks have so many microbatches of one sequence."""
    dp = others.pop("dp", 1)
    return {
        "pp": pp,
        "pp_schedule": PipelineSchedule[schedule],
        "virtual_stages": virtual,
        "model": {"num_hidden_layers": 8} | others.pop("model", {}),
        "data": {"micro_batch": 1, "global_batch": microbatches * dp},
        **others,
    }


CASES: list[tuple[int, dict[str, Any]]] = [
    (2, settings("gpipe", 2, 1, 4)),
    (2, settings("1f1b", 2, 1, 4)),
    (2, settings("interleaved_1f1b", 2, 2, 4)),
    (2, settings("interleaved_zero_bubble", 2, 2, 4)),
    (2, settings("zbv_zero_bubble", 2, 2, 4)),
    (2, settings("dualpipe_v", 2, 2, 4)),
    (3, settings("1f1b", 3, 1, 4)),
    (3, settings("gpipe", 3, 1, 2)),
    (4, settings("interleaved_1f1b", 4, 2, 8)),
    (4, settings("zbv_zero_bubble", 4, 2, 4)),
    (4, settings("dualpipe_v", 4, 2, 9)),
    (4, settings("interleaved_zero_bubble", 4, 1, 8)),
    (4, settings("1f1b", 2, 1, 4, tp=2)),
    (4, settings("interleaved_1f1b", 2, 2, 4, tp=2, sequence_parallel=True, loss_parallel=True)),
    (4, settings("zbv_zero_bubble", 2, 2, 4, tp=2, sequence_parallel=True, loss_parallel=True)),
    # several sequences in a microbatch: what sequence parallelism hands on is then no longer contiguous
    *[
        (4, settings(name, 2, 2, 4, tp=2, sequence_parallel=True, data={"micro_batch": 3, "global_batch": 12}))
        for name in ("interleaved_1f1b", "zbv_zero_bubble")
    ],
    (8, settings("1f1b", 2, 1, 4, dp=2, tp=2, zero=3, sequence_parallel=True, loss_parallel=True)),
    (8, settings("interleaved_1f1b", 2, 2, 4, dp=2, tp=2, zero=2, sequence_parallel=True, recompute="full")),
    (2, settings("1f1b", 2, 1, 4, model={"tie_word_embeddings": True})),
    (4, settings("interleaved_1f1b", 2, 2, 4, dp=2, zero=3, model={"tie_word_embeddings": True, "dropout": 0.1})),
    (2, settings("zbv_zero_bubble", 2, 2, 4, model={"tie_word_embeddings": True})),
    (4, settings("zbv_zero_bubble", 2, 2, 4, dp=2, zero=2, model={"tie_word_embeddings": True})),
    (8, settings("dualpipe_v", 2, 2, 4, dp=2, zero=3, tp=2, model={"tie_word_embeddings": True})),
    (3, settings("1f1b", 3, 1, 4, model={"num_hidden_layers": 7})),
    (4, settings("1f1b", 4, 1, 4, model={"num_hidden_layers": 5})),
    (4, settings("gpipe", 4, 1, 4, model={"num_hidden_layers": 30})),
    (2, settings("1f1b", 2, 1, 4, pp_split=[6, 2], optimizer="adamw", recompute="selective:mlp")),
]


ZERO: list[tuple[int, dict[str, Any]]] = [
    *[(4, settings("1f1b", 2, 1, 3, dp=2, zero=zero)) for zero in (0, 1, 2, 3)],
    *[(4, settings("interleaved_1f1b", 2, 2, 4, dp=2, zero=zero)) for zero in (0, 1, 2, 3)],
    *[(4, settings("interleaved_zero_bubble", 2, 2, 4, dp=2, zero=zero)) for zero in (0, 1, 2, 3)],
    *[(4, settings("zbv_zero_bubble", 2, 2, 4, dp=2, zero=zero)) for zero in (0, 2, 3)],
    *[(4, settings("dualpipe_v", 2, 2, 4, dp=2, zero=zero)) for zero in (1, 3)],
]


@pytest.mark.parametrize(("world", "chosen"), [*CASES, *thinned(ZERO)], ids=str)
def test_schedule_equals_one_process(pool: Pool, world: int, chosen: dict[str, Any]) -> None:
    check(pool, world, chosen)


def check(pool: Pool, world: int, chosen: dict[str, Any], steps: int = 3) -> None:
    """A pipeline is the same run as one process, from the initial weights to the replicas' bits."""
    config = make_config(**chosen)
    expected = reference(pool, config, steps)
    traces = pool.run(world, TRAIN, config, steps)
    error, where = worst_error(expected, merged(traces))
    print(f"{error:.1e} ({where})")
    assert error < 1e-9, where
    assert merged(traces).initial == expected.initial
    assert samples_read(config, traces) == expected.samples
    assert disagreeing_replicas(traces) == []


SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipe_v", 2),
]


def matrix() -> list[tuple[int, dict[str, Any]]]:
    """Schedules x 2, 3, 4 pipeline ranks x microbatches x ZeRO x tensor parallelism, as far as it is legal."""
    cases = []
    for (schedule, virtual), pp, zero, tp in product(SCHEDULES, (2, 3, 4), (0, 1, 2, 3), (1, 2)):
        dp = 2 if zero else 1
        for microbatches in (pp, 2 * pp, 3 * pp, 2 * pp + 1):
            model = {"num_hidden_layers": max(4, pp * virtual)}
            axes: dict[str, Any] = {"dp": dp, "tp": tp, "zero": zero, "sequence_parallel": tp > 1}
            chosen = settings(schedule, pp, virtual, microbatches, model=model, **axes)
            world = pp * dp * tp
            if all(problem.severity != Severity.error for problem in validate(make_config(**chosen), world)):
                cases.append((world, chosen))
    return cases


@pytest.fixture(scope="module")
def wide_pool() -> Iterator[Pool]:
    """Four pipeline ranks x 2 data ranks x 2 tensor ranks."""
    pool = Pool(16)
    yield pool
    pool.close()


@pytest.mark.long
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_the_whole_matrix_equals_one_process(wide_pool: Pool, case: tuple[int, dict[str, Any]]) -> None:
    check(wide_pool, *case, steps=2)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv_zero_bubble"])
def test_given_bfloat16_when_the_backward_pass_is_split_then_gradients_are_still_summed_in_float32(
    pool: Pool, schedule: str
) -> None:
    # The same numbers of bfloat16 from every microbatch: only the order of sums in float32 differs.
    plain, split = (
        merged(pool.run(2, TRAIN, make_config(**settings(name, 2, virtual, 8), precision="bf16")))
        for name, virtual in (("1f1b", 1), (schedule, 2))
    )
    worst = max((relative(plain.gradients[0][name], split.gradients[0][name]), name) for name in plain.gradients[0])
    assert worst[0] < 1e-5, worst
