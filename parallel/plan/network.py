"""Which wires an axis of the rank grid runs over, and how fast they are."""

import numpy as np

from parallel.config import ClusterConfig
from parallel.devices import DEVICES
from parallel.layout import AXES, EXPERT_AXES, Layout


def nodes_spanned(layout: Layout, axis: str, devices_per_node: int | None) -> int:
    """Over how many nodes the widest group of an axis is spread; 1 where all is one node, or nodes are not known."""
    if devices_per_node is None or layout.world <= devices_per_node:
        return 1
    if axis == "world":
        return -(-layout.world // devices_per_node)
    groups = layout.groups(axis) if axis in AXES else _expert_groups(layout, axis)
    # All groups of an axis are shifts of one another along the other axes: some of them show what can differ.
    sample = groups if len(groups) <= 64 else groups[:: max(len(groups) // 64, 1)]
    return max(len({int(rank) // devices_per_node for rank in group}) for group in sample)


def _expert_groups(layout: Layout, axis: str) -> np.ndarray:
    """The groups of the second grid: int (number of groups, ranks in a group)."""
    grid = layout.expert_grid()
    dim = EXPERT_AXES.index("dp_replicate" if axis == "expert_replicate" else axis)
    return np.moveaxis(grid, dim, -1).reshape(-1, grid.shape[dim])


def link_bytes_per_s(cluster: ClusterConfig, spanned: int) -> float | None:
    """What a rank can send in a second to the others of a group over so many nodes; None where it is not known."""
    if spanned > 1:
        return None if cluster.network_gb_per_s is None else cluster.network_gb_per_s * 1e9
    device = DEVICES.get(cluster.device)
    return None if device is None else device.link_bytes_per_s
