"""A gradient that is not finite stops every rank before the update, and says which parameter of which rank."""

import pytest
import torch
import torch.distributed as dist

from parallel.gradients import NonFiniteGradientError, guard_update
from parallel.sharded import local
from parallel.step import clip, forward_backward
from recipes.optimizers import make_optimizer
from tests.distributed.cases import build, make_config
from tests.distributed.pool import Pool

POISONED = "model.layers.1.mlp.up_proj.weight"


def poisoned_step(config, value: float) -> tuple[str, bool]:
    """One step with a bad element in the last rank's gradient: the message, and whether any weight moved."""
    model, batches = build(config)
    optimizer = make_optimizer(config.optimizer, model.decoder)
    forward_backward(model, batches[0], 0)
    parameters = dict(model.decoder.named_parameters())
    if dist.get_rank() == dist.get_world_size() - 1:
        local(parameters[POISONED].grad)[0, 0] = value
    before = [local(parameter.detach()).clone() for parameter in parameters.values()]
    message = ""
    try:
        guard_update(model.decoder, optimizer, clip(model).norm)
        optimizer.step()
    except NonFiniteGradientError as error:
        message = str(error)
    after = [local(parameter.detach()) for parameter in parameters.values()]
    return message, not all(a.equal(b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", [{"zero": 3}, {"zero": 0}, {"tp": 2}], ids=str)
def test_every_rank_stops_and_names_parameter_and_rank(pool: Pool, layout: dict, value: float) -> None:
    config = make_config(**layout)
    for message, moved in pool.run(2, "tests.distributed.test_gradients:poisoned_step", config, value):
        assert f"rank 1: {POISONED}" in message
        assert not moved


def skipped_update(config) -> bool:
    """Whether weights stay as they are when the fused kernel is told of a bad gradient, as on a GPU."""
    model, batches = build(config)
    optimizer = make_optimizer(config.optimizer, model.decoder)
    forward_backward(model, batches[0], 0)
    before = [local(parameter.detach()).clone() for parameter in model.decoder.parameters()]
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    held = all(a.equal(local(p.detach())) for a, p in zip(before, model.decoder.parameters(), strict=True))
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    return held and not all(a.equal(local(p.detach())) for a, p in zip(before, model.decoder.parameters(), strict=True))


def test_the_fused_update_can_be_held_back_without_asking_the_device(pool: Pool) -> None:
    config = make_config(tp=2, zero=3, precision="fp32", optimizer="adamw")
    assert pool.run(4, "tests.distributed.test_gradients:skipped_update", config) == [True] * 4


def test_prefetching_and_offloading_change_no_gradient(pool: Pool) -> None:
    plain, ahead, offloaded = (
        pool.run(2, "tests.distributed.cases:train", make_config(zero=3, **settings))[0]
        for settings in ({}, {"prefetch": 2}, {"offload": True})
    )
    for other in (ahead, offloaded):
        for expected, found in zip(plain.gradients, other.gradients, strict=True):
            assert all(expected[name].equal(found[name]) for name in expected)
