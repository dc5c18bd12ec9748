"""bfloat16 with sums in float32: splitting a batch over ranks, or layers over stages, rounds nothing that was not."""

from typing import Any

import pytest

from tests.distributed.cases import make_config, merged, relative
from tests.distributed.pool import Pool

TRAIN = "tests.distributed.cases:train"
EIGHT = {"micro_batch": 1, "global_batch": 8}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    *[(4, {"zero": zero}) for zero in range(4)],
    (4, {"zero": 2, "dp_replicate": 2}),
    (2, {"pp": 2}),
    (4, {"pp": 2, "zero": 3}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=[str(layout) for _, layout in LAYOUTS])
def test_every_microbatch_gives_the_same_numbers_and_they_are_summed_in_float32(
    pool: Pool, world: int, layout: dict[str, Any]
) -> None:
    whole = pool.run(1, TRAIN, make_config(data=EIGHT, precision="bf16"))[0].gradients[0]
    split = merged(pool.run(world, TRAIN, make_config(data=EIGHT, precision="bf16", **layout))).gradients[0]
    assert whole.keys() == split.keys()
    worst = max((relative(whole[name], split[name]), name) for name in whole)
    assert worst[0] < 1e-6, worst
