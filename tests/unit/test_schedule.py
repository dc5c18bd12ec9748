"""The learning rate over the run at points worked out by hand, and which parameters decay."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from models.decoder import Decoder
from recipes.optimizers import learning_rate_factor, make_optimizer, make_schedule
from tests.small import SMALL, config

BASE = ("data=synthetic", "trainer.max_steps=110", "scheduler.warmup=10", "scheduler.minimum_ratio=0.1")
# The decay runs over 100 steps from step 10; its middle is step 60.
POINTS = {
    "constant": {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 60: 1.0, 110: 1.0, 500: 1.0},
    "linear": {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 85: 0.325, 110: 0.1, 500: 0.1},
    "cosine": {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 85: 0.1 + 0.45 * (1 - math.sqrt(0.5)), 110: 0.1, 500: 0.1},
    "wsd": {0: 0.1, 9: 1.0, 10: 1.0, 90: 1.0, 100: 0.55, 105: 0.325, 110: 0.1, 500: 0.1},
}


@pytest.mark.parametrize("shape", POINTS)
@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_given_a_shape_when_steps_or_tokens_pass_then_the_rate_is_that_by_hand(shape: str, unit: str) -> None:
    decay = ["scheduler.decay=20"] if shape == "wsd" else []
    made, per_step = config(*BASE, f"scheduler={shape}", *decay), 1
    if unit == "tokens":
        per_step = made.data.global_batch * made.data.seq_len
        scaled = replace(made.scheduler, unit="tokens", warmup=10 * per_step, decay=made.scheduler.decay * per_step)
        made = replace(made, scheduler=scaled)
    for step, factor in POINTS[shape].items():
        assert learning_rate_factor(made, step * per_step, per_step) == pytest.approx(factor, rel=1e-12), step


def test_given_a_total_when_it_is_not_the_runs_length_then_the_decay_ends_there() -> None:
    made = config(*BASE, "scheduler=linear", "scheduler.total=60")
    assert [learning_rate_factor(made, step) for step in (35, 60, 110)] == pytest.approx([0.55, 0.1, 0.1])


def test_given_no_warm_up_when_started_then_the_first_step_has_the_peak() -> None:
    assert learning_rate_factor(config(*BASE, "scheduler.warmup=0", "scheduler=cosine"), 0) == 1.0


def test_given_groups_of_other_peaks_when_scheduled_then_each_keeps_its_own() -> None:
    made = config(*BASE, "optimizer=muon", "optimizer.lr=0.02", "scheduler=linear")
    optimizer = make_optimizer(made.optimizer, Decoder(SMALL))
    schedule = make_schedule(made, optimizer)
    peaks = [0.02, *[3e-4] * (len(optimizer.param_groups) - 1)]
    assert schedule.get_last_lr() == pytest.approx([peak * 0.1 for peak in peaks])


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_given_an_optimizer_when_made_then_every_parameter_is_in_it_once_and_only_matrices_decay(
    name: str, embeddings: bool
) -> None:
    decoder = Decoder(replace(SMALL, attention_bias=True, qk_norm=True))
    settings = [f"optimizer={name}", "optimizer.weight_decay=0.1", f"optimizer.decay_embeddings={embeddings}"]
    optimizer = make_optimizer(config(*settings).optimizer, decoder)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay)
    for parameter_name, parameter in decoder.named_parameters():
        matrix = parameter.dim() == 2 and (embeddings or ".layers." in parameter_name)
        assert decay.pop(id(parameter)) == (0.1 if matrix else 0.0), parameter_name
    assert not decay


def test_given_muon_when_its_state_is_loaded_into_another_then_both_go_on_alike() -> None:
    made = config("optimizer=muon").optimizer

    def step(decoder: Decoder, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        decoder(torch.arange(24).view(2, 12), labels=torch.arange(1, 25).view(2, 12)).backward()
        optimizer.step()

    torch.manual_seed(0)
    first = Decoder(SMALL)
    one = make_optimizer(made, first)
    step(first, one)
    second = Decoder(SMALL)
    second.load_state_dict(first.state_dict())
    two = make_optimizer(made, second)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for decoder, optimizer in ((first, one), (second, two)):
        step(decoder, optimizer)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
