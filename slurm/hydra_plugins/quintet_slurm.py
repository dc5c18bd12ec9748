"""`hydra/launcher=slurm`. Hydra looks for plugins in packages of this name; the work is done in recipes/sweep.py."""

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SlurmLauncher(Launcher):
    """Hydra makes it from conf/hydra/launcher/slurm.yaml."""

    def __init__(self, concurrent: int, poll_s: float) -> None:
        self.concurrent, self.poll_s = concurrent, poll_s
        self.config: Any = None
        self.hydra_context: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """What Hydra hands over. The task is not called here: the jobs call it."""
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all points as jobs and wait for them."""
        from recipes.sweep import Sweep  # Hydra looks into every plugin at every start; most do not sweep

        sweep = Sweep(self.config, self.hydra_context.config_loader, self.concurrent, self.poll_s)
        return sweep.run([list(overrides) for overrides in job_overrides], initial_job_idx)
