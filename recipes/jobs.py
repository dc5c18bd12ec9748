"""A training run as a SLURM job: its batch script, the snapshot that it runs, and handing both to sbatch.

Everything that a person may write reaches the batch script quoted: see `quote_option` and `shlex.quote`.
"""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from models.errors import ConfigError, RunError
from parallel.cluster import Container, SlurmConfig
from parallel.config import Config
from parallel.plan.problems import refuse
from parallel.plan.validate import validate
from recipes import safety
from recipes.environment import git_state

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ("conf", "models", "parallel", "recipes", "slurm", "pyproject.toml")
log = logging.getLogger("quintet")


@dataclass(frozen=True)
class Job:
    """One batch script and where it lies."""

    config: Config
    run_dir: Path
    folder: Path
    """In the run directory: the script, the snapshot, logs, and what the script notes down from start to start."""
    script: str


def make_job(config: Config, overrides: list[str]) -> Job:
    """The batch script of a run. Raises ConfigError where the config is not fit for a queue."""
    cluster, run_dir = config.cluster, Path(config.run.dir).absolute()
    if cluster.devices_per_node is None:
        raise ConfigError(
            f"cluster.devices_per_node=null: a queue must be told. Write cluster=slurm_h100 or another of a queue, or "
            f"cluster.devices_per_node=8 (cluster={cluster.name})."
        )
    problems = validate(config, cluster.nodes * cluster.devices_per_node)
    refuse(problems)
    for problem in problems:
        log.warning("%s: %s", problem.severity, problem.message)
    safety.check_overrides(overrides)
    if not str(run_dir).isprintable() or "\\" in str(run_dir):
        raise ConfigError(
            f"run.dir={str(run_dir)!r} stands in sbatch's options, which cannot hold line ends, control characters or "
            f"backslashes. Choose another run.dir or run.root."
        )
    folder = run_dir / f"job-{len(_earlier_jobs(run_dir, config)) + 1}"
    return Job(config, run_dir, folder, render(config, overrides, run_dir, folder))


def _earlier_jobs(run_dir: Path, config: Config) -> list[Path]:
    """Folders of jobs that this run had before. Raises ConfigError where one may still run, or was another run's."""
    earlier = list(run_dir.glob("job-*"))
    for path in earlier:
        number = path / "number"
        if number.exists() and in_queue(number.read_text().strip()):
            raise ConfigError(
                f"run.dir={run_dir} has job {number.read_text().strip()} in the queue, and two would write over "
                f"each other. Cancel it first (scancel), or choose another run.dir."
            )
    if (run_dir / "config.yaml").exists():
        from recipes.run_directory import RunDirectory

        RunDirectory(run_dir).changes(config)
    return earlier


def in_queue(number: str) -> bool:
    """Whether a job waits, runs or is about to start again; where there is no SLURM none does."""
    if shutil.which("squeue") is None:
        return False
    done = subprocess.run(["squeue", "--noheader", f"--jobs={number}"], capture_output=True, text=True)
    if done.returncode and "Invalid job id" not in done.stderr:
        return True  # SLURM does not answer just now
    return bool(done.stdout.strip())


