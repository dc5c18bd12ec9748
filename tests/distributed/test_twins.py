"""The twin of every large recipe trains on gloo with the recipe's axes, and is the run of one process."""

from typing import Any

import pytest

from recipes.locks import first_losses, is_measured, loss_differences, read_lock, recipes
from tests.distributed.cases import merged, reference, worst_error
from tests.distributed.pool import Pool
from tests.small import config

TWINS = [name for name in recipes() if name.startswith("tiny_") and name != "tiny_moe"]
SHORT = (
    *("data=synthetic", "data.seq_len=32", "data.global_batch=8", "data.validation_sequences=4", "precision=fp64"),
    *("model.hidden_size=64", "model.head_dim=16", "optimizer=sgd", "callbacks=none", "logger=none"),
)


def test_every_large_recipe_has_a_twin() -> None:
    large = [name for name in recipes() if not name.startswith("tiny")]
    assert sorted(TWINS) == sorted(f"tiny_{name}" for name in large)


def but_long(names: list[str], *short: str) -> list[Any]:
    """Names as parameters, of which all but some are for the long tests."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", but_long(TWINS, "tiny_mixtral_8x7b"))
def test_given_a_twin_when_trained_two_steps_then_it_is_the_run_of_one_process(pool: Pool, name: str) -> None:
    made = config(f"recipe={name}", *SHORT)
    expected = reference(pool, made)
    traces = pool.run(made.recipe.devices or 1, "tests.distributed.cases:train", made, 3)
    error, where = worst_error(expected, merged(traces))
    assert error < 1e-9, where


@pytest.mark.parametrize("name", [name for name in recipes() if is_measured(name)])
def test_given_a_locks_losses_when_compared_with_others_then_a_thousandth_is_a_difference(name: str) -> None:
    losses = read_lock(name)["measured"]["first_losses"]
    assert len(losses) == 3
    assert loss_differences(name, losses) == []
    assert loss_differences(name, [losses[0], losses[1], losses[2] * 1.001]) != []


@pytest.mark.parametrize("name", but_long([name for name in recipes() if is_measured(name)], "tiny"))
def test_given_a_recipe_that_runs_anywhere_when_begun_then_its_losses_are_those_of_its_lock(name: str) -> None:
    assert loss_differences(name, first_losses(name)) == []
