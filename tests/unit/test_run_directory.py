"""What a run leaves behind is whole or not there: files, metrics, checkpoints."""

import json
import os
from pathlib import Path

import pytest

from models.errors import ConfigError, RunError
from parallel.files import write_whole
from recipes.metrics import MetricsFile
from recipes.run_directory import RunDirectory, first_failure
from recipes.schema import read_config
from tests.small import config


def _rows(*steps: int) -> list[dict[str, float]]:
    return [{"step": step, "loss": step / 3} for step in steps]


def _read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_given_rows_when_appended_then_floats_come_back_unrounded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.append(_rows(1, 2))
    file.append(_rows(3))
    assert _read(path) == _rows(1, 2, 3)


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', "{", '{"step": 3, "loss": 1.0}'])
def test_given_a_last_line_without_an_end_when_opened_then_it_is_cut_off_and_the_rest_stays(
    tmp_path: Path, torn: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(_rows(1, 2))
    with path.open("a") as file:
        file.write(torn)
    MetricsFile(path).append(_rows(3))
    assert _read(path) == _rows(1, 2, 3)


def test_given_steps_that_will_be_run_again_when_rewound_then_their_lines_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.rewind(0)
    assert not path.exists()
    file.append(_rows(1, 2, 3, 4))
    file.rewind(2)
    assert _read(path) == _rows(1, 2)
    file.append(_rows(3))
    file.rewind(0)
    assert _read(path) == []
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_given_a_full_disk_when_appended_then_it_stops_and_only_whole_lines_are_left(small_disk: Path) -> None:
    path = small_disk / "metrics.jsonl"
    file, step = MetricsFile(path), 0
    with pytest.raises(RunError, match=r"metrics\.jsonl: .*(disk is full|No space).*metrics cannot be kept"):  # noqa: PT012
        while step < 100_000:
            file.append(_rows(*range(step, step + 7)))
            step += 7
    assert step > 100
    assert path.read_bytes().endswith(b"\n")
    assert _read(path) == _rows(*range(step))


def test_given_a_folder_that_is_gone_when_appended_then_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file"):
        MetricsFile(tmp_path / "gone" / "metrics.jsonl").append(_rows(1))


def test_given_a_full_disk_when_a_file_is_written_then_the_old_one_stays_whole_and_nothing_else(
    small_disk: Path,
) -> None:
    path = small_disk / "config.yaml"
    write_whole(path, "old")
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "x" * 100_000)
    assert path.read_text() == "old"
    assert os.listdir(small_disk) == ["config.yaml"]


def test_given_a_full_disk_when_a_run_fails_then_saying_so_does_not_raise(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 64 * 1024)
    RunDirectory(small_disk).fail("reason")
    assert os.listdir(small_disk) == ["filler"]


def test_given_a_new_run_when_created_then_its_files_are_there_and_the_config_reads_back(tmp_path: Path) -> None:
    made = config("data=synthetic")
    run = RunDirectory(tmp_path / "deep" / "run")
    run.create(made, ["data=synthetic"])
    assert read_config(run.path / "config.yaml") == made
    assert (run.path / "overrides.yaml").read_text() == "- data=synthetic\n"
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith("2.")
    assert set(environment["git"]) == {"commit", "dirty"}


def test_given_a_finished_run_when_created_again_then_the_same_config_goes_on_and_another_is_refused(
    tmp_path: Path,
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(config("data=synthetic"), [])
    run.finish({"loss": 1.0})
    with pytest.raises(ConfigError, match=r"another config: optimizer.lr=1.0 \(was 0.003\), seed=1 \(was 0\)\. "):
        run.create(config("data=synthetic", "seed=1", "optimizer.lr=1", "trainer.log_interval=7"), [])
    other = ["trainer.compile=true", "recipe.devices=1", "recipe.status=seen", "data.workers=1", "parallelism.zero=2"]
    assert run.is_done(config("data=synthetic", *other))
    assert (run.path / "DONE").exists()
    run.fail("reason")
    run.create(config("data=synthetic", "ckpt=none"), [])
    assert not (run.path / "DONE").exists()
    assert not (run.path / "FAILED").exists()


def test_given_a_path_that_is_a_file_when_created_then_it_is_an_error_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match=r"run\.dir=.*run cannot be written"):
        RunDirectory(tmp_path / "run").create(config(), [])


@pytest.mark.parametrize("torn", ["", "{", "a word"])
def test_given_a_run_directory_with_a_torn_config_when_created_then_it_is_refused(tmp_path: Path, torn: str) -> None:
    (tmp_path / "config.yaml").write_text(torn)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        RunDirectory(tmp_path).create(config(), [])


def test_given_a_rank_that_has_failed_when_another_fails_for_it_then_the_first_reason_stays(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(config("data=synthetic"), [])
    with pytest.raises(RuntimeError, match="gone"), run.recorded():  # noqa: PT012
        first_failure(run.path, "rank 1 on node2: the cause")
        raise RuntimeError("connection gone")
    assert (run.path / "FAILED").read_text() == "rank 1 on node2: the cause\n"
    run.create(config("data=synthetic"), [])
    with pytest.raises(RuntimeError, match="gone"), run.recorded():
        raise RuntimeError("gone")
    assert (run.path / "FAILED").read_text() == "RuntimeError: gone\n"
