"""What collectives this rank has entered: torch's flight recorder, which gloo and NCCL both fill.

It must be switched on before the first process group, by TORCH_FR_BUFFER_SIZE. A record costs about a microsecond.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel.layout import Layout, axes_along

ENTRIES = 2000


@dataclass(frozen=True)
class Collective:
    """One collective or transfer that this rank has entered."""

    group: str
    """torch's name of the process group; the same on all its ranks."""
    number: int
    """Its place in its group's order, from 1; transfers between two ranks are counted apart."""
    operation: str
    shapes: str
    transfer: bool
    pending: bool
    entered: float
    """Seconds since 1970."""
    seconds: float | None = None
    """How long it took, where the recorder times (NCCL with TORCH_NCCL_ENABLE_TIMING)."""


def switch_on() -> None:
    """Have torch remember collectives; a number that the user has chosen stands."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(ENTRIES))
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):  # it went by another name then
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", os.environ["TORCH_FR_BUFFER_SIZE"])


def recorded() -> list[Collective]:
    """The collectives that are remembered, oldest first; empty where this torch has no recorder for its back end."""
    bindings: Any = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if dump := getattr(bindings, name, None):
            entries += json.loads(dump()).get("entries", [])
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return [_collective(entry) for entry in entries]


def _collective(entry: dict[str, Any]) -> Collective:
    transfer = bool(entry["is_p2p"])
    duration = entry.get("duration_ms")
    types = entry.get("input_dtypes") or ["?"]
    return Collective(
        group=str(entry["process_group"][0]),
        number=int(entry["p2p_seq_id"] if transfer else entry["collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        shapes=f"{types[0].lower()} {entry.get('input_sizes')}",
        transfer=transfer,
        pending=not entry["retired"] and entry["state"] != "completed",
        entered=float(entry["time_created_ns"]) / 1e9,
        seconds=None if duration is None else float(duration) / 1e3,
    )


def axis_groups(mesh: DeviceMesh, layout: Layout, zero: int) -> dict[str, tuple[str, list[int]]]:
    """For each process group of a mesh's axes: the axis (or axes, where one group serves several) and its ranks.

    Axes are named as in the config, which has other data axes than the mesh.
    """
    import torch.distributed as dist

    found: dict[str, tuple[str, list[int]]] = {}
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if group.size() > 1:
            named = ", ".join(axes_along(layout, axis, zero))
            names = f"{found[group.group_name][0]}, {named}" if group.group_name in found else named
            found[group.group_name] = names, dist.get_process_group_ranks(group)
    return found
