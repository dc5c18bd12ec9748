"""When checkpoints are written: every n steps or minutes, at the end, when the metric is good, when somebody asks."""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import ReduceOp

from parallel.collectives import all_reduce
from parallel.config import Config
from parallel.ranks import from_first_rank
from parallel.remote import keep_only, upload
from parallel.retention import checkpoint_name, complete_checkpoints, is_among_best, read_index, record, retain, sweep
from parallel.saver import SaveError, Saver

log = logging.getLogger("quintet")
_LAST_WAIT_S = 60.0  # for a save that is under way when training fails


class Checkpoints(Callback):
    """Writes the run's state and removes old ones, as the `checkpoint` group says.

    A save that fails is reported and training goes on, but for the last one.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.policy = config.checkpoint
        self._saved = 0
        self._waits_for_validation = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved = trainer.global_step  # what was resumed from is there already
        self._last_time = time.monotonic()
        if trainer.is_global_zero:
            sweep(self.folder)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._report_failure(trainer)
        step, every = trainer.global_step, self.policy.every_n_steps
        due = self._time_is_up(trainer) or (self.policy.at_end and step >= trainer.max_steps)
        due = due or (every is not None and step % every == 0)
        interval = self.config.trainer.val_interval
        if due and self.policy.best and interval and step % interval == 0:
            self._waits_for_validation = True  # the checkpoint is to know its metric
        elif due:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not self.policy.best:
            return
        metrics = {key: value for key, value in pl_module.validation.items() if key == self.policy.metric}
        good = is_among_best(metrics, from_first_rank(read_index(self.folder)), self.policy)
        if good or self._waits_for_validation:
            self._waits_for_validation = False
            self._save(trainer, metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.policy.at_end:
            self._save(trainer)  # a run that another callback has stopped
        _saver(trainer).wait()  # the last one must not fail

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if cast(Any, trainer.strategy).saver is None:
            return
        try:
            _saver(trainer).wait(_LAST_WAIT_S)
        except SaveError as error:
            log.error("%s", error)

    def save_now(self, trainer: Trainer) -> None:
        """Save at the end of this step, if it is not saved, and wait until the checkpoint is complete.

        For who ends the run next. All ranks call it. Raises SaveError where it cannot be written.
        """
        self._save(trainer, wait=True)

    def _time_is_up(self, trainer: Trainer) -> bool:
        """By rank 0's clock, the same on every rank. Waits for the other hosts, never for a device."""
        minutes = self.policy.every_n_minutes
        if minutes is None:
            return False
        up = trainer.is_global_zero and time.monotonic() - self._last_time >= minutes * 60
        return bool(all_reduce(torch.tensor(int(up)), dist.group.WORLD, ReduceOp.MAX))

    def _save(self, trainer: Trainer, metrics: dict[str, float] | None = None, wait: bool = False) -> None:
        step = trainer.global_step
        if step in (0, self._saved):
            if wait:
                _saver(trainer).wait()
            return
        name = checkpoint_name(step)
        options = {
            "asynchronous": self.policy.asynchronous and not wait,
            "metrics": metrics or {},
            "then": partial(_keep_house, self, name, metrics or {}),
            "failed": partial(self._report, trainer),
        }
        self._saved, self._last_time = step, time.monotonic()
        last = wait or step >= trainer.max_steps
        try:
            trainer.save_checkpoint(self.folder / name, storage_options=options)
        except SaveError as error:
            if last:
                raise
            self._report(trainer, error)

    def _report_failure(self, trainer: Trainer) -> None:
        """Say that a save in the background has failed, if it has."""
        try:
            _saver(trainer).wait(0.0)
        except SaveError as error:
            self._report(trainer, error)

    def _report(self, trainer: Trainer, error: SaveError) -> None:
        if trainer.is_global_zero:
            newest = next(reversed(complete_checkpoints(self.folder)), None)
            log.error("CHECKPOINT FAILED: %s. Training goes on; the newest complete checkpoint is %s.", error, newest)


def _keep_house(checkpoints: Checkpoints, name: str, metrics: dict[str, float]) -> None:
    """On rank 0, in the thread that has just completed a checkpoint."""
    try:
        record(checkpoints.folder, name, metrics)
        retain(checkpoints.folder, checkpoints.policy)
    except OSError as error:
        log.error("%s: %s; checkpoints that are no longer needed stay.", checkpoints.folder, error.strerror)
    if checkpoints.policy.mirror is None:
        return
    try:
        upload(checkpoints.folder / name, checkpoints.policy.mirror)
        keep_only({path.name for path in complete_checkpoints(checkpoints.folder)}, checkpoints.policy.mirror)
    except Exception as error:  # whatever a store's library raises: the checkpoint is safe here, and training goes on
        log.error("CHECKPOINT NOT COPIED to %s: %s", checkpoints.policy.mirror, error)


def _saver(trainer: Any) -> Saver:
    saver = trainer.strategy.saver
    assert saver is not None
    return saver
