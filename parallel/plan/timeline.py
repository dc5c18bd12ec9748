"""When a pipeline's ranks do what: a simulation of the very orders that they execute, with a cost per stage.

Times are in units of the given costs; messages are free. The bubble is the share of all ranks' time in which a rank
computes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from models.config import ModelConfig
from models.counts import forward_flops_per_token
from parallel.config import Config, ParallelismConfig, recompute_interval
from parallel.layout import Layout, microbatch_count
from parallel.order import order
from parallel.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from parallel.stages import split_layers, stage_count


@dataclass(frozen=True)
class Span:
    """An action on a rank, from start to end in seconds or in units of cost."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(orders: list[list[Action]], stages: int, cost: Callable[[Action], float]) -> list[Span]:
    """Run the orders: an action starts when its rank is free and what it needs is there.

    Raises AssertionError for orders that wait for one another for ever.
    """
    done: dict[Action, float] = {}
    spans: list[Span] = []
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(actions) for place, actions in zip(places, orders, strict=True)):
        moved = False
        for rank, actions in enumerate(orders):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needed = needs(action, stages, done)
                if needed is None:
                    break
                start = max(clocks[rank], needed)
                clocks[rank] = done[action] = start + cost(action)
                spans.append(Span(rank, action, start, clocks[rank]))
                places[rank] += 1
                moved = True
        assert moved, f"the schedule cannot go on: rank places {places}"
    return spans


def needs(action: Action, stages: int, done: dict[Action, float]) -> float | None:
    """When what an action needs is there; None while it is not."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == FORWARD:
        needed = [] if stage == 0 else [[Action(FORWARD, stage - 1, microbatch)]]
    elif action.kind == WEIGHT:
        needed = [[Action(INPUT, stage, microbatch)]]
    else:
        needed = [[Action(FORWARD, stage, microbatch)]]
        if stage < stages - 1:
            needed.append([Action(BACKWARD, stage + 1, microbatch), Action(INPUT, stage + 1, microbatch)])
    times = []
    for alternatives in needed:
        found = [done[alternative] for alternative in alternatives if alternative in done]
        if not found:
            return None
        times.append(min(found))
    return max(times, default=0.0)


def equal_costs(action: Action) -> float:
    """A backward pass costs two forward passes, each half of a split one as much as a forward pass.

    But on the first stage, where nobody asks for the inputs' gradients, torch leaves all to the half of the weights.
    """
    if action.stage == 0 and action.kind in (INPUT, WEIGHT):
        return 0.0 if action.kind == INPUT else 2.0
    return 2.0 if action.kind == BACKWARD else 1.0


def stage_costs(model: ModelConfig, parallelism: ParallelismConfig, seq_len: int) -> list[float]:
    """Floating-point operations per token of each stage's forward pass, the output layer with the last."""
    outputs = forward_flops_per_token(replace(model, num_hidden_layers=0), seq_len, causal=True)
    stages = split_layers(model, parallelism)
    layers = [
        forward_flops_per_token(replace(model, num_hidden_layers=len(stage)), seq_len, causal=True) for stage in stages
    ]
    return [flops - outputs * (number < len(stages) - 1) for number, flops in enumerate(layers)]


def _cost(forward: list[float], again: float, action: Action) -> float:
    return forward[action.stage] * (equal_costs(action) + (again if action.kind == BACKWARD else 0.0))


def bubble(spans: list[Span], ranks: int) -> float:
    """Share of the ranks' time, from the first start to the last end, in which they compute nothing."""
    length = max(span.end for span in spans) - min(span.start for span in spans)
    return 1.0 - sum(span.end - span.start for span in spans) / (ranks * length)


def peak_activations(actions: list[Action]) -> int:
    """The most microbatches times stages whose activations a rank holds at once: from forward to backward's end.

    The activations of a split backward pass live until its weight half.
    """
    split = {action.kind for action in actions} & {WEIGHT}
    held = peak = 0
    waiting = {(a.stage, a.microbatch) for a in actions if a.kind == WEIGHT} if split else set()
    for action in actions:
        key = (action.stage, action.microbatch)
        if action.kind == FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.kind in (BACKWARD, WEIGHT) or (action.kind == INPUT and key not in waiting):
            held -= 1
    assert held == 0
    return peak


def expected(parallelism: ParallelismConfig, microbatches: int) -> list[Span]:
    """The simulated timeline of a pipeline with equal costs of all stages."""
    return simulate(order(parallelism, microbatches), stage_count(parallelism), equal_costs)


def expected_of(config: Config, layout: Layout) -> list[Span]:
    """The simulated timeline of a run's step, stages costing what their layers do (`stage_costs`).

    Layers that are worked out again in whole make the backward pass dearer; the selective modes are left out.
    """
    parallelism = config.parallelism
    interval = recompute_interval(parallelism.recompute)
    cost = partial(
        _cost, stage_costs(config.model, parallelism, config.data.seq_len), 1.0 / interval if interval else 0.0
    )
    return simulate(order(parallelism, microbatch_count(config, layout)), stage_count(parallelism), cost)


def expected_bubble(config: Config, layout: Layout) -> float:
    """The simulated bubble of a run; 0 without a pipeline."""
    return 0.0 if layout.pp == 1 else bubble(expected_of(config, layout), layout.pp)
