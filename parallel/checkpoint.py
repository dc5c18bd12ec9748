"""A run's state on disk: sharded tensors by torch.distributed.checkpoint, everything else as plain containers.

A checkpoint is a folder that is written under another name, synced, listed with checksums (manifest.py), renamed, and
then marked COMPLETE. Nothing in it is ever executed: it is read with weights_only=True. It holds

    *.distcp, .metadata    weights, optimizer state by parameter name, random number generators by rank
    state.pt               progress of the loop, schedules, data and callbacks
    run.json               for people and tools: step, config, recipe lock, layout, versions, metrics
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from models.errors import ConfigError
from parallel import rng
from parallel.plain_reader import PlainPlanner, PlainReader, one_process_is_fine
from parallel.ranks import rank_and_world
from parallel.saver import OPTIONS, RUN, STATE, Saver, plain_bytes, split_state


def save(
    folder: Path, model: nn.Module, optimizers: list[Optimizer], state: dict[str, Any], about: dict[str, Any]
) -> None:
    """Write a checkpoint and wait until it is complete; see `Saver.start`."""
    saver = Saver()
    saver.start(folder, model, optimizers, state, about)
    saver.wait()


def load(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint into the model and its optimizers, whatever layout wrote it.

    Returns the plain state, and this rank's random number generators if as many ranks wrote it (else nothing). Raises
    ConfigError for a checkpoint of another model or optimizer. That its files are whole is asked before: `find`.
    """
    tensors = split_state(model, optimizers)
    rank, world = rank_and_world()
    known = PlainReader(folder).read_metadata().state_dict_metadata
    if optimizers and sum(name.endswith(".torch") for name in known if name.startswith("rng.")) == world:
        mine = {name: state for name, state in rng.capture().items() if f"rng.{rank}.{name}" in known}
        tensors["rng"] = {str(rank): mine}
    _read(folder, tensors, "ckpt", "model and optimizer")
    set_model_state_dict(model, tensors["model"], options=OPTIONS)
    for index, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, tensors[f"optimizer_{index}"], options=OPTIONS)
    state = torch.load(folder / STATE, weights_only=True, map_location="cpu")
    return state, tensors.get("rng", {}).get(str(rank), {})


def save_weights(
    folder: Path, tensors: dict[str, Tensor], make: Callable[[str], Tensor], about: dict[str, Any]
) -> None:
    """Write a checkpoint of weights alone, each made by its name only while it is written; one process calls it.

    `tensors` give shapes and types (on the meta device).
    """
    files = {STATE: plain_bytes({}), RUN: (json.dumps(about | {"weights_only": True}, indent=1) + "\n").encode()}
    Saver().write(folder, {"model": tensors}, files, _MadeWhenWritten(make))


def load_weights(folder: Path, model: nn.Module) -> None:
    """Read all but adapters from a checkpoint into a model of any layout.

    Raises ConfigError where the checkpoint does not have the model's parameters in their shapes.
    """
    held = get_model_state_dict(model, options=OPTIONS)
    tensors = {"model": {name: tensor for name, tensor in held.items() if ".lora_" not in name}}
    _read(folder, tensors, "weights", "model")
    set_model_state_dict(model, tensors["model"], options=StateDictOptions(strict=False))


def _read(folder: Path, tensors: dict[str, Any], key: str, of: str) -> None:
    reader, alone = PlainReader(folder), rank_and_world()[1] == 1
    try:
        with one_process_is_fine():
            dcp.load(tensors, storage_reader=reader, planner=PlainPlanner(), no_dist=alone)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise ConfigError(f"{key}={folder} is not a checkpoint of this {of}: {cause}") from error


class _MadeWhenWritten(dcp.DefaultSavePlanner):
    """torch's planner, but that a tensor is made when it is to be written."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._make = make

    def lookup_object(self, index: Any) -> Tensor:
        return self._make(index.fqn.removeprefix("model."))
