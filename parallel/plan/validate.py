"""Every fault of a config at once, before anything is built: a pure function from the config to a list of problems."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from models.counts import parameter_count
from models.errors import ConfigError
from parallel.balance import padded_length
from parallel.config import (
    Config,
    DecayShape,
    FloatType,
    MuonConfig,
    SyntheticData,
    TokenizerKind,
    recompute_interval,
)
from parallel.devices import DEVICES
from parallel.layout import Layout, divisors, resolve
from parallel.plan.context_rules import context_rules
from parallel.plan.timeline import equal_costs, simulate
from parallel.plan.traffic import BYTES, ring_bytes
from parallel.schedule import check, read_csv
from parallel.stages import SINGLE, V_SHAPED, split_layers, splits_backward, stage_count


class Severity(StrEnum):
    error = "error"
    warning = "warning"
    note = "note"


@dataclass(frozen=True)
class Problem:
    """One rule that a config breaks: refused (`error`), or legal but costly (`warning`), or worth knowing (`note`)."""

    severity: Severity
    message: str
    """Keys, values, the rule with its numbers, and what to write instead."""


def refuse(problems: list[Problem]) -> None:
    """Raise one ConfigError that lists every error, if there is any."""
    errors = [problem.message for problem in problems if problem.severity == Severity.error]
    if errors:
        raise ConfigError("\n".join(errors))


def validate(config: Config, world: int) -> list[Problem]:
    """All problems of a config in a world of so many ranks; an empty list is a config that can run."""
    messages: list[str] = []
    for rule in (
        _model,
        _precision,
        _unavailable,
        _recompute,
        _sequence,
        _vocabulary,
        _data,
        _optimizer,
        _scheduler,
        _trainer,
    ):
        messages += rule(config)
    try:
        layout = resolve(config.parallelism, world, config.cluster.nodes)
    except ConfigError as error:
        messages.append(str(error))
    else:
        for layout_rule in (batch_arithmetic, _tensor_parallel, context_rules, _zero, _pipeline):
            messages += layout_rule(config, layout)
        problems = [Problem(Severity.warning, message) for message in _costs(config, layout)] if not messages else []
        return [Problem(Severity.error, message) for message in messages] + problems
    return [Problem(Severity.error, message) for message in messages]


def batch_arithmetic(config: Config, layout: Layout) -> Iterator[str]:
    """global_batch must be a whole number of microbatches on every data rank."""
    data, dp = config.data, layout.dp
    for key in ("seq_len", "global_batch", "micro_batch"):
        if getattr(data, key) < 1:
            yield f"data.{key}={getattr(data, key)} must be at least 1."
            return
    if data.global_batch % (data.micro_batch * dp) == 0:
        return
    unit = data.micro_batch * dp
    below, above = data.global_batch // unit * unit, -(-data.global_batch // unit) * unit
    batches = " or ".join(str(batch) for batch in (below, above) if batch)
    micro = divisors(data.global_batch // dp) if data.global_batch % dp == 0 else []
    nearest = sorted(micro, key=lambda size: abs(size - data.micro_batch))[:2]
    other = f" or data.micro_batch={' or '.join(map(str, sorted(nearest)))}" if nearest else ""
    yield (
        f"data.global_batch={data.global_batch} must be a multiple of data.micro_batch={data.micro_batch} * {dp} data "
        f"ranks (dp_replicate={layout.dp_replicate} * dp_shard={layout.dp_shard}) = {unit}. "
        f"Write data.global_batch={batches}{other}."
    )


def _tensor_parallel(config: Config, layout: Layout) -> Iterator[str]:
    parallelism, model, tp = config.parallelism, config.model, layout.tp
    if tp == 1:
        for key in ("sequence_parallel", "loss_parallel", "async_tp"):
            if getattr(parallelism, key):
                yield f"parallelism.{key}=true needs parallelism.tp above 1. Write parallelism.{key}=false."
        return
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    legal = [size for size in range(1, heads + 1) if heads % size == 0]
    if heads % tp:
        yield (
            f"parallelism.tp={tp} must divide model.num_attention_heads={heads}, since heads are dealt out whole. "
            f"Write one of {legal}."
        )
    elif key_value_heads % tp and tp % key_value_heads:
        both = [size for size in legal if key_value_heads % size == 0 or size % key_value_heads == 0]
        yield (
            f"parallelism.tp={tp} must divide model.num_key_value_heads={key_value_heads} or be a multiple of it, so "
            f"that every rank has whole key/value heads or one that is held by several. Write one of {both}."
        )
    if parallelism.sequence_parallel and layout.cp == 1 and config.data.seq_len % tp:
        yield (
            f"data.seq_len={config.data.seq_len} must be a multiple of parallelism.tp={tp} with sequence_parallel. "
            f"Write data.seq_len={-(-config.data.seq_len // tp) * tp}, or sequence_parallel=false."
        )
    if parallelism.zero and layout.dp_shard * layout.cp > 1:
        for key in ("vocab_size", "intermediate_size"):
            size = getattr(model, key)
            if size % tp:
                yield (
                    f"model.{key}={size} must be a multiple of parallelism.tp={tp} where parallelism.zero="
                    f"{parallelism.zero} splits the rows once more. Write model.{key}={-(-size // tp) * tp}, or zero=0."
                )


def _zero(config: Config, layout: Layout) -> Iterator[str]:
    zero = config.parallelism.zero
    if zero not in (0, 1, 2, 3):
        yield f"parallelism.zero={zero} must be 0, 1, 2 or 3."
    if config.parallelism.prefetch < 0:
        yield f"parallelism.prefetch={config.parallelism.prefetch} must be 0 or more."
    if config.parallelism.prefetch and zero != 3:
        yield (
            f"parallelism.prefetch={config.parallelism.prefetch} is for zero=3, where every layer is gathered when "
            f"it is used; zero={zero} gathers once a step. Write parallelism.prefetch=0."
        )
    if config.parallelism.offload and (config.cluster.device == "cpu" or layout.dp * layout.cp == 1):
        yield (
            f"parallelism.offload=true needs a GPU to offload from and more than one data rank; cluster.device="
            f"{config.cluster.device}, data ranks {layout.dp * layout.cp}. Write parallelism.offload=false."
        )
    if isinstance(config.optimizer, MuonConfig) and (layout.tp > 1 or (zero > 0 and layout.dp_shard * layout.cp > 1)):
        yield (
            f"optimizer=muon works on whole matrices, which parallelism.tp={layout.tp} and zero={zero} split. Write "
            f"parallelism.tp=1 and parallelism.zero=0, or optimizer=adamw."
        )


def _pipeline(config: Config, layout: Layout) -> Iterator[str]:
    parallelism, data = config.parallelism, config.data
    pp, virtual, schedule = parallelism.pp, parallelism.virtual_stages, parallelism.pp_schedule
    if pp == 1:
        if virtual != 1:
            yield f"parallelism.virtual_stages={virtual} needs parallelism.pp above 1. Write virtual_stages=1."
        return
    if schedule in SINGLE and virtual != 1:
        yield (
            f"parallelism.virtual_stages={virtual}: pp_schedule={schedule} has one stage per rank. Write "
            f"virtual_stages=1, or pp_schedule=interleaved_1f1b."
        )
    elif schedule in V_SHAPED and virtual != 2:
        yield (
            f"parallelism.virtual_stages={virtual}: pp_schedule={schedule} has two stages per rank. Write "
            f"virtual_stages=2."
        )
    elif virtual < 1 or (virtual == 1 and schedule == "interleaved_1f1b"):
        yield (
            f"parallelism.virtual_stages={virtual}: pp_schedule={schedule} interleaves several stages per rank. Write "
            f"virtual_stages=2, or pp_schedule=1f1b."
        )
    else:
        try:
            split_layers(config.model, parallelism)
        except ConfigError as error:
            yield str(error)
    if data.micro_batch < 1 or data.global_batch % (data.micro_batch * layout.dp):
        return
    microbatches = data.global_batch // (data.micro_batch * layout.dp)
    if schedule == "csv":
        yield from _schedule_file(config, microbatches)
        return
    if parallelism.recompute != "none" and splits_backward(parallelism):
        yield _RECOMPUTE_TWICE.format(recompute=parallelism.recompute, schedule=schedule)
    least = {"1f1b": pp, "dualpipe_v": 2 * pp}.get(schedule, 1)
    rounds = max(microbatches // pp, 1)
    unit = data.micro_batch * layout.dp
    if microbatches < least:
        yield (
            f"data.global_batch={data.global_batch} makes {microbatches} microbatches, and pp_schedule={schedule} with "
            f"parallelism.pp={pp} needs {least} or more. Write data.global_batch={least * unit}, a smaller "
            f"data.micro_batch, or pp_schedule=gpipe."
        )
    elif schedule.startswith("interleaved") and microbatches % rounds:
        yield (
            f"data.global_batch={data.global_batch} makes {microbatches} microbatches, which pp_schedule={schedule} "
            f"deals out in {rounds} equal rounds of about pp={pp}. Write data.global_batch="
            f"{microbatches // pp * pp * unit} or {-(-microbatches // pp) * pp * unit}."
        )


_RECOMPUTE_TWICE = (
    "parallelism.recompute={recompute} with pp_schedule={schedule}: its backward pass is cut in pieces, each of which "
    "would work the layers out again. Write recompute=none, or pp_schedule=interleaved_1f1b."
)


def _schedule_file(config: Config, microbatches: int) -> Iterator[str]:
    parallelism = config.parallelism
    try:
        orders = read_csv(parallelism.pp_schedule_file)
    except ConfigError as error:
        yield str(error)
        return
    where = f"parallelism.pp_schedule_file={parallelism.pp_schedule_file}"
    faults = check(where, orders, parallelism.pp, parallelism.virtual_stages, microbatches)
    yield from faults
    if faults:
        return
    if parallelism.recompute != "none" and splits_backward(parallelism):
        yield _RECOMPUTE_TWICE.format(recompute=parallelism.recompute, schedule="csv")
    try:
        simulate(orders, stage_count(parallelism), equal_costs)
    except AssertionError as error:
        yield f"{where}: {error}. Put every action after what it needs."


def _costs(config: Config, layout: Layout) -> Iterator[str]:
    """What is legal and costly."""
    parallelism, data = config.parallelism, config.data
    shards = layout.dp_shard * layout.cp
    padded = padded_length(data.seq_len, parallelism)
    if padded != data.seq_len:
        yield (
            f"data.seq_len={data.seq_len} is filled up to {padded} with tokens that do not count: "
            f"{data.global_batch * (padded - data.seq_len)} of {data.global_batch * padded} a step "
            f"({1 - data.seq_len / padded:.1%}). data.seq_len={padded} needs none."
        )
    if parallelism.zero and shards == 1:
        yield (
            f"parallelism.zero={parallelism.zero} shares nothing out: there is one rank to a shard (dp_shard * cp = 1)."
        )
    if layout.pp == 1 or parallelism.zero < 2 or shards == 1:
        return
    stage = parameter_count(config.model) // (layout.pp * layout.tp)
    microbatches = data.global_batch // (data.micro_batch * layout.dp)
    if splits_backward(parallelism):
        size = stage * BYTES[config.precision.reduce] / 1e9
        yield (
            f"parallelism.zero={parallelism.zero} with pp_schedule={parallelism.pp_schedule} keeps gradients (about "
            f"{size:.2f} GB a rank) and gathered parameters whole within a step, since its backward pass is "
            f"split: that is the memory of zero=1."
        )
    elif parallelism.zero == 3:
        sent = ring_bytes("all_gather", stage * BYTES[config.precision.compute], shards) * 2 * microbatches
        yield (
            f"parallelism.zero=3 with parallelism.pp={layout.pp} gathers a stage's parameters again for forward "
            f"and backward of each of {microbatches} microbatches: a rank sends about {sent / 1e9:.2f} GB a step, with "
            f"zero=1 {sent / 1e9 / (2 * microbatches):.2f} GB."
        )


def _model(config: Config) -> Iterator[str]:
    try:
        config.model.check()
    except ConfigError as error:
        yield str(error)


def _precision(config: Config) -> Iterator[str]:
    precision = config.precision
    sizes = {key: BYTES[getattr(precision, key)] for key in ("master", "compute", "reduce")}
    if sizes["compute"] > sizes["master"] or sizes["reduce"] > sizes["master"] or sizes["reduce"] < sizes["compute"]:
        yield (
            f"precision: compute={precision.compute} must not be finer than master={precision.master}, nor reduce="
            f"{precision.reduce} coarser than compute or finer than master. Write precision=fp32, bf16 or fp64."
        )
    if precision.master == FloatType.bfloat16:
        yield "precision.master=bfloat16 loses small updates. Write precision.master=float32, as precision=bf16 does."


def _recompute(config: Config) -> Iterator[str]:
    try:
        recompute_interval(config.parallelism.recompute)
    except ConfigError as error:
        yield str(error)


def _unavailable(config: Config) -> Iterator[str]:
    for axis in ("ep", "etp"):
        size = getattr(config.parallelism, axis)
        if size > 1:
            yield f"parallelism.{axis}={size}: this version cannot split along {axis} yet. Write parallelism.{axis}=1."


def _sequence(config: Config) -> Iterator[str]:
    longest = config.model.max_position_embeddings
    if config.data.seq_len > longest:
        yield (
            f"data.seq_len={config.data.seq_len} is above model.max_position_embeddings={longest}, the longest that "
            f"the rotary embedding of model={config.model.name} is meant for. Write data.seq_len={longest} or less, or "
            f"raise the limit together with model.rope.scaling."
        )


def _vocabulary(config: Config) -> Iterator[str]:
    needed, source = tokens_needed(config)
    if config.model.vocab_size < needed:
        yield (
            f"model.vocab_size={config.model.vocab_size} is smaller than the {needed} tokens of {source}. "
            f"Write model.vocab_size={needed} or more."
        )


def tokens_needed(config: Config) -> tuple[int, str]:
    """How many token ids the data may hold, and where they come from."""
    if isinstance(config.data, SyntheticData):
        return config.data.vocab_size, f"data.vocab_size={config.data.vocab_size}"
    if config.data.tokenizer.kind == TokenizerKind.byte:
        return 257, "data.tokenizer.kind=byte (256 bytes and the document mark)"
    size = config.data.tokenizer.vocab_size or 0
    return size, f"data.tokenizer.vocab_size={size}"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if not 0.0 < data.validation_fraction < 1.0:
        yield f"data.validation_fraction={data.validation_fraction} must lie between 0 and 1, both excluded."
    if data.workers < 0:
        yield f"data.workers={data.workers} must be 0 or more."
    if isinstance(data, SyntheticData):
        if min(data.sequences, data.validation_sequences, data.vocab_size) < 1:
            yield "data.sequences, data.validation_sequences and data.vocab_size must be at least 1."
    elif data.tokenizer.kind == TokenizerKind.bpe and (data.tokenizer.vocab_size or 0) < 257:
        yield (
            f"data.tokenizer.vocab_size={data.tokenizer.vocab_size}: bpe starts from 256 bytes and the document mark. "
            f"Write 257 or more, such as 2048."
        )


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    for key in ("lr", "adamw_lr", "weight_decay", "eps", "momentum"):
        value = getattr(optimizer, key, 0.0)
        if not 0.0 <= value < inf:
            yield f"optimizer.{key}={value} must not be negative, and must be finite."
    if getattr(optimizer, "nesterov", False) and getattr(optimizer, "momentum", 0.0) == 0.0:
        yield "optimizer.nesterov=true needs a momentum: write optimizer.momentum=0.9, or optimizer.nesterov=false."
    betas = getattr(optimizer, "betas", [0.0, 0.0])
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        yield f"optimizer.betas={list(betas)} must be two numbers in [0, 1), such as [0.9,0.95]."
    if isinstance(optimizer, MuonConfig) and config.precision.name == "fp64":
        yield "optimizer=muon works in bfloat16 inside, which precision=fp64 would hide. Write optimizer=adamw or sgd."


def _scheduler(config: Config) -> Iterator[str]:
    scheduler = config.scheduler
    if not 0.0 <= scheduler.minimum_ratio <= 1.0:
        yield f"scheduler.minimum_ratio={scheduler.minimum_ratio} must lie in [0, 1]."
    total = schedule_total(config)
    if scheduler.total is not None and total < 1:
        yield f"scheduler.total={total} must be at least 1, or null for the length of the run."
    if scheduler.warmup < 0 or scheduler.decay < 0:
        yield f"scheduler.warmup={scheduler.warmup} and scheduler.decay={scheduler.decay} must be 0 or more."
    if scheduler.shape == DecayShape.wsd and scheduler.decay > total:
        yield (
            f"scheduler.decay={scheduler.decay} is longer than the schedule's {total} {scheduler.unit} (scheduler."
            f"total, or what trainer.max_steps makes). Write scheduler.decay={total} or less."
        )


def schedule_total(config: Config) -> int:
    """Steps, or tokens, at which the learning rate's decay ends."""
    if config.scheduler.total is not None:
        return config.scheduler.total
    if config.scheduler.unit == "tokens":
        return config.trainer.max_steps * config.data.global_batch * config.data.seq_len
    return config.trainer.max_steps


