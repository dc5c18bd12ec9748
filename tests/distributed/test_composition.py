"""The table of what goes with what (recipes/composition.py): what it says works trains, and the rest is refused."""

from typing import Any

import pytest

from models.errors import ConfigError
from parallel.plan.problems import refuse
from recipes.composition import GRIDS, cell, cells
from recipes.docs import COMPOSITION
from tests.distributed.cases import disagreeing_replicas, merged, reference, worst_error
from tests.distributed.pool import Pool
from tests.distributed.thinned import thinned
from tests.small import config

CELLS = [(grid, row, column, [one, other]) for grid in GRIDS for row, column, one, other in cells(grid)]


@pytest.mark.parametrize(("grid", "row", "column", "changes"), thinned(CELLS, 40))
def test_a_cell_is_what_it_says(pool: Pool, grid: str, row: str, column: str, changes: list[dict[str, Any]]) -> None:
    made, world, problems = cell(config(*COMPOSITION), *changes)
    if problems:
        with pytest.raises(ConfigError) as refused:
            refuse(problems)
        for change in changes:
            assert any(f"{key.rpartition('.')[2]}=" in str(refused.value) for key in change)
        return
    compiled = "test_compiled:train_compiled" if made.trainer.compile else "cases:train"
    results = pool.run(world, f"tests.distributed.{compiled}", made, 2)
    traces = [result[0] if made.trainer.compile else result for result in results]
    error, where = worst_error(reference(pool, made, 2), merged(traces))
    assert error < 1e-9, where
    assert disagreeing_replicas(traces) == []
