"""Everything that can be said of a run before it starts, as plain numbers: the source of text, JSON and pictures."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from models.counts import parameter_count, training_flops_per_token
from parallel.config import RECOMPUTE_MODES, Config, FloatType, SyntheticData
from parallel.devices import DEVICES
from parallel.layout import AXES, Layout, mesh_layout, microbatch_count, resolve
from parallel.plan.memory import KINDS, RESERVED_BYTES, SLACK, Memory, rank_memory
from parallel.plan.network import link_bytes_per_s, nodes_spanned
from parallel.plan.problems import Problem, refuse
from parallel.plan.timeline import Span, bubble, expected_of
from parallel.plan.traffic import Traffic, traffic
from parallel.plan.validate import errors, validate
from parallel.plan.weights import rank_layers
from parallel.stages import split_layers, stages_of


@dataclass(frozen=True)
class PipelineRank:
    """Those ranks that have one place along pp: what they hold, and what they send."""

    pp_rank: int
    stages: list[int]
    layers: list[int]
    memory: Memory
    """The peak of its ranks that hold most."""
    needed: int
    """The peak with what is not counted in tensors: `RESERVED_BYTES` and `SLACK`."""
    by_recompute: dict[str, int]
    """`needed` under each recompute mode that is legal here, other things equal."""
    traffic: list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """A run that is legal, in numbers."""

    config: Config
    layout: Layout
    problems: list[Problem]
    """Warnings and notes."""
    devices_per_node: int
    parameters: int
    tokens_per_step: int
    microbatches: int
    steps_per_epoch: float | None
    """None where it depends on text that is not prepared yet."""
    flops_per_token_causal: float
    flops_per_token_full: float
    device_memory: int | None
    """Bytes; None where the device is not known."""
    pipeline_ranks: list[PipelineRank]
    bubble: float
    spans: list[Span]
    """The simulated pipeline, of so many microbatches:"""
    microbatches_drawn: int
    device_hours: float | None
    """For the whole schedule, at the assumed share of the device's peak."""
    mfu: float

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits its device; None where the device is not known."""
        if self.device_memory is None:
            return None
        return all(rank.needed <= self.device_memory for rank in self.pipeline_ranks)


def make_plan(config: Config, world: int, mfu: float = 0.4) -> Plan:
    """The plan of a config in a world of so many ranks. Raises ConfigError where it is refused."""
    problems = validate(config, world)
    refuse(problems)
    layout = resolve(config.parallelism, world, config.cluster.nodes)
    causal, full = (training_flops_per_token(config.model, config.data.seq_len, causal) for causal in (True, False))
    device = DEVICES.get(config.cluster.device)
    tokens = config.data.global_batch * config.data.seq_len
    spans, drawn, idle = timeline(config, layout)
    hours = None
    if device is not None:
        rate = device.bf16_flops if config.precision.compute == FloatType.bfloat16 else device.fp32_flops
        hours = tokens * config.trainer.max_steps * causal / (rate * mfu) / 3600
    sequences = config.data.sequences if isinstance(config.data, SyntheticData) else None
    modes = [mode for mode in RECOMPUTE_MODES if _may_recompute(config, mode, world)]
    per_node = config.cluster.devices_per_node or max(world // config.cluster.nodes, 1)
    return Plan(
        config=config,
        layout=layout,
        problems=problems,
        devices_per_node=per_node,
        parameters=parameter_count(config.model),
        tokens_per_step=tokens,
        microbatches=microbatch_count(config, layout),
        steps_per_epoch=None if sequences is None else sequences / config.data.global_batch,
        flops_per_token_causal=causal,
        flops_per_token_full=full,
        device_memory=None if device is None else device.memory_bytes,
        pipeline_ranks=[pipeline_rank(config, layout, pp_rank, modes) for pp_rank in range(layout.pp)],
        bubble=idle,
        spans=spans,
        microbatches_drawn=drawn,
        device_hours=hours,
        mfu=mfu,
    )


def timeline(config: Config, layout: Layout) -> tuple[list[Span], int, float]:
    """The simulated pipeline of a step in units of cost, the microbatches in it, and the step's bubble.

    Once a pipeline is full every microbatch more takes the same time: a long step is worked out from two short ones, of
    which the shorter is returned as a picture of it.
    """
    count, pp = microbatch_count(config, layout), layout.pp
    if pp == 1:
        return [], count, 0.0
    if count <= 8 * pp or config.parallelism.pp_schedule == "csv":
        spans = expected_of(config, layout)
        return spans, count, bubble(spans, pp)
    short, longer = (_simulated(config, layout, rounds * pp) for rounds in (4, 8))
    ends, works = ([f(spans) for spans in (short, longer)] for f in (_end, _work))
    more = (count - 4 * pp) / (4 * pp)
    end, work = (pair[0] + more * (pair[1] - pair[0]) for pair in (ends, works))
    return short, 4 * pp, 1.0 - work / (pp * end)


def _simulated(config: Config, layout: Layout, count: int) -> list[Span]:
    data = replace(config.data, global_batch=count * config.data.micro_batch * layout.dp)
    return expected_of(replace(config, data=data), layout)


def _end(spans: list[Span]) -> float:
    return max(span.end for span in spans)


def _work(spans: list[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def _recomputing(config: Config, mode: str) -> Config:
    return replace(config, parallelism=replace(config.parallelism, recompute=mode))


def _may_recompute(config: Config, mode: str, world: int) -> bool:
    """Whether a mode goes with the rest of the config, be it that it does not fit."""
    return all(fault.rule == "memory" for fault in errors(_recomputing(config, mode), world))


def pipeline_rank(config: Config, layout: Layout, pp_rank: int, modes: list[str]) -> PipelineRank:
    """One pipeline rank of a legal config, and what it would need under other recompute modes."""
    memory = rank_memory(config, layout, pp_rank)
    return PipelineRank(
        pp_rank=pp_rank,
        stages=stages_of(pp_rank, config.parallelism),
        layers=rank_layers(config, pp_rank),
        memory=memory,
        needed=memory.needed,
        by_recompute={mode: rank_memory(_recomputing(config, mode), layout, pp_rank).needed for mode in modes},
        traffic=[described(row, config, layout) for row in traffic(config, layout, pp_rank)],
    )


def described(row: Traffic, config: Config, layout: Layout) -> dict[str, Any]:
    """One row of traffic with the wires it runs over, its seconds on them, and what of it can hide under compute."""
    copies = ("dp_replicate",) if config.parallelism.zero else ("dp_replicate", "expert_dp")
    axes = {"world": AXES, "expert_replicate": copies}.get(row.axis, (row.axis,))
    # Collectives over data ranks run over context ranks too; the experts' axes are as they stand.
    grid = mesh_layout(layout, config.parallelism.zero) if set(axes) <= set(AXES) else layout
    spanned = nodes_spanned(grid, axes, config.cluster.devices_per_node)
    speed = link_bytes_per_s(config.cluster, spanned)
    return asdict(row) | {
        "nodes_spanned": spanned,
        "seconds": None if speed is None else row.bytes_sent / speed,
        "can_hide": can_hide(row, config, layout),
    }


def can_hide(row: Traffic, config: Config, layout: Layout) -> float:
    """The largest share of a row that computing can hide, by what waits for what; never a promise.

    Tensor parallelism's results are needed at once. A ring's keys and values travel while attention works on others. A
    pipeline's messages hide but for those that fill and drain it.
    FSDP2 gathers a layer while another computes and reduces one while the next goes backward: all but the first gather,
    or the last reduction, of as many as there are groups.
    """
    if row.axis == "pp":
        count = microbatch_count(config, layout)
        return max(count - layout.pp, 0) / count
    if row.axis == "cp" and row.operation == "send":
        return 1.0
    if row.axis in ("dp_replicate", "dp_shard", "expert_replicate", "expert_dp") and row.calls > 1:
        groups = len(split_layers(config.model, config.parallelism)[0]) + 1
        return (groups - 1) / groups
    return 0.0


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain numbers, strings, lists and dicts."""
    layout, config = plan.layout, plan.config
    return {
        "recipe": config.recipe.name,
        "model": config.model.name,
        "parameters": plan.parameters,
        "world": layout.world,
        "layout": {axis: getattr(layout, axis) for axis in (*AXES, "ep", "etp", "expert_dp")},
        "zero": config.parallelism.zero,
        "recompute": config.parallelism.recompute,
        "precision": config.precision.name,
        "cluster": {
            "name": config.cluster.name,
            "device": config.cluster.device,
            "nodes": config.cluster.nodes,
            "devices_per_node": plan.devices_per_node,
        },
        "tokens_per_step": plan.tokens_per_step,
        "microbatches": plan.microbatches,
        "steps": config.trainer.max_steps,
        "steps_per_epoch": plan.steps_per_epoch,
        "tokens_total": plan.tokens_per_step * config.trainer.max_steps,
        "flops_per_token": {"causal": plan.flops_per_token_causal, "full": plan.flops_per_token_full},
        "flops_per_step": {
            "causal": plan.flops_per_token_causal * plan.tokens_per_step,
            "full": plan.flops_per_token_full * plan.tokens_per_step,
        },
        "device_hours": plan.device_hours,
        "mfu_assumed": plan.mfu,
        "bubble": plan.bubble,
        "device_memory": plan.device_memory,
        "memory_assumed": {"reserved_bytes": RESERVED_BYTES, "slack": SLACK},
        "fits": plan.fits,
        "pipeline_ranks": [
            {
                "pp_rank": rank.pp_rank,
                "stages": rank.stages,
                "layers": rank.layers,
                "first_rank": layout.rank(pp=rank.pp_rank),
                "moment": rank.memory.moment,
                "memory": {kind: getattr(rank.memory, kind) for kind in KINDS},
                "peak": rank.memory.total,
                "needed": rank.needed,
                "needed_by_recompute": rank.by_recompute,
                "traffic": rank.traffic,
            }
            for rank in plan.pipeline_ranks
        ],
        "rank_order": list(AXES),
        "problems": [{"severity": str(problem.severity), "message": problem.message} for problem in plan.problems],
    }
