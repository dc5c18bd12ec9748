"""What a run will need, before it is started: `python -m recipes.plan [GROUP=OPTION] [KEY=VALUE] ... [plan.KEY=...]`.

Answers in seconds on a machine without a GPU: every fault of the config at once, memory per stage, bytes on every wire,
the pipeline's bubble. `plan.dry_run=true` builds the very model on fake ranks and measures instead.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from parallel.layout import world_size
from parallel.plan.plan import as_json, make_plan
from recipes.command import command
from recipes.plan_text import text
from recipes.schema import to_config


@dataclass
class PlanSettings:
    """What is asked."""

    dry_run: bool = False
    """Also run one step of some ranks on fake tensors, and hold it against the formulas."""
    rank: str = "corners"
    """`corners` (the ends of the pipeline) or the number of a rank."""
    out: str | None = None
    """A folder for plan.json and plan.html."""
    mfu: float = 0.4
    """Model FLOP/s over the device's peak, assumed for device hours."""


@dataclass
class PlanExtra:
    """What `conf/plan.yaml` has beside the config of a run."""

    plan: PlanSettings = field(default_factory=PlanSettings)


def plan(composed: DictConfig) -> None:
    """Print the plan; exit code 2 with every fault at once where the config is refused."""
    settings = OmegaConf.to_object(composed.plan)
    assert isinstance(settings, PlanSettings)
    config = to_config(composed)
    made = make_plan(config, world_size(config.cluster, config.parallelism, 0), settings.mfu)
    print(text(made))
    if settings.out is not None:
        from parallel.files import write_whole
        from recipes.plan_page import page

        folder = Path(settings.out)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "plan.json", json.dumps(as_json(made), indent=1) + "\n")
        write_whole(folder / "plan.html", page(made))
        print(f"\n{folder / 'plan.json'}, {folder / 'plan.html'}")
    if settings.dry_run:
        from recipes.plan_dry_run import dry_runs

        print("\n".join(["", *dry_runs(made, settings.rank)]))


if __name__ == "__main__":
    command("plan", plan, extra_schema=PlanExtra)
