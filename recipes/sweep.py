"""Sweeps on SLURM: `python -m recipes.train --multirun hydra/launcher=slurm cluster=slurm_h100 optimizer.lr=1e-3,3e-3`.

Hydra's launcher plugin (slurm/hydra_plugins/) comes here: each point becomes a job as `recipes.submit` makes it, of as
many nodes as its config says. This process submits no more than `concurrent` at a time, waits for all, and prints one
table; a point that fails does not end the sweep. It needs little and may be left in tmux on the login node. If it ends,
the jobs go on.
"""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from models.errors import ConfigError, RunError
from recipes.jobs import Job, enqueue, in_queue, make_job
from recipes.schema import to_config

log = logging.getLogger("quintet")


@dataclass
class Point:
    """One point of the sweep."""

    overrides: list[str]
    job: Job | None = None
    number: str = ""
    fault: str = ""
    """Why it could not be submitted."""

    def outcome(self) -> str:
        """`done`, or why not; empty while its job waits or runs."""
        if self.fault or self.job is None:
            return f"refused: {self.fault}"
        if in_queue(self.number):
            return ""
        if (self.job.run_dir / "DONE").exists():
            return "done"
        failed = self.job.run_dir / "FAILED"
        said = failed.read_text().splitlines() if failed.exists() else []
        return f"failed: {said[0] if said else 'look at its log'}"


class Sweep:
    """What `hydra/launcher=slurm` does with the points that Hydra's sweeper has made."""

    def __init__(self, config: DictConfig, loader: Any, concurrent: int, poll_s: float) -> None:
        """`loader` is Hydra's, which composes the config of a point."""
        self.config: Any = config
        self.loader, self.concurrent, self.poll_s = loader, concurrent, poll_s

    def run(self, job_overrides: list[list[str]], first: int) -> list[JobReturn]:
        """Submit all points, wait for them, show how they ended. Raises RunError at the end where any has not."""
        if self.concurrent < 1 or self.poll_s <= 0:
            raise ConfigError("hydra.launcher.concurrent must be at least 1, and hydra.launcher.poll_s above 0.")
        setup_globals()
        points = [Point(overrides) for overrides in job_overrides]
        outcomes: dict[int, str] = {}
        waiting = list(range(len(points)))
        while len(outcomes) < len(points):
            running = [index for index in range(len(points)) if index not in waiting and index not in outcomes]
            for index in waiting[: self.concurrent - len(running)]:
                waiting.remove(index)
                self._submit(points[index], first + index)
                running.append(index)
            for index in running:
                if outcome := points[index].outcome():
                    outcomes[index] = outcome
                    log.info(
                        "point %d of %d: %s  %s", index + 1, len(points), outcome, " ".join(points[index].overrides)
                    )
                    break
            else:
                time.sleep(self.poll_s)
        self._summarise(points, outcomes)
        failed = sum(outcome != "done" for outcome in outcomes.values())
        if failed:
            raise RunError(f"{failed} of {len(points)} points did not end well; see above.")
        return [_returned(point) for point in points]

    def _submit(self, point: Point, index: int) -> None:
        try:
            composed = self.loader.load_sweep_config(self.config, point.overrides)
            OmegaConf.clear_cache(composed)  # or every point would be called as the first
            with open_dict(composed):
                del composed["hydra"]  # it is Hydra's, not the run's
            config = to_config(composed)
            point.job = make_job(config, point.overrides)
            point.number = enqueue(point.job)
        except (ConfigError, RunError) as error:
            point.fault = str(error)
        else:
            log.info("point %d: job %s, %s", index + 1, point.number, point.job.run_dir)

    def _summarise(self, points: list[Point], outcomes: dict[int, str]) -> None:
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [_row(point, outcomes[index]) for index, point in enumerate(points)]
        (folder / "summary.json").write_text(json.dumps(rows, indent=2) + "\n")
        from rich.console import Console
        from rich.table import Column, Table

        table = Table(*(Column(name, overflow="fold") for name in ("point", "job", "outcome", "loss", "run directory")))
        common = set.intersection(*(set(point.overrides) for point in points)) if len(points) > 1 else set()
        for row in rows:
            swept = [word for word in row["overrides"] if word not in common]
            loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
            table.add_row(" ".join(swept), row["job"], row["outcome"], loss, row["run_dir"])
        Console(stderr=True).print(table)


def _row(point: Point, outcome: str) -> dict[str, Any]:
    run_dir = "" if point.job is None else str(point.job.run_dir)
    row = {"overrides": point.overrides, "job": point.number, "outcome": outcome, "run_dir": run_dir, "loss": None}
    return row if outcome != "done" else row | {"loss": json.loads(Path(run_dir, "DONE").read_text()).get("loss")}


def _returned(point: Point) -> JobReturn:
    result = JobReturn(overrides=point.overrides, status=JobStatus.COMPLETED)
    result.return_value = None
    return result