def enqueue(job: Job, *options: str) -> str:
    """Write the job's folder and give it to sbatch; the job's number."""
    if shutil.which("sbatch") is None:
        raise RunError("sbatch is not found: submit where SLURM is, or look with submit.show=true.")
    try:
        take_snapshot(job)
    except OSError as error:
        raise RunError(f"{error.filename}: {error.strerror}; set run.dir or run.root.") from error
    script = job.folder / "train.sbatch"
    script.write_text(job.script)
    # What this process has of another job, such as its node list, is not this job's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    environment |= {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
    done = subprocess.run(
        ["sbatch", "--parsable", *options, str(script)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RunError(f"sbatch refused {script}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    (job.folder / "number").write_text(f"{number}\n")
    return number


def take_snapshot(job: Job) -> None:
    """Copy the code and the config groups into the job's folder, with the commit they come from."""
    code = job.folder / "code"
    code.mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in SNAPSHOT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, code / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, code / name)
    (code / "snapshot.json").write_text(json.dumps(git_state()) + "\n")


def log_path(job: Job, number: str) -> Path:
    """Where the job's output goes, of all its starts."""
    return job.folder / f"log-{number}.txt"


def render(config: Config, overrides: list[str], run_dir: Path, folder: Path) -> str:
    """The batch script as text."""
    import jinja2

    cluster, slurm = config.cluster, config.cluster.slurm
    python = slurm.python or ("python" if slurm.container != Container.none else sys.executable)
    # What the run is called and where it lies is settled now; each start of the job must find the same.
    settled = [f"run.id={config.run.id}", f"run.dir={quote_override(str(run_dir))}"]
    kept = [word for word in overrides if word.partition("=")[0] not in ("run.id", "run.dir")]
    kept.append(f"data.cache_dir={quote_override(os.path.abspath(config.data.cache_dir))}")
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "slurm"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is no HTML; the filter `sh` quotes
    )
    templates.filters["sh"] = shlex.quote
    flags, prefix = container(slurm, run_dir, config.data.cache_dir)
    return templates.get_template("train.sbatch.j2").render(
        options=[quote_option(*option) for option in sbatch_options(config, folder)],
        job_dir=str(folder),
        run_dir=str(run_dir),
        modules=slurm.modules,
        threads=cluster.threads or slurm.cpus_per_task or 1,
        environment=list(cluster.environment.items()),
        container_flags=flags,
        container_prefix=prefix,
        requeue=slurm.requeue,
        max_restarts=slurm.max_restarts,
        max_failures=slurm.max_failures,
        backoff_s=slurm.backoff_s,
        exclude_bad_nodes=slurm.exclude_bad_nodes,
        excluded="".join(f",{node}" for node in slurm.exclude),
        health_gate=slurm.health_gate,
        python=python,
        overrides=[*kept, *settled],
    )


def sbatch_options(config: Config, folder: Path) -> list[tuple[str, str | None]]:
    """Name and value of every option of sbatch, in the order in which they stand in the script."""
    cluster, slurm = config.cluster, config.cluster.slurm
    devices = cluster.devices_per_node
    optional = {
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "nodelist": ",".join(slurm.include) or None,
        "exclude": ",".join(slurm.exclude) or None,
        "time": slurm.time,
        "gres": None if slurm.gres is None else f"{slurm.gres}:{devices}",
        "cpus-per-task": None if slurm.cpus_per_task is None else str(slurm.cpus_per_task),
        "mem": slurm.mem,
    }
    options: list[tuple[str, str | None]] = [
        ("job-name", slurm.job_name or config.recipe.name),
        ("nodes", str(cluster.nodes)),
        ("ntasks-per-node", str(devices)),
        *((name, value) for name, value in optional.items() if value is not None),
    ]
    if slurm.exclusive:
        options.append(("exclusive", None))
    options += [
        ("signal", f"USR1@{slurm.signal_lead_s}"),
        ("requeue" if slurm.requeue else "no-requeue", None),
        ("open-mode", "append"),
        ("output", f"{str(folder).replace('%', '%%')}/log-%j.txt"),
    ]
    for word in slurm.options:
        name, equals, value = word.removeprefix("--").partition("=")
        options.append((name, value if equals else None))
    return options


def quote_option(name: str, value: str | None) -> str:
    """`--name="value"` as sbatch reads it in a script: it knows double quotes and backslashes, and expands nothing."""
    if value is None:
        return f"--{name}"
    return f"--{name}=" + '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def quote_override(value: str) -> str:
    """A path as Hydra reads it in an override, whatever characters it has."""
    if re.fullmatch(r"[\w/.+-]+", value, re.ASCII):
        return value
    escaped = value.replace("'", "\\'").replace("${", "\\${")
    return f"'{escaped}'"


def container(slurm: SlurmConfig, run_dir: Path, cache_dir: str) -> tuple[list[str], list[str]]:
    """Flags for srun, and words before the command, that put the ranks into the container."""
    places = [str(run_dir), os.path.abspath(cache_dir)]
    mounts = [*(f"{place}:{place}" for place in places), *slurm.container_mounts]
    image = slurm.container_image or ""
    if slurm.container == Container.pyxis:
        return [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", "--no-container-mount-home"], []
    if slurm.container == Container.apptainer:
        return [], ["apptainer", "exec", "--nv", *(f"--bind={mount}" for mount in mounts), image]
    return [], []
