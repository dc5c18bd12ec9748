"""Signs of life from the training loop, and which rank is slower than the others. See parallel/watch.py."""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from parallel.cluster import WatchConfig
from parallel.collectives import begin_all_gather
from parallel.flight import axis_groups, recorded
from parallel.layout import Layout
from parallel.ranks import Ranks, node_name
from parallel.watch import Watch

LOOKS = 40
"""How often the watch must have looked before a rank's share of waiting means anything: two seconds."""
log = logging.getLogger("quintet")


class Watching(Callback):
    """Says at every turn of the loop what comes next; the last of the callbacks."""

    def __init__(self, watch: Watch, config: WatchConfig) -> None:
        self.watch, self.config = watch, config

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        model = pl_module.parallel
        self.watch.groups = axis_groups(model.mesh, model.layout, model.config.parallelism.zero)
        self.watch.beat("data", trainer.global_step + 1, self.config.start_limit_s)
        self._first = trainer.global_step

    def _limit_s(self, trainer: Trainer) -> float:
        """The first step of a start also compiles and warms up."""
        return self.config.start_limit_s if trainer.global_step == self._first else self.config.step_limit_s

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.watch.beat("forward and backward", trainer.global_step + 1, self._limit_s(trainer))

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self.watch.beat("update", trainer.global_step + 1, self._limit_s(trainer))

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        self.watch.beat("save", trainer.global_step, self.config.save_limit_s)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.watch.beat("data", trainer.global_step + 1, self.config.step_limit_s)

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.watch.beat("validation", trainer.global_step, self.config.step_limit_s)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.watch.beat("data", trainer.global_step + 1, self.config.step_limit_s)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.watch.beat("end", trainer.global_step, self.config.save_limit_s)


class Stragglers(Callback):
    """Names, while the run goes on, a rank that works longer per step than its like.

    All ranks take equally long over a step, since they wait for each other: a slow one waits less. What a rank works is
    the time of its steps but for the share spent waiting in collectives. On a CPU that share comes from looking at the
    main thread; on a GPU from the flight recorder's times, which TORCH_NCCL_ENABLE_TIMING=1 switches on.
    """

    def __init__(self, watch: Watch, layout: Layout, ranks: Ranks, factor: float, log_interval: int) -> None:
        self.watch, self.layout, self.ranks = watch, layout, ranks
        self.factor, self.log_interval = factor, log_interval
        self._answer: Callable[[], torch.Tensor] | None = None
        self._nodes: list[str] = []
        self._slow: dict[int, int] = {}
        """Ranks that were slow at the last comparison, and at how many in a row."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._nodes = [""] * self.ranks.world
        if self.ranks.world > 1:
            dist.all_gather_object(self._nodes, node_name())
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._since, self._began, self._from = time.monotonic(), time.time(), trainer.global_step
        self.watch.take_waiting_share()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.ranks.world == 1 or trainer.global_step % self.log_interval:
            return
        if self._answer is not None:
            self._compare(self._answer().tolist(), trainer.global_step)
        # Read at the next interval, so that nobody waits for it.
        works = torch.tensor([self._works(trainer, pl_module.device.type)], dtype=torch.float64)
        assert dist.group.WORLD is not None
        self._answer = begin_all_gather(works, dist.group.WORLD)

    def _works(self, trainer: Trainer, device: str) -> float:
        """Seconds of work per step since the last answer; 0 where it is too early for one."""
        if self.watch.looks < LOOKS:
            return 0.0
        seconds, count = time.monotonic() - self._since, trainer.global_step - self._from
        share = self.watch.take_waiting_share()
        if device == "cuda":
            share = sum(c.seconds or 0.0 for c in recorded() if c.entered > self._began) / seconds
        self._begin(trainer)
        return seconds / count * max(1.0 - share, 1e-3)  # 0 would be "not known"

    def _compare(self, works: list[float], step: int) -> None:
        if not all(works):
            return  # too early on some rank: this says nothing, and forgets nothing
        found = stragglers(works, self.layout, self.factor)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in found}
        for rank, usual in found.items():
            # Once may be chance, and once said is enough.
            if self._slow[rank] == 2 and self.ranks.rank == 0:
                log.warning(
                    "rank %d on %s is slow: it works %.3g s a step, the others of its pipeline stage %.3g s (step %d)",
                    *(rank, self._nodes[rank], works[rank], usual, step),
                )


def stragglers(works: list[float], layout: Layout, factor: float) -> dict[int, float]:
    """Ranks whose work per step is above `factor` times the median of the others of their pipeline stage: that median.

    `works` is by rank, in seconds; 0 is not known.
    """
    found = {}
    for stage in layout.grid().reshape(layout.pp, -1).tolist():
        for rank in stage:
            others = [works[other] for other in stage if other != rank and works[other] > 0.0]
            if others and works[rank] > factor * statistics.median(others):
                found[rank] = statistics.median(others)
    return found
