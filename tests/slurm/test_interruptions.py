"""A run that is preempted, cut off, killed and bereft of a node ends by itself, and is the run it would have been."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.recipes.commands import assert_same_weights
from tests.recipes.commands import metrics as rows
from tests.slurm.jobs import (
    DEVCLUSTER,
    TINY,
    command,
    field,
    rank_processes,
    slurm,
    steps,
    submit,
    wait_for,
    wait_for_end,
)
from tests.slurm.plants import plant

# One task on each node, the pipeline between them; dropout, so that a resume that forgets a random state is seen.
RUN = [
    *TINY,
    *("cluster.devices_per_node=1", "parallelism.pp=2", "model.dropout=0.1", "optimizer=adamw"),
    *("checkpoint.every_n_steps=20", "logger=wandb"),
]


def _requeue(job: str, *_: object) -> None:
    slurm("scontrol", "requeue", job)


def _usr1(job: str, *_: object) -> None:
    slurm("scancel", "--signal=USR1", job)


def _kill_a_rank(job: str, run: Path, cluster: Path, draw: random.Random) -> None:
    def killed() -> bool:
        ranks = rank_processes(run)
        if not ranks:
            return False
        with suppress(ProcessLookupError):  # SLURM may have ended it meanwhile
            os.kill(ranks[draw.choice(sorted(ranks))], signal.SIGKILL)
            return True
        return False

    wait_for(killed, "a rank to kill", 120, run)


def _lose_a_node(job: str, run: Path, cluster: Path, draw: random.Random) -> None:
    restarts, node = int(field(job, "Restarts")), draw.choice(["node1", "node2"])
    subprocess.run([DEVCLUSTER, f"--dir={cluster}", "stop", node], check=True)
    wait_for(lambda: int(field(job, "Restarts")) > restarts, f"SLURM to give {node} up", 60, run)
    subprocess.run([DEVCLUSTER, f"--dir={cluster}", "start", node], check=True)


def _time_limit(job: str, run: Path, *_: object) -> None:
    restarts = int(field(job, "Restarts"))
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_for(lambda: int(field(job, "Restarts")) > restarts, "the time limit", 150, run)
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=30")


KINDS: dict[str, Callable[..., None]] = {
    "requeue": _requeue,
    "usr1": _usr1,
    "killed rank": _kill_a_rank,
    "lost node": _lose_a_node,
    "time limit": _time_limit,
}


# Steps take their time until all interruptions are over, so that no machine is too fast for them.
UNHURRIED = """
right = module.clip
def unhurried(*arguments, **named):
    if not os.path.exists({hurry!r}):
        time.sleep(0.2)
    return right(*arguments, **named)
module.clip = unhurried
"""


def _starts(run: Path) -> int:
    """How many times the run has come as far as its first step."""
    log = run / "train.log"
    return log.read_text().count(" tokens per step, ") if log.exists() else 0


def _interrupted_run(kinds: list[str], steps_in_all: int, cluster: Path, root: Path, anywhere: bool) -> Path:
    """A run that is interrupted once for each of `kinds`, when it trains again, or `anywhere`: also while it starts."""
    draw, length = random.Random(7), [f"trainer.max_steps={steps_in_all}", f"run.root={root}"]
    patient = ["cluster.slurm.backoff_s=0", "cluster.slurm.max_failures=1000"]
    hurry = root / "hurry"
    slowly = plant(root / "plant", "True", "parallel.step", "clip", UNHURRIED.format(hurry=str(hurry)))
    job = submit(*RUN, *length, slowly, "run.id=often", "cluster.slurm.max_restarts=1000", *patient)
    run = root / "tiny/often"
    begun = 0
    for kind in kinds:
        state = ""
        while state != "RUNNING":  # SLURM may end this start too, by a signal meant for the last one
            wait_for(lambda before=begun: _starts(run) > before or anywhere, "a start", 120, run)
            wait_for(lambda: field(job, "JobState") == "RUNNING", "the job to run", 120, run)
            time.sleep(draw.uniform(0.0, 10.0 if anywhere else 2.0))
            state = field(job, "JobState")
            assert state in ("RUNNING", "COMPLETING", "PENDING"), f"the run ended before {kind}: {state}"
        restarts = int(field(job, "Restarts"))
        KINDS[kind](job, run, cluster, draw)
        wait_for(lambda before=restarts: int(field(job, "Restarts")) > before, f"a restart after {kind}", 120, run)
        begun = _starts(run)
    hurry.touch()
    assert wait_for_end(job, run, 600) == "COMPLETED"
    # SLURM's controller repeats what a lost or slow node has not answered, and may hit the next start of the same job.
    restarts = int(field(job, "Restarts"))
    print(f"{len(kinds)} interruptions, {restarts} restarts")
    assert restarts >= len(kinds)
    return run


def _assert_the_same_run(often: Path, once: Path, steps_in_all: int) -> None:
    assert steps(often) == list(range(1, steps_in_all + 1))
    assert rows(often) == rows(once)
    assert_same_weights(often, once)
    assert {path.name for path in often.parent.iterdir()} == {often.name, once.name}
    # S-40: the same W&B run, whatever the number of starts.
    assert {path.name for path in often.glob("wandb/offline-run-*/*.wandb")} == {f"run-{often.name}.wandb"}
    assert (often / "DONE").exists()
    assert not (often / "FAILED").exists()
    assert rank_processes(often) == {}


def _compare(kinds: list[str], steps_in_all: int, cluster: Path, tmp_path: Path, anywhere: bool = False) -> None:
    often = _interrupted_run(kinds, steps_in_all, cluster, tmp_path, anywhere)
    alone = [*RUN, "cluster.threads=1", f"trainer.max_steps={steps_in_all}", f"run.root={tmp_path}", "run.id=once"]
    once = command("train", "cluster.nodes=1", *(word for word in alone if "devices_per_node" not in word))
    assert once.returncode == 0, once.stderr
    _assert_the_same_run(often, tmp_path / "tiny/once", steps_in_all)


@pytest.mark.timeout(600)
def test_given_one_interruption_of_each_kind_when_it_ends_then_it_is_the_run_that_was_not_interrupted(
    cluster: Path, tmp_path: Path
) -> None:
    _compare(["time limit", "requeue", "usr1", "lost node", "killed rank"], 300, cluster, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_given_fifty_random_interruptions_when_it_ends_then_it_is_the_run_that_was_not_interrupted(
    cluster: Path, tmp_path: Path
) -> None:
    draw = random.Random(11)
    kinds = [draw.choice(["requeue", "usr1", "killed rank", "lost node"]) for _ in range(48)] + ["time limit"] * 2
    _compare(kinds, 4_000, cluster, tmp_path, anywhere=True)


def test_given_a_cancelled_job_when_it_ends_then_it_stays_cancelled(cluster: Path, tmp_path: Path) -> None:
    job = submit(*RUN, "trainer.max_steps=100000", f"run.root={tmp_path}", "run.id=a", "logger=none")
    run = tmp_path / "tiny/a"
    wait_for(lambda: steps(run), "a step", 120, run)
    slurm("scancel", job)
    assert wait_for_end(job, run) == "CANCELLED"
    assert list(run.glob("checkpoints/*/COMPLETE")), "the steps until then are not lost"
    assert "SIGTERM" in (run / "FAILED").read_text()
    time.sleep(2)
    assert field(job, "JobState") == "CANCELLED"
    assert rank_processes(run) == {}
