"""The checks for a GPU, as far as a CPU has them: they run, and know every preset as Hydra composes it."""

import os
import subprocess
import sys

import pytest
import torch

from models.decoder import DecoderLayer
from tests.gpu.smoke import CONF, check_attention, check_experts, check_layer, check_loss, check_rectangle, load_model
from tests.small import config


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_given_a_preset_when_loaded_without_hydra_then_it_is_what_hydra_composes(name: str) -> None:
    model = load_model(name)
    assert model == config(f"model={name}").model
    with torch.device("meta"):
        DecoderLayer(model, 0)


def test_given_a_cpu_when_kernels_are_checked_then_they_are_within_their_limits() -> None:
    check_attention(torch.device("cpu"))
    check_rectangle(torch.device("cpu"))
    check_loss(torch.device("cpu"))
    check_experts(torch.device("cpu"))
    check_layer(load_model("tiny_moe"), torch.device("cpu"), 128)


@pytest.mark.long
def test_given_a_cpu_when_all_checks_run_then_they_pass() -> None:
    command = [sys.executable, "-m", "tests.gpu.smoke", "cpu"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training: last loss over first" in done.stdout
