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
from parallel.flight import Collective, axis_groups, recorded
from parallel.layout import Layout
from parallel.ranks import Ranks, node_name
from parallel.watch import Watch

LOOKS = 40
"""How often every rank's watch must have looked before shares of waiting mean anything: two seconds."""
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
        self._nodes = [""] * ranks.world
        self._slow: dict[int, int] = {}
        """Ranks that were slow at the last comparison, and at how many in a row."""
        self._start_comparison()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.ranks.world > 1:
            dist.all_gather_object(self._nodes, node_name())
        self._begin(trainer.global_step)

    def _begin(self, step: int) -> None:
        self._since, self._began, self._from = time.monotonic(), time.time(), step
        self.watch.take_looks()

    def _start_comparison(self) -> None:
        self._sums = torch.zeros(self.ranks.world, 4, dtype=torch.float64)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.ranks.world == 1 or trainer.global_step % self.log_interval:
            return
        if self._answer is not None:
            self.add(self._answer().view(-1, 4), trainer.global_step)
        # Read at the next interval, so that nobody waits for it.
        assert dist.group.WORLD is not None
        self._answer = begin_all_gather(self._interval(trainer.global_step, pl_module.device.type), dist.group.WORLD)

    def _interval(self, step: int, device: str) -> torch.Tensor:
        """Steps since the last interval, their seconds, how often the watch looked, and how often it saw a wait."""
        seconds = time.monotonic() - self._since
        looks, waiting = self.watch.take_looks()
        if device == "cuda":
            waiting = round(looks * waited_share(recorded(), self._began, time.time()))
        interval = [step - self._from, seconds, looks, waiting]
        self._begin(step)
        return torch.tensor(interval, dtype=torch.float64)

    def add(self, interval: torch.Tensor, step: int) -> None:
        """Take what all ranks say of an interval, (world, 4), and compare them once all have been seen often enough.

        Every rank sends every interval and all sum up the same, so that they come to compare at the same step: ranks
        that decided by themselves when they have seen enough could miss each other for ever.
        """
        self._sums += interval
        steps, seconds, looks, waiting = self._sums.unbind(1)
        if looks.min() < LOOKS:
            return
        works = seconds / steps * (1.0 - waiting / looks).clamp_min(1e-3)  # a factor of nothing would be no factor
        self._compare(works.tolist(), step)
        self._start_comparison()

    def _compare(self, works: list[float], step: int) -> None:
        found = stragglers(works, self.layout, self.factor)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in found}
        for rank, usual in found.items():
            # Once may be chance, and once said is enough.
            if self._slow[rank] == 2 and self.ranks.rank == 0:
                log.warning(
                    "rank %d on %s is slow: it works %.3g s a step, its like %.3g s (step %d)",
                    *(rank, self._nodes[rank], works[rank], usual, step),
                )


def waited_share(collectives: list[Collective], since: float, now: float) -> float:
    """The share of the time from `since` to `now` that a GPU spent in collectives, at least; 0 to 1.

    Of as much of that time as the recorder remembers. Groups work at the same time as one another, and a sum over them
    would count it twice: the group that took longest speaks for all.
    """
    seen = [collective for collective in collectives if collective.entered > since]
    if not seen:
        return 0.0
    seconds: dict[str, float] = {}
    for collective in seen:
        seconds[collective.group] = seconds.get(collective.group, 0.0) + (collective.seconds or 0.0)
    remembered = now - max(since, collectives[0].entered)
    return min(max(seconds.values()) / remembered, 1.0)


def stragglers(works: list[float], layout: Layout, factor: float) -> dict[int, float]:
    """Ranks whose work per step is above `factor` times the median of the others at their place along pp: that median.

    `works` is by rank, in seconds.
    """
    found = {}
    for alike in layout.grid().reshape(layout.pp, -1).tolist():
        for rank in alike:
            others = [works[other] for other in alike if other != rank]
            if others and works[rank] > factor * statistics.median(others):
                found[rank] = statistics.median(others)
    return found
