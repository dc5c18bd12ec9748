"""The order in which every rank of a pipeline does what: what torch's schedules themselves execute.

GPipe (Huang et al., 2019, arXiv:1811.06965), 1F1B (Narayanan et al., 2019, PipeDream), interleaved 1F1B (Narayanan et
al., 2021, arXiv:2104.04473), zero bubble and ZBV (Qi et al., 2024, arXiv:2401.10241), DualPipeV (DeepSeek-AI, 2025).
"""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from parallel.config import ParallelismConfig
from parallel.schedule import BACKWARD, FORWARD, Action, read_csv
from parallel.stages import SINGLE, stage_count, stages_of

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
    "csv": "_PipelineScheduleRuntime",  # what runs all of torch's schedules of several stages; private
}
"""Classes of torch.distributed.pipelining.schedules."""


def order(parallelism: ParallelismConfig, microbatches: int) -> list[list[Action]]:
    """The actions of every pipeline rank in the order in which its schedule runs them."""
    schedule, pp = parallelism.pp_schedule, parallelism.pp
    if schedule in SINGLE:
        plain = _gpipe if schedule == "gpipe" else _one_f_one_b
        return [plain(rank, pp, microbatches) for rank in range(pp)]
    if schedule == "csv":
        return read_csv(parallelism.pp_schedule_file)
    if schedule == "interleaved_1f1b":
        return [_interleaved(rank, pp, parallelism.virtual_stages, microbatches) for rank in range(pp)]
    # torch is imported here only: what has no pipeline, or another schedule, is planned without it.
    from torch import nn
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=stage_count(parallelism),
            group_size=pp,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == stage_count(parallelism) - 1,
            submod=nn.Identity(),
        )
        for stage in stages_of(0, parallelism)
    ]
    built = getattr(schedules, SCHEDULES[schedule])(
        stages, microbatches, loss_fn=lambda loss, _: loss, scale_grads=False
    )
    return [_plain(built.pipeline_order[rank]) for rank in range(pp)]


def _plain(actions: Sequence[Any]) -> list[Action]:
    flat = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
    return [Action(part.computation_type.value, part.stage_index, part.microbatch_index) for part in flat]


def _gpipe(rank: int, pp: int, microbatches: int) -> list[Action]:
    return [Action(kind, rank, microbatch) for kind in (FORWARD, BACKWARD) for microbatch in range(microbatches)]


def _one_f_one_b(rank: int, pp: int, microbatches: int) -> list[Action]:
    warmup = min(microbatches, pp - rank)
    actions = [Action(FORWARD, rank, microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        actions.append(Action(BACKWARD, rank, microbatch))
        if warmup + microbatch < microbatches:
            actions.append(Action(FORWARD, rank, warmup + microbatch))
    return actions


def _interleaved(rank: int, pp: int, virtual: int, microbatches: int) -> list[Action]:
    """Narayanan et al., 2021, figure 4, in rounds of microbatches as torch deals them out."""
    per_round = microbatches // max(microbatches // pp, 1)
    total = virtual * microbatches
    warmup = min((virtual - 1) * per_round + 2 * (pp - 1 - rank), total)
    seen: Counter[tuple[str, int]] = Counter()

    def action(kind: str, number: int) -> Action:
        turn = number // per_round % virtual
        stage = (turn if kind == FORWARD else virtual - 1 - turn) * pp + rank
        seen[kind, stage] += 1
        return Action(kind, stage, seen[kind, stage] - 1)

    actions = [action(FORWARD, number) for number in range(warmup)]
    for number in range(total):
        if warmup + number < total:
            actions.append(action(FORWARD, warmup + number))
        actions.append(action(BACKWARD, number))
    return actions
