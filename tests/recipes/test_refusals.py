"""What cannot run says why in one breath: exit code 2 for a config, 1 otherwise, and no traceback."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.recipes.commands import MICRO, MODEL, run, start

CONFIG = {
    "unknown key": (["trainer.max_step=3"], "Did you mean trainer.max_steps?"),
    "unknown group": (["modell=tiny"], "Did you mean model?"),
    "unknown option": (["model=tinny"], "Did you mean tiny?"),
    "no option": (["model=null"], "model"),
    "wrong type": (["trainer.max_steps=many"], "trainer.max_steps"),
    "not an override": (["trainer.max_steps"], "not of the form KEY=VALUE"),
    "missing file": (["data=files", "data.paths=[/nowhere/x.jsonl]"], "data.paths: /nowhere/x.jsonl matches no file"),
    "no file named": (["data=files"], "reads data.paths, which is empty"),
    "vocabulary": (["data.vocab_size=300"], "model.vocab_size=260 is smaller than the 300 tokens"),
    "seq_len": (["data.seq_len=2048"], "data.seq_len=2048 is above model.max_position_embeddings=1024"),
    "evil target": (["+callbacks.x._target_=os.system"], "would run code from outside"),
    "secret": (["run.root=/tmp/hf_abcdefghijklmnopqrstuvwxyz"], "looks like a secret (not shown)"),
    "a mirror that no package knows": (["checkpoint.mirror=s3://bucket/x"], "checkpoint.mirror=s3://bucket/x needs"),
    "no such checkpoint": (["ckpt=/nowhere"], "ckpt=/nowhere is neither a complete checkpoint"),
}


def _command(name: str, root: Path) -> list[str]:
    overrides, _ = CONFIG[name]
    base = MODEL if "data=files" in overrides else MICRO
    return [*base, f"run.root={root}/runs", "logger=none", *overrides]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, "subprocess.CompletedProcess[str]"]]:
    """Where all the bad commands were run, two at a time, and how each ended."""
    root = tmp_path_factory.mktemp("refused")
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda name: start("train", *_command(name, root)).finish(), CONFIG)
        return root, dict(zip(CONFIG, ended, strict=True))


@pytest.mark.parametrize("name", CONFIG)
def test_given_a_bad_config_when_run_then_it_is_refused_with_2_and_nothing_is_done(
    refused: tuple[Path, dict[str, "subprocess.CompletedProcess[str]"]], name: str
) -> None:
    root, ended = refused
    done, (_, words) = ended[name], CONFIG[name]
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "config refused:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "hf_abc" not in done.stderr + done.stdout
    assert not list(root.rglob("DONE"))


def test_given_an_empty_file_when_run_then_it_is_refused_and_the_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").touch()
    done = run("train", *MODEL, "data=files", f"data.paths=[{tmp_path}/*.jsonl]", f"run.dir={tmp_path}/run")
    assert done.returncode == 2, done.stderr
    assert "x.jsonl is empty (0 bytes)" in done.stderr
    assert "Traceback" not in done.stderr


def test_given_a_secret_that_a_later_override_replaces_when_run_then_no_file_holds_it(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    run("train", *MICRO, f"run.id={secret}", "run.id=x", f"run.dir={tmp_path}/run", "logger=none")
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert holding == []


def test_given_a_read_only_run_directory_when_run_then_it_fails_with_1_and_names_it(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = run("train", *MICRO, f"run.dir={small_disk}/run", "logger=none")
    assert done.returncode == 1, done.stderr
    assert f"run.dir={small_disk}/run cannot be written: Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


def test_given_a_disk_that_fills_up_when_training_then_it_fails_with_1_and_metrics_are_whole(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    endless = ["trainer.max_steps=5000", "trainer.log_interval=7", "checkpoint.at_end=false", "logger=none"]
    done = run("train", *MICRO, *endless, "callbacks=none", f"run.dir={run_dir}")
    assert done.returncode == 1, done.stderr
    assert "metrics.jsonl: " in done.stderr
    assert "its metrics cannot be kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run_dir / "DONE").exists()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1].endswith("\n")
    assert len(lines) > 20


def test_given_a_disk_too_small_for_a_checkpoint_when_training_then_it_fails_with_1_and_none_is_believed(
    small_disk: Path,
) -> None:
    done = run("train", *MICRO, f"run.dir={small_disk}/run", "logger=none")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
    assert not list(small_disk.glob("run/checkpoints/*/COMPLETE"))
    assert not (small_disk / "run" / "DONE").exists()
