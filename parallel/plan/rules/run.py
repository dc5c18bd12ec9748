"""Data, optimizer, schedule, checkpoints, and what else a run needs beside its layout."""

import re
from collections.abc import Iterator
from math import inf

from parallel.config import (
    AdamWConfig,
    Config,
    DecayShape,
    FilesData,
    HubData,
    MuonConfig,
    SyntheticData,
    TokenizerKind,
    schedule_total,
)
from parallel.devices import DEVICES
from parallel.plan.problems import Fault
from parallel.stages import splits_backward


def data(config: Config) -> Iterator[Fault]:
    """Where the text comes from."""
    source = config.data
    for key in ("seq_len", "global_batch", "micro_batch"):
        if getattr(source, key) < 1:
            yield Fault(
                "data-positive", f"data.{key}={getattr(source, key)} must be at least 1.", {f"data.{key}": [1, 8]}
            )
    if not 0.0 < source.validation_fraction < 1.0:
        yield Fault(
            "validation-fraction",
            f"data.validation_fraction={source.validation_fraction} must lie between 0 and 1, both excluded.",
            {"data.validation_fraction": [0.02]},
        )
    if source.workers < 0:
        yield Fault("workers", f"data.workers={source.workers} must be 0 or more.", {"data.workers": [0]})
    if isinstance(source, SyntheticData):
        for key in ("sequences", "validation_sequences", "vocab_size"):
            if getattr(source, key) < 1:
                yield Fault(
                    "data-positive", f"data.{key}={getattr(source, key)} must be at least 1.", {f"data.{key}": [64]}
                )
        if source.document_len < 0:
            yield Fault(
                "document-length",
                f"data.document_len={source.document_len} must be 0 (one document) or more.",
                {"data.document_len": [0]},
            )
    elif source.tokenizer.kind == TokenizerKind.bpe and (source.tokenizer.vocab_size or 0) < 257:
        yield Fault(
            "bpe-size",
            f"data.tokenizer.vocab_size={source.tokenizer.vocab_size}: bpe starts from 256 bytes and the document "
            "mark, so it needs 257 or more.",
            {"data.tokenizer.vocab_size": [257, min(max(config.model.vocab_size, 257), 2048)]},
        )
    tokenizer, from_file = source.tokenizer, source.tokenizer.kind == TokenizerKind.file
    if from_file and not tokenizer.path:
        yield Fault(
            "tokenizer-path",
            "data.tokenizer.kind=file reads data.tokenizer.path, which is not set: write the tokenizer.json, or the "
            "folder of a published model that has one.",
        )
    for key in ("path", "document_mark"):
        if not from_file and getattr(tokenizer, key) is not None:
            yield Fault(
                "tokenizer-file",
                f"data.tokenizer.{key}={getattr(tokenizer, key)} is for data.tokenizer.kind=file; the kind is "
                f"{tokenizer.kind}.",
                {f"data.tokenizer.{key}": [None]},
            )
    if isinstance(source, FilesData) and not source.paths:
        yield Fault("data-paths", "data=files reads data.paths, which is empty: write the files or globs to read.")
    if isinstance(source, HubData) and not source.dataset:
        yield Fault("data-dataset", "data=hub reads data.dataset, which is empty: write its name on the hub.")
    if isinstance(source, FilesData | HubData) and not source.text_field:
        yield Fault(
            "data-text", "data.text_field is empty: it names the column of text.", {"data.text_field": ["text"]}
        )


def data_notes(config: Config) -> Iterator[Fault]:
    """What cannot be repeated, or goes round."""
    source = config.data
    if isinstance(source, HubData) and source.revision is None:
        yield Fault(
            "data-revision",
            f"data.revision=null takes whatever data.dataset={source.dataset} holds on the day: the run cannot be "
            f"repeated. Write a commit of it.",
        )
    if isinstance(source, SyntheticData):
        steps = source.sequences // source.global_batch
        if config.trainer.max_steps > max(steps, 1):
            yield Fault(
                "data-epochs",
                f"data.sequences={source.sequences:,} last {steps:,} steps of data.global_batch={source.global_batch}, "
                f"and trainer.max_steps={config.trainer.max_steps:,} reads them "
                f"{config.trainer.max_steps / max(steps, 1):.1f} times.",
            )


