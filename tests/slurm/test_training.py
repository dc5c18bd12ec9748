"""Training under a real SLURM: two nodes, a task per device, and the numbers of one process."""

import json
from pathlib import Path

import pytest

from tests.slurm.jobs import TINY, command, field, slurm, steps, submit, wait_for, wait_for_end

# Tensor parallel inside a node, the pipeline across.
SPLIT = ["parallelism.tp=4", "parallelism.pp=2", "data.micro_batch=2", "trainer.max_steps=4"]


def _rows(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "tokens")} for row in rows]


@pytest.mark.timeout(600)
def test_two_nodes_of_four_tasks_train_as_one_process_does(cluster: Path, tmp_path: Path) -> None:
    job = submit(
        *TINY, *SPLIT, f"run.root={tmp_path}", "run.id=slurm", "logger=wandb", "cluster.slurm.health_gate=true"
    )
    alone = command("train", *TINY, "data.micro_batch=2", "trainer.max_steps=4", f"run.root={tmp_path}", "run.id=one")
    assert alone.returncode == 0, alone.stderr
    run = tmp_path / "tiny/slurm"
    assert wait_for_end(job, run) == "COMPLETED", next(run.glob("job-1/log-*.txt")).read_text()
    for a, b in zip(_rows(tmp_path / "tiny/one"), _rows(run), strict=True):
        assert a["step"] == b["step"]
        assert a["tokens"] == b["tokens"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-9)
    assert (run / "DONE").exists()
    log = next(run.glob("job-1/log-*.txt")).read_text()
    for words in ("all_reduce over pp, GB/s", "all_reduce over tp, GB/s", "all is well"):
        assert words in log
    # S-43: one W&B run for eight tasks.
    assert len(list(run.glob("wandb/offline-run-*/run-slurm.wandb"))) == 1
    # What runs is a snapshot, and the run still knows which commit it is of.
    assert json.loads((run / "environment.json").read_text())["git"]["commit"]


def test_given_fewer_tasks_than_devices_when_started_then_it_is_an_error_and_not_fewer_ranks(
    cluster: Path, tmp_path: Path
) -> None:
    # S-41
    job = submit(*TINY, *SPLIT, f"run.root={tmp_path}", "run.id=a", "cluster.slurm.options=[--hold]")
    script = tmp_path / "tiny/a/job-1/train.sbatch"
    slurm("scancel", job)
    text = script.read_text().replace('--ntasks-per-node="4"', '--ntasks-per-node="1"')
    script.write_text(text.replace("#SBATCH --hold\n", ""))
    job = slurm("sbatch", "--parsable", str(script)).strip()
    run = tmp_path / "tiny/a"
    assert wait_for_end(job, run) == "FAILED"
    log = (script.parent / f"log-{job}.txt").read_text()
    assert "srun started 2 processes, 1 on this node, but cluster.devices_per_node=4" in log
    assert "Traceback" not in log
    assert "the config is refused" in log
    assert field(job, "Restarts") == "0"
    assert steps(run) == []


def test_two_jobs_on_the_same_nodes_do_not_meet_each_other(cluster: Path, tmp_path: Path) -> None:
    two = [*TINY, "cluster.devices_per_node=1", "parallelism.pp=2", "trainer.max_steps=2", f"run.root={tmp_path}"]
    jobs = {name: submit(*two, f"run.id={name}") for name in ("a", "b")}
    for name in jobs:
        wait_for(lambda name=name: list((tmp_path / f"tiny/{name}/job-1").glob("meeting-*")), f"{name} to meet")
    ports = {next((tmp_path / f"tiny/{name}/job-1").glob("meeting-*")).read_text() for name in jobs}
    assert len(ports) == 2
    for name, job in jobs.items():
        assert wait_for_end(job, tmp_path / "tiny" / name) == "COMPLETED"
        assert steps(tmp_path / "tiny" / name) == [1, 2]
