"""Which wires an axis of the rank grid runs over, and how fast they are."""

from parallel.cluster import ClusterConfig
from parallel.devices import DEVICES
from parallel.layout import Layout


def nodes_spanned(layout: Layout, axes: str | tuple[str, ...], devices_per_node: int | None) -> int:
    """Over how many nodes the widest group of axes is spread; 1 where all is one node, or nodes are not known."""
    if devices_per_node is None or layout.world <= devices_per_node:
        return 1
    # All groups of an axis are shifts of one another along the other axes; the first and last cover what can differ.
    groups = layout.groups(*(axes if isinstance(axes, tuple) else (axes,)))
    sample = groups if len(groups) <= 64 else groups[:: max(len(groups) // 64, 1)]
    return max(len({int(rank) // devices_per_node for rank in group}) for group in sample)


def link_bytes_per_s(cluster: ClusterConfig, spanned: int) -> float | None:
    """What a rank can send in a second to the others of a group over so many nodes; None where it is not known."""
    if spanned > 1:
        return None if cluster.network_gb_per_s is None else cluster.network_gb_per_s * 1e9
    device = DEVICES.get(cluster.device)
    return None if device is None else device.link_bytes_per_s