def optimizer(config: Config) -> Iterator[Fault]:
    """Rates, momenta and decay are numbers that can be used."""
    chosen = config.optimizer
    usual = {"lr": 1e-3, "adamw_lr": 3e-4, "weight_decay": 0.1, "eps": 1e-8, "momentum": 0.9}
    for key, value in usual.items():
        found = getattr(chosen, key, 0.0)
        if not 0.0 <= found < inf:
            yield Fault(
                "optimizer-number",
                f"optimizer.{key}={found} must not be negative, and must be finite.",
                {f"optimizer.{key}": [value]},
            )
    if getattr(chosen, "nesterov", False) and getattr(chosen, "momentum", 0.0) == 0.0:
        yield Fault(
            "nesterov",
            "optimizer.nesterov=true needs a momentum, and optimizer.momentum=0.0.",
            {"optimizer.momentum": [0.9], "optimizer.nesterov": [False]},
        )
    betas = getattr(chosen, "betas", [0.0, 0.0])
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        yield Fault(
            "betas",
            f"optimizer.betas={list(betas)} must be two numbers in [0, 1).",
            {"optimizer.betas": [[0.9, 0.95]]},
        )
    if isinstance(chosen, MuonConfig) and config.precision.name == "fp64":
        yield Fault(
            "muon-fp64",
            "optimizer=muon works in bfloat16 inside, which precision=fp64 would hide.",
            {"optimizer": [adamw_for(chosen)]},
        )


def adamw_for(muon: MuonConfig) -> AdamWConfig:
    """What stands in for muon where it has no rule: the optimizer of its own vectors."""
    return AdamWConfig("adamw", muon.adamw_lr, muon.weight_decay, muon.decay_embeddings)


