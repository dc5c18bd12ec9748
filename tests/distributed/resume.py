"""Runs that fail and go on, in the workers of the pool: `fit` of the train command, with Lightning, on each rank."""

import logging
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import rng
from parallel.config import CheckpointConfig, Config, RunConfig
from parallel.layout import resolve
from parallel.ranks import Ranks
from parallel.sharded import local
from parallel.strategy import QuintetStrategy
from parallel.watch import Watch
from recipes.module import LanguageModel
from recipes.run_directory import RunDirectory
from recipes.signals import Told
from recipes.train import fit


class PlantedError(Exception):
    """What a test makes a run die of."""


@dataclass
class Outcome:
    """What one rank saw."""

    samples: list[list[int]]
    """Per training step in this process, the numbers of the sequences it read."""
    state: dict[str, Tensor]
    """This rank's blocks of weights and optimizer state at the end, by name."""
    generators: dict[str, Tensor]
    """The random number generators at the last step."""
    summary: dict[str, Any]
    died: str
    """The error that ended it, or nothing."""
    validations: list[float]
    """The mean loss of each validation."""
    said: list[str]
    """The log."""


def with_run(config: Config, folder: Path, steps: int, every: int, **checkpoint: Any) -> Config:
    """A config of tests/distributed/cases.py as a run in a folder."""
    return replace(
        config,
        run=RunConfig("", "test", str(folder)),
        trainer=replace(config.trainer, max_steps=steps),
        checkpoint=CheckpointConfig(every_n_steps=every, **checkpoint),
        ckpt="auto",
    )


def run(config: Config, die_at: int | None = None, tell_at: int | None = None, tell: int = 0) -> Outcome:
    """Train on this rank until the end, until it dies in step `die_at`, or rank `tell` is told to end in `tell_at`.

    Steps count from 1. Random numbers are drawn in every step, as a user's code may.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    run_directory = RunDirectory(Path(config.run.dir), writes=rank == 0)
    run_directory.create(config, [])
    ranks, told = Ranks(rank, world, rank, world), Told()
    watch = Watch(config.cluster.watch, ranks, run_directory.path / "stalls", lambda *_: None)
    outcome = Outcome([], {}, {}, {}, "", [], [])
    listener = logging.Handler()
    listener.emit = lambda record: outcome.said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("quintet")
    right_end = LanguageModel.on_validation_epoch_end
    right = QuintetStrategy.training_step
    torch.manual_seed(rank)

    def training_step(self: QuintetStrategy, batch: dict[str, Tensor], *rest: Any) -> Tensor:
        step = self.module.trainer.global_step + 1
        if step == die_at:
            raise PlantedError(f"in step {step}")
        if step == tell_at and rank == tell:
            told.signal = signal.SIGUSR1
        result = right(self, batch, *rest)
        outcome.samples.append(batch["ids"].tolist())
        torch.rand(3)
        outcome.generators = rng.capture()
        return result

    def on_validation_epoch_end(self: LanguageModel) -> None:
        right_end(self)
        outcome.validations.append(self.validation["val/loss"])

    def teardown(self: QuintetStrategy) -> None:
        outcome.state = _state(self)

    os.environ["WANDB_MODE"] = "disabled"
    layout = resolve(config.parallelism, world)
    log.addHandler(listener)
    with (
        patch.multiple(QuintetStrategy, training_step=training_step, teardown=teardown),
        patch.object(LanguageModel, "on_validation_epoch_end", on_validation_epoch_end),
    ):
        try:
            outcome.summary = fit(config, layout, ranks, run_directory, 0, told, watch)
        except Exception as error:
            outcome.died = f"{type(error).__name__}: {error}"
            if die_at is None and tell_at is None:
                raise
        finally:
            log.removeHandler(listener)
    return outcome


def _state(strategy: QuintetStrategy) -> dict[str, Tensor]:
    assert strategy.parallel is not None
    strategy.parallel.decoder.state_dict()  # after a validation FSDP2 holds whole parameters; this shards them
    names = {parameter: name for name, parameter in strategy.parallel.decoder.named_parameters()}
    state = {name: local(parameter.detach()).clone() for parameter, name in names.items()}
    for optimizer in strategy.optimizers:
        for parameter, values in optimizer.state.items():
            state |= {f"{names[parameter]}.{key}": local(value).clone() for key, value in values.items()}
    return state
