"""Every fault of a config at once, before anything is built: a pure function from the config to a list of problems."""

from collections.abc import Callable, Iterable, Sequence

from models.errors import ConfigError
from parallel.config import Config
from parallel.layout import Layout, resolve
from parallel.plan.problems import Fault, Problem, Severity
from parallel.plan.repair import advice, repairs
from parallel.plan.rules import cluster, context, experts, fit, idle, layout, model, pipeline, run, sharding, tensor

Rule = Callable[[Config], Iterable[Fault]]
LayoutRule = Callable[[Config, Layout], Iterable[Fault]]

OF_CONFIG = (
    model.shape,
    model.precision,
    model.recompute,
    model.sequence,
    model.vocabulary,
    run.data,
    run.optimizer,
    run.scheduler,
    run.loop,
    run.compiled,
    run.checkpoint,
    run.adapters,
    cluster.variables,
    cluster.slurm,
    cluster.watch,
)
"""Rules that a config keeps or breaks by itself."""
OF_LAYOUT = (
    layout.batch,
    tensor.splits,
    context.method,
    sharding.sharding,
    pipeline.stages,
    pipeline.microbatches,
    experts.split,
    experts.routing,
)
"""Rules about a config in a world of some size, once its axes make one up."""
OF_MEMORY = (fit.fits,)
"""Rules that can be asked only when all others are kept."""
COSTS = (model.precision_costs, model.aligned, run.scheduler_costs, run.loop_costs, idle.idle)
LAYOUT_COSTS = (
    tensor.costs,
    context.costs,
    pipeline.costs,
    sharding.costs,
    experts.costs,
    fit.tight,
    fit.recompute_costs,
)
"""What is legal and costly."""
NOTES = (model.vocabulary_notes, run.data_notes, run.compiled_notes)
LAYOUT_NOTES = (layout.costs, context.notes, sharding.notes, experts.advice)
"""What is worth knowing."""


def validate(config: Config, world: int) -> list[Problem]:
    """All problems of a config in a world of so many ranks; without errors it can run."""
    faults = errors(config, world)
    if faults:
        found = [repairs(config, world, fault, faults, errors) for fault in faults]
        return [
            Problem(Severity.error, fault.message + advice(changes), fault.rule, tuple(changes))
            for fault, changes in zip(faults, found, strict=True)
        ]
    grid = resolve(config.parallelism, world, config.cluster.nodes)
    return [
        *(Problem(Severity.warning, f.message, f.rule) for f in _found(COSTS, LAYOUT_COSTS, config, grid)),
        *(Problem(Severity.note, f.message, f.rule) for f in _found(NOTES, LAYOUT_NOTES, config, grid)),
    ]


def errors(config: Config, world: int) -> list[Fault]:
    """The faults for which a config is refused."""
    faults = [fault for rule in OF_CONFIG for fault in rule(config)]
    faults += layout.world(config, world)
    try:
        grid = resolve(config.parallelism, world, config.cluster.nodes)
    except (ConfigError, ZeroDivisionError):
        return faults
    faults += [fault for rule in OF_LAYOUT for fault in rule(config, grid)]
    if not faults:
        faults += [fault for rule in OF_MEMORY for fault in rule(config, grid)]
    return faults


def _found(of_config: Sequence[Rule], of_layout: Sequence[LayoutRule], config: Config, layout: Layout) -> list[Fault]:
    faults = [fault for rule in of_config for fault in rule(config)]
    return faults + [fault for rule in of_layout for fault in rule(config, layout)]
