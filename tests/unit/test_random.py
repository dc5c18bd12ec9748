"""Random numbers that are a function of what they are for: Philox, initial weights, dropout."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.decoder import Decoder
from models.dropout import Dropout, DropoutKey
from models.initialise import initialise
from models.random import fill_normal, key_of, philox, uniform
from tests.small import SMALL, random_decoder, random_tokens

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN, ids=["zeros", "ones", "pi"])
def test_given_a_known_vector_when_philox_runs_then_the_published_words_come_out(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = philox(tuple(torch.tensor(word) for word in counter), key[0] | key[1] << 32)
    assert [int(word) for word in words] == expected


def test_given_the_extreme_words_when_made_uniform_then_they_stay_inside_the_open_interval() -> None:
    low, high = uniform(torch.tensor([0, 0xFFFFFFFF])).tolist()
    assert 0.0 < low < 1e-9
    assert 1.0 - 1e-9 < high < 1.0


def test_given_parts_of_other_types_or_splits_when_keyed_then_keys_differ() -> None:
    assert len({key_of(1, "a"), key_of("1", "a"), key_of("1a"), key_of(1, "a", ""), key_of(2, "a")}) == 5


@pytest.mark.parametrize("shape", [(1000,), (37, 41), (5, 7, 11)])
def test_given_a_block_of_a_tensor_when_filled_then_it_holds_what_the_whole_has_there(shape: tuple[int, ...]) -> None:
    whole = torch.empty(shape, dtype=torch.float64)
    fill_normal(whole, 3, "w", 0.02)
    offset = tuple(size // 3 for size in shape)
    inside = tuple(slice(start, size - 1) for start, size in zip(offset, shape, strict=True))
    block = torch.empty_like(whole[inside])
    fill_normal(block, 3, "w", 0.02, shape, offset)
    assert torch.equal(block, whole[inside])


def test_given_more_elements_than_a_chunk_when_filled_in_rows_then_the_rows_make_the_whole() -> None:
    whole = torch.empty(300, 500)
    fill_normal(whole, 0, "w", 1.0)
    rows = torch.empty(300, 500)
    for row in range(300):
        fill_normal(rows[row : row + 1], 0, "w", 1.0, (300, 500), (row, 0))
    assert torch.equal(rows, whole)
    assert whole.unique().numel() > 149_000  # float32 has a few ties, a repeated chunk would have a third


def test_given_another_seed_or_name_when_filled_then_nothing_is_shared() -> None:
    tensors = []
    for seed, name in ((0, "a"), (1, "a"), (0, "b")):
        tensors.append(torch.empty(1000, dtype=torch.float64))
        fill_normal(tensors[-1], seed, name, 1.0)
    again = torch.empty(1000, dtype=torch.float64)
    torch.manual_seed(99)
    fill_normal(again, 0, "a", 1.0)
    assert torch.equal(again, tensors[0])
    correlations = torch.corrcoef(torch.stack(tensors)) - torch.eye(3)
    assert correlations.abs().max() < 5 / math.sqrt(1000)


def test_given_many_values_when_measured_then_they_are_normal() -> None:
    count, std = 200_000, 0.02
    values = torch.empty(count, dtype=torch.float64)
    fill_normal(values, 5, "moments", std)
    values = values.sort().values / std
    moments = [float((values**power).mean()) for power in (1, 2, 3, 4)]
    # Standard errors of the moments of a normal sample: sqrt(var(x^p) / n), with var 1, 2, 15, 96.
    for moment, expected, variance in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(moment - expected) < 5 * math.sqrt(variance / count)
    ideal = torch.special.ndtr(values)
    assert (ideal - (torch.arange(count) + 0.5) / count).abs().max() < 2 / math.sqrt(count)  # Kolmogorov, p < 0.001
    assert values.abs().max() > 4


class _Reversed(nn.Module):
    """A decoder that names its parameters in the opposite order."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Parameter]]:
        yield from reversed(list(self.decoder.named_parameters()))


