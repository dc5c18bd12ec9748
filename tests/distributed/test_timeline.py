"""What ranks of a pipeline really do, and when: the schedule's order, and no waiting for what is there already.

Stages are made to last by sleeping, so that two cores can run four ranks at once. What a wait must stay below is the
length of the shortest action: a rank that waits for a message in vain waits for an action at least. Each wait is the
shortest of six steps, since a wait that the order of messages causes comes again in every step.
"""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from parallel.config import Config
from parallel.order import order
from parallel.pipeline import _Stage
from parallel.plan.timeline import Span, bubble, equal_costs, needs, simulate
from parallel.schedule import Action
from parallel.stages import stage_count
from parallel.step import forward_backward
from tests.distributed.cases import build, make_config
from tests.distributed.pool import Pool
from tests.distributed.test_pipeline import settings
from tests.distributed.thinned import thinned
from tests.unit.test_timeline import ALL

pytestmark = pytest.mark.alone  # it looks at the clock
UNIT_S = 0.03
STEPS = 6


def recorded(config: Config) -> list[list[tuple[Action, float, float]]]:
    """Per step, this rank's actions with their starts and ends by the machine's clock."""

    def lasting(method: str, units: dict[str, float]) -> Any:
        original = getattr(_Stage, method)

        def slow(stage: _Stage, kind: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(UNIT_S * units.get(kind if isinstance(kind, str) else "forward", 0.0))
            return original(stage, kind, *args, **kwargs)

        return patch.object(_Stage, method, slow)

    model, batches = build(config)
    assert model.pipeline is not None
    steps = []
    forward = lasting("forward_maybe_with_nosync", {"forward": 1.0})
    backward = lasting("backward_maybe_with_nosync", {"full": 2.0, "input": 1.0, "weight": 1.0})
    with forward, backward:
        for step in range(STEPS + 1):
            forward_backward(model, batches[step], step)
            recording = model.pipeline.recording
            steps.append([(a, recording.begin + start, recording.begin + end) for a, start, end in recording.spans()])
    return steps[1:]  # in the first step connections are opened


@pytest.mark.parametrize(("schedule", "virtual"), thinned(ALL))
def test_ranks_keep_the_order_and_wait_for_nothing_that_is_there(pool: Pool, schedule: str, virtual: int) -> None:
    config = make_config(**settings(schedule, 4, virtual, 8))
    ranks = pool.run(4, "tests.distributed.test_timeline:recorded", config)
    planned = order(config.parallelism, 8)
    for rank, steps in enumerate(ranks):
        for spans in steps:
            assert [action for action, _, _ in spans] == planned[rank]
    waits: dict[Action, list[float]] = {}
    for step in range(STEPS):
        ends = {action: end for steps in ranks for action, _, end in steps[step]}
        for steps in ranks:
            free = steps[step][0][1]
            for action, start, end in steps[step]:
                ready = needs(action, stage_count(config.parallelism), ends)
                assert ready is not None
                waits.setdefault(action, []).append(start - max(free, ready))
                free = end
    worst = max(waits, key=lambda action: min(waits[action]))
    measured = [
        bubble([Span(rank, *span) for rank, steps in enumerate(ranks) for span in steps[step]], 4)
        for step in range(STEPS)
    ]
    expected = bubble(simulate(planned, stage_count(config.parallelism), equal_costs), 4)
    print(f"longest wait {min(waits[worst]) * 1e3:.1f} ms at {worst}")
    print(f"bubble {min(measured):.3f}, simulated {expected:.3f}")
    assert min(waits[worst]) < UNIT_S / 2, worst
    # Between actions pass milliseconds that the simulation does not have.
    assert expected - 0.01 < min(measured) < expected + 0.07


def test_a_schedule_from_a_file_is_the_same_run(pool: Pool, tmp_path: Path) -> None:
    from tests.distributed.cases import merged, reference, worst_error

    parallelism = make_config(**settings("interleaved_1f1b", 2, 2, 4)).parallelism
    path = tmp_path / "schedule.csv"
    path.write_text("".join(",".join(map(str, actions)) + "\n" for actions in order(parallelism, 4)))
    config = make_config(**settings("csv", 2, 2, 4), pp_schedule_file=str(path))
    traces = pool.run(2, "tests.distributed.cases:train", config)
    error, where = worst_error(reference(pool, config), merged(traces))
    assert error < 1e-9, where
