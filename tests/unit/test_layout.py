"""The rank grid: every rank once, groups that are slices, and sizes that are refused."""

import time

import numpy as np
import pytest

from models.errors import ConfigError
from parallel.cluster import ClusterConfig
from parallel.config import ParallelismConfig
from parallel.layout import AXES, Layout, axes_along, mesh_layout, resolve, world_size

LAYOUTS = [
    Layout(),
    Layout(tp=4),
    Layout(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=4, ep=4, etp=2),
    Layout(pp=3, dp_shard=5, tp=2, ep=5, etp=1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_given_a_layout_when_asked_for_ranks_and_coordinates_then_each_is_the_others_inverse(layout: Layout) -> None:
    places = [tuple(layout.coordinates(rank).items()) for rank in range(layout.world)]
    assert len(set(places)) == layout.world
    assert [layout.rank(**dict(place)) for place in places] == list(range(layout.world))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("axes", [*((axis,) for axis in AXES), ("dp_replicate", "dp_shard"), ("dp_shard", "cp"), AXES])
def test_given_axes_when_grouped_then_ranks_are_partitioned_and_differ_only_along_them(
    layout: Layout, axes: tuple[str, ...]
) -> None:
    groups = layout.groups(*axes)
    assert sorted(groups.flatten().tolist()) == list(range(layout.world))
    assert groups.shape[1] == np.prod([getattr(layout, axis) for axis in axes])
    for group in groups:
        places = [layout.coordinates(rank) for rank in group]
        assert all(place[axis] == places[0][axis] for place in places for axis in AXES if axis not in axes)
        assert list(group) == sorted(group)


def test_given_tp_when_grouped_then_its_ranks_are_consecutive_and_on_one_node() -> None:
    layout = Layout(pp=2, dp_shard=4, tp=8)
    for group in layout.groups("tp"):
        assert np.array_equal(group, np.arange(group[0], group[0] + 8))
        assert len({int(rank) // 8 for rank in group}) == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_given_a_layout_when_data_ranks_are_counted_then_every_part_is_read_and_model_ranks_share_one(
    layout: Layout,
) -> None:
    parts = {rank: layout.data_rank(rank) for rank in range(layout.world)}
    assert set(parts.values()) == set(range(layout.dp))
    for axes in (("tp",), ("cp",), ("pp",), ("pp", "cp", "tp")):
        for group in layout.groups(*axes):
            assert len({parts[int(rank)] for rank in group}) == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_given_experts_when_placed_then_their_grid_has_every_rank_once_and_the_same_stages_and_replicas(
    layout: Layout,
) -> None:
    experts = layout.expert_grid()
    assert experts.shape == (layout.pp, layout.dp_replicate, layout.expert_dp, layout.ep, layout.etp)
    assert np.array_equal(
        experts.reshape(layout.pp, layout.dp_replicate, -1),
        layout.grid().reshape(layout.pp, layout.dp_replicate, -1),
    )


def test_given_16384_ranks_when_laid_out_then_it_takes_no_time() -> None:
    layout = resolve(ParallelismConfig(tp=8, pp=16, cp=16), 16_384)
    started = time.process_time()
    assert layout.dp_shard == 8
    assert layout.groups("dp_shard").shape == (2048, 8)
    assert layout.coordinates(16_383) == {"pp": 15, "dp_replicate": 0, "dp_shard": 7, "cp": 15, "tp": 7}
    assert layout.rank(pp=1) == 1024
    assert time.process_time() - started < 1.0  # processor time: seconds here would mean a loop over all ranks


@pytest.mark.parametrize(
    ("sizes", "world", "shard"),
    [({}, 1, 1), ({}, 8, 8), ({"tp": 2, "pp": 2}, 8, 2), ({"tp": 8}, 8, 1), ({"dp_replicate": 2}, 8, 4)],
)
def test_given_minus_one_when_resolved_then_dp_shard_is_what_is_left(
    sizes: dict[str, int], world: int, shard: int
) -> None:
    layout = resolve(ParallelismConfig(**sizes), world)
    assert (layout.dp_shard, layout.world) == (shard, world)


@pytest.mark.parametrize(
    ("sizes", "world", "words"),
    [
        ({"tp": 0}, 8, "parallelism.tp=0 must be at least 1."),
        ({"dp_shard": 0}, 8, "parallelism.dp_shard=0 must be at least 1 or -1."),
        ({"dp_shard": -2}, 8, "parallelism.dp_shard=-2 must be at least 1 or -1."),
        ({"tp": 2, "dp_shard": 2}, 8, "make 4 ranks, but there are 8 .* dp_shard=4 fits"),
        ({"tp": 3}, 8, "make 6 ranks, but there are 8 .*2.67 for dp_shard: .* divisor of 8"),
        ({"tp": 16}, 8, "make 16 ranks, but there are 8 "),
        ({"ep": 3}, 8, "ep=3 .* must divide dp_shard .* = 8"),
    ],
)
def test_given_sizes_that_make_no_world_when_resolved_then_the_message_has_the_numbers(
    sizes: dict[str, int], world: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(ParallelismConfig(**sizes), world)


@pytest.mark.parametrize(
    ("nodes", "devices", "gpus", "world"), [(1, None, 0, 6), (2, 8, 0, 16), (2, None, 4, 8), (1, 3, 8, 3)]
)
def test_given_a_cluster_when_counted_then_the_world_is_what_it_says_or_what_is_seen(
    nodes: int, devices: int | None, gpus: int, world: int
) -> None:
    cluster = ClusterConfig("c", "auto", nodes=nodes, devices_per_node=devices)
    assert world_size(cluster, ParallelismConfig(tp=2, pp=3), gpus) == world


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_given_an_axis_of_the_mesh_when_named_then_it_is_by_axes_of_the_config_of_as_many_ranks(
    layout: Layout, zero: int
) -> None:
    mesh = mesh_layout(layout, zero)
    for axis in AXES:
        sizes = [getattr(layout, name) for name in axes_along(layout, axis, zero)]
        if getattr(mesh, axis) > 1:
            assert int(np.prod(sizes)) == getattr(mesh, axis)
            assert 1 not in sizes
    assert axes_along(Layout(dp_shard=2), "dp_replicate", 0) == ["dp_shard"]
