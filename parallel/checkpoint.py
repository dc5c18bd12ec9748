"""A run's state on disk: sharded tensors by torch.distributed.checkpoint, everything else as plain containers.

A checkpoint is a folder that is written under another name, synced, renamed, and then marked COMPLETE; without the mark
it is never believed. Nothing in it is ever executed: it is read with weights_only=True.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from models.errors import ConfigError, RunError
from parallel.plain_reader import PlainPlanner, PlainReader

COMPLETE = "COMPLETE"
_STATE = "state.pt"
# Flattened: named by parameter, so that the state of different stages and layouts has different names.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def checkpoint_name(step: int) -> str:
    """The folder's name; names sort as steps do."""
    return f"step-{step:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{COMPLETE}"))


def find(path: Path) -> Path:
    """The checkpoint a path means: itself, or the newest complete one of a run directory.

    Raises ConfigError where there is none, so that a path that cannot be used never means "from scratch".
    """
    if (path / COMPLETE).is_file():
        return path
    complete = complete_checkpoints(path / "checkpoints")
    if complete:
        return complete[-1]
    raise ConfigError(
        f"{path} is neither a complete checkpoint (a folder with the file {COMPLETE}) nor a run directory with one in "
        f"checkpoints/."
    )


def save(folder: Path, model: nn.Module, optimizers: list[Optimizer], state: dict[str, Any]) -> None:
    """Write a checkpoint of the model, its optimizers and plain `state` (numbers, strings, lists, dicts, tensors).

    Every rank writes its shards; rank 0 does the rest.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    partial = folder.with_name(f".{folder.name}.partial")
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _wait_for_all()
    with _one_process_is_fine():
        try:
            dcp.save(_tensors(model, optimizers), checkpoint_id=partial, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(folder)) from error
            raise
    _wait_for_all()
    if first:
        _require_shards(partial)
        torch.save(state, partial / _STATE)
        for path in partial.iterdir():
            _sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        (folder / COMPLETE).touch()
        _sync(folder / COMPLETE)
        _sync(folder)
    _wait_for_all()


def load(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Read a checkpoint into the model and its optimizers, whatever layout wrote it; returns the plain state."""
    tensors = _tensors(model, optimizers)
    with _one_process_is_fine():
        reader, planner = PlainReader(folder), PlainPlanner()
        try:
            dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise ConfigError(f"ckpt={folder} is not a checkpoint of this model and optimizer: {cause}") from error
    set_model_state_dict(model, tensors["model"], options=_OPTIONS)
    for index, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, tensors[f"optimizer_{index}"], options=_OPTIONS)
    return torch.load(folder / _STATE, weights_only=True, map_location="cpu")


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints of a `checkpoints` folder."""
    for path in complete_checkpoints(folder)[:-keep]:
        (path / COMPLETE).unlink()
        shutil.rmtree(path)


def _tensors(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    tensors: dict[str, Any] = {"model": get_model_state_dict(model, options=_OPTIONS)}
    for index, optimizer in enumerate(optimizers):
        tensors[f"optimizer_{index}"] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    return tensors


def _require_shards(folder: Path) -> None:
    """Raise RunError unless every file that the metadata speaks of is there: a rank may have written elsewhere."""
    storage = PlainReader(folder).read_metadata().storage_data
    missing = sorted({info.relative_path for info in storage.values() if not (folder / info.relative_path).exists()})
    if missing:
        raise RunError(f"{folder}: {', '.join(missing)} is missing; do all ranks see this folder?")


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
