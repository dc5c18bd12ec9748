"""S-31: a checkpoint of one layout is a checkpoint of every layout: weights and optimizer state both."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from models.config import MoEConfig
from tests.distributed.cases import Continued, make_config, one_process, relative
from tests.distributed.pool import Pool
from tests.distributed.thinned import thinned

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
    "cp2zero3": (4, {"cp": 2, "zero": 3}),
    "cp4": (4, {"cp": 4}),
    "cp2tp2": (4, {"cp": 2, "tp": 2} | SP),
    "eight": (8, {"tp": 2, "pp": 2, "zero": 0} | SP),
}
MIXTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "moe one": (1, {}),
    "moe pp4": (4, {"pp": 4}),
    "moe ep4": (4, {"ep": 4, "zero": 2}),
    "moe ep2 pp2": (4, {"ep": 2, "pp": 2, "zero": 1}),
    "moe tp2 etp2": (2, {"tp": 2, "etp": 2} | SP),
    "moe ep2 zero3 x4": (4, {"ep": 2, "zero": 3}),
}
PAIRS = [
    *[("one", "tp4"), ("tp4", "zero3x4"), ("zero3x4", "zero2x2"), ("zero2x2", "one"), ("tp2", "pp2")],
    *[("pp2", "tp2zero0"), ("tp2zero0", "zero0x2"), ("zero0x2", "tp2"), ("zero1x3", "zero2x2"), ("pp4", "hybrid")],
    *[("interleaved", "zbv"), ("zbv", "zero1x3"), ("cp2zero3", "zero2x2"), ("tp2", "cp2zero3")],
    *[("moe pp4", "moe ep4"), ("moe ep4", "moe tp2 etp2"), ("moe tp2 etp2", "moe ep2 zero3 x4")],
]
MORE = [
    *[("zero3x4", "pp4"), ("hybrid", "tp4"), ("tp4", "pp2zero1"), ("pp2zero1", "zero3x4"), ("tp2pp2", "zero1x3")],
    *[("zero1x3", "tp2pp2"), ("pp4", "interleaved"), ("eight", "one"), ("one", "eight"), ("eight", "pp4")],
    *[("hybrid", "zbv"), ("tp2", "zero3x4"), ("zero2x2", "hybrid"), ("interleaved", "tp2pp2")],
    *[("cp4", "pp4"), ("zero1x3", "cp4"), ("cp2tp2", "cp2zero3"), ("moe ep4", "moe one"), ("moe one", "moe ep2 pp2")],
    *[("moe ep2 pp2", "moe pp4"), ("moe ep2 zero3 x4", "moe ep4"), ("moe ep4", "moe pp4")],
]


EXPERTS = MoEConfig(8, 2, 20, balance_loss=0.1, z_loss=0.01, bias_update_rate=0.02)


def _config(name: str) -> Any:
    model = {"num_hidden_layers": 4, "moe": EXPERTS} if name in MIXTURES else ODD
    return make_config(model, BATCH, optimizer="adamw", **(LAYOUTS | MIXTURES)[name][1])


def _world(name: str) -> int:
    return (LAYOUTS | MIXTURES)[name][0]


@pytest.fixture(scope="module")
def straight(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Continued]:
    """Four steps of one process without a break, of the dense model and of the mixture (True)."""
    folder = tmp_path_factory.mktemp("straight")
    configs = {name in MIXTURES: one_process(_config(name)) for name in ("one", "moe one")}
    return {key: pool.run(1, RESUMED, config, folder, 0, 4, False)[0] for key, config in configs.items()}


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder with a layout's checkpoint after two steps, made when it is first asked for."""

    @cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        pool.run(_world(name), RESUMED, _config(name), folder, 0, 2)
        return folder

    return folder_of


def _check(pool: Pool, straight: dict[bool, Continued], saved: Any, before: str, after: str) -> None:
    expected = straight[after in MIXTURES]
    parts: list[Continued] = pool.run(_world(after), RESUMED, _config(after), saved(before), 2, 4, False)
    found = {name: weight for part in parts for name, weight in part.weights.items()}
    assert found.keys() == expected.weights.keys()
    errors = [(relative(expected.weights[name], found[name]), name) for name in found]
    for step, (right, loss) in enumerate(zip(expected.losses[2:], parts[0].losses, strict=True), 2):
        errors.append((abs(loss - right) / right, f"loss of step {step}"))
    worst, where = max(errors)
    print(f"{before} to {after}: {worst:.1e} ({where})")
    assert worst < 1e-9, where


@pytest.mark.parametrize(("before", "after"), thinned(PAIRS))
def test_resuming_on_another_layout_is_the_same_run(
    pool: Pool, straight: dict[bool, Continued], saved: Any, before: str, after: str
) -> None:
    _check(pool, straight, saved, before, after)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), MORE)
def test_resuming_on_more_layouts_is_the_same_run(
    pool: Pool, straight: dict[bool, Continued], saved: Any, before: str, after: str
) -> None:
    _check(pool, straight, saved, before, after)
