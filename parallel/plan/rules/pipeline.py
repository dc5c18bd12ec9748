"""Pipelines: stages, schedules, microbatches."""

from collections.abc import Iterator
from typing import Any

from models.errors import ConfigError, nearest
from parallel.config import Config, PipelineSchedule
from parallel.layout import Layout, divisors, microbatch_count
from parallel.plan.problems import Fault
from parallel.plan.timeline import equal_costs, simulate
from parallel.schedule import check, read_csv
from parallel.stages import SINGLE, V_SHAPED, split_layers, splits_backward, stage_count

BUBBLE_LIMIT = 0.2
_PLAIN = PipelineSchedule["1f1b"]


def stages(config: Config, layout: Layout) -> Iterator[Fault]:
    """Every rank has the stages that its schedule wants, and every stage a layer."""
    parallelism = config.parallelism
    pp, virtual, schedule = parallelism.pp, parallelism.virtual_stages, parallelism.pp_schedule
    what = f"parallelism.virtual_stages={virtual}"
    if pp == 1:
        if virtual != 1:
            yield Fault("virtual-stages", f"{what} needs parallelism.pp above 1.", {"parallelism.virtual_stages": [1]})
        if parallelism.pp_split not in ("balanced", "even"):
            yield Fault(
                "layers",
                f"parallelism.pp_split={parallelism.pp_split} is for parallelism.pp above 1.",
                {"parallelism.pp_split": ["balanced"]},
            )
        return
    interleaved = PipelineSchedule["interleaved_1f1b"]
    if schedule in SINGLE and virtual != 1:
        yield Fault(
            "virtual-stages",
            f"{what}: pp_schedule={schedule} has one stage per rank.",
            {"parallelism.virtual_stages": [1], "parallelism.pp_schedule": [interleaved]},
        )
    elif schedule in V_SHAPED and virtual != 2:
        yield Fault(
            "virtual-stages",
            f"{what}: pp_schedule={schedule} has two stages per rank.",
            {"parallelism.virtual_stages": [2]},
        )
    elif virtual < 1 or (virtual == 1 and schedule == "interleaved_1f1b"):
        yield Fault(
            "virtual-stages",
            f"{what}: pp_schedule={schedule} interleaves several stages per rank.",
            {"parallelism.virtual_stages": [2, 1], "parallelism.pp_schedule": [_PLAIN]},
        )
    elif virtual >= 1:
        try:
            split_layers(config.model, parallelism)
        except ConfigError as error:
            message, _, _ = str(error).partition(" Write ")
            yield Fault("layers", message, _layer_tries(config, layout))


