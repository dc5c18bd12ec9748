"""Submit a training run to SLURM: `python -m recipes.submit recipe=... cluster=... [submit.show=true]`.

The job runs a snapshot of the code and the config, so that edits made while it waits do not change it.
"""

import shlex
from dataclasses import dataclass, field

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from recipes.command import command
from recipes.jobs import enqueue, log_path, make_job
from recipes.schema import to_config


@dataclass
class Submit:
    """What is done with the job."""

    show: bool = False
    """Print the batch script and submit nothing."""


@dataclass
class SubmitExtra:
    """What `conf/submit.yaml` has beside the config of a run."""

    submit: Submit = field(default_factory=Submit)


def submit(composed: DictConfig) -> None:
    """Check the config as `train` does, and show or submit the job."""
    settings = OmegaConf.to_object(composed.submit)
    assert isinstance(settings, Submit)
    overrides = [word for word in HydraConfig.get().overrides.task if not word.lstrip("+~").startswith("submit.")]
    job = make_job(to_config(composed), overrides)
    if settings.show:
        print(job.script, end="")
        return
    number = enqueue(job)
    print(f"job {number}: {job.config.recipe.name}, {job.config.cluster.nodes} nodes; run directory {job.run_dir}")
    print(f"log: {log_path(job, number)}\nfollow it: tail -F {shlex.quote(str(log_path(job, number)))}")


if __name__ == "__main__":
    command("submit", submit, extra_schema=SubmitExtra)
