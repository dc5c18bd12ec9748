"""A plan as text for a terminal."""

from collections.abc import Iterator

from parallel.plan.memory import KINDS, RESERVED_BYTES, SLACK
from parallel.plan.plan import PipelineRank, Plan

SHOWN = 8
"""Places along pp."""


def text(plan: Plan) -> str:
    """The whole plan."""
    return "\n".join([*_run(plan), "", *_ranks(plan), "", *_memory(plan), "", *_traffic(plan), *_problems(plan)])


def _run(plan: Plan) -> Iterator[str]:
    config, layout = plan.config, plan.layout
    split = " · ".join(f"{axis} {size}" for axis, size in layout.split.items())
    cluster = config.cluster
    yield f"{config.recipe.name}: {config.model.name}, {plan.parameters:,} parameters, {config.precision.name}"
    yield (
        f"{layout.world:,} x {cluster.device} on {cluster.nodes:,} node{'s' * (cluster.nodes > 1)}: "
        f"{split or 'one rank'}, zero {config.parallelism.zero}, recompute {config.parallelism.recompute}"
    )
    total = plan.tokens_per_step * config.trainer.max_steps
    epoch = "" if plan.steps_per_epoch is None else f", {plan.steps_per_epoch:,.0f} steps an epoch"
    yield (
        f"{plan.tokens_per_step:,} tokens a step in {plan.microbatches} microbatches of {config.data.micro_batch} x "
        f"{config.data.seq_len:,} per data rank; {config.trainer.max_steps:,} steps{epoch}, {total:,} tokens"
    )
    causal, full = (
        flops * plan.tokens_per_step / 1e15 for flops in (plan.flops_per_token_causal, plan.flops_per_token_full)
    )
    hours = (
        ""
        if plan.device_hours is None
        else f"; {plan.device_hours:,.0f} device hours in all at {plan.mfu:.0%} of the peak (assumed)"
    )
    yield f"{causal:,.2f} PFLOP a step (causal attention; {full:,.2f} in full){hours}"
    if layout.pp > 1:
        yield f"pipeline: {config.parallelism.pp_schedule}, bubble {plan.bubble:.1%} (simulated, messages free)"


def _ranks(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    yield "ranks (tp varies fastest; ranks fill one node after another)"
    each = layout.world // layout.pp
    for rank in _shown(plan.pipeline_ranks):
        first, last = rank.pp_rank * each, (rank.pp_rank + 1) * each - 1
        nodes = sorted({end // plan.devices_per_node for end in (first, last)})
        where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"
        held = ranges(rank.layers)
        ends = ["embedding"] * (0 in rank.stages) + ["output layer"] * _is_last(plan, rank)
        yield f"  pp {rank.pp_rank}: ranks {first} to {last}, {where}: layers {', '.join([held, *ends])}"
    yield from _left_out(plan)


def _memory(plan: Plan) -> Iterator[str]:
    limit = "" if plan.device_memory is None else f", device {_gb(plan.device_memory)}"
    yield f"memory of a rank at its peak, in GB{limit}"
    yield f"  {'pp':>3}" + "".join(f"{kind:>14}" for kind in KINDS) + f"{'peak':>10}{'needed':>10}  peaks in"
    for rank in _shown(plan.pipeline_ranks):
        parts = "".join(f"{getattr(rank.memory, kind) / 1e9:>14.2f}" for kind in KINDS)
        over = plan.device_memory is not None and rank.needed > plan.device_memory
        sizes = f"{rank.memory.total / 1e9:>10.2f}{rank.needed / 1e9:>10.2f}"
        yield f"  {rank.pp_rank:>3}{parts}{sizes}  {rank.memory.moment}{'  MAY NOT FIT' * over}"
    yield from _left_out(plan)
    yield (
        f"  needed = peak + {SLACK:.0%} that the allocator holds unused + {RESERVED_BYTES / 1e9:.2f} for context and "
        f"NCCL (both assumed)"
    )
    worst = {
        mode: max(rank.by_recompute[mode] for rank in plan.pipeline_ranks)
        for mode in plan.pipeline_ranks[0].by_recompute
    }
    yield "  needed under each recompute: " + ", ".join(f"{mode} {size / 1e9:.1f}" for mode, size in worst.items())


def _traffic(plan: Plan) -> Iterator[str]:
    if not any(rank.traffic for rank in plan.pipeline_ranks):
        yield "traffic: none"
        return
    busiest = max(plan.pipeline_ranks, key=lambda rank: sum(row["bytes_sent"] for row in rank.traffic))
    yield f"what a rank of pp {busiest.pp_rank} sends in a step (the busiest)"
    yield f"  {'axis':<13}{'operation':<16}{'calls':>8}{'GB':>11}  {'wires':<15}{'seconds':>9}{'can hide':>10}"
    for row in sorted(busiest.traffic, key=lambda row: -row["bytes_sent"]):
        wires = "in a node" if row["nodes_spanned"] == 1 else f"{row['nodes_spanned']} nodes"
        seconds = "?" if row["seconds"] is None else f"{row['seconds']:.3f}"
        yield (
            f"  {row['axis']:<13}{row['operation']:<16}{row['calls']:>8,}{row['bytes_sent'] / 1e9:>11.3f}  "
            f"{wires:<15}{seconds:>9}{row['can_hide']:>10.0%}"
        )


def _problems(plan: Plan) -> Iterator[str]:
    if plan.problems:
        yield ""
    for problem in plan.problems:
        yield f"{problem.severity}: {problem.message}"


def _shown(ranks: list[PipelineRank]) -> list[PipelineRank]:
    if len(ranks) <= SHOWN:
        return ranks
    return [*ranks[: SHOWN - 1], ranks[-1]]


def _left_out(plan: Plan) -> Iterator[str]:
    if len(plan.pipeline_ranks) > SHOWN:
        yield f"  (pp {SHOWN - 1} to {len(plan.pipeline_ranks) - 2} are in plan.json)"


def _is_last(plan: Plan, rank: PipelineRank) -> bool:
    return plan.config.model.num_hidden_layers - 1 in rank.layers


def ranges(numbers: list[int]) -> str:
    """Layers in runs: 0-9, 40-49."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