def test_given_another_order_or_depth_when_initialised_then_a_parameter_depends_on_seed_and_name_alone() -> None:
    model = replace(SMALL, attention_bias=True, qk_norm=True)
    torch.manual_seed(1)
    first = Decoder(model)
    initialise(first, model, seed=7)
    torch.manual_seed(2)
    second = Decoder(model)
    initialise(_Reversed(second), model, seed=7)
    deeper = Decoder(replace(model, num_hidden_layers=3))
    initialise(deeper, deeper.config, seed=7)
    other = Decoder(model)
    initialise(other, model, seed=8)
    deep = dict(deeper.named_parameters())
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        constant = name.endswith(("norm.weight", ".bias"))
        assert torch.equal(a, c) == constant, name
        if not name.endswith(("o_proj.weight", "down_proj.weight")):  # their spread depends on the depth
            assert torch.equal(a, deep[name]), name


def test_given_a_decoder_when_initialised_then_norms_are_one_biases_zero_and_residual_projections_smaller() -> None:
    model = replace(SMALL, attention_bias=True, mlp_bias=True, num_hidden_layers=8, initializer_range=0.05)
    decoder = random_decoder(model)
    initialise(decoder, model, seed=0)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.all(parameter == 1), name
        elif name.endswith(".bias"):
            assert torch.all(parameter == 0), name
        else:
            expected = 0.05 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.1), name


def _key(sample: list[int], position: range, seed: int = 0, step: int = 0) -> DropoutKey:
    shape = (len(sample), len(position))
    samples = torch.tensor(sample).unsqueeze(-1).expand(shape)
    return DropoutKey(seed, step, samples, torch.tensor(position).expand(shape))


def test_given_a_split_batch_or_sequence_when_dropped_then_a_token_has_the_mask_of_the_whole() -> None:
    whole = Dropout(0.3, "here")(torch.ones(4, 16, 30), _key([0, 1, 2, 3], range(16)))
    alone = Dropout(0.3, "here")(torch.ones(1, 16, 30), _key([2], range(16)))
    later = Dropout(0.3, "here")(torch.ones(4, 8, 30), _key([0, 1, 2, 3], range(8, 16)))
    assert torch.equal(alone[0], whole[2])
    assert torch.equal(later, whole[:, 8:])


def test_given_another_seed_step_place_sample_position_or_channel_when_dropped_then_masks_are_independent() -> None:
    ones, samples, positions = torch.ones(2, 2, 4000), [0, 1], range(2)
    base = Dropout(0.5, "a")(ones, _key(samples, positions))
    variants = [
        Dropout(0.5, "a")(ones, _key(samples, positions, seed=1))[0, 0],
        Dropout(0.5, "a")(ones, _key(samples, positions, step=1))[0, 0],
        Dropout(0.5, "b")(ones, _key(samples, positions))[0, 0],
        base[1, 0],
        base[0, 1],
        base[0, 0].roll(1),
    ]
    masks = torch.stack([base[0, 0], *variants]) > 0
    agreement = torch.stack([(masks[0] == mask).double().mean() for mask in masks[1:]])
    assert (agreement - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_given_a_probability_when_dropped_then_that_share_is_zero_and_the_rest_keeps_the_mean(
    probability: float,
) -> None:
    dropped = Dropout(probability, "here")(torch.ones(8, 64, 203), _key(list(range(8)), range(64)))
    keep, count = 1 - probability, dropped.numel()
    tolerance = 5 * math.sqrt(keep * probability / count)
    assert float((dropped != 0).double().mean()) == pytest.approx(keep, abs=tolerance)
    assert torch.allclose(dropped[dropped != 0], torch.tensor(1 / keep))


def test_given_no_key_when_a_decoder_with_dropout_runs_then_nothing_is_dropped() -> None:
    tokens = random_tokens(SMALL, 2, 16)
    plain, dropping = random_decoder(SMALL), random_decoder(replace(SMALL, dropout=0.9))
    assert torch.equal(plain(tokens), dropping(tokens))
    assert not torch.equal(plain(tokens), dropping(tokens, dropout_key=_key([0, 1], range(16))))
