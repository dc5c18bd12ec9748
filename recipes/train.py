"""Train a decoder: `python -m recipes.train [GROUP=OPTION] [KEY=VALUE] ...`."""

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from parallel.config import Config
from parallel.layout import Layout, resolve, world_size
from parallel.plan.validate import refuse, validate
from recipes.command import command
from recipes.schema import to_config

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import Logger

    from recipes.data.module import Data
    from recipes.metrics import Metrics
    from recipes.run_directory import RunDirectory

log = logging.getLogger("quintet")


def train(composed: DictConfig) -> None:
    """Check the config, make the run directory, train, and leave DONE or FAILED there."""
    config = to_config(composed)
    # torch and Lightning take seconds to import: not before the config is known to be good.
    import torch

    gpus = 0 if config.cluster.device == "cpu" else torch.cuda.device_count()
    world = world_size(config.cluster, config.parallelism, gpus)
    refuse(validate(config, world))
    layout = resolve(config.parallelism, world)

    from recipes.run_directory import RunDirectory

    run = RunDirectory(Path(config.run.dir))
    run.create(config, list(HydraConfig.get().overrides.task))
    with recorded(run):
        run.finish(fit(config, layout, run, on_gpu=gpus > 0))
    log.info("run directory: %s", run.path)


def fit(config: Config, layout: Layout, run: "RunDirectory", on_gpu: bool) -> dict[str, Any]:
    """Train to trainer.max_steps and validate; returns the final numbers."""
    import torch
    from lightning.pytorch import Trainer

    from models.counts import parameter_count
    from parallel.checkpoint import complete_checkpoints, find
    from parallel.devices import recognise
    from parallel.strategy import QuintetStrategy
    from recipes.callbacks import Checkpoints, Profile
    from recipes.data.module import Data
    from recipes.metrics import Metrics, MetricsFile
    from recipes.module import LanguageModel

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning.pytorch.utilities._pytree")
    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    data = Data(config)
    data.load()
    data.save_tokenizer(run.path)
    lengths = None if data.tokenizer is None else torch.from_numpy(data.tokenizer.bytes_per_token())
    module = LanguageModel(config, lengths)

    device = recognise(torch.cuda.get_device_name(0)) if on_gpu else None
    metrics = Metrics(config, MetricsFile(run.path / "metrics.jsonl"), device, layout.world)
    callbacks = [metrics, *make_callbacks(config, data), Checkpoints(config.checkpoint, run.checkpoints)]
    if config.debug.profile:
        callbacks.append(Profile(run.path))

    trainer = Trainer(
        strategy=QuintetStrategy(config, layout),
        accelerator="cuda" if on_gpu else "cpu",
        devices=layout.world // config.cluster.nodes,
        num_nodes=config.cluster.nodes,
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=config.trainer.val_interval or config.trainer.max_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        callbacks=callbacks,
        logger=make_loggers(config, run),
        log_every_n_steps=1,
        deterministic=config.deterministic,
        detect_anomaly=config.debug.detect_anomaly,
        use_distributed_sampler=False,
        enable_checkpointing=any(is_checkpoint_callback(callback) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.path,
    )
    resume = None
    if config.ckpt == "auto":
        resume = next(iter(reversed(complete_checkpoints(run.checkpoints))), None)
    elif config.ckpt != "none":
        resume = find(Path(config.ckpt))

    log.info(
        "%s: %s parameters, %s tokens per step, %d steps, %s on %s",
        config.model.name,
        f"{parameter_count(config.model):,}",
        f"{config.data.global_batch * config.data.seq_len:,}",
        config.trainer.max_steps,
        config.precision.name,
        f"{layout.world} GPU{'s' * (layout.world > 1)}" if on_gpu else f"CPU, {torch.get_num_threads()} threads",
    )
    if resume is not None:
        log.info("going on from %s", resume)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if config.trainer.val_interval and trainer.global_step % config.trainer.val_interval:
        trainer.validate(module, datamodule=data, verbose=False)
    return final_numbers(trainer, metrics)


def final_numbers(trainer: "Trainer", metrics: "Metrics") -> dict[str, Any]:
    """What DONE holds: the last step's row and the last validation."""
    validation = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
    return {"steps": trainer.global_step, **metrics.latest, **validation}


def make_callbacks(config: Config, data: "Data") -> "list[Callback]":
    """The callbacks of the config's named nodes."""
    from recipes.safety import build

    return [build(node, config=config, tokenizer=data.tokenizer) for node in config.callbacks.values() if node]


def make_loggers(config: Config, run: "RunDirectory") -> "list[Logger]":
    """The loggers of the config's named nodes, told everything that describes the run."""
    from models.counts import parameter_count
    from recipes.run_directory import environment, plain
    from recipes.safety import build

    described = {
        "config": plain(config),
        "environment": environment(),
        "parameters": parameter_count(config.model),
        "tokens_per_step": config.data.global_batch * config.data.seq_len,
    }
    available = {"run_dir": run.path, "run_id": config.run.id, "config": described}
    return [build(node, **available) for node in config.logger.values() if node]


def is_checkpoint_callback(callback: "Callback") -> bool:
    """Whether it is one of Lightning's own checkpoint callbacks, which the Trainer must be told of."""
    from lightning.pytorch.callbacks import Checkpoint

    return isinstance(callback, Checkpoint)


@contextmanager
def recorded(run: "RunDirectory") -> Iterator[None]:
    """Keep the log in train.log while the run lives, and leave FAILED with the reason if it dies."""
    handler = run.start_log()
    started = time.monotonic()
    try:
        yield
        log.info("done in %.0f s", time.monotonic() - started)
    except BaseException as error:
        run.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        log.removeHandler(handler)
        handler.close()


if __name__ == "__main__":
    command("config", train)
