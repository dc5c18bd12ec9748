"""Training as a person runs it: repeatable, resumable, one run directory and one W&B run each."""

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.recipes.commands import MICRO, assert_same_weights, metrics, run, start, succeed, weights


def test_given_the_same_command_twice_when_run_then_metrics_and_weights_are_bitwise_equal(tmp_path: Path) -> None:
    same = [*MICRO, "model.dropout=0.1", "data.mask=uneven", f"run.root={tmp_path}"]
    succeed(start("train", *same, "run.id=a"), start("train", *same, "run.id=b"))
    a, b = tmp_path / "tiny" / "a", tmp_path / "tiny" / "b"
    rows = metrics(a)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert len({row["loss"] for row in rows}) == 3
    assert {"loss", "grad_norm", "lr", "tokens"} <= rows[0].keys()
    assert rows == metrics(b)
    assert_same_weights(a, b)


def test_given_a_run_when_it_ends_then_its_directory_is_complete_with_one_offline_wandb_run(tmp_path: Path) -> None:
    done = run("train", *MICRO, f"run.dir={tmp_path}/run", "run.id=one", "logger=wandb")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    assert str(folder) in done.stderr + done.stdout
    names = {"config.yaml", "overrides.yaml", "environment.json", "metrics.jsonl", "train.log", "checkpoints", "DONE"}
    assert names <= {path.name for path in folder.iterdir()}
    assert not (folder / "FAILED").exists()
    assert not [path for path in folder.rglob("*") if "partial" in path.name]
    final = json.loads((folder / "DONE").read_text())
    assert final["steps"] == 3
    assert final["loss"] == metrics(folder)[-1]["loss"]
    assert final["val/loss"] > 0
    wandb = [path.name for path in (folder / "wandb").iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(wandb) == 1, wandb
    assert wandb[0].startswith("offline-run-")
    assert wandb[0].endswith("-one")
    assert "validation loss" in (folder / "train.log").read_text()


def test_given_a_sweep_when_a_point_is_refused_then_the_others_have_a_run_directory_each(tmp_path: Path) -> None:
    done = run("train", "--multirun", *MICRO, f"run.root={tmp_path}", "logger=none", "data.micro_batch=1,3,2", "seed=1")
    assert done.returncode == 2, done.stderr
    assert "data.global_batch=4 must be a multiple of data.micro_batch=3" in done.stderr
    assert "Traceback" not in done.stderr
    runs = sorted((tmp_path / "tiny").iterdir())
    assert len(runs) == 2
    assert all((folder / "DONE").exists() for folder in runs)
    first, second = (weights(folder) for folder in runs)  # the same batch in other microbatches: the same update
    assert all((first[name] - second[name]).abs().max() < 1e-4 for name in first)


SIX = [
    *(part for part in MICRO if not part.startswith(("model.hidden", "model.inter", "trainer.max_steps"))),
    *("model.dropout=0.1", "data.mask=uneven", "trainer.max_steps=6", "trainer.log_interval=1", "logger=none"),
    *("checkpoint.every_n_steps=3", "data.seq_len=128", "data.global_batch=16", "run.id=x"),
]


def _kill_at(folder: Path, step: int, *more: str) -> None:
    process = start("train", *SIX, f"run.dir={folder}", *more)
    mark = folder / "checkpoints" / f"step-{step:08d}" / "COMPLETE"
    while not mark.exists():
        assert process.poll() is None, process.finish()
        time.sleep(0.002)
    process.kill()
    process.finish()
    assert not (folder / "DONE").exists()
    assert not (folder / "checkpoints" / "step-00000006").exists(), "the process was killed too late to show anything"


def test_given_a_run_that_was_killed_when_run_again_then_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    # S-40: by `run=`, with other loader processes, in the same W&B run.
    reference = start("train", *SIX, f"run.dir={tmp_path}/whole")
    _kill_at(tmp_path / "killed", 3, "data.workers=2", "logger=wandb")
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')  # what the kill may have left
    again = start("train", f"run={tmp_path}/killed", "data.workers=0")
    succeed(reference)
    done = again.finish()
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stderr
    assert "step-00000003" in done.stderr
    assert "changed since this run began: data.workers 2 -> 0" in done.stderr
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert [row["step"] for row in metrics(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    final = [json.loads((tmp_path / name / "DONE").read_text())["val/loss"] for name in ("killed", "whole")]
    assert final[0] == final[1]
    files = [path.name for path in (tmp_path / "killed" / "wandb").glob("offline-run-*/*.wandb")]
    assert files == ["run-x.wandb"] * 2


def test_given_what_is_no_run_directory_when_gone_on_with_then_it_is_refused(tmp_path: Path) -> None:
    done = run("train", f"run={tmp_path}")
    assert done.returncode == 2, done.stderr
    assert "overrides.yaml is missing, so it is not a run directory" in done.stderr


OFTEN = [*MICRO, "checkpoint.every_n_steps=1", "checkpoint.keep=1", "run.id=x", "logger=none"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 3 steps that ended well."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    succeed(start("train", *OFTEN, f"run.dir={folder}"))
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-00000003"]
    return folder


def test_given_a_finished_run_when_run_again_then_nothing_is_trained_and_its_result_stays(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    succeed(start("train", *OFTEN, f"run.dir={tmp_path}/run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()
    assert json.loads((tmp_path / "run" / "DONE").read_text()) == json.loads((finished / "DONE").read_text())


def test_given_a_directory_with_checkpoints_when_started_afresh_in_it_then_it_is_refused_and_they_stay(
    finished: Path, tmp_path: Path
) -> None:
    # Else checkpoints of more steps than the new run has made count as the newest: its own are removed, and the next
    # run goes on from the old ones.
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    done = run("train", *OFTEN, "ckpt=none", f"run.dir={folder}")
    assert done.returncode == 2, done.stderr
    assert "ckpt=none" in done.stderr
    assert str(folder) in done.stderr
    assert_same_weights(folder, finished)
    assert (folder / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()


def test_given_a_run_as_ckpt_when_trained_then_it_starts_from_its_newest_checkpoint_and_another_model_is_refused(
    finished: Path, tmp_path: Path
) -> None:
    longer = [*(part for part in MICRO if not part.startswith("trainer.max_steps")), "trainer.max_steps=4"]
    good = start("train", *longer, f"ckpt={finished}", f"run.dir={tmp_path}/a", "logger=none")
    wide = start("train", *longer, "model.hidden_size=48", f"ckpt={finished}", f"run.dir={tmp_path}/b", "logger=none")
    succeed(good)
    assert [row["step"] for row in metrics(tmp_path / "a")] == [4]
    refused = wide.finish()
    assert refused.returncode == 2, refused.stderr
    assert "ckpt=" in refused.stderr
    assert "Traceback" not in refused.stderr
