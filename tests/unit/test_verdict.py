"""The verdict over ranks that stand still or are slow, from what they say of themselves."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel.cluster import WatchConfig
from parallel.flight import Collective
from parallel.layout import Layout
from parallel.ranks import Ranks
from parallel.verdict import Status, differing_order, verdict
from parallel.watch import Watch
from recipes.watching import LOOKS, Stragglers, stragglers, waited_share

TP = {"tp0": ("tp", [0, 1]), "tp1": ("tp", [2, 3])}


def _collective(
    group: str, number: int, pending: bool = False, operation: str = "all_reduce", shapes: str = "float [[4]]"
):
    return Collective(group, number, operation, shapes, transfer=False, pending=pending, entered=float(number))


def _status(rank: int, *collectives: Collective, waiting: bool = True, **more) -> Status:
    groups = {
        f"tp{rank // 2}": ("tp", [rank // 2 * 2, rank // 2 * 2 + 1]),
        f"dp{rank % 2}": ("dp_shard", [rank % 2, rank % 2 + 2]),
    }
    stack = [f"model.py:{rank} forward: x = sum(x)"]
    fields = {"phase": "forward and backward", "step": 7, "silent_s": 30.0} | more
    return Status(
        rank,
        f"node{rank // 2 + 1}",
        stack=stack,
        waiting=waiting,
        collectives=list(collectives),
        groups=groups,
        **fields,
    )


def test_given_a_rank_that_has_not_come_when_others_wait_then_it_alone_is_named() -> None:
    statuses = [
        _status(0, _collective("tp0", 4), _collective("dp0", 9, pending=True)),
        _status(1, _collective("tp0", 4), _collective("dp1", 9, pending=True)),
        _status(2, _collective("tp1", 5, pending=True), _collective("dp0", 8)),
        _status(3, _collective("tp1", 4), _collective("dp1", 8), waiting=False),
    ]
    text = verdict(statuses, 4)
    assert text.startswith(
        "rank 3 on node2 did not enter all_reduce of axis dp_shard (ranks 1, 3) in step 7 "
        "(phase: forward and backward), where rank 1 waits for it; silent for 30 s. Its stack:\n  model.py:3 forward"
    )
    assert "rank 2 on" not in text


def test_given_a_rank_with_something_in_flight_when_it_does_something_else_then_it_is_still_the_culprit() -> None:
    # An asynchronous reduction that it has started does not excuse it.
    statuses = [
        _status(0, _collective("tp0", 5), _collective("tp0", 6, pending=True)),
        _status(1, _collective("tp0", 5, pending=True), waiting=False),
    ]
    assert verdict(statuses, 2).startswith("rank 1 on node1 did not enter all_reduce of axis tp (ranks 0, 1)")


def test_given_a_rank_that_left_no_word_when_judged_then_it_is_named() -> None:
    text = verdict([_status(0, _collective("tp0", 5, pending=True))], 2)
    assert text.startswith("rank 1 gave no sign at all")


def test_given_ranks_that_swap_two_collectives_when_judged_then_both_are_shown_with_the_first_difference() -> None:
    gather = {"operation": "all_gather", "shapes": "float [[2]]"}
    statuses = [
        _status(0, _collective("tp0", 3), _collective("tp0", 4, pending=True)),
        _status(1, _collective("tp0", 3), _collective("tp0", 4, pending=True, **gather)),
    ]
    text = differing_order(statuses)
    assert text is not None
    assert "as number 4 of axis tp (ranks 0, 1), rank 0 on node1 (now in step 7) entered all_reduce" in text
    assert "but rank 1 on node1 (now in step 7) entered all_gather of float [[2]]" in text
    assert "model.py:0" in text
    assert "model.py:1" in text


def test_given_uneven_all_to_alls_when_compared_then_their_shapes_may_differ() -> None:
    uneven = {"operation": "all_to_all_single"}
    statuses = [_status(rank, _collective("tp0", 4, shapes=f"float [[{rank}]]", **uneven)) for rank in (0, 1)]
    assert differing_order(statuses) is None


def test_given_two_ranks_that_wait_in_two_groups_when_judged_then_the_order_of_groups_is_the_cause() -> None:
    statuses = [
        _status(0, _collective("a", 5, pending=True), _collective("b", 2)),
        _status(1, _collective("a", 4), _collective("b", 3, pending=True)),
    ]
    for status in statuses:
        status.groups = {"a": ("tp", [0, 1]), "b": ("cp", [0, 1])}
    text = verdict(statuses, 2)
    assert text.startswith(
        "ranks differ in the order of their groups: in step 7 rank 0 on node1 waits in all_reduce of axis tp"
    )
    assert "rank 1 on node1 waits in all_reduce of axis cp" in text


def test_a_status_survives_being_written_down() -> None:
    status = _status(1, _collective("tp0", 3, pending=True), error="gone")
    assert Status.read(status.plain()) == status


def test_given_the_work_of_ranks_when_compared_then_only_with_their_own_stage() -> None:
    layout = Layout(pp=2, dp_shard=3)
    assert stragglers([1.0, 1.1, 2.0, 5.0, 5.1, 5.2], layout, 1.5) == {2: 1.05}
    assert stragglers([1.0, 1.0], Layout(pp=2), WatchConfig().straggler_factor) == {}


def test_given_timed_collectives_when_summed_then_the_longest_group_counts_over_what_is_remembered() -> None:
    timed = [
        replace(_collective(group, number), seconds=seconds)  # entered at `number` seconds
        for number, group, seconds in ((2, "tp0", 1.0), (4, "dp0", 3.0), (5, "tp0", 0.5), (6, "dp0", 1.0))
    ]
    assert waited_share(timed, since=3.0, now=8.0) == 4.0 / 5.0
    assert waited_share(timed, since=0.0, now=10.0) == 4.0 / 8.0  # what was before the oldest is forgotten
    assert waited_share(timed, since=5.5, now=6.1) == 1.0
    assert waited_share([], since=0.0, now=1.0) == 0.0


def test_given_ranks_looked_at_unequally_often_when_one_is_slow_then_they_compare_together_and_name_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(0, 2)
    watch = Watch(WatchConfig(), ranks, tmp_path / "stalls", lambda _: None)
    callback = Stragglers(watch, Layout(dp_shard=2), ranks, 2.0, log_interval=5)
    with caplog.at_level(logging.WARNING, "quintet"):
        for interval in range(1, 11):  # of 5 steps; rank 0 waits nine tenths of its time, rank 1 never
            callback.add(torch.tensor([[5, 1.2, LOOKS - 10, 0.9 * (LOOKS - 10)], [5, 1.2, LOOKS + 1, 0]]), 5 * interval)
    [record] = caplog.records
    assert "rank 1 on  is slow: it works 0.24 s a step" in record.message
    assert record.message.endswith("(step 20)")
