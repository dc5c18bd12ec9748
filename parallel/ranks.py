"""Who this process is among the processes of a run, and how they find each other."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from models.errors import ConfigError

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

    A SLURM allocation without srun, or srun with one task, is one process: it starts its own.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Ranks(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", "0")),
            int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
            "quintet" if STORE_VARIABLE in environment else "torchrun",
        )
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        tasks, nodes = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NNODES", "1"))
        return Ranks(
            int(environment["SLURM_PROCID"]), tasks, int(environment["SLURM_LOCALID"]), max(tasks // nodes, 1), "srun"
        )
    return Ranks()


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
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world, timeout=timeout, device_id=device_id)
        return
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=timeout, device_id=device_id
    )


def stop_process_group() -> None:
    """Leave torch.distributed, if this process is in it."""
    if dist.is_initialized():
        dist.destroy_process_group()
