"""Which layers make up which pipeline stage, and which rank holds it. No torch: `plan` asks the same questions."""

from functools import cache
from itertools import pairwise

from models.config import ModelConfig
from models.counts import active_parameters_per_layer
from models.errors import ConfigError
from parallel.config import ParallelismConfig
from parallel.schedule import INPUT, read_csv

SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on a rank."""
V_SHAPED = ("zbv_zero_bubble", "dualpipe_v")
"""Schedules with two stages on a rank, the second coming back: rank r has stages r and 2 pp - 1 - r."""
_SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v")


def stage_count(parallelism: ParallelismConfig) -> int:
    """Stages of the whole pipeline."""
    return parallelism.pp * parallelism.virtual_stages


def splits_backward(parallelism: ParallelismConfig) -> bool:
    """Whether the schedule works out gradients of inputs and of weights at different times."""
    if parallelism.pp_schedule == "csv":
        return any(action.kind == INPUT for actions in read_csv(parallelism.pp_schedule_file) for action in actions)
    return parallelism.pp_schedule in _SPLIT_BACKWARD


def rank_of(stage: int, parallelism: ParallelismConfig) -> int:
    """The pipeline rank that holds a stage."""
    pp = parallelism.pp
    if parallelism.pp_schedule == "csv" and pp > 1:
        orders = read_csv(parallelism.pp_schedule_file)
        return next(rank for rank, actions in enumerate(orders) if any(action.stage == stage for action in actions))
    if parallelism.pp_schedule in V_SHAPED and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def stages_of(rank: int, parallelism: ParallelismConfig) -> list[int]:
    """The stages of a pipeline rank, first to last."""
    stages = range(stage_count(parallelism))
    return [stage for stage in stages if rank_of(stage, parallelism) == rank]


def split_layers(model: ModelConfig, parallelism: ParallelismConfig) -> list[range]:
    """The layers of every stage: each layer stands in exactly one.

    `even` deals out layers, the first stages taking one more where they do not divide. `balanced` weighs stages by
    their multiply-adds per token, the output layer counted with the last, and makes the slowest as fast as can be; a
    layer of experts costs what a token meets of it, and all layers the same, their mean. A list says how many layers
    each stage has. Raises ConfigError where there are more stages than layers, or a list that does not add up.
    """
    layers, stages = model.num_hidden_layers, stage_count(parallelism)
    if stages > layers:
        raise ConfigError(
            f"parallelism.pp={parallelism.pp} * virtual_stages={parallelism.virtual_stages} = {stages} stages, but "
            f"model.num_hidden_layers={layers}: every stage needs a layer. Write a product of at most {layers}."
        )
    split = parallelism.pp_split
    if split == "balanced":
        head = model.vocab_size * model.hidden_size / (sum(active_parameters_per_layer(model)) / layers)
        counts = _balanced(layers, stages, head)
    elif split == "even":
        counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    else:
        counts = _listed(split, layers, stages)
    bounds = [sum(counts[:stage]) for stage in range(stages + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def _listed(split: object, layers: int, stages: int) -> list[int]:
    if not isinstance(split, list) or not all(isinstance(count, int) for count in split):
        raise ConfigError(
            f"parallelism.pp_split={split} is none of balanced, even, or a list of layers per stage such as "
            f"[{','.join(str(layers // stages) for _ in range(stages))}]."
        )
    if len(split) != stages or sum(split) != layers or min(split) < 1:
        raise ConfigError(
            f"parallelism.pp_split={split} must name {stages} stages (pp * virtual_stages) of at least one layer each, "
            f"{layers} layers in all (model.num_hidden_layers); it names {len(split)} of {sum(split)} layers."
        )
    return split


@cache
def _balanced(layers: int, stages: int, head: float) -> list[int]:
    """Layers per stage such that the dearest stage is cheapest; the last stage also has the output layer's cost.

    The last stage can do with fewer layers, never more; for each such number the rest is dealt out evenly.
    """
    if stages == 1:
        return [layers]

    def dearest(last: int) -> float:
        return max(-(-(layers - last) // (stages - 1)), last + head)

    last = min(range(1, layers - stages + 2), key=lambda count: (dearest(count), -count))
    rest = layers - last
    return [rest // (stages - 1) + (stage < rest % (stages - 1)) for stage in range(stages - 1)] + [last]