def _layer_tries(config: Config, layout: Layout) -> dict[str, list[Any]]:
    parallelism, layers = config.parallelism, config.model.num_hidden_layers
    tries: dict[str, list[Any]] = {}
    if parallelism.pp_split not in ("balanced", "even"):
        tries["parallelism.pp_split"] = ["balanced", "even"]
    if parallelism.virtual_stages > 1 and parallelism.pp_schedule not in V_SHAPED:
        tries["parallelism.virtual_stages"] = [
            *nearest(range(1, layers // parallelism.pp + 1), parallelism.virtual_stages)
        ]
    fitting = [size for size in divisors(layout.world) if size * parallelism.virtual_stages <= layers]
    tries["parallelism.pp"] = [*nearest(fitting, parallelism.pp)][:4]
    return tries


def microbatches(config: Config, layout: Layout) -> Iterator[Fault]:
    """The schedule can be filled, and dealt out in equal rounds."""
    parallelism, data = config.parallelism, config.data
    pp, schedule = layout.pp, parallelism.pp_schedule
    if pp == 1 or min(data.global_batch, data.micro_batch) < 1 or data.global_batch % (data.micro_batch * layout.dp):
        return
    count, unit = microbatch_count(config, layout), data.micro_batch * layout.dp
    if schedule == "csv":
        yield from _schedule_file(config, count)
        return
    if parallelism.recompute != "none" and splits_backward(parallelism):
        yield _recompute_twice(config)
    least = {"1f1b": pp, "dualpipe_v": 2 * pp}.get(schedule, 1)
    rounds = max(count // pp, 1)
    smaller = [size for size in divisors(data.global_batch // layout.dp) if size < data.micro_batch][::-1]
    if count < least:
        yield Fault(
            "microbatches",
            f"data.global_batch={data.global_batch} makes {count} microbatches, and pp_schedule={schedule} with "
            f"parallelism.pp={pp} needs {least} or more.",
            {
                "data.global_batch": [least * unit],
                "data.micro_batch": smaller,
                "parallelism.pp_schedule": [PipelineSchedule["gpipe"]],
            },
        )
    elif schedule.startswith("interleaved") and count % rounds:
        yield Fault(
            "rounds",
            f"data.global_batch={data.global_batch} makes {count} microbatches, which pp_schedule={schedule} deals out "
            f"in {rounds} equal rounds of about pp={pp}.",
            {"data.global_batch": [count // pp * pp * unit, -(-count // pp) * pp * unit], "data.micro_batch": smaller},
        )


def _recompute_twice(config: Config) -> Fault:
    parallelism = config.parallelism
    return Fault(
        "recompute-split-backward",
        f"parallelism.recompute={parallelism.recompute} with pp_schedule={parallelism.pp_schedule}: its backward pass "
        "is cut in pieces, each of which would work the layers out again.",
        {"parallelism.recompute": ["none"], "parallelism.pp_schedule": [PipelineSchedule["interleaved_1f1b"], _PLAIN]},
    )


def _schedule_file(config: Config, count: int) -> Iterator[Fault]:
    parallelism = config.parallelism
    try:
        orders = read_csv(parallelism.pp_schedule_file)
    except ConfigError as error:
        yield Fault("schedule-file", str(error), {"parallelism.pp_schedule": [_PLAIN]})
        return
    where = f"parallelism.pp_schedule_file={parallelism.pp_schedule_file}"
    faults = check(where, orders, parallelism.pp, parallelism.virtual_stages, count)
    yield from (Fault("schedule-file", fault, {"parallelism.pp_schedule": [_PLAIN]}) for fault in faults)
    if faults:
        return
    if parallelism.recompute != "none" and splits_backward(parallelism):
        yield _recompute_twice(config)
    try:
        simulate(orders, stage_count(parallelism), equal_costs)
    except AssertionError as error:
        yield Fault("schedule-file", f"{where}: {error}. Put every action after what it needs.")


def costs(config: Config, layout: Layout) -> Iterator[Fault]:
    """Ranks that wait."""
    parallelism, pp = config.parallelism, layout.pp
    if pp == 1 or parallelism.pp_schedule == "csv":
        return
    count, virtual = microbatch_count(config, layout), parallelism.virtual_stages
    idle = (pp - 1) / (virtual * count + pp - 1)
    if not splits_backward(parallelism) and idle > BUBBLE_LIMIT:
        enough = -(-4 * (pp - 1) // virtual)
        yield Fault(
            "bubble",
            f"pp_schedule={parallelism.pp_schedule} with parallelism.pp={pp} and {count} microbatches leaves every "
            f"rank idle for {idle:.0%} of a step, (pp - 1) / (virtual_stages * microbatches + pp - 1); {enough} "
            f"microbatches would make it {BUBBLE_LIMIT:.0%}: a larger data.global_batch, a smaller micro_batch, or "
            "more virtual_stages.",
        )
    counts = {len(stage) for stage in split_layers(config.model, parallelism)[:-1]}
    if len(counts) > 1 or (
        parallelism.pp_split == "even" and config.model.num_hidden_layers % stage_count(parallelism)
    ):
        yield Fault(
            "uneven-stages",
            f"model.num_hidden_layers={config.model.num_hidden_layers} on {stage_count(parallelism)} stages makes "
            f"stages of {min(counts)} to {max(counts)} layers, and the ranks of small ones wait for the others.",
        )
    if config.model.tie_word_embeddings:
        yield Fault(
            "tied-pipeline",
            f"model.tie_word_embeddings=true with parallelism.pp={pp}: the first and last stage both hold the "
            f"embedding ({config.model.vocab_size * config.model.hidden_size:,} parameters) and exchange its gradient "
            "every step.",
        )
