"""The health gate on two nodes, one of which is bad: it is named before a training step is taken."""

import re
from pathlib import Path

import pytest

from tests.slurm.jobs import TINY, field, slurm, steps, submit, wait_for, wait_for_end
from tests.slurm.plants import ON_NODE2, plant

RUN = [*TINY, "cluster.devices_per_node=1", "parallelism.pp=2", "trainer.max_steps=2", "cluster.slurm.health_gate=true"]
OLD = """
right = module.version
module.version = lambda package: "2.6.5" if package == "lightning" else right(package)
"""
SLOW = "right = module.perf_counter\nmodule.perf_counter = lambda: 20.0 * right()"
FORGETFUL = """
right = module.Path.read_text
def read_text(self, *arguments, **named):
    text = right(self, *arguments, **named)
    if str(self) == "/proc/meminfo":
        import re
        text = re.sub(r"MemAvailable: +[0-9]+", "MemAvailable: 1000000", text)
    return text
module.Path.read_text = read_text
"""
CASES = {
    "a wrong version": (("importlib.metadata", "version", OLD), "lightning 2.6.5 is installed, 2.6.6 is wanted"),
    "a slow matmul": (("time", "perf_counter", SLOW), "matmul, TFLOP/s: "),
    "less memory": (("pathlib", "Path", FORGETFUL), "free host memory, GiB: 0.954 on rank 1"),
    "a full disk": (("tempfile", "gettempdir", "module.tempdir = {small!r}"), "/small: 0.000 GB free"),
}


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    (small_disk / "filler").write_bytes(bytes(60 << 10))
    return small_disk


def test_given_a_bad_node_when_the_gate_runs_then_it_is_named_and_no_step_is_taken(
    cluster: Path, tmp_path: Path, full_disk: Path
) -> None:
    jobs = {}
    for index, (name, ((module, attribute, body), _)) in enumerate(CASES.items()):
        text = body.replace("{small!r}", repr(str(full_disk)))
        planted = plant(tmp_path / f"plant{index}", ON_NODE2, module, attribute, text)
        jobs[name] = submit(*RUN, planted, f"run.root={tmp_path}", f"run.id=bad{index}")
    for index, (name, (_, words)) in enumerate(CASES.items()):
        run = tmp_path / f"tiny/bad{index}"
        assert wait_for_end(jobs[name], run) == "FAILED"
        log = next(run.glob("job-1/log-*.txt")).read_text()
        assert re.search(rf"BAD node2: .*{re.escape(words)}", log), log
        assert "BAD node1" not in log
        assert "the health gate has failed: no training step was taken" in log
        assert "Traceback" not in log
        assert steps(run) == []
        assert (run / "job-1/bad-nodes").read_text() == "node2\n"


def test_given_a_bad_node_when_asked_to_exclude_it_then_the_job_waits_for_another(
    cluster: Path, tmp_path: Path
) -> None:
    planted = plant(tmp_path / "plant", ON_NODE2, "importlib.metadata", "version", OLD)
    exclude = ["cluster.slurm.exclude_bad_nodes=true", "cluster.slurm.backoff_s=0"]
    job = submit(*RUN, *exclude, planted, f"run.root={tmp_path}", "run.id=a")
    wait_for(lambda: field(job, "Restarts") == "1", "a restart", 120, tmp_path / "tiny/a")
    wait_for(lambda: field(job, "ExcNodeList") == "node2", "node2 to be excluded", 30)
    wait_for(lambda: field(job, "JobState") == "PENDING", "the job to wait", 60)
    slurm("scancel", job)
    wait_for(lambda: field(job, "JobState") == "CANCELLED", "the end")
