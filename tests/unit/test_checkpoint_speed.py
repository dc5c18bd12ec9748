"""What a save costs the training loop, and how fast a run of 100 million parameters is back."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.counts import parameter_count
from models.decoder import Decoder
from parallel.checkpoint import load
from parallel.retention import checkpoint_name, find
from parallel.saver import Saver
from tests.small import SMALL

HUNDRED_MILLION = replace(
    SMALL,
    vocab_size=16_000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_given_a_hundred_million_parameters_then_a_save_stalls_under_a_tenth_and_loading_takes_under_fifteen_seconds(
    tmp_path: Path,
) -> None:
    assert 95e6 < parameter_count(HUNDRED_MILLION) < 115e6
    model = Decoder(HUNDRED_MILLION)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    saver, stalls, totals = Saver(), [], []
    for step in range(1, 4):
        began = time.perf_counter()
        saver.start(tmp_path / checkpoint_name(step), model, [optimizer], {}, {"step": step})
        stalls.append(time.perf_counter() - began)
        saver.wait()  # a synchronous save waits here
        totals.append(time.perf_counter() - began)
    # The first save makes the buffers that later ones copy into.
    ratios = [stall / total for stall, total in zip(stalls, totals, strict=True)][1:]
    began = time.perf_counter()
    load(find(tmp_path / checkpoint_name(3), "ckpt"), model, [optimizer])
    resumed = time.perf_counter() - began
    print(f"stalls {stalls}, whole saves {totals}, ratios {ratios}; verified and loaded in {resumed:.1f} s")
    assert min(ratios) < 0.1
    assert resumed < 15.0