def scheduler(config: Config) -> Iterator[Fault]:
    """The learning rate over the run."""
    chosen, total = config.scheduler, schedule_total(config)
    if not 0.0 <= chosen.minimum_ratio <= 1.0:
        yield Fault(
            "minimum-ratio",
            f"scheduler.minimum_ratio={chosen.minimum_ratio} must lie in [0, 1].",
            {"scheduler.minimum_ratio": [0.1]},
        )
    if chosen.total is not None and total < 1:
        yield Fault(
            "schedule-total",
            f"scheduler.total={total} must be at least 1, or null for the length of the run.",
            {"scheduler.total": [None]},
        )
    for key in ("warmup", "decay"):
        if getattr(chosen, key) < 0:
            yield Fault(
                "schedule-negative",
                f"scheduler.{key}={getattr(chosen, key)} must be 0 or more.",
                {f"scheduler.{key}": [0]},
            )
    if chosen.shape == DecayShape.wsd and chosen.decay > total:
        yield Fault(
            "decay-length",
            f"scheduler.decay={chosen.decay} is longer than the schedule's {total} {chosen.unit} (scheduler.total, or "
            f"what trainer.max_steps makes).",
            {"scheduler.decay": [max(total, 0), max(total // 10, 0)]},
        )


def scheduler_costs(config: Config) -> Iterator[Fault]:
    """A warm-up that never ends, a decay that ends elsewhere."""
    chosen, total = config.scheduler, schedule_total(config)
    if chosen.warmup >= total > 0:
        yield Fault(
            "warmup-length",
            f"scheduler.warmup={chosen.warmup} {chosen.unit} are not over when the schedule's {total} are: the "
            f"learning rate only rises. Write scheduler.warmup={max(total // 100, 1)}, or a longer run.",
        )
    steps = config.trainer.max_steps if chosen.unit == "steps" else None
    if steps is not None and chosen.total is not None and chosen.total != steps and chosen.shape != DecayShape.constant:
        yield Fault(
            "schedule-end",
            f"scheduler.total={chosen.total} is not trainer.max_steps={steps}: the decay ends "
            f"{'before' if chosen.total < steps else 'after'} the run does.",
        )


def loop(config: Config) -> Iterator[Fault]:
    """The trainer, checkpoints, names."""
    trainer, device = config.trainer, config.cluster.device
    if device not in ("auto", "cpu", "cuda", *DEVICES):
        yield Fault(
            "device",
            f"cluster.device={device} is not known: it is auto, cpu, cuda or one of {', '.join(DEVICES)}.",
            {"cluster.device": ["auto"]},
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", config.run.id):
        clean = re.sub(r"[^\w.-]", "-", config.run.id).lstrip("_.-") or "run"
        yield Fault(
            "run-id",
            f"run.id={config.run.id} names a folder and a W&B run: letters, digits, '.', '_' and '-' only.",
            {"run.id": [clean]},
        )
    for key, value, usual in (
        ("trainer.max_steps", trainer.max_steps, 1000),
        ("trainer.log_interval", trainer.log_interval, 10),
        ("trainer.val_interval", trainer.val_interval, None),
        ("trainer.val_sequences", trainer.val_sequences, None),
        ("checkpoint.every_n_steps", config.checkpoint.every_n_steps, None),
        ("checkpoint.keep", config.checkpoint.keep, 2),
        ("debug.overfit_steps", config.debug.overfit_steps, None),
        ("cluster.nodes", config.cluster.nodes, 1),
        ("cluster.devices_per_node", config.cluster.devices_per_node, None),
        ("cluster.threads", config.cluster.threads, None),
    ):
        if value is not None and value < 1:
            yield Fault("at-least-1", f"{key}={value} must be at least 1.", {key: [1, usual]})
    if config.cluster.network_gb_per_s is not None and not 0.0 < config.cluster.network_gb_per_s < inf:
        yield Fault(
            "network-speed",
            f"cluster.network_gb_per_s={config.cluster.network_gb_per_s} must be above 0, or null where it is not "
            f"known.",
            {"cluster.network_gb_per_s": [None]},
        )
    if trainer.gradient_clip is not None and not 0.0 < trainer.gradient_clip < inf:
        yield Fault(
            "gradient-clip",
            f"trainer.gradient_clip={trainer.gradient_clip} must be above 0, or null for no clipping.",
            {"trainer.gradient_clip": [1.0, None]},
        )


def loop_costs(config: Config) -> Iterator[Fault]:
    """Work that would be lost or never looked at."""
    steps, checkpoint = config.trainer.max_steps, config.checkpoint
    interval = config.trainer.val_interval
    by_steps = checkpoint.every_n_steps is not None and checkpoint.every_n_steps <= steps
    by_metric = checkpoint.best > 0 and (interval is None or interval <= steps)
    if not (checkpoint.at_end or by_steps or by_metric or checkpoint.every_n_minutes is not None):
        yield Fault(
            "no-checkpoint",
            f"checkpoint.at_end=false, and in trainer.max_steps={steps} neither checkpoint.every_n_steps="
            f"{checkpoint.every_n_steps}, every_n_minutes=null nor best={checkpoint.best} writes a checkpoint: what is "
            f"trained is lost.",
        )
    for key, value in (("val_interval", config.trainer.val_interval), ("log_interval", config.trainer.log_interval)):
        if value is not None and value > steps:
            yield Fault("interval", f"trainer.{key}={value} is above trainer.max_steps={steps}: only the end is seen.")
    if config.debug.profile and steps < 7:
        yield Fault("profile", f"debug.profile traces steps 5 to 7, and trainer.max_steps={steps}: nothing is traced.")
    if config.debug.detect_anomaly and config.cluster.device in DEVICES:
        yield Fault("anomaly", "debug.detect_anomaly=true checks every operation and makes a GPU wait for each.")


def compiled(config: Config) -> Iterator[Fault]:
    """What goes with compiled layers."""
    parallelism = config.parallelism
    if not config.trainer.compile:
        return
    if parallelism.pp > 1 and splits_backward(parallelism):
        yield Fault(
            "compile-split-backward",
            f"trainer.compile=true with parallelism.pp_schedule={parallelism.pp_schedule}: the schedule runs the two "
            "halves of a layer's backward pass apart, and a compiled layer's backward pass is one piece.",
            {"trainer.compile": [False], "parallelism.pp_schedule": ["interleaved_1f1b", "1f1b"]},
        )
    if parallelism.recompute.startswith("selective"):
        yield Fault(
            "compile-selective",
            f"trainer.compile=true with parallelism.recompute={parallelism.recompute}: a layer is compiled as a whole. "
            "With none, its compiled code keeps the results of matrix products and works out what stands between them "
            "again, as selective:ops does.",
            {"parallelism.recompute": ["none", "full"], "trainer.compile": [False]},
        )
    if parallelism.async_tp:
        yield Fault(
            "compile-async",
            "trainer.compile=true with parallelism.async_tp=true has never been run, so it is not offered.",
            {"trainer.compile": [False], "parallelism.async_tp": [False]},
        )


def compiled_notes(config: Config) -> Iterator[Fault]:
    """What the plan does not know of compiled layers."""
    if config.trainer.compile:
        yield Fault(
            "compile-memory",
            "trainer.compile=true: the plan's activations are those of layers that are not compiled, and what compiled "
            "ones keep was not measured.",
        )


def checkpoint(config: Config) -> Iterator[Fault]:
    """When checkpoints are written and which are kept."""
    chosen, known = config.checkpoint, ("val/loss", "val/perplexity", "val/loss_per_byte")
    minutes = chosen.every_n_minutes
    if minutes is not None and not 0.0 < minutes < inf:
        yield Fault(
            "checkpoint-minutes",
            f"checkpoint.every_n_minutes={minutes} must be above 0, or null.",
            {"checkpoint.every_n_minutes": [10.0, None]},
        )
    if chosen.best < 0:
        yield Fault("checkpoint-best", f"checkpoint.best={chosen.best} must be 0 or more.", {"checkpoint.best": [0]})
    if chosen.best > 0 and config.trainer.val_interval is None:
        yield Fault(
            "checkpoint-best",
            f"checkpoint.best={chosen.best} goes by checkpoint.metric={chosen.metric}, which is known after a "
            f"validation, and trainer.val_interval=null validates only at the end.",
            {"trainer.val_interval": [max(config.trainer.max_steps // 10, 1)], "checkpoint.best": [0]},
        )
    if chosen.metric not in known:
        yield Fault(
            "checkpoint-metric",
            f"checkpoint.metric={chosen.metric} is none of {', '.join(known)}.",
            {"checkpoint.metric": ["val/loss"]},
        )
    if chosen.mirror is not None and "://" not in chosen.mirror:
        yield Fault(
            "checkpoint-mirror",
            f"checkpoint.mirror={chosen.mirror} is no address such as s3://bucket/run.",
            {"checkpoint.mirror": [None]},
        )


def adapters(config: Config) -> Iterator[Fault]:
    """Adapters stand beside weights that were trained, and where every linear layer computes by itself."""
    rank = config.model.lora.rank
    if rank > 0 and config.weights is None and config.ckpt in ("auto", "none"):
        yield Fault(
            "adapters-of-nothing",
            f"model.lora.rank={rank} trains adapters of weights that stand still, and these would be random: name them "
            f"by weights=<a checkpoint, run directory or folder of safetensors>.",
            {"model.lora.rank": [0]},
        )
    if rank and config.parallelism.async_tp:
        yield Fault(
            "adapters-async",
            f"model.lora.rank={rank}: parallelism.async_tp=true multiplies several weights at once and knows no "
            f"adapters.",
            {"parallelism.async_tp": [False], "model.lora.rank": [0]},
        )
