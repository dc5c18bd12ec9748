"""Who sees whom: causal, within a window, within a document, by brute force; and documents packed together."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.attention import attend_alone
from models.config import RopeConfig, RopeScaling
from models.mask import AttentionMask
from models.rotary import rotary_tables
from tests.small import SMALL, random_decoder, random_tokens

LENGTH = 9
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])


def _by_hand(query: Tensor, key: Tensor, value: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
    """Softmax over exactly the keys that the rules allow, one query at a time."""
    batch, heads, queries, size = query.shape
    keys, share = key.shape[2], heads // key.shape[1]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for q in range(queries):
                at = keys - queries + q
                seen = [
                    k
                    for k in range(at + 1)
                    if (window is None or at - k < window)
                    and (documents is None or documents[b, k] == documents[b, at])
                ]
                scores = key[b, h // share, seen] @ query[b, h, q] / math.sqrt(size)
                out[b, h, q] = scores.softmax(-1) @ value[b, h // share, seen]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("queries", [LENGTH, 4, 1])
def test_given_a_mask_when_attended_then_exactly_the_allowed_keys_are_seen(
    window: int | None, documents: Tensor | None, queries: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 8, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, LENGTH, 8, generator=draw, dtype=torch.float64)
    mask = AttentionMask.of_sequence(queries, LENGTH, window, documents)
    expected = _by_hand(query, key, value, window, documents)
    torch.testing.assert_close(attend_alone(query, key, value, mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_given_packed_documents_when_masked_then_logits_are_those_of_each_document_alone(window: int | None) -> None:
    decoder = random_decoder(replace(SMALL, sliding_window=window), torch.float64)
    tokens = random_tokens(SMALL, 1, 21)
    lengths = [8, 1, 12]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    with torch.no_grad():
        packed = decoder(tokens, positions, ids)
        alone = torch.cat([decoder(part) for part in tokens.split(lengths, dim=1)], dim=1)
        unmasked = decoder(tokens, positions)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)
    assert (unmasked - alone).abs().max() > 1e-3


def test_given_positions_shifted_together_when_attended_then_only_differences_matter() -> None:
    decoder = random_decoder(SMALL, torch.float64)
    tokens, positions = random_tokens(SMALL, 1, 12), torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(decoder(tokens, positions), decoder(tokens, positions + 1000), rtol=1e-9, atol=1e-9)


def test_given_a_far_position_when_rotated_then_angles_keep_float64_accuracy() -> None:
    position = 131_071
    cosine, sine = rotary_tables(RopeConfig(theta=500000.0), 4, torch.tensor([[position]]), torch.float32)
    angles = [position, position * 500000.0**-0.5]
    assert cosine[0, 0, 0, :2].tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=1e-7)
    assert sine[0, 0, 0, 2:].tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=1e-7)


def test_given_linear_scaling_when_rotated_then_position_n_turns_as_n_over_factor() -> None:
    scaled = RopeConfig(scaling=RopeScaling.linear, factor=4.0)
    there = rotary_tables(scaled, 16, torch.tensor([[20]]), torch.float64)
    here = rotary_tables(RopeConfig(), 16, torch.tensor([[5]]), torch.float64)
    torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-12)
