"""A run that stands still says who holds it up, ends within the limit, leaves no process, and goes on afterwards."""

import json
import re
from pathlib import Path

import pytest

from tests.slurm.jobs import TINY, field, rank_processes, steps, submit, wait_for_end
from tests.slurm.plants import FIRST_START_OF_NODE2, plant

LIMIT_S = 10.0
RUN = [
    *TINY,
    *("cluster.devices_per_node=1", "trainer.max_steps=8", "checkpoint.every_n_steps=2"),
    *(f"cluster.watch.step_limit_s={LIMIT_S}", "cluster.watch.start_limit_s=60", "cluster.slurm.backoff_s=0"),
]
LATE = """
right, calls = module.{name}, []
def late(*arguments, **named):
    calls.append(1)
    if len(calls) == 5:
        time.sleep(1000)
    return right(*arguments, **named)
module.{name} = late
"""
SWAPPED = """
right, calls = module.gradient_norm, []
def swapped(*arguments, **named):
    calls.append(1)
    if len(calls) == 5:
        import torch
        import torch.distributed as dist
        module.all_reduce(torch.zeros(()), dist.group.WORLD, dist.ReduceOp.MAX)
    return right(*arguments, **named)
module.gradient_norm = swapped
"""
STALLED_WORKER = """
right = module.TrainBatches.__getitem__
def stalled(self, step):
    if step == 4:
        time.sleep(1000)
    return right(self, step)
module.TrainBatches.__getitem__ = stalled
"""
CASES = {
    "a rank that sleeps before a collective": (
        ["parallelism.tp=2"],
        ("parallel.gradients", "clip_gradients", LATE.format(name="gradient_norm")),
        r"rank 1 on node2 did not enter all_reduce of axis tp \(ranks 0, 1\) in step 5 \(phase: update\), where rank 0 "
        r"waits for it; silent for \d+ s. Its stack:\n(.*\n)*.*time.sleep\(1000\)",
    ),
    "a rank of another pipeline stage": (
        ["parallelism.pp=2"],
        ("parallel.step", "clip", LATE.format(name="clip_gradients")),
        r"rank 1 on node2 did not enter all_reduce of axis pp \(ranks 0, 1\) in step 5",
    ),
    "two ranks that swap two collectives": (
        ["parallelism.tp=2"],
        ("parallel.gradients", "clip_gradients", SWAPPED),
        r"ranks differ in the order of their collectives: as number \d+ of axis tp \(ranks 0, 1\), rank 0 on node1 "
        r"\(now in step 5\) entered all_reduce of double .*, but rank 1 on node2 \(now in step 5\) entered all_reduce "
        r"of float",
    ),
    "a data worker that stalls": (
        ["parallelism.dp_shard=2", "data.workers=1"],
        ("recipes.data.windows", "TrainBatches", STALLED_WORKER),
        r"rank 1 on node2 did not enter all_reduce of axis dp_shard \(ranks 0, 1\) in step 5 \(phase: data\)",
    ),
}


SLOW = """
right = module.forward_backward
def slow(*arguments, **named):
    time.sleep(0.4)
    return right(*arguments, **named)
module.forward_backward = slow
"""


@pytest.fixture(scope="module")
def jobs(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """All cases as jobs that run at the same time: number and run directory."""
    submitted, root = {}, tmp_path_factory.mktemp("stalls")
    for index, (name, (split, (module, attribute, body), _)) in enumerate(CASES.items()):
        planted = plant(root / f"plant{index}", FIRST_START_OF_NODE2, module, attribute, body)
        job = submit(*RUN, *split, planted, f"run.root={root}", f"run.id={index}")
        submitted[name] = job, root / f"tiny/{index}"
    planted = plant(root / "slow", FIRST_START_OF_NODE2, "parallel.step", "clip", SLOW)
    longer = ["parallelism.dp_shard=2", "trainer.max_steps=45", "trainer.log_interval=5"]
    chosen = [word for word in RUN if not word.startswith("trainer.")]
    job = submit(*chosen, *longer, "cluster.watch.straggler_factor=2", planted, f"run.root={root}", "run.id=slow")
    return submitted | {"slow": (job, root / "tiny/slow")}


@pytest.mark.parametrize("name", CASES)
def test_given_a_planted_stall_when_the_limit_has_passed_then_rank_node_axis_and_step_are_named_and_the_run_goes_on(
    jobs: dict[str, tuple[str, Path]], name: str
) -> None:
    (job, run), words = jobs[name], CASES[name][2]
    assert wait_for_end(job, run) == "COMPLETED"
    [stall] = run.glob("stalls/*/verdict.txt")
    verdict = stall.read_text()
    assert re.search(words, verdict), verdict
    # The last sign of life is that of the rank that was silent longest; the files' times are of one clock.
    reports = [json.loads(path.read_text()) for path in stall.parent.glob("rank-*.json")]
    assert len(reports) == 2
    assert max(report["silent_s"] for report in reports) < LIMIT_S + 5
    written = min(path.stat().st_mtime for path in stall.parent.glob("rank-*.json"))
    assert stall.stat().st_mtime - written < 10
    # It has gone on by itself, and nothing of the stalled start is left.
    assert int(field(job, "Restarts")) == 1
    assert steps(run) == list(range(1, 9))
    assert rank_processes(run) == {}
    log = next(run.glob("job-1/log-*.txt")).read_text()
    assert "restart 1 of at most" in log
    assert re.search(words.partition(" of axis")[0], log), log


def test_given_a_slow_rank_when_training_then_it_is_named_while_the_run_goes_on(
    jobs: dict[str, tuple[str, Path]],
) -> None:
    job, run = jobs["slow"]
    assert wait_for_end(job, run) == "COMPLETED"
    log = (run / "train.log").read_text()
    assert re.search(r"rank 1 on node2 is slow: it works [\d.e-]+ s a step, its like ", log), log
    assert "rank 0 on node1 is slow" not in log
