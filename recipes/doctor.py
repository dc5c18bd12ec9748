"""Is this machine, or every node of this job, fit to train?

    python -m recipes.doctor [GROUP=OPTION KEY=VALUE ...]    checks, and prints a table; 1 where something is wrong
    python -m recipes.doctor run=DIR                         what has changed since a run was made
    python -m recipes.doctor --locks [RECIPE ...]            what recipes and their locks do not agree on

The batch script runs it on every rank before training. Rank 0 then names bad nodes, in words and in the job's file
`bad-nodes`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from models.errors import ConfigError, RunError
from parallel.config import Config
from parallel.layout import Layout, resolve, world_size
from parallel.plan.problems import refuse
from parallel.plan.validate import validate
from recipes import command as commands
from recipes import safety
from recipes.schema import to_config

if TYPE_CHECKING:
    from parallel.ranks import Ranks
    from recipes.health import Report

ELEMENTS = 1 << 20
"""Float32 numbers in the collective whose bandwidth is taken."""


def doctor(composed: DictConfig) -> None:
    """Check this machine, or as one of a job's ranks its node and the way to the others."""
    config = to_config(composed)
    safety.check_overrides(list(HydraConfig.get().overrides.task))
    import torch

    from parallel.ranks import check_launch, detect, node_name, stop_process_group, wait_for_all
    from recipes.health import CHECKS, Report, bad_nodes

    gpus = 0 if config.cluster.device == "cpu" else torch.cuda.device_count()
    ranks = detect()
    check_launch(ranks, config.cluster.nodes, config.cluster.devices_per_node)
    world = ranks.world if ranks.launcher != "none" else world_size(config.cluster, config.parallelism, gpus)
    refuse(validate(config, world))
    if gpus:
        torch.cuda.set_device(ranks.local_rank % gpus)
    mine = Report(ranks.rank, node_name())
    for check in CHECKS:
        check(config, mine)
    reports = exchange(mine, config, ranks, gpus)
    bad = bad_nodes(reports, "cuda" if gpus else "cpu")
    if not bad and ranks.world > 1:
        axis_collectives(mine, config, resolve(config.parallelism, world, config.cluster.nodes), gpus)
        reports = gather(mine)
        bad = bad_nodes(reports, "cuda" if gpus else "cpu")
    if ranks.rank == 0:
        show(reports, bad)
        note_bad_nodes(reports, bad)
    wait_for_all()  # srun ends all when the first one fails: not before rank 0 has spoken
    stop_process_group()
    if bad and ranks.rank > 0:
        sys.exit(1)  # rank 0 says why, once
    if bad:
        raise RunError("; ".join(f"bad node {node}: {', '.join(reasons)}" for node, reasons in sorted(bad.items())))


def exchange(mine: "Report", config: Config, ranks: "Ranks", gpus: int) -> "list[Report]":
    """Every rank's report, on every rank; the clocks are read when all have arrived."""
    if ranks.world == 1:
        mine.clock = time.time()
        return [mine]
    import torch

    from parallel.ranks import start_process_group, wait_for_all

    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    try:
        start_process_group(ranks, device, timeout_s=300.0)
    except RuntimeError as error:
        raise RunError(f"rank {ranks.rank} on {mine.node}: the ranks do not find each other: {error}") from error
    wait_for_all()
    mine.clock = time.time()
    return gather(mine)


def gather(mine: "Report") -> "list[Report]":
    """Every rank's report, in order."""
    import torch.distributed as dist

    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, mine)
    return reports


def axis_collectives(mine: "Report", config: Config, layout: Layout, gpus: int) -> None:
    """Over each axis: does a sum come out right, and how fast (bytes of the tensor over seconds, of the best of 5)."""
    import torch

    from parallel.collectives import all_reduce
    from parallel.layout import AXES
    from parallel.step import make_mesh

    kind = "cuda" if gpus else "cpu"
    mesh = make_mesh(config, layout, kind)
    for axis in AXES:
        group = mesh.get_group(axis)
        if group.size() == 1:
            continue
        x = torch.full((ELEMENTS,), float(group.rank() + 1), device=kind)
        best, total = float("inf"), x
        for _ in range(5):
            started = time.perf_counter()
            total = all_reduce(x, group)
            if gpus:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        mine.more_is_better[f"all_reduce over {axis}, GB/s"] = 4 * ELEMENTS / best / 1e9
        expected = group.size() * (group.size() + 1) / 2
        if not bool((total == expected).all()):
            mine.faults.append(f"all_reduce over {axis} came out wrong on rank {mine.rank}: {total[0]}, not {expected}")


def show(reports: "list[Report]", bad: dict[str, list[str]]) -> None:
    """The table: a line for each thing looked at, its value or the range of values, and where it is wrong."""
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "found", title=f"{len(reports)} ranks on {len({report.node for report in reports})} nodes")
    for name in dict.fromkeys(name for report in reports for name in report.equal):
        table.add_row(name, ", ".join(sorted({report.equal.get(name, "missing") for report in reports})))
    for name in dict.fromkeys(name for report in reports for name in report.more_is_better):
        values = sorted(report.more_is_better.get(name, 0.0) for report in reports)
        low, high = f"{values[0]:.3g}", f"{values[-1]:.3g}"
        table.add_row(name, low if low == high else f"{low} to {high}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for node, reasons in sorted(bad.items()):
        for reason in reasons:
            console.print(f"BAD {node}: {reason}", style="red", markup=False, soft_wrap=True)
    if not bad:
        console.print("all is well", style="green")


def note_bad_nodes(reports: "list[Report]", bad: dict[str, list[str]]) -> None:
    """Add the bad nodes to the submitted job's list, from which its batch script excludes them if it was asked to.

    Where all are bad it is not the nodes: excluding every node would leave the job in the queue for ever.
    """
    if commands.JOB_VARIABLE in os.environ and bad.keys() < {report.node for report in reports}:
        with Path(os.environ[commands.JOB_VARIABLE], "bad-nodes").open("a") as file:
            file.writelines(f"{node}\n" for node in sorted(bad))


def changes(then: Any, now: Any, path: str = "") -> list[str]:
    """Key by key, what differs between two trees."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*then, *now])
        return [line for key in keys for line in changes(then.get(key), now.get(key), f"{path}.{key}".lstrip("."))]
    return [] if then == now else [f"{path}: {then} then, {now} now"]


def since(run: str) -> bool:
    """Print what has changed since a run was made; whether nothing has."""
    from recipes.environment import environment

    path = Path(run) / "environment.json"
    try:
        then = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"run={run} is not a run directory: {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}.") from error
    found = changes(then, json.loads(json.dumps(environment())))
    print("\n".join(found) or "nothing has changed")
    return not found


def main() -> None:
    """The command line: `run=DIR` alone, `--locks`, or overrides."""
    if "--locks" in sys.argv[1:]:
        from recipes import locks

        locks.main([argument for argument in sys.argv[1:] if argument != "--locks"])
    if len(sys.argv) == 2 and sys.argv[1].startswith("run="):
        commands.start_console_log()
        try:
            sys.exit(0 if since(sys.argv[1].removeprefix("run=")) else 1)
        except (ConfigError, RunError) as error:
            sys.exit(commands.report(error))
    commands.command("doctor", doctor)


if __name__ == "__main__":
    main()
