"""S-31: a checkpoint of one layout is a checkpoint of every layout: weights and optimizer state both."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import Continued, make_config, one_process, relative
from tests.distributed.pool import Pool

RESUMED = "tests.distributed.cases:resumed"
SP = {"sequence_parallel": True, "loss_parallel": True}
# S-25: 259 rows of the vocabulary divide by nothing here. 12 sequences a step divide by 1, 2, 3 and 4 data ranks.
ODD = {"vocab_size": 259, "num_key_value_heads": 2, "qk_norm": True, "num_hidden_layers": 4}
BATCH = {"global_batch": 12, "micro_batch": 1}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero0x2": (2, {"zero": 0}),
    "zero1x3": (3, {"zero": 1}),
    "zero2x2": (2, {"zero": 2}),
    "zero3x4": (4, {"zero": 3}),
    "hybrid": (4, {"zero": 3, "dp_replicate": 2}),
    "tp2": (2, {"tp": 2} | SP),
    "tp4": (4, {"tp": 4}),
    "tp2zero0": (4, {"tp": 2, "zero": 0}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "interleaved": (2, {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "zbv": (2, {"pp": 2, "pp_schedule": "zbv_zero_bubble", "virtual_stages": 2}),
    "pp2zero1": (4, {"pp": 2, "zero": 1}),
    "tp2pp2": (4, {"tp": 2, "pp": 2} | SP),
    "eight": (8, {"tp": 2, "pp": 2, "zero": 0} | SP),
}
PAIRS = [
    *[("one", "tp4"), ("tp4", "zero3x4"), ("zero3x4", "zero2x2"), ("zero2x2", "one"), ("tp2", "pp2")],
    *[("pp2", "tp2zero0"), ("tp2zero0", "zero0x2"), ("zero0x2", "tp2"), ("zero1x3", "zero2x2"), ("pp4", "hybrid")],
    *[("interleaved", "zbv"), ("zbv", "zero1x3")],
]
MORE = [
    *[("zero3x4", "pp4"), ("hybrid", "tp4"), ("tp4", "pp2zero1"), ("pp2zero1", "zero3x4"), ("tp2pp2", "zero1x3")],
    *[("zero1x3", "tp2pp2"), ("pp4", "interleaved"), ("eight", "one"), ("one", "eight"), ("eight", "pp4")],
    *[("hybrid", "zbv"), ("tp2", "zero3x4"), ("zero2x2", "hybrid"), ("interleaved", "tp2pp2")],
]


def _config(name: str) -> Any:
    return make_config(ODD, BATCH, optimizer="adamw", **LAYOUTS[name][1])


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Continued:
    """Four steps of one process without a break."""
    folder = tmp_path_factory.mktemp("straight")
    return pool.run(1, RESUMED, one_process(_config("one")), folder, 0, 4, False)[0]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder with a layout's checkpoint after two steps, made when it is first asked for."""

    @cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        pool.run(LAYOUTS[name][0], RESUMED, _config(name), folder, 0, 2)
        return folder

    return folder_of


def _check(pool: Pool, straight: Continued, saved: Any, before: str, after: str) -> None:
    parts: list[Continued] = pool.run(LAYOUTS[after][0], RESUMED, _config(after), saved(before), 2, 4, False)
    found = {name: weight for part in parts for name, weight in part.weights.items()}
    assert found.keys() == straight.weights.keys()
    errors = [(relative(straight.weights[name], found[name]), name) for name in found]
    for step, (expected, loss) in enumerate(zip(straight.losses[2:], parts[0].losses, strict=True), 2):
        errors.append((abs(loss - expected) / expected, f"loss of step {step}"))
    worst, where = max(errors)
    print(f"{before} to {after}: {worst:.1e} ({where})")
    assert worst < 1e-9, where


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resuming_on_another_layout_is_the_same_run(
    pool: Pool, straight: Continued, saved: Any, before: str, after: str
) -> None:
    _check(pool, straight, saved, before, after)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), MORE)
def test_resuming_on_more_layouts_is_the_same_run(
    pool: Pool, straight: Continued, saved: Any, before: str, after: str
) -> None:
    _check(pool, straight, saved, before, after)
