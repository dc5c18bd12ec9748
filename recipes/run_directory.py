"""The run directory: what a run leaves behind, written so that a half-written file is never believed."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from models.errors import ConfigError, RunError
from parallel.config import Config
from parallel.files import write_whole
from parallel.retention import complete_checkpoints
from recipes.environment import environment
from recipes.plain import plain
from recipes.schema import read_config

DONE, FAILED = "DONE", "FAILED"
SPLIT = ("parallelism.", "cluster.", "recipe.hardware", "recipe.status", "recipe.devices", "data.micro_batch")
SPEED = ("trainer.compile", "data.workers", "data.cache_dir")
WATCHED = ("trainer.log_interval", "trainer.val_", "debug.detect_anomaly", "debug.profile", "callbacks.", "logger.")
FREE = (*SPLIT, *SPEED, *WATCHED, "checkpoint.", "ckpt", "run.")
"""Keys, by how they begin, that may change while a run goes on: they do not make it another run."""
log = logging.getLogger("quintet")


class RunDirectory:
    """One run's files. Of the run's processes only the one that `writes` touches them."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.checkpoints = path / "checkpoints"

    def create(self, config: Config, overrides: list[str]) -> None:
        """Make the directory with config.yaml, overrides.yaml and environment.json.

        Raises ConfigError where it holds the finished run of another config, RunError where it cannot be written.
        """
        if not self.writes:
            return
        if (self.path / "config.yaml").exists() or (self.path / DONE).exists():
            for line in self.changes(config):
                log.info("changed since this run began: %s", line)
        if config.ckpt == "none" and complete_checkpoints(self.checkpoints):
            raise ConfigError(
                f"ckpt=none would start afresh in run.dir={self.path}, which holds checkpoints of an earlier start. "
                f"Choose another run.dir, or remove {self.checkpoints}."
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(plain(config))))
            write_whole(self.path / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(overrides)))
            write_whole(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
            for mark in (DONE, FAILED):
                (self.path / mark).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(
                f"run.dir={self.path} cannot be written: {error.strerror}. Set run.dir or run.root."
            ) from error

    def is_done(self, config: Config) -> bool:
        """Whether the run of this config ended well here. Raises ConfigError where it was the run of another."""
        if not (self.path / DONE).exists():
            return False
        self.changes(config)
        return True

    def changes(self, config: Config) -> list[str]:
        """What is other than in config.yaml, of that which may be. Raises ConfigError for the rest."""
        try:
            written = read_config(self.path / "config.yaml")
        except ConfigError as error:
            raise ConfigError(f"run.dir={self.path}: {error} Choose another run.dir, or remove it.") from error
        old, new = _flat(plain(written)), _flat(plain(config))
        differ = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        if fixed := [key for key in differ if not key.startswith(FREE)]:
            listed = ", ".join(f"{key}={new.get(key)} (was {old.get(key)})" for key in fixed[:6])
            listed += f" and {len(fixed) - 6} more" * (len(fixed) > 6)
            raise ConfigError(
                f"run.dir={self.path} holds a run of another config: {listed}. Going on would mix two runs: choose "
                f"another run.dir, or give the settings of {self.path}/config.yaml."
            )
        return [
            f"{key} {old.get(key)} -> {new.get(key)}"
            for key in differ
            if not key.startswith(("run.", "ckpt", "callbacks.", "logger."))
        ]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep the log in train.log while the run lives, and leave FAILED with the reason if it dies."""
        if not self.writes:
            yield
            return
        handler = logging.FileHandler(self.path / "train.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        started = time.monotonic()
        try:
            yield
            log.info("done in %.0f s; run directory: %s", time.monotonic() - started, self.path)
        except BaseException as error:
            first_failure(self.path, f"{type(error).__name__}: {error}")
            raise
        finally:
            log.removeHandler(handler)
            handler.close()

    def finish(self, summary: dict[str, Any]) -> None:
        """Leave DONE with a few final numbers."""
        if self.writes:
            write_whole(self.path / DONE, json.dumps(summary, indent=2) + "\n")

    def fail(self, reason: str) -> None:
        """Leave FAILED with the reason; where even that cannot be written, the log line must do."""
        try:
            write_whole(self.path / FAILED, reason.rstrip() + "\n")
        except OSError:
            log.error("could not write %s", self.path / FAILED)


def first_failure(path: Path, reason: str) -> None:
    """Leave FAILED, unless it is there: the rank that failed first is the cause of those that fail after it."""
    try:
        with (path / FAILED).open("x") as file:
            file.write(reason.rstrip() + "\n")
    except FileExistsError:
        return
    except OSError:
        log.error("could not write %s", path / FAILED)


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    parts = [_flat(value, f"{path}.{key}" if path else str(key)) for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}
