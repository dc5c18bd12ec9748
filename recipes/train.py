"""Train a decoder: `python -m recipes.train [GROUP=OPTION] [KEY=VALUE] ...`."""

import json
import logging
import os
import secrets
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from models.errors import ConfigError
from parallel.config import Config
from parallel.files import write_whole
from parallel.layout import Layout, resolve, world_size
from parallel.plan.plan import as_json, make_plan
from parallel.plan.problems import refuse
from parallel.plan.validate import validate
from recipes import safety
from recipes.command import command, given_arguments, report
from recipes.continued import continued
from recipes.schema import to_config
from recipes.signals import RunInterruptedError, Told

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger

    from parallel.ranks import Ranks
    from parallel.watch import Watch
    from recipes.data.module import Data
    from recipes.metrics import Metrics
    from recipes.run_directory import RunDirectory

log = logging.getLogger("quintet")


def train(composed: DictConfig) -> None:
    """Check the config, start the ranks if nobody has, train, and leave DONE or FAILED in the run directory."""
    told = Told().listen()
    config = to_config(composed)
    # torch and Lightning take seconds to import: not before the config is known to be well formed.
    import torch

    from parallel import flight
    from parallel.ranks import (
        check_launch,
        detect,
        from_first_rank,
        start_process_group,
        stop_process_group,
        wait_for_all,
    )
    from parallel.remote import check_address
    from parallel.watch import Watch
    from recipes.launch import error_reported, run_on_ranks, stalled
    from recipes.loggers import finish_wandb
    from recipes.run_directory import RunDirectory

    gpus = 0 if config.cluster.device == "cpu" else torch.cuda.device_count()
    ranks = detect()
    check_launch(ranks, config.cluster.nodes, config.cluster.devices_per_node)
    world = world_size(config.cluster, config.parallelism, gpus) if ranks.launcher == "none" else ranks.world
    problems = validate(config, world)
    refuse(problems)
    if config.checkpoint.mirror is not None:
        check_address("checkpoint.mirror", config.checkpoint.mirror)
    if ranks.rank == 0 and ranks.launcher != "quintet":  # then the launcher has said it
        for problem in problems:
            log.warning("%s: %s", problem.severity, problem.message)
    layout = resolve(config.parallelism, world)
    overrides = given_arguments()
    safety.check_overrides(overrides)
    if config.ckpt == "auto" and RunDirectory(Path(config.run.dir)).is_done(config):
        log.info("this run is done already: %s", config.run.dir)
        return
    if ranks.launcher == "none" and world > 1:
        if config.cluster.nodes > 1:
            raise ConfigError(
                f"cluster.nodes={config.cluster.nodes}: one process cannot start ranks on other nodes. Use torchrun or "
                f"srun, or write cluster.nodes=1."
            )
        try:
            run_on_ranks("recipes.train", [*overrides, f"run.id={config.run.id}"], world, config.run.id)
        except BaseException as error:
            # Rank 0 writes the run's files, but it may not be the one that failed.
            RunDirectory(Path(config.run.dir)).fail(f"{type(error).__name__}: {error}")
            raise
        return

    flight.switch_on()
    with error_reported(ranks, Path(config.run.dir)) as watched:
        gpu = ranks.local_rank if gpus > 1 else 0
        device = torch.device("cuda", gpu) if gpus else torch.device("cpu")
        start_process_group(ranks, device, config.cluster.watch.longest_s())
        config = replace(config, run=from_first_rank(config.run))
        run = RunDirectory(Path(config.run.dir), writes=ranks.rank == 0)
        run.create(config, overrides)
        if run.writes:
            write_whole(run.path / "plan.json", json.dumps(as_json(make_plan(config, world)), indent=1) + "\n")
        start = from_first_rank(f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
        watch = Watch(config.cluster.watch, ranks, run.path / "stalls" / start, partial(stalled, run.path))
        watched.append(watch)
        watch.start()
        try:
            with run.recorded():
                try:
                    with told.heeded():
                        summary = fit(config, layout, ranks, run, gpus, told, watch)
                    watch.beat("end", config.trainer.max_steps, config.cluster.watch.save_limit_s)
                    run.finish(summary)
                finally:
                    finish_wandb()
        except RunInterruptedError:
            # srun ends all when the first one fails: not before rank 0 has written what it must. A rank that was told
            # before the first step was told alone, and others may wait for it elsewhere.
            if not told.at_once:
                wait_for_all()
            raise
        wait_for_all()  # srun gives those that are left a minute, and rank 0 may still send its last metrics
        watch.stop()
        stop_process_group()


def fit(
    config: Config, layout: Layout, ranks: "Ranks", run: "RunDirectory", gpus: int, told: Told, watch: "Watch"
) -> dict[str, Any]:
    """Train to trainer.max_steps and validate; returns the final numbers."""
    import torch
    from lightning.pytorch import Trainer

    from parallel.devices import recognise
    from parallel.strategy import QuintetStrategy, RanksEnvironment
    from recipes.data.module import Data
    from recipes.environment import environment
    from recipes.locks import under_lock
    from recipes.metrics import Metrics, MetricsFile
    from recipes.module import LanguageModel
    from recipes.plain import plain
    from recipes.resume import checkpoint_to_resume, starting_weights

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning.pytorch.utilities._pytree")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # what we log is summed over ranks already
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")  # it is: see recipes/data/module.py
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")  # ranks are started by whoever may
    if config.cluster.threads is not None:
        torch.set_num_threads(config.cluster.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    data = Data(config, layout.data_rank(ranks.rank), layout.dp)
    data.load()
    if run.writes:
        data.save_tokenizer(run.path)
    lengths = None if data.tokenizer is None else torch.from_numpy(data.tokenizer.bytes_per_token())
    device = recognise(torch.cuda.get_device_name(0)) if gpus else None
    file = MetricsFile(run.path / "metrics.jsonl") if run.writes else None
    metrics = Metrics(config, file, device, layout)
    callbacks = make_callbacks(config, layout, ranks, data, metrics, run, told, watch)
    about = {"config": plain(config), "recipe_lock": under_lock(config), "environment": environment()}

    strategy = QuintetStrategy(config, layout, ranks, lambda: about | data.state_dict())
    resume = checkpoint_to_resume(config, run, data.tokenizer)
    if resume is None and config.weights is not None:
        strategy.start = starting_weights(config.weights, run, data.tokenizer)
    trainer = Trainer(
        strategy=strategy,
        plugins=[RanksEnvironment(ranks)],
        accelerator="cuda" if gpus else "cpu",
        devices=min(ranks.local_world, gpus) if gpus else ranks.local_world,
        num_nodes=ranks.world // ranks.local_world,
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=config.trainer.val_interval or config.trainer.max_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        callbacks=callbacks,
        logger=make_loggers(config, run) if run.writes else False,
        log_every_n_steps=1,
        deterministic=config.deterministic,
        detect_anomaly=config.debug.detect_anomaly,
        use_distributed_sampler=False,
        enable_checkpointing=any(is_checkpoint_callback(callback) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.path,
    )
    if run.writes:
        log.info(describe(config, layout, gpus > 0))
        if resume is not None:
            log.info("going on from %s", resume)
    module = LanguageModel(config, layout.coordinates(ranks.rank)["pp"], lengths)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if config.trainer.val_interval and trainer.global_step % config.trainer.val_interval:
        trainer.validate(module, datamodule=data, verbose=False)
    return {"steps": trainer.global_step, **metrics.latest, **module.validation}


def describe(config: Config, layout: Layout, on_gpu: bool) -> str:
    """The run in one line."""
    import torch

    from models.counts import active_parameter_count, parameter_count
    from parallel.plan.timeline import expected_bubble

    sizes = [f"{axis} {size}" for axis, size in layout.split.items()]
    experts = f" ({active_parameter_count(config.model):,} to a token)" if config.model.moe.num_experts else ""
    share = expected_bubble(config, layout)
    bubble = f", {share:.0%} bubble expected" if layout.pp > 1 else ""
    split = f" ({', '.join(sizes)}, zero {config.parallelism.zero}{bubble})" if sizes else ""
    where = f"{layout.world} GPU{'s' * (layout.world > 1)}" if on_gpu else f"{layout.world} CPU process"
    where += "" if on_gpu else f"{'es' * (layout.world > 1)} of {torch.get_num_threads()} threads"
    return (
        f"{config.model.name}: {parameter_count(config.model):,} parameters{experts}, "
        f"{config.data.global_batch * config.data.seq_len:,} tokens per step, {config.trainer.max_steps} steps, "
        f"{config.precision.name} on {where}{split}"
    )


def make_callbacks(
    config: Config,
    layout: Layout,
    ranks: "Ranks",
    data: "Data",
    metrics: "Metrics",
    run: "RunDirectory",
    told: Told,
    watch: "Watch",
) -> "list[Callback]":
    """The config's named nodes, between what every run has: metrics; checkpoints, being told to end, signs of life."""
    from recipes.callbacks import Profile, Timeline
    from recipes.checkpoints import Checkpoints
    from recipes.interruption import Interruption
    from recipes.safety import build
    from recipes.watching import Stragglers, Watching

    available = {"config": config, "tokenizer": data.tokenizer, "metrics": metrics, "run_dir": run.path}
    chosen = [build(node, **available) for node in config.callbacks.values() if node]
    profile = [Profile(run.path)] if config.debug.profile else []
    timeline = [Timeline(run.path)] if config.parallelism.pp > 1 else []
    checkpoints = Checkpoints(config, run.checkpoints)
    interval, limits = config.trainer.log_interval, config.cluster.watch
    stragglers = Stragglers(watch, layout, ranks, limits.straggler_factor, interval)
    ending = Interruption(told, checkpoints.save_now)
    return [metrics, *chosen, *profile, *timeline, stragglers, checkpoints, ending, Watching(watch, limits)]


def make_loggers(config: Config, run: "RunDirectory") -> "list[Logger]":
    """The loggers of the config's named nodes, told everything that describes the run."""
    from models.counts import parameter_count
    from recipes.environment import environment
    from recipes.plain import plain
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


if __name__ == "__main__":
    try:
        sys.argv[1:] = continued(sys.argv[1:])
    except ConfigError as error:
        sys.exit(report(error))
    command("config", train)
