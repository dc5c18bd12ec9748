"""Who this process is among the processes of a run, and how they find each other."""

import ctypes
import os
import platform
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from models.errors import ConfigError, RunError

T = TypeVar("T")
STORE_VARIABLE = "QUINTET_STORE"
"""A file on this machine through which the processes of our own launcher meet: no port that another could take."""
MEETING_VARIABLE = "QUINTET_MEETING"
"""A file that all nodes see, where rank 0 of a submitted job says on which address and port it listens."""


@dataclass(frozen=True)
class Ranks:
    """One process among `world`; `local_world` of them are on this node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = "none"
    """Who started the processes: `none`, `quintet`, `torchrun` or `srun`."""


def node_name() -> str:
    """What SLURM calls this node, or else the host's own name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def detect(environment: Mapping[str, str] = os.environ) -> Ranks:
    """This process's place, from the variables that our launcher, torchrun or srun set.

    A SLURM allocation without srun, or srun with one task, is one process: it starts its own. Raises ConfigError where
    variables are missing.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        if int(environment["WORLD_SIZE"]) > 1 and "LOCAL_RANK" not in environment:
            raise ConfigError(
                "RANK and WORLD_SIZE are set, but LOCAL_RANK is not: use torchrun, or set it for every process."
            )
        return Ranks(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", "0")),
            int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
            "quintet" if STORE_VARIABLE in environment else "torchrun",
        )
    # The step's own number: a batch script, too, has SLURM_PROCID and the number of tasks of the whole job.
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        tasks = int(environment["SLURM_STEP_NUM_TASKS"])
        return Ranks(
            int(environment["SLURM_PROCID"]),
            tasks,
            int(environment["SLURM_LOCALID"]),
            _tasks_on_this_node(environment, tasks),
            "srun",
        )
    return Ranks()


def _tasks_on_this_node(environment: Mapping[str, str], tasks: int) -> int:
    """From a list such as 4(x2),3: four tasks on each of two nodes, three on the next."""
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if listed is None:
        return max(tasks // int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1"))), 1)
    counts: list[int] = []
    for part in listed.split(","):
        count, _, repeated = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(repeated or 1)
    return counts[int(environment.get("SLURM_NODEID", "0"))]


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where the tasks of a SLURM step meet: its first node, and a port of the job's and step's own."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    first = re.match(r"[^,\[]+(\[[^,\]-]+)?", nodes)
    assert first is not None, f"no host in {nodes}"
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    return first[0].replace("[", ""), 15000 + (job * 101 + step) % 20000


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def check_launch(ranks: Ranks, nodes: int, devices_per_node: int | None) -> None:
    """Raise ConfigError where the processes that were started are not those that the config speaks of."""
    if ranks.launcher == "none":
        return
    started = f"{ranks.launcher} started {ranks.world} processes, {ranks.local_world} on this node"
    if devices_per_node is not None and ranks.local_world != devices_per_node:
        raise ConfigError(
            f"{started}, but cluster.devices_per_node={devices_per_node}. Start {devices_per_node} tasks per node, or "
            f"write cluster.devices_per_node={ranks.local_world}."
        )
    if ranks.world != nodes * ranks.local_world:
        raise ConfigError(
            f"{started}, but cluster.nodes={nodes} would make {nodes * ranks.local_world}. Write "
            f"cluster.nodes={ranks.world // ranks.local_world}, or start as many on each node."
        )


def start_process_group(ranks: Ranks, device: torch.device, timeout_s: float = 1800.0) -> None:
    """torch.distributed for this process: gloo for what lies on the CPU, NCCL for what lies on a GPU.

    Nothing if it is running already.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    # Groups that are made later, by DeviceMesh too, take these: NCCL's would give up after ten minutes.
    c10d: Any = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    device_id = device if device.type == "cuda" else None
    if ranks.world == 1:
        store: dist.Store = dist.HashStore()
    elif STORE_VARIABLE in os.environ:
        store = dist.FileStore(os.environ[STORE_VARIABLE], ranks.world)
    elif MEETING_VARIABLE in os.environ and ranks.launcher == "srun":
        store = _meet(Path(os.environ[MEETING_VARIABLE]), ranks, timeout)
    else:
        if ranks.launcher == "srun":
            address, port = slurm_meeting_point(os.environ)
            os.environ.setdefault("MASTER_ADDR", address)
            os.environ.setdefault("MASTER_PORT", str(port))
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world, timeout=timeout, device_id=device_id)
        return
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=timeout, device_id=device_id
    )


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are; 0 and 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _meet(file: Path, ranks: Ranks, timeout: timedelta) -> dist.Store:
    """The store of a submitted job. Rank 0 holds its port before it names it, so that no neighbour can take it."""
    if ranks.rank == 0:
        address = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = dist.TCPStore(address, 0, ranks.world, is_master=True, timeout=timeout, wait_for_workers=False)
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(f"{address} {store.port}")
        partial.replace(file)
        return store
    deadline = time.monotonic() + timeout.total_seconds()
    while not file.exists():
        if time.monotonic() > deadline:
            raise RunError(f"rank 0 left no word in {file} for {timeout}; do all nodes see this folder?")
        time.sleep(0.05)
    address, port = file.read_text().split()
    return dist.TCPStore(address, int(port), ranks.world, is_master=False, timeout=timeout)


def from_first_rank(value: T) -> T:
    """Rank 0's value, on every rank."""
    values = [value]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, on every rank."""
    world = rank_and_world()[1]
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value, group=group)
    return values


def wait_for_all() -> None:
    """Return when every rank has come here."""
    if dist.is_initialized():
        dist.barrier()


def stop_process_group() -> None:
    """Leave torch.distributed, if this process is in it."""
    if dist.is_initialized():
        dist.destroy_process_group()
