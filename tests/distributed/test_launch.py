"""The launcher: ranks start by themselves, join those that exist, and end together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.errors import ConfigError
from parallel.ranks import check_launch, detect, end_with_parent, slurm_meeting_point

SMALL = [
    "data=synthetic",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "model.head_dim=8",
    "data.seq_len=32",
    "trainer.max_steps=3",
    "trainer.val_sequences=8",
    "precision=fp64",
    "logger=none",
    "callbacks=none",
]
FOUR = ["parallelism.tp=2", "parallelism.dp_shard=2", "parallelism.zero=3"]
TWO = ["parallelism.dp_shard=2", "parallelism.zero=3"]


def start(*arguments: str, root: Path, module: str = "recipes.train", **environment: str) -> subprocess.Popen[str]:
    """`python -m module SMALL arguments` with its output as text."""
    chosen = {argument.partition("=")[0] for argument in arguments}
    small = [setting for setting in SMALL if setting.partition("=")[0] not in chosen]
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments, *small, f"run.root={root}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,  # a test run that is killed leaves nothing behind
    )


def rows(run: Path) -> list[dict]:
    """The run's metrics without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "tokens")} for line in lines]


def runs(root: Path) -> list[Path]:
    return sorted(root.glob("tiny/*"))


def children(parent: int) -> list[int]:
    """The ranks that a launcher has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return sorted(int(pid) for pid in listed.split())


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in _state(pid)]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def plant(folder: Path, code: str) -> str:
    """The PYTHONPATH with which every process runs `code` first: Python runs sitecustomize when it starts."""
    (folder / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(folder), os.getcwd()])


def wait_until_training(process: subprocess.Popen[str], root: Path, ranks: int) -> list[int]:
    """The ranks' process ids once the first step has been written."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(path.stat().st_size for path in root.glob("tiny/*/metrics.jsonl")):
            return children(process.pid)
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no step in 120 s")


def test_ranks_start_by_themselves_and_make_the_same_run_as_one(tmp_path: Path) -> None:
    alone = start(root=tmp_path / "one")
    assert alone.wait(120) == 0, alone.communicate()[0]
    two = start(*TWO, "logger=wandb", root=tmp_path / "two")
    assert two.wait(180) == 0, two.communicate()[0]
    [one_run], [two_run] = runs(tmp_path / "one"), runs(tmp_path / "two")
    for a, b in zip(rows(one_run), rows(two_run), strict=True):
        assert a["step"] == b["step"]
        assert a["tokens"] == b["tokens"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-9)
    # S-43: exactly one W&B run, whatever the number of processes.
    assert len(list(two_run.glob("wandb/offline-run-*"))) == 1
    assert (two_run / "DONE").exists()


def test_context_ranks_make_the_same_run_as_one_and_report_what_fills_sequences_up(tmp_path: Path) -> None:
    documents = ["data.seq_len=31", "data.document_mask=true", "data.document_len=9", "data.mask=uneven"]
    alone = start(*documents, root=tmp_path / "one")
    assert alone.wait(120) == 0, alone.communicate()[0]
    two = start(*documents, "parallelism.cp=2", root=tmp_path / "two")
    said = two.communicate(timeout=180)[0]
    assert two.returncode == 0, said
    assert "data.seq_len=31 is filled up to 32" in said
    [one_run], [two_run] = runs(tmp_path / "one"), runs(tmp_path / "two")
    for a, b in zip(rows(one_run), rows(two_run), strict=True):
        assert a["tokens"] == b["tokens"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-9)
    ends = [json.loads((run / "DONE").read_text()) for run in (one_run, two_run)]
    assert ends[1]["val/loss"] == pytest.approx(ends[0]["val/loss"], rel=1e-9)
    assert ends[1]["val/tokens"] == ends[0]["val/tokens"]
    assert "padding_tokens" not in ends[0]
    assert ends[1]["padding_tokens"] == 8


def test_torchrun_ranks_are_joined(tmp_path: Path) -> None:
    rendezvous = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    chosen = ["parallelism.tp=2", f"run.root={tmp_path}"]
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *rendezvous, "-m", "recipes.train", *SMALL, *chosen],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stderr
    [run] = runs(tmp_path)  # both ranks agree on it, though nobody told them
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert len(list(run.glob("checkpoints/step-*/__*.distcp"))) == 2


@pytest.mark.alone
@pytest.mark.long  # stages of a pipeline end by the same way, below
def test_a_killed_rank_ends_all_within_ten_seconds_and_is_named(tmp_path: Path) -> None:
    process = start(*FOUR, "trainer.max_steps=100000", "trainer.log_interval=1", root=tmp_path)
    ranks = wait_until_training(process, tmp_path, 4)
    assert len(ranks) == 4
    os.kill(ranks[2], signal.SIGKILL)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 1
    assert output.rstrip().endswith("rank 2 was ended by signal SIGKILL.")
    assert alive(ranks) == []
    [run] = runs(tmp_path)
    assert "rank 2" in (run / "FAILED").read_text()


