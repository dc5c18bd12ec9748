"""Told to end: a signal sets a flag, all ranks agree at the end of a step, save, and leave together.

Saving inside a signal handler would start collectives among those that are under way. Here a handler only notes the
signal (SLURM sends USR1 before the time limit and TERM before it kills), and ranks find out together: each step starts
one small reduction of the flags on the CPU and reads that of the step before, so that no rank waits for it.
"""

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from parallel.collectives import begin_all_reduce
from recipes.signals import RunInterruptedError, Told


class Interruption(Callback):
    """Ends the run at the end of a step once any rank was told to, after saving by `save_now`."""

    def __init__(self, told: Told, save_now: Callable[[Trainer], None]) -> None:
        self.told, self.save_now = told, save_now
        self._answer: Callable[[], torch.Tensor] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.told.at_once = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        number = self._agreed()
        if trainer.global_step >= trainer.max_steps:
            return
        if number:
            self.save_now(trainer)
            raise RunInterruptedError(
                f"told to end by {signal.Signals(number).name} after step {trainer.global_step} of "
                f"{trainer.max_steps}; the state is saved, and the same command goes on."
            )
        flag = torch.tensor(self.told.signal)
        self._answer = begin_all_reduce(flag, dist.group.WORLD, dist.ReduceOp.MAX)

    def _agreed(self) -> int:
        """The signal that any rank had been told when the step before ended, the same on every rank; 0 is none."""
        return 0 if self._answer is None else int(self._answer())
