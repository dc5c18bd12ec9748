"""The rank grid: one integer array, reshaped and sliced, for any world size and without a process group.

    pp * dp_replicate * dp_shard * cp * tp = world        tp varies fastest, so its groups are consecutive ranks

Experts see the same ranks through a second grid: within a pipeline stage,

    dp_replicate * expert_dp * ep * etp                   with ep * etp * expert_dp = dp_shard * cp * tp
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np

from models.errors import ConfigError
from parallel.cluster import ClusterConfig
from parallel.config import Config, ParallelismConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "expert_dp", "ep", "etp")


@dataclass(frozen=True)
class Layout:
    """The size of every axis; every size is known and their product is the world."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def split(self) -> dict[str, int]:
        """The axes along which anything is split, and their sizes; ep and etp are among the others' ranks."""
        return {axis: getattr(self, axis) for axis in (*AXES, "ep", "etp") if getattr(self, axis) > 1}

    @property
    def dp(self) -> int:
        """How many data ranks there are: each reads its own part of every step's batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_dp(self) -> int:
        """Over how many ranks ZeRO shards an expert's parameters."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def grid(self) -> np.ndarray:
        """All ranks, int (pp, dp_replicate, dp_shard, cp, tp)."""
        return np.arange(self.world).reshape([getattr(self, axis) for axis in AXES])

    def expert_grid(self) -> np.ndarray:
        """The same ranks as experts see them, int (pp, dp_replicate, expert_dp, ep, etp)."""
        return np.arange(self.world).reshape([getattr(self, axis) for axis in EXPERT_AXES])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis of `AXES`."""
        place = np.unravel_index(rank, self.grid().shape)
        return {axis: int(index) for axis, index in zip(AXES, place, strict=True)}

    def rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates; an axis that is not named is at 0."""
        return int(self.grid()[tuple(coordinates.get(axis, 0) for axis in AXES)])

    def groups(self, *axes: str) -> np.ndarray:
        """The groups of ranks that differ only along `axes`, all of one grid: int (groups, ranks in a group)."""
        grid, names = self.grid(), AXES
        if not set(axes) <= set(AXES):
            grid, names = self.expert_grid(), EXPERT_AXES
        inside = [names.index(axis) for axis in axes]
        outside = [dim for dim in range(grid.ndim) if dim not in inside]
        size = int(np.prod([grid.shape[dim] for dim in inside]))
        return grid.transpose(outside + inside).reshape(-1, size)

    def data_rank(self, rank: int) -> int:
        """Which part of every step's batch a rank reads, 0 to dp - 1; ranks of one data coordinate share it."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]


def mesh_layout(layout: Layout, zero: int) -> Layout:
    """The grid that the mesh is built from: context ranks are data ranks to it, since all see tokens of their own.

    ZeRO shards over dp_shard * cp ranks, and gradients are summed over them all. With zero=0 every one of them is a
    replica and a shard is one rank.
    """
    shard = layout.dp_shard * layout.cp
    if zero > 0:
        return Layout(layout.pp, layout.dp_replicate, shard, 1, layout.tp, layout.ep, layout.etp)
    return Layout(layout.pp, layout.dp_replicate * shard, 1, 1, layout.tp, layout.ep, layout.etp)


def axes_along(layout: Layout, axis: str, zero: int) -> list[str]:
    """The config's axes, of more than one rank, along which an axis of the mesh (`mesh_layout`) runs."""
    folded = {"dp_shard": ("dp_shard", "cp")} if zero > 0 else {"dp_replicate": ("dp_replicate", "dp_shard", "cp")}
    return [name for name in folded.get(axis, (axis,)) if getattr(layout, name) > 1]


def expert_mesh_sizes(layout: Layout, zero: int) -> list[int]:
    """Sizes of `EXPERT_AXES` that the mesh of experts is built from; with zero=0 a shard is one rank here too."""
    if zero > 0:
        return [layout.pp, layout.dp_replicate, layout.expert_dp, layout.ep, layout.etp]
    return [layout.pp, layout.dp_replicate * layout.expert_dp, 1, layout.ep, layout.etp]


def piece(size: int, ranks: int, rank: int) -> range:
    """Which indices of a dimension a rank holds: equal pieces of ceil(size / ranks), the last ones shorter or empty."""
    length = -(-size // ranks)
    return range(min(rank * length, size), min((rank + 1) * length, size))


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def microbatch_count(config: Config, layout: Layout) -> int:
    """Microbatches of a data rank in a step."""
    return config.data.global_batch // (config.data.micro_batch * layout.dp)


def world_size(cluster: ClusterConfig, parallelism: ParallelismConfig, gpus: int) -> int:
    """How many ranks a run has: what the cluster says, else every GPU seen, else on a CPU what the axes ask for."""
    if cluster.devices_per_node is not None:
        return cluster.nodes * cluster.devices_per_node
    if gpus:
        return cluster.nodes * gpus
    shard = max(parallelism.dp_shard, 1)
    return parallelism.pp * parallelism.dp_replicate * shard * parallelism.cp * parallelism.tp


def resolve(parallelism: ParallelismConfig, world: int, nodes: int = 1) -> Layout:
    """The layout of a config in a world of so many ranks. Raises ConfigError where the sizes do not make up a world."""
    sizes = {axis: getattr(parallelism, axis) for axis in (*AXES, "ep", "etp")}
    for axis, size in sizes.items():
        if size < 1 and not (axis == "dp_shard" and size == -1):
            raise ConfigError(f"parallelism.{axis}={size} must be at least 1{' or -1' * (axis == 'dp_shard')}.")
    if world % nodes:
        raise ConfigError(
            f"cluster.nodes={nodes} must divide the {world} ranks of the run, the same number on each. Write cluster."
            f"nodes=1, or axes whose product {nodes} divides."
        )
    others = sizes["pp"] * sizes["dp_replicate"] * sizes["cp"] * sizes["tp"]
    if sizes["dp_shard"] == -1:
        sizes["dp_shard"] = max(world // others, 1)
    layout = Layout(**sizes)
    if layout.world != world:
        product = " * ".join(f"{axis}={sizes[axis]}" for axis in AXES)
        advice = (
            f"with these, dp_shard={world // others} fits"
            if world % others == 0
            else f"{world} ranks leave {world / others:.2f} for dp_shard: the others must make a divisor of {world}"
        )
        raise ConfigError(
            f"parallelism: {product} make {layout.world} ranks, but there are {world} "
            f"(cluster.nodes * cluster.devices_per_node); {advice}."
        )
    if (layout.dp_shard * layout.cp * layout.tp) % (layout.ep * layout.etp):
        inner = layout.dp_shard * layout.cp * layout.tp
        legal = [n for n in range(1, inner + 1) if inner % n == 0]
        raise ConfigError(
            f"parallelism.ep={layout.ep} * etp={layout.etp} must divide dp_shard * cp * tp = {inner}, the ranks that "
            f"experts are dealt out over. Write a product among {legal}."
        )
    return layout
