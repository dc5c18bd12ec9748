"""Who this process is among the processes of a run, and how they find each other."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from models.errors import ConfigError

T = TypeVar("T")
STORE_VARIABLE = "QUINTET_STORE"
"""A file on this machine through which the processes of our own launcher meet: no port that another could take."""


@dataclass(frozen=True)
class Ranks:
    """One process among `world`; `local_world` of them are on this node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = "none"
    """Who started the processes: `none`, `quintet`, `torchrun` or `srun`."""


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
        nodes = int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")))
        return Ranks(
            int(environment["SLURM_PROCID"]), tasks, int(environment["SLURM_LOCALID"]), max(tasks // nodes, 1), "srun"
        )
    return Ranks()


def slurm_meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where the tasks of a SLURM step meet: its first node, and a port of the job's and step's own."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    first = re.match(r"[^,\[]+(\[[^,\]-]+)?", nodes)
    assert first is not None, f"no host in {nodes}"
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    return first[0].replace("[", ""), 15000 + (job * 101 + step) % 20000


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
    device_id = device if device.type == "cuda" else None
    if ranks.world == 1:
        store: dist.Store = dist.HashStore()
    elif STORE_VARIABLE in os.environ:
        store = dist.FileStore(os.environ[STORE_VARIABLE], ranks.world)
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


def stop_process_group() -> None:
    """Leave torch.distributed, if this process is in it."""
    if dist.is_initialized():
        dist.destroy_process_group()
