"""Every layout is the same run: loss, norm and every parameter's gradient equal one process in fp64."""

from typing import Any

import pytest

from tests.distributed.cases import disagreeing_replicas, make_config, merged, reference, samples_read, worst_error
from tests.distributed.pool import Pool

TRAIN = "tests.distributed.cases:train"
MICROBATCHES = (1, 2, 4)


def _sizes(layout: dict[str, Any], world: int) -> tuple[int, int]:
    tp = layout.get("tp", 1)
    return world // tp, tp


def _data(layout: dict[str, Any], world: int, microbatches: int) -> dict[str, Any]:
    """A global batch that gives each data rank `microbatches` microbatches of two sequences."""
    dp, _ = _sizes(layout, world)
    return {"global_batch": 2 * microbatches * dp, "micro_batch": 2}


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    *[(world, {"zero": zero}) for world in (2, 3, 4) for zero in (0, 1, 2, 3)],
    *[(4, {"zero": zero, "dp_replicate": 2}) for zero in (0, 1, 2, 3)],
    (6, {"zero": 3, "dp_replicate": 2}),
    (6, {"zero": 1, "dp_replicate": 3}),
    *[
        (tp, {"tp": tp, "sequence_parallel": sequence, "loss_parallel": loss})
        for tp in (2, 4)
        for sequence in (False, True)
        for loss in (False, True)
    ],
    *[
        (4, {"tp": 2, "zero": zero, "sequence_parallel": sequence, "loss_parallel": True})
        for zero in (0, 1, 2, 3)
        for sequence in (False, True)
    ],
    (6, {"tp": 2, "zero": 3, "sequence_parallel": True}),
    (8, {"tp": 2, "zero": 2, "dp_replicate": 2, "sequence_parallel": True, "loss_parallel": True}),
    (8, {"tp": 4, "zero": 3, "sequence_parallel": True, "loss_parallel": True}),
    (8, {"tp": 4, "zero": 1, "dp_replicate": 2}),
]


def _name(case: tuple[int, dict[str, Any]]) -> str:
    world, layout = case
    short = {"sequence_parallel": "sp", "loss_parallel": "lp", "dp_replicate": "rep"}
    parts = [
        f"{short.get(key, key)}{'' if value is True else value}" for key, value in layout.items() if value is not False
    ]
    return "-".join([f"world{world}", *parts])


@pytest.mark.parametrize("case", LAYOUTS, ids=_name)
def test_layout_equals_one_process(pool: Pool, case: tuple[int, dict[str, Any]]) -> None:
    # Microbatch count and optimizer go round with the case, so that each meets every axis without a full product.
    world, layout = case
    index = LAYOUTS.index(case)
    config = make_config(
        data=_data(layout, world, MICROBATCHES[index % 3]), optimizer=("sgd", "adamw")[index % 2], **layout
    )
    expected = reference(pool, config)
    traces = pool.run(world, TRAIN, config)
    error, where = worst_error(expected, merged(traces))
    print(f"{_name(case)}: worst relative error {error:.1e} ({where})")
    assert error < 1e-9, where
    assert traces[0].tokens == expected.tokens
    assert merged(traces).initial == expected.initial
    assert samples_read(config, traces) == expected.samples
    assert disagreeing_replicas(traces) == []
