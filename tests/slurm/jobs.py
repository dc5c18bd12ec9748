"""Jobs on the development cluster: submitted as a person would, waited for, looked at."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEVCLUSTER = ROOT / "slurm" / "devcluster"
TINY = [
    *("data=synthetic", "data.validation_sequences=4", "data.seq_len=32", "data.global_batch=8", "data.micro_batch=1"),
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "model.head_dim=8"),
    *("trainer.val_interval=null", "trainer.log_interval=1", "precision=fp64", "logger=none", "callbacks=none"),
    "cluster.slurm.health_gate=false",
]
"""A run of seconds, logged step by step."""


def slurm(*words: str) -> str:
    """What one of SLURM's commands prints."""
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def command(name: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m recipes.NAME ARGUMENTS`."""
    return subprocess.run(
        [sys.executable, "-m", f"recipes.{name}", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def submit(*arguments: str, **environment: str) -> str:
    """Submit a run to the development cluster; the job's number."""
    done = command("submit", "cluster=slurm_dev", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    found = re.match(r"job (\d+)", done.stdout)
    assert found, done.stdout
    return found[1]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120.0, log: Path | None = None) -> Any:
    """The condition's value once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        said = "\n".join(path.read_text() for path in log.glob("job-*/log-*.txt")) if log else ""
        assert time.monotonic() < deadline, f"{what}: not in {seconds} s\n{slurm('squeue', '-l')}\n{said[-6000:]}"
        time.sleep(0.1)
    return value


def wait_for_end(job: str, run: Path, seconds: float = 240.0) -> str:
    """Wait until a job has left the queue for good; its last state."""
    wait_for(lambda: _state(job) not in ("PENDING", "RUNNING", "COMPLETING"), f"job {job} to end", seconds, run)
    return _state(job)


def _state(job: str) -> str:
    return field(job, "JobState")


def field(job: str, name: str) -> str:
    """One field of `scontrol show job`."""
    found = re.search(rf"\b{name}=(\S+)", slurm("scontrol", "show", "job", job))
    assert found, name
    return found[1]


def steps(run: Path) -> list[int]:
    """The steps in metrics.jsonl, in its order."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def rank_processes(run: Path) -> dict[int, int]:
    """The ranks of a run that are alive, with their process ids."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = dict(
                line.partition("=")[::2] for line in (path / "environ").read_bytes().decode().split("\0") if line
            )
        except (OSError, UnicodeDecodeError):
            continue
        if (
            "recipes.train" in words
            and f"run.dir={run}" in words
            and "SLURM_PROCID" in variables
            and words[0] != "srun"
        ):
            found[int(variables["SLURM_PROCID"])] = int(path.name)
    return found