@pytest.mark.alone
@pytest.mark.long  # stages of a pipeline end by the same way, below
def test_an_exception_on_one_rank_is_the_last_thing_said(tmp_path: Path) -> None:
    # The hook raises on rank 1 alone.
    planted = plant(
        tmp_path,
        "import os, sys\n"
        "def hook(event, arguments):\n"
        "    if event == 'import' and arguments[0] == 'recipes.metrics':\n"
        "        raise RuntimeError('planted on rank 1')\n"
        "if os.environ.get('RANK') == '1':\n"
        "    sys.addaudithook(hook)\n",
    )
    process = start(*FOUR, root=tmp_path / "runs", PYTHONPATH=planted)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 failed:" in output
    assert output.rstrip().endswith("RuntimeError: planted on rank 1")


PIPELINE = ["parallelism.pp=2", "model.num_hidden_layers=2", "data.micro_batch=1"]


@pytest.mark.alone
def test_a_killed_stage_ends_all_within_ten_seconds_and_is_named(tmp_path: Path) -> None:
    process = start(*PIPELINE, "trainer.max_steps=100000", "trainer.log_interval=1", root=tmp_path)
    ranks = wait_until_training(process, tmp_path, 2)
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 1
    assert output.rstrip().endswith("rank 1 was ended by signal SIGKILL.")
    assert alive(ranks) == []
    [run] = runs(tmp_path)
    assert "rank 1" in (run / "FAILED").read_text()


@pytest.mark.alone
def test_an_exception_in_a_stage_ends_all_within_ten_seconds_and_is_the_last_thing_said(tmp_path: Path) -> None:
    # Once the stage's class is there, rank 1's raises in the middle of its fifth step.
    planted = plant(
        tmp_path,
        "import os, sys, threading, time\n"
        "def plant():\n"
        "    while not hasattr(sys.modules.get('parallel.pipeline'), '_Stage'):\n"
        "        time.sleep(0.001)\n"
        "    stage, calls = sys.modules['parallel.pipeline']._Stage, []\n"
        "    original = stage.backward_one_chunk\n"
        "    def backward(self, *arguments, **named):\n"
        "        calls.append(time.time())\n"
        "        if len(calls) == 37:\n"
        "            raise RuntimeError(f'planted in a stage at {calls[-1]}')\n"
        "        return original(self, *arguments, **named)\n"
        "    stage.backward_one_chunk = backward\n"
        "if os.environ.get('RANK') == '1':\n"
        "    threading.Thread(target=plant, daemon=True).start()\n",
    )
    process = start(*PIPELINE, "trainer.max_steps=100000", root=tmp_path / "runs", PYTHONPATH=planted)
    output, _ = process.communicate(timeout=120)
    ended = time.time()
    assert process.returncode == 1
    assert "rank 1 failed:" in output
    said, _, planted = output.rstrip().rpartition(" at ")
    assert said.endswith("RuntimeError: planted in a stage")
    assert ended - float(planted) < 10
    [run] = runs(tmp_path / "runs")
    assert "planted in a stage" in (run / "FAILED").read_text()


@pytest.mark.alone
def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    process = start(*TWO, "trainer.max_steps=100000", "trainer.log_interval=1", root=tmp_path)
    ranks = wait_until_training(process, tmp_path, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=15)
    assert process.returncode == 130
    assert alive(ranks) == []


@pytest.mark.alone
def test_a_run_that_is_asked_to_end_leaves_the_reason(tmp_path: Path) -> None:
    for place, split in (("one", []), ("two", ["parallelism.tp=2"])):
        process = start("trainer.max_steps=100000", "trainer.log_interval=1", *split, root=tmp_path / place)
        ranks = wait_until_training(process, tmp_path / place, len(split) * 2)
        process.terminate()
        process.communicate(timeout=15)
        assert process.returncode == 1
        assert alive(ranks) == []
        [run] = runs(tmp_path / place)
        assert "SIGTERM" in (run / "FAILED").read_text()


@pytest.mark.alone
@pytest.mark.long  # minutes, which the default suite does not have
def test_a_run_that_is_asked_to_end_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    # Dropout, so that a random state that is not kept would be seen.
    same = ["parallelism.tp=2", "model.dropout=0.1", "trainer.max_steps=400", "trainer.log_interval=1", "run.id=a"]
    process = start(*same, root=tmp_path / "often")
    ranks = wait_until_training(process, tmp_path / "often", 2)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    [run] = runs(tmp_path / "often")
    told = int(re.search(r"told to end by SIGUSR1 after step (\d+) of 400", output)[1])
    assert (run / f"checkpoints/step-{told:08d}/COMPLETE").exists()
    assert (run / "FAILED").read_text().startswith("RunInterruptedError: told to end by SIGUSR1")
    assert alive(ranks) == []
    for root in ("often", "once"):
        process = start(*same, root=tmp_path / root)
        assert process.wait(240) == 0, process.communicate()[0]
    assert rows(run) == rows(tmp_path / "once/tiny/a")
    assert not (run / "FAILED").exists()


