"""S-32: killed at any moment, the run goes on from the newest complete checkpoint, and no torn one is believed.

Ranks are forked from a server that has imported everything, so that a run starts in a fraction of a second; they run
`fit` with a checkpoint after every step and a slow disk, and are killed with SIGKILL at a random moment.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.config import Config
from parallel.manifest import damage
from parallel.retention import complete_checkpoints
from parallel.stored import StoredWeights
from parallel.strategy import QuintetStrategy
from tests.distributed.cases import make_config
from tests.distributed.resume import run, with_run

FORKS = multiprocessing.get_context("forkserver")
LAZY = ("torch._dynamo", "recipes.data.module", "recipes.metrics", "recipes.module", "recipes.checkpoints")
FORKS.set_forkserver_preload(["tests.distributed.test_checkpoint_kill", *LAZY])  # with what `fit` imports when called
WORLD = 2
FSYNC_S = 0.02


def _rank(rank: int, config: Config, store: str, began: str, fsync_s: float) -> None:
    torch.set_num_threads(1)
    right_sync, right_step = os.fsync, QuintetStrategy.training_step

    def fsync(descriptor: int) -> None:
        time.sleep(fsync_s)
        right_sync(descriptor)

    def training_step(self: QuintetStrategy, *arguments: Any) -> Any:
        if rank == 0 and not Path(began).exists():
            Path(began).write_text(str(self.module.trainer.global_step))
        return right_step(self, *arguments)

    os.fsync = fsync
    QuintetStrategy.training_step = training_step  # type: ignore[method-assign]
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    run(config)
    os._exit(0)


def _start(config: Config, folder: Path, number: int, fsync_s: float) -> tuple[list[Any], Path]:
    began = folder / f"began-{number}"
    arguments = (config, str(folder / f"store-{number}"), str(began), fsync_s)
    ranks = [FORKS.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    return ranks, began


def _wait_for(condition: Any, ranks: list[Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert all(process.is_alive() or process.exitcode == 0 for process in ranks), "a rank has died by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _steps(checkpoints: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in complete_checkpoints(checkpoints)]


def _config(folder: Path, steps: int) -> Config:
    config = make_config({"dropout": 0.1}, {"micro_batch": 2}, "fp32", "adamw", zero=2)
    return with_run(config, folder, steps, 1, at_end=True, keep=2)


def _kill_often(folder: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    config = _config(folder / "killed", 1_000_000)
    checkpoints = folder / "killed" / "checkpoints"
    newest, inside = 0, 0
    for number in range(kills):
        ranks, began = _start(config, folder, number, FSYNC_S)
        _wait_for(began.exists, ranks)
        _wait_for(lambda began=began: began.read_text() != "", ranks)
        assert int(began.read_text()) == newest, "it did not go on from the newest complete checkpoint"
        target = newest + draw.randrange(3)
        _wait_for(lambda target=target: max(_steps(checkpoints), default=0) >= target, ranks)
        time.sleep(draw.uniform(0.0, 0.6))
        victims = ranks if draw.random() < 0.5 else [draw.choice(ranks)]
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        if len(victims) < len(ranks):
            time.sleep(draw.uniform(0.0, 0.3))  # until the launcher notices
        for process in ranks:
            process.kill()
            process.join()
        inside += bool(list(checkpoints.glob(".*.partial")) or list(checkpoints.glob(".*.removed")))
        marked = complete_checkpoints(checkpoints)
        assert [damage(path) for path in marked] == [[]] * len(marked), "a torn checkpoint bears the mark"
        steps = _steps(checkpoints)
        assert max(steps, default=0) >= newest, "a complete checkpoint was lost"
        newest = max(steps, default=0)
    print(f"{kills} kills, {inside} of them inside a save or a removal, {newest} steps made and kept")
    assert newest > 0

    whole = _config(folder / "whole", newest)
    ranks, _ = _start(whole, folder, kills, 0.0)
    for process in ranks:
        process.join(240)
        assert process.exitcode == 0
    mine, theirs = (StoredWeights(folder / name / "checkpoints" / f"step-{newest:08d}") for name in ("killed", "whole"))
    assert mine.shapes == theirs.shapes
    assert [name for name in mine.shapes if not torch.equal(mine.read(name), theirs.read(name))] == []
    rows = [_losses(folder / name)[:newest] for name in ("killed", "whole")]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == list(range(1, newest + 1))


def _losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["step"], row["loss"]) for row in rows]


def test_given_a_few_kills_at_random_moments_then_nothing_is_lost_but_the_steps_since(tmp_path: Path) -> None:
    _kill_often(tmp_path, 5, 1)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_given_two_hundred_kills_at_random_moments_then_nothing_is_lost_but_the_steps_since(tmp_path: Path) -> None:
    _kill_often(tmp_path, 200, 2)
