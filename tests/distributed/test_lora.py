"""Adapters under every layout train as they do in one process; the weights beside them stand still."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models import initialise
from models.config import LORA_TARGETS, LoRAConfig
from models.random import fill_normal
from parallel.config import Config
from tests.distributed.cases import (
    Trace,
    disagreeing_replicas,
    make_config,
    merged,
    one_process,
    train,
    worst_error,
)
from tests.distributed.pool import Pool

SP = {"sequence_parallel": True, "loss_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2} | SP),
    "tp4, two key/value heads": (4, {"tp": 4, "model": {"num_key_value_heads": 2}} | SP),
    "zero3": (2, {"zero": 3}),
    "zero0": (3, {"zero": 0, "data": {"global_batch": 12}}),
    "tp2 zero2": (4, {"tp": 2, "zero": 2} | SP),
    "pp2": (2, {"pp": 2}),
    "pp2, tied": (2, {"pp": 2, "model": {"tie_word_embeddings": True}}),
    "zbv": (2, {"pp": 2, "pp_schedule": "zbv_zero_bubble", "virtual_stages": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2} | SP),
}


def _config(layout: dict[str, Any]) -> Config:
    layout = dict(layout)
    model = {"num_hidden_layers": 4, "lora": LoRAConfig(4, 8.0, list(LORA_TARGETS))} | layout.pop("model", {})
    return make_config(model, **layout)


def trained(config: Config) -> Trace:
    """A run whose B does not begin at 0: else A would have no gradient in the first step."""
    right = initialise.initialise

    def begin(model: Any, config: Any, seed: int, fill: Any = fill_normal) -> None:
        right(model, config, seed, fill)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B.weight"):
                    fill(parameter, seed, name, 0.05)

    with patch("parallel.step.initialise", begin):
        return train(config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_given_adapters_when_trained_under_a_layout_then_every_gradient_is_that_of_one_process(
    pool: Pool, name: str
) -> None:
    world, layout = LAYOUTS[name]
    config = _config(layout)
    expected: Trace = pool.run(1, "tests.distributed.test_lora:trained", one_process(config))[0]
    traces: list[Trace] = pool.run(world, "tests.distributed.test_lora:trained", config)
    found = merged(traces)
    assert len(expected.gradients[0]) == 4 * 7 * 2
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.gradients[0].values())
    error, where = worst_error(expected, found)
    print(f"{name}: {error:.1e} ({where})")
    assert error < 1e-9, where
    assert disagreeing_replicas(traces) == []


def test_given_adapters_when_trained_then_the_weights_beside_them_are_those_of_the_start(pool: Pool) -> None:
    config = _config(LAYOUTS["tp2 zero2"][1])
    before: dict[str, Tensor] = pool.run(1, "tests.distributed.cases:train", one_process(config), 0)[0].weights
    after = pool.run(4, "tests.distributed.cases:train", config)[0].weights
    plain = replace(one_process(config), model=replace(config.model, lora=LoRAConfig()))
    without: dict[str, Tensor] = pool.run(1, "tests.distributed.cases:train", plain, 0)[0].weights
    for name, weight in without.items():
        assert torch.equal(weight, before[name])
        assert torch.equal(weight, after[name]), name
    adapters = before.keys() - without.keys()
    assert all((before[name] != after[name]).any() for name in adapters if name.endswith("lora_B.weight"))
