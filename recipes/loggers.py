"""Loggers by the name a config gives them. metrics.jsonl is not among them: it is always written."""

import os
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, WandbLogger


def wandb_logger(
    run_dir: Path,
    run_id: str,
    config: dict[str, Any],
    offline: bool,
    project: str,
    entity: str | None,
    group: str | None,
    tags: list[str] | None,
) -> WandbLogger:
    """One W&B run for the training run, under the run's own id; its files lie in the run directory."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(
        dir=run_dir,
        id=run_id,
        name=run_id,
        resume="allow",
        mode="offline" if offline else "online",
        project=project,
        entity=entity,
        group=group or config["config"]["recipe"]["name"],
        job_type="pretrain",
        tags=tags,
        config=config,
        settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
    )
    return WandbLogger(experiment=run)


def finish_wandb() -> None:
    """End this process's W&B run, if there is one: the next point of a sweep must not go on in it."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


def csv_logger(run_dir: Path, run_id: str, config: dict[str, Any]) -> CSVLogger:
    """metrics.csv in the run directory."""
    return CSVLogger(save_dir=run_dir, name="", version="csv")