def _trainer(config: Config) -> Iterator[str]:
    trainer = config.trainer
    device = config.cluster.device
    if device not in ("auto", "cpu", "cuda", *DEVICES):
        yield f"cluster.device={device} is not known. Write auto, cpu, cuda or one of {', '.join(DEVICES)}."
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", config.run.id):
        yield f"run.id={config.run.id} names a folder and a W&B run: write letters, digits, '.', '_' and '-' only."
    for key, value in (
        ("trainer.max_steps", trainer.max_steps),
        ("trainer.log_interval", trainer.log_interval),
        ("trainer.val_interval", trainer.val_interval),
        ("trainer.val_sequences", trainer.val_sequences),
        ("checkpoint.every_n_steps", config.checkpoint.every_n_steps),
        ("checkpoint.keep", config.checkpoint.keep),
        ("debug.overfit_steps", config.debug.overfit_steps),
        ("cluster.nodes", config.cluster.nodes),
        ("cluster.devices_per_node", config.cluster.devices_per_node),
        ("cluster.threads", config.cluster.threads),
    ):
        if value is not None and value < 1:
            yield f"{key}={value} must be at least 1."
    if trainer.gradient_clip is not None and not 0.0 < trainer.gradient_clip < inf:
        yield f"trainer.gradient_clip={trainer.gradient_clip} must be above 0, or null for no clipping."
