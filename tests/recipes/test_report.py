"""The picture of a run, and the pipeline's timeline in it."""

import json
import shutil
from pathlib import Path

import pytest

from parallel.layout import Layout
from parallel.order import order
from recipes.report import pipeline_timelines
from recipes.schema import read_config
from tests.recipes.commands import MICRO, run


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two pipeline ranks."""
    folder = tmp_path_factory.mktemp("report") / "run"
    done = run("train", *MICRO, "parallelism.pp=2", "model.num_hidden_layers=2", f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def test_given_a_pipeline_when_it_has_run_then_every_step_has_its_bubble_and_the_timeline_is_the_schedules(
    pipeline: Path,
) -> None:
    config = read_config(pipeline / "config.yaml")
    microbatches = config.data.global_batch // config.data.micro_batch
    for line in (pipeline / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["bubble_expected"] == pytest.approx(1 / (microbatches + 1), abs=0.05)
        assert 0.0 < row["bubble"] < 1.0
    ranks = json.loads((pipeline / "timeline.json").read_text())["ranks"]
    planned = order(config.parallelism, microbatches)
    assert [[action for action, _, _ in spans] for spans in ranks] == [[str(a) for a in actions] for actions in planned]
    (_, measured), (_, simulated) = pipeline_timelines(pipeline, config)
    assert Layout(pp=2).world == 1 + max(span.rank for span in measured)
    busy = [sum(span.end - span.start for span in spans) for spans in (measured, simulated)]
    assert busy[0] == pytest.approx(busy[1])


def test_given_a_run_when_reported_then_there_is_a_picture_and_its_path_is_said(pipeline: Path) -> None:
    done = run("report", str(pipeline))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(pipeline / "report.png")
    assert (pipeline / "report.png").read_bytes().startswith(b"\x89PNG")


def test_given_no_run_when_reported_then_it_is_refused_with_2(pipeline: Path, tmp_path: Path) -> None:
    done = run("report", str(tmp_path))
    assert done.returncode == 2
    assert "config.yaml" in done.stderr
    shutil.copy(pipeline / "config.yaml", tmp_path)
    done = run("report", str(tmp_path))
    assert done.returncode == 2
    assert "there are no steps to draw yet" in done.stderr
    assert "Traceback" not in done.stderr


def test_given_a_place_that_cannot_be_written_when_reported_then_it_fails_with_1(pipeline: Path) -> None:
    done = run("report", str(pipeline), "--out", "/proc/report.png")
    assert done.returncode == 1
    assert "/proc/report.png" in done.stderr
    done = run("report", str(pipeline), "--out", str(pipeline / "report.exe"))
    assert done.returncode == 2
    assert "exe" in done.stderr
