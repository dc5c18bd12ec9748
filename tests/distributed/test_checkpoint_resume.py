"""S-30: a run that dies and goes on is, to the bit, the run that never died; on every axis and through Lightning."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from models.config import MoEConfig
from parallel.config import Config
from parallel.retention import complete_checkpoints, read_index
from parallel.strategy import QuintetStrategy
from tests.distributed.cases import make_config
from tests.distributed.pool import Pool
from tests.distributed.resume import Outcome, run, with_run

RUN = "tests.distributed.resume:run"
SP = {"sequence_parallel": True, "loss_parallel": True}
EXPERTS = MoEConfig(8, 2, 20, balance_loss=0.1, bias_update_rate=0.02)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2 sp": (2, {"tp": 2} | SP),
    "zero1": (2, {"zero": 1}),
    "zero3": (3, {"zero": 3, "data": {"global_batch": 6, "micro_batch": 1}}),
    "replicas": (4, {"zero": 2, "dp_replicate": 2}),
    "pp2": (2, {"pp": 2}),
    "zbv": (2, {"pp": 2, "pp_schedule": "zbv_zero_bubble", "virtual_stages": 2}),
    "cp2": (2, {"cp": 2}),
    "ep2": (2, {"ep": 2, "zero": 1, "model": {"moe": EXPERTS}}),
    "tp2 pp2 ep2 zero2": (8, {"tp": 2, "pp": 2, "ep": 2, "zero": 2, "model": {"moe": EXPERTS}} | SP),
}
SECOND = {"zero1", "replicas", "pp2", "tp2 pp2 ep2 zero2"}
"""The default suite has one of each axis."""


def _config(layout: dict[str, Any]) -> Config:
    layout = dict(layout)
    data = {"global_batch": 8, "micro_batch": 2} | layout.pop("data", {})
    model = {"dropout": 0.1, "num_hidden_layers": 4, "vocab_size": 66} | layout.pop("model", {})
    return make_config(model, data, "fp32", "adamw", **layout)


def _rows(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")} for row in rows]


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SECOND else ()) for name in LAYOUTS]
)
def test_given_a_run_that_dies_when_run_again_then_all_it_leaves_is_equal_to_the_bit(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    world, layout = LAYOUTS[name]
    config = _config(layout)
    whole: list[Outcome] = pool.run(world, RUN, with_run(config, tmp_path / "whole", 6, 3))
    dying = with_run(config, tmp_path / "dying", 6, 3)
    first: list[Outcome] = pool.run(world, RUN, dying, 5)
    assert first[0].died == "PlantedError: in step 5"
    assert [path.name for path in complete_checkpoints(tmp_path / "dying" / "checkpoints")] == ["step-00000003"]
    second: list[Outcome] = pool.run(world, RUN, dying)
    assert _rows(tmp_path / "dying") == _rows(tmp_path / "whole")
    assert [row["step"] for row in _rows(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]
    for never, before, after in zip(whole, first, second, strict=True):
        assert before.samples[:3] + after.samples == never.samples
        assert len(never.samples) == 6
        _equal(never.state, after.state)
        _equal(never.generators, after.generators)
        assert never.summary["val/loss"] == after.summary["val/loss"]
    about = json.loads((tmp_path / "dying/checkpoints/step-00000006/run.json").read_text())
    assert (about["step"], about["consumed_samples"]) == (6, 6 * config.data.global_batch)
    assert {"config", "recipe_lock", "layout", "environment"} < about.keys()


@pytest.mark.long  # compiling takes most of a minute
def test_given_compiled_layers_when_resumed_twice_then_names_are_those_of_plain_layers_and_bits_stay(
    pool: Pool, tmp_path: Path
) -> None:
    # S-33
    plain = _config({})
    config = replace(plain, trainer=replace(plain.trainer, compile=True))
    never: Outcome = pool.run(1, RUN, with_run(config, tmp_path / "whole", 6, 2))[0]
    dying = with_run(config, tmp_path / "dying", 6, 2)
    for die_at in (4, 6):
        assert pool.run(1, RUN, dying, die_at)[0].died == f"PlantedError: in step {die_at}"
    after: Outcome = pool.run(1, RUN, dying)[0]
    _equal(never.state, after.state)
    assert _rows(tmp_path / "dying") == _rows(tmp_path / "whole")
    other: Outcome = pool.run(1, RUN, with_run(plain, tmp_path / "plain", 6, 2))[0]
    assert other.state.keys() == after.state.keys()
    names = [(tmp_path / run / "checkpoints/step-00000006/manifest.json").read_text() for run in ("plain", "whole")]
    assert json.loads(names[0])["files"].keys() == json.loads(names[1])["files"].keys()


def test_given_a_save_after_a_validation_when_resumed_then_neither_is_done_again(pool: Pool, tmp_path: Path) -> None:
    config = _config({})
    config = replace(config, trainer=replace(config.trainer, val_interval=2))
    policy = {"best": 1, "keep": 1, "at_end": True}
    whole = pool.run(1, RUN, with_run(config, tmp_path / "whole", 6, 100, **policy))[0]
    dying = with_run(config, tmp_path / "dying", 6, 100, **policy)
    first: Outcome = pool.run(1, RUN, dying, 5)[0]
    index = read_index(tmp_path / "dying" / "checkpoints")
    assert index["step-00000004"] == {"val/loss": first.validations[-1]}
    second: Outcome = pool.run(1, RUN, dying)[0]
    assert first.samples[:4] + second.samples == whole.samples
    _equal(whole.state, second.state)
    assert first.validations + second.validations == whole.validations
    kept = [path.name for path in complete_checkpoints(tmp_path / "whole" / "checkpoints")]
    values = dict(zip((2, 4, 6), whole.validations[1:], strict=True))  # the first is Lightning's check of the loop
    lowest = min(values, key=lambda step: values[step])
    assert kept == [f"step-{step:08d}" for step in sorted({lowest, 6})]


def fills_the_disk(config: Config, disk: Path) -> Outcome:
    """A run whose disk is full from its second step to its third."""
    right, filler = QuintetStrategy.training_step, disk / "filler"

    def training_step(self: QuintetStrategy, *arguments: Any) -> Any:
        step = self.module.trainer.global_step + 1
        assert self.saver is not None
        if self.saver._thread is not None:
            self.saver._thread.join()
        if step == 2:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        if step == 4:
            filler.unlink()
        return right(self, *arguments)

    with patch.object(QuintetStrategy, "training_step", training_step):
        return run(config)


@pytest.mark.parametrize("small_disk", ["16m"], indirect=True)
def test_given_a_disk_that_is_full_for_a_while_when_saved_then_training_goes_on_and_old_checkpoints_stay(
    pool: Pool, tmp_path: Path, small_disk: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").symlink_to(small_disk)
    config = with_run(_config({}), folder, 6, 1, keep=10)
    outcome: Outcome = pool.run(1, "tests.distributed.test_checkpoint_resume:fills_the_disk", config, small_disk)[0]
    assert [path.name[-1] for path in complete_checkpoints(small_disk)] == ["1", "4", "5", "6"]
    assert [row["step"] for row in _rows(folder)] == [1, 2, 3, 4, 5, 6]
    failures = [line for line in outcome.said if "CHECKPOINT FAILED" in line]
    assert len(failures) == 2
    assert "step-00000002 could not be written: rank 0: No space left on device" in failures[0]
    assert "the newest complete checkpoint is" in failures[0]
    assert "step-00000001" in failures[0]


def test_given_minutes_when_they_are_over_then_the_run_is_saved(pool: Pool, tmp_path: Path) -> None:
    policy = {"every_n_minutes": 1e-9, "keep": 10, "at_end": False}
    pool.run(2, RUN, with_run(_config({"tp": 2}), tmp_path, 3, 100, **policy))
    assert [path.name[-1] for path in complete_checkpoints(tmp_path / "checkpoints")] == ["1", "2", "3"]


def test_given_one_rank_that_is_told_to_end_then_all_save_and_the_run_goes_on_to_the_same_bits(
    pool: Pool, tmp_path: Path
) -> None:
    config = _config(LAYOUTS["zero1"][1])
    whole = pool.run(2, RUN, with_run(config, tmp_path / "whole", 5, 100))
    stopped = with_run(config, tmp_path / "stopped", 5, 100)
    first: list[Outcome] = pool.run(2, RUN, stopped, None, 2, 1)
    assert ["told to end by SIGUSR1 after step 3" in outcome.died for outcome in first] == [True, True]
    assert [path.name for path in complete_checkpoints(tmp_path / "stopped" / "checkpoints")] == ["step-00000003"]
    second: list[Outcome] = pool.run(2, RUN, stopped)
    assert _rows(tmp_path / "stopped") == _rows(tmp_path / "whole")
    for never, after in zip(whole, second, strict=True):
        _equal(never.state, after.state)
