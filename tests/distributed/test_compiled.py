"""S-22: compiled layers are the same run with every schedule and mask that they are offered with; the rest is refused.

A fallback to layers that are not compiled would be the same run too: cases count what was compiled.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from models.generate import generate
from parallel.compiled import compile_layers
from parallel.config import Config, PipelineSchedule
from parallel.plan.validate import Severity, validate
from tests.distributed.cases import Trace, make_config, merged, reference, train, worst_error
from tests.distributed.pool import Pool
from tests.distributed.thinned import thinned
from tests.small import SMALL, random_decoder, random_tokens

MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {"document_mask": False}),
    "window": ({"sliding_window": 5}, {"document_mask": False}),
    "documents": ({}, {}),
    "window+documents": ({"sliding_window": 5}, {}),
}
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]
SPLIT = [("interleaved_zero_bubble", 2), ("zbv_zero_bubble", 2), ("dualpipe_v", 2)]
SP = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}


def compiled(mask: str, **chosen: Any) -> Config:
    model, data = MASKS[mask]
    config = make_config(
        {"num_hidden_layers": 4} | model | chosen.pop("model", {}), data | {"micro_batch": 1}, **chosen
    )
    return replace(config, trainer=replace(config.trainer, compile=True))


def train_compiled(config: Config, steps: int = 3) -> tuple[Trace, int]:
    """A run, and how many graphs were compiled in it."""
    torch._dynamo.reset()
    counters.clear()
    return train(config, steps), counters["stats"]["unique_graphs"]


def check(pool: Pool, world: int, config: Config) -> None:
    assert [problem for problem in validate(config, world) if problem.severity == Severity.error] == []
    expected = reference(pool, config)
    results = pool.run(world, "tests.distributed.test_compiled:train_compiled", config)
    traces = merged([trace for trace, _ in results])
    error, where = worst_error(expected, traces)
    graphs = [count for _, count in results]
    print(f"{error:.1e} ({where}), graphs {graphs}")
    assert error < 1e-9, where
    assert min(graphs) > 0
    assert traces.weights.keys() == expected.weights.keys()  # S-33


SOME: list[tuple[int, str, dict[str, Any]]] = [
    (2, "window+documents", {"recompute": "full"} | SP),
    (1, "causal", {}),
    (4, "documents", {"pp": 2, "pp_schedule": PipelineSchedule["interleaved_1f1b"], "virtual_stages": 2, "zero": 3}),
    (2, "causal", {"cp": 2, "model": {"dropout": 0.1}}),
]


@pytest.mark.parametrize(("world", "mask", "chosen"), thinned(SOME, 4), ids=str)
def test_compiled_layers_are_the_same_run(pool: Pool, world: int, mask: str, chosen: dict[str, Any]) -> None:
    check(pool, world, compiled(mask, **chosen))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "schedule", "recompute", "split"),
    list(product(MASKS, [(None, 1), *SCHEDULES], ("none", "full"), ({}, SP, {"zero": 3}))),
    ids=str,
)
def test_every_mask_schedule_and_recompute_mode_is_the_same_run(
    pool: Pool, mask: str, schedule: tuple[str | None, int], recompute: str, split: dict[str, Any]
) -> None:
    name, virtual = schedule
    chosen = split | {"recompute": recompute, "virtual_stages": virtual}
    if name is not None:
        chosen |= {"pp": 2, "pp_schedule": PipelineSchedule[name]}
    world = (2 if name else 1) * (2 if split else 1)
    check(pool, world, compiled(mask, **chosen))


def test_given_compiled_layers_when_text_is_generated_then_no_length_of_it_is_compiled() -> None:
    plain, layered = random_decoder(SMALL), random_decoder(SMALL)
    prompt = random_tokens(SMALL, 1, 4)
    expected = [int(token) for token in generate(plain, prompt, 50)]
    torch._dynamo.reset()
    counters.clear()
    compile_layers(layered, torch.device("cpu"), plain=True)
    assert [int(token) for token in generate(layered, prompt, 50)] == expected
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("schedule", SPLIT, ids=str)
def test_given_a_split_backward_pass_when_compiled_then_it_is_refused(schedule: tuple[str, int]) -> None:
    name, virtual = schedule
    config = compiled("causal", pp=2, pp_schedule=PipelineSchedule[name], virtual_stages=virtual)
    (problem,) = [problem for problem in validate(config, 2) if problem.severity == Severity.error]
    assert f"trainer.compile=true with parallelism.pp_schedule={name}" in problem.message
    assert {"trainer.compile": False} in problem.repairs


@pytest.mark.parametrize("recompute", ["selective:attention", "selective:mlp", "selective:ops"])
def test_given_recomputed_parts_of_layers_when_compiled_then_it_is_refused(recompute: str) -> None:
    (problem,) = [p for p in validate(compiled("causal", recompute=recompute), 1) if p.severity == Severity.error]
    assert {"parallelism.recompute": "none"} in problem.repairs