def test_a_signal_before_the_first_step_ends_a_run_at_once(tmp_path: Path) -> None:
    process = start("trainer.max_steps=100000", root=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("tiny/*/config.yaml")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "told to end by SIGTERM" in output


@pytest.mark.alone
def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    process = start(*TWO, "trainer.max_steps=100000", "trainer.log_interval=1", root=tmp_path)
    ranks = wait_until_training(process, tmp_path, 2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while alive(ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(ranks) == []


def test_a_sweep_over_ranks_does_not_sweep_in_its_children(tmp_path: Path) -> None:
    # S-42: two points of two ranks are two runs, each with its own three steps.
    process = start("--multirun", "parallelism.tp=2", "seed=1,2", root=tmp_path)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert len(runs(tmp_path)) == 2
    assert [[row["step"] for row in rows(run)] for run in runs(tmp_path)] == [[1, 2, 3]] * 2


def test_every_point_of_a_sweep_has_its_own_wandb_run(tmp_path: Path) -> None:
    # S-43: the points share one process.
    process = start("--multirun", "seed=1,2", "logger=wandb", root=tmp_path)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    found = [list(run.glob("wandb/offline-run-*/*.wandb")) for run in runs(tmp_path)]
    assert [len(files) for files in found] == [1, 1]


def test_callbacks_of_lightning_see_the_true_loss_on_every_pipeline_rank(tmp_path: Path) -> None:
    stop = "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"
    keep = "+callbacks.keep._target_=lightning.pytorch.callbacks.ModelCheckpoint"
    process = start(
        *(stop, "+callbacks.stop.monitor=val/loss", "+callbacks.stop.min_delta=1000", "+callbacks.stop.patience=2"),
        *(keep, "+callbacks.keep.monitor=val/loss", f"+callbacks.keep.dirpath={tmp_path}/best"),
        *("parallelism.pp=2", "model.num_hidden_layers=2", "trainer.val_interval=1", "trainer.max_steps=50"),
        root=tmp_path,
    )
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    [run] = runs(tmp_path)
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert (run / "checkpoints/step-00000003/COMPLETE").exists()
    assert len(list((tmp_path / "best").iterdir())) == 1


def test_a_refused_config_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    process = start("parallelism.tp=3", root=tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "parallelism.tp=3" in output
    assert runs(tmp_path) == []


@pytest.mark.parametrize(
    ("tasks", "node", "expected"), [("4(x2)", 1, 4), ("4(x2),3", 2, 3), ("5,3", 0, 5), ("8", 0, 8)]
)
def test_tasks_of_a_node_are_counted_as_slurm_lists_them(tasks: str, node: int, expected: int) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": str(node)}
    assert detect(variables | {"SLURM_STEP_TASKS_PER_NODE": tasks}).local_world == expected


def test_slurm_tasks_are_ranks() -> None:
    variables = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    ranks = detect(variables)
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.local_world) == (5, 8, 1, 4)
    assert detect(variables | {"SLURM_STEP_NUM_TASKS": "1"}).launcher == "none"
    # A batch script has a rank and the job's tasks too, but no step of several tasks.
    assert detect({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).launcher == "none"
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        detect({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("node1", "node1"), ("node[3-5,9]", "node3"), ("a7,b[1-2]", "a7"), ("n[07,09]", "n07")]
)
def test_tasks_of_a_step_meet_on_its_first_node(nodes: str, first: str) -> None:
    assert slurm_meeting_point({"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "12"})[0] == first


def test_tasks_that_do_not_match_the_devices_are_an_error() -> None:
    # S-41
    ranks = detect({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"})
    check_launch(ranks, nodes=2, devices_per_node=4)
    with pytest.raises(ConfigError, match=r"4 on this node.*devices_per_node=8"):
        check_launch(ranks, nodes=2, devices_per_node=8)
    with pytest.raises(ConfigError, match=r"cluster\.nodes=1"):
        check_launch(ranks, nodes=1, devices_per_node=4)


@pytest.mark.alone
def test_a_rank_that_is_told_alone_before_the_first_step_does_not_wait_for_the_others(tmp_path: Path) -> None:
    # Rank 0 sleeps on its way to the first step, and rank 1 waits for it in a collective.
    planted = plant(
        tmp_path,
        "import os, sys, time\n"
        "def hook(event, arguments):\n"
        "    if event == 'import' and arguments[0] == 'recipes.resume':\n"
        f"        open({str(tmp_path / 'asleep')!r}, 'w').close()\n"
        "        time.sleep(1000)\n"
        "if os.environ.get('RANK') == '0':\n"
        "    sys.addaudithook(hook)\n",
    )
    process = start(*TWO, root=tmp_path / "runs", PYTHONPATH=planted)
    deadline = time.monotonic() + 60
    while not (tmp_path / "asleep").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1.0)
    ranks = children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "told to end by SIGUSR1 before the first step" in output
    assert alive(ranks) == []
