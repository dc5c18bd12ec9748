"""The simulated pipeline timelines: bubbles and live activations are those that the schedules are known for."""

from dataclasses import replace

import pytest

from parallel.config import ParallelismConfig, PipelineSchedule
from parallel.order import order
from parallel.plan.timeline import bubble, expected, peak_activations, simulate
from parallel.schedule import BACKWARD, FORWARD, Action
from parallel.stages import rank_of, split_layers, stage_count, stages_of
from tests.small import SMALL

SIZES = [(2, 4), (4, 8), (4, 16), (8, 32)]
ALL = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipe_v", 2),
]


def pipeline(schedule: str, pp: int, virtual: int) -> ParallelismConfig:
    return ParallelismConfig(pp=pp, pp_schedule=PipelineSchedule[schedule], virtual_stages=virtual)


def bubble_of(schedule: str, pp: int, virtual: int, microbatches: int) -> float:
    return bubble(expected(pipeline(schedule, pp, virtual), microbatches), pp)


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_plain_schedules_have_the_bubble_of_the_formula(schedule: str, pp: int, microbatches: int) -> None:
    assert bubble_of(schedule, pp, 1, microbatches) == pytest.approx((pp - 1) / (microbatches + pp - 1))


@pytest.mark.parametrize("virtual", [2, 4])
@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_interleaving_divides_the_bubble_by_the_virtual_stages(pp: int, microbatches: int, virtual: int) -> None:
    found = bubble_of("interleaved_1f1b", pp, virtual, microbatches)
    assert found == pytest.approx((pp - 1) / (virtual * microbatches + pp - 1))


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"])
def test_zero_bubble_schedules_have_a_smaller_bubble_than_interleaving(
    schedule: str, pp: int, microbatches: int
) -> None:
    assert bubble_of(schedule, pp, 2, microbatches) < 0.5 * bubble_of("interleaved_1f1b", pp, 2, microbatches)


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_live_activations_are_those_of_the_schedule(pp: int, microbatches: int) -> None:
    def peaks(schedule: str, virtual: int) -> list[int]:
        return [peak_activations(actions) for actions in order(pipeline(schedule, pp, virtual), microbatches)]

    assert peaks("gpipe", 1) == [microbatches] * pp
    assert peaks("1f1b", 1) == [min(microbatches, pp - rank) for rank in range(pp)]
    for virtual in (2, 4):  # Narayanan et al., 2021: the warm-up's forward passes, and one
        warmup = [min(2 * (pp - rank - 1) + (virtual - 1) * pp, virtual * microbatches) for rank in range(pp)]
        assert peaks("interleaved_1f1b", virtual) == [min(held + 1, virtual * microbatches) for held in warmup]
    assert peaks("zbv_zero_bubble", 2) == [2 * pp] * pp  # Qi et al., 2024: that of 1F1B's first rank, on every rank
    assert max(peaks("dualpipe_v", 2)) == 2 * pp + 1  # DeepSeek-AI, 2025: one more


@pytest.mark.parametrize(("schedule", "virtual"), ALL)
@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_every_stage_does_every_microbatch_once_on_its_own_rank(
    schedule: str, virtual: int, pp: int, microbatches: int
) -> None:
    config = pipeline(schedule, pp, virtual)
    for rank, actions in enumerate(order(config, microbatches)):
        forwards = [(action.stage, action.microbatch) for action in actions if action.kind == FORWARD]
        assert sorted(forwards) == [(s, m) for s in stages_of(rank, config) for m in range(microbatches)]


@pytest.mark.parametrize(("schedule", "virtual"), ALL)
def test_every_stage_has_one_rank(schedule: str, virtual: int) -> None:
    config = pipeline(schedule, 4, virtual)
    held = sorted(stage for rank in range(4) for stage in stages_of(rank, config))
    assert held == list(range(stage_count(config)))
    assert all(stage in stages_of(rank_of(stage, config), config) for stage in held)


def test_orders_that_wait_for_each_other_are_found() -> None:
    first = [Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0)]
    second = [Action(BACKWARD, 1, 0), Action(FORWARD, 1, 0)]
    with pytest.raises(AssertionError, match="cannot go on"):
        simulate([first, second], 2, lambda _: 1.0)


@pytest.mark.parametrize("split", ["balanced", "even"])
@pytest.mark.parametrize(("layers", "pp", "virtual"), [(30, 4, 1), (80, 16, 2), (7, 3, 1), (5, 4, 1), (8, 4, 2)])
def test_every_layer_exists_exactly_once(layers: int, pp: int, virtual: int, split: str) -> None:
    # S-20
    config = ParallelismConfig(pp=pp, virtual_stages=virtual, pp_split=split)
    ranges = split_layers(replace(SMALL, num_hidden_layers=layers), config)
    assert [layer for stage in ranges for layer in stage] == list(range(layers))
    assert all(len(stage) >= 1 for stage in ranges)


def test_a_balanced_split_gives_the_last_stage_less_where_the_output_layer_is_dear() -> None:
    model = replace(SMALL, num_hidden_layers=12, vocab_size=4000)
    counts = [len(stage) for stage in split_layers(model, ParallelismConfig(pp=4))]
    assert counts[-1] < min(counts[:-1])
