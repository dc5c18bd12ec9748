"""A sweep whose points are jobs of two nodes: so many at a time, one summary; a failed one does not end the rest."""

import json
import threading
from pathlib import Path

from tests.slurm.jobs import TINY, command, slurm, steps

RUN = [*TINY, "cluster=slurm_dev", "cluster.devices_per_node=1", "parallelism.pp=2", "trainer.max_steps=2"]


def test_given_a_sweep_when_launched_on_slurm_then_every_point_is_a_job_and_a_failed_one_does_not_end_it(
    cluster: Path, tmp_path: Path
) -> None:
    most, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            most[0] = max(most[0], len(slurm("squeue", "--noheader", "--name=swept").splitlines()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        # model.num_hidden_layers=1 cannot be cut into two stages, and is refused before it is queued.
        swept = command(
            *(
                "train",
                "--multirun",
                "hydra/launcher=slurm",
                "hydra.launcher.concurrent=1",
                "hydra.launcher.poll_s=0.5",
            ),
            *RUN,
            *(f"run.root={tmp_path}", f"hydra.sweep.dir={tmp_path}/sweep", "cluster.slurm.job_name=swept"),
            *("model.num_hidden_layers=1,2", "optimizer.lr=1e-3,3e-3"),
        )
    finally:
        done.set()
        looking.join()
    assert swept.returncode == 1, swept.stderr
    assert "2 of 4 points did not end well" in swept.stderr
    assert "Traceback" not in swept.stderr
    rows = json.loads((tmp_path / "sweep/summary.json").read_text())
    assert [row["outcome"].partition(":")[0] for row in rows] == ["refused", "refused", "done", "done"]
    assert most[0] == 1
    good = [Path(row["run_dir"]) for row in rows if row["outcome"] == "done"]
    assert len(set(good)) == 2
    # S-42: the jobs train; they do not sweep again.
    assert sorted(tmp_path.glob("tiny/*")) == sorted(good)
    for run, row in zip(good, [row for row in rows if row["outcome"] == "done"], strict=True):
        assert steps(run) == [1, 2]
        assert row["loss"] == json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        assert "--multirun" not in (run / "job-1/train.sbatch").read_text()
        assert 'nodes="2"' in (run / "job-1/train.sbatch").read_text()
