"""The measured half of a plan: ranks are built and run one step on fake tensors, and held against the formulas."""

from collections.abc import Iterator

from models.errors import ConfigError
from parallel.config import Config
from parallel.layout import Layout
from parallel.plan.dry_run import DryRun, dry_run
from parallel.plan.memory import KINDS, peak
from parallel.plan.plan import Plan
from parallel.plan.traffic import Traffic, by_group, traffic
from recipes.optimizers import make_optimizer


def corners(layout: Layout) -> list[int]:
    """The first rank of the first and of the last pipeline stage, between which all others lie."""
    return sorted({layout.rank(), layout.rank(pp=layout.pp - 1)})


def chosen(layout: Layout, rank: str) -> list[int]:
    """The ranks that `plan.rank` names. Raises ConfigError for none that exists."""
    if rank == "corners":
        return corners(layout)
    if not rank.isdigit() or int(rank) >= layout.world:
        raise ConfigError(f"plan.rank={rank} is neither corners nor a rank from 0 to {layout.world - 1}.")
    return [int(rank)]


def run(config: Config, layout: Layout, rank: int) -> DryRun:
    """One rank's step with the optimizer of the config."""
    return dry_run(config, layout, rank, make_optimizer)


def expected_traffic(done: DryRun, config: Config, layout: Layout) -> list[Traffic]:
    """What the formula says that this rank sends, by group as the dry run counts."""
    return by_group(traffic(config, layout, done.coordinates["pp"], done.coordinates["cp"]), config, layout)


def dry_runs(plan: Plan, rank: str) -> Iterator[str]:
    """Lines for a terminal, rank by rank as each is done."""
    for number in chosen(plan.layout, rank):
        done = run(plan.config, plan.layout, number)
        yield from describe(done, plan.config, plan.layout)


def describe(done: DryRun, config: Config, layout: Layout) -> Iterator[str]:
    """One rank, measured and by formula."""
    formula = peak(config, layout, done.coordinates)
    place = " ".join(f"{axis} {index}" for axis, index in done.coordinates.items() if getattr(layout, axis) > 1)
    yield f"dry run of rank {done.rank}{f' ({place})' if place else ''}: one step in {done.seconds:.1f} s"
    if config.data.document_mask:
        yield "  each sequence is taken as one document, with which attention costs most: where they end is in the data"
    yield f"  {'peak, GB':<10}" + "".join(f"{kind:>14}" for kind in KINDS) + f"{'total':>10}"
    measured = "".join(f"{done.peak.get(kind, 0) / 1e9:>14.3f}" for kind in KINDS)
    yield f"  {'measured':<10}{measured}{done.total / 1e9:>10.3f}"
    stated = "".join(f"{getattr(formula, kind) / 1e9:>14.3f}" for kind in KINDS)
    yield f"  {'formula':<10}{stated}{formula.total / 1e9:>10.3f}  ({formula.total / done.total - 1:+.2%})"
    rows = {(row.axis, row.operation): row for row in done.traffic}
    expected = {(row.axis, row.operation): row for row in expected_traffic(done, config, layout)}
    for key in sorted(rows.keys() | expected.keys()):
        found, said = rows.get(key), expected.get(key)
        same = "as the formula says" if found == said else f"BUT THE FORMULA SAYS {said}"
        sent = f"{found.calls:,} calls, {found.bytes_sent / 1e9:.3f} GB" if found else "nothing"
        yield f"  {key[0]} {key[1]}: {sent}, {same}"
