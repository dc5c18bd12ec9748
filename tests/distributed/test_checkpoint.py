"""A checkpoint of one layout is a checkpoint of every layout: weights and optimizer state both."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import make_config, one_process, relative
from tests.distributed.pool import Pool

RESUMED = "tests.distributed.cases:resumed"
SP = {"sequence_parallel": True, "loss_parallel": True}
# S-25: 259 rows of the vocabulary divide by nothing here.
ODD = {"vocab_size": 259, "num_key_value_heads": 2, "qk_norm": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero2 on 2": (2, {"zero": 2}),
    "zero3 on 4": (4, {"zero": 3}),
    "zero0 on 2": (2, {"zero": 0}),
    "tp2": (2, {"tp": 2} | SP),
    "tp4": (4, {"tp": 4}),
    "tp2 zero0": (4, {"tp": 2, "zero": 0}),
    "pp2": (2, {"pp": 2, "data": {"micro_batch": 2}}),
}
PAIRS = [
    ("one", "tp4"),
    ("tp4", "zero3 on 4"),
    ("zero3 on 4", "zero2 on 2"),
    ("zero2 on 2", "one"),
    ("tp2", "pp2"),
    ("pp2", "tp2 zero0"),
    ("tp2 zero0", "zero0 on 2"),
    ("zero0 on 2", "tp2"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resuming_on_another_layout_is_the_same_run(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    configs = {name: make_config(**{"model": ODD, "optimizer": "adamw"} | LAYOUTS[name][1]) for name in (before, after)}
    straight = pool.run(1, RESUMED, one_process(configs[before]), tmp_path / "straight", 0, 4)[0]
    pool.run(LAYOUTS[before][0], RESUMED, configs[before], tmp_path, 0, 2)
    traces = pool.run(LAYOUTS[after][0], RESUMED, configs[after], tmp_path, 2, 4)
    found = {name: weight for weights in traces for name, weight in weights.items()}
    assert found.keys() == straight.keys()
    worst = max((relative(straight[name], found[name]), name) for name in straight)
    print(f"{before} to {after}: {worst[0]:.1e} ({worst[1]})")
    assert worst[0] < 1e-9
