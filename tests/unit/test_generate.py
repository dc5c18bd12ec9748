"""Generation with a key/value cache is generation without one, and refuses what cannot be."""

from dataclasses import replace

import pytest
import torch

from models.config import ModelConfig, RopeConfig, RopeScaling
from models.decoder import Decoder
from models.errors import ConfigError
from models.generate import choose, generate
from tests.small import SMALL, random_decoder, random_tokens

MODELS = {
    "causal": SMALL,
    "window": replace(SMALL, sliding_window=5),
    "qk_norm and yarn": replace(
        SMALL,
        qk_norm=True,
        rope=RopeConfig(scaling=RopeScaling.yarn, factor=4.0, original_max_position_embeddings=16),
    ),
}


def _all(decoder: Decoder, prompt: torch.Tensor, count: int, **settings: float | int | None) -> torch.Tensor:
    return torch.stack(list(generate(decoder, prompt, count, **settings)), dim=1)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_given_a_cache_when_generating_greedily_then_tokens_are_those_of_recomputation(model: ModelConfig) -> None:
    decoder = random_decoder(model, torch.float64)
    tokens = prompt = random_tokens(model, 2, 6)
    for _ in range(20):
        tokens = torch.cat((tokens, decoder(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    generated = _all(decoder, prompt, 20, temperature=0.0)
    assert torch.equal(generated, tokens[:, 6:])
    assert generated.unique().numel() > 5


def test_given_a_seed_when_sampling_then_it_repeats_and_others_differ() -> None:
    decoder, prompt = random_decoder(SMALL), random_tokens(SMALL, 1, 4)
    first = _all(decoder, prompt, 30, seed=1)
    assert torch.equal(first, _all(decoder, prompt, 30, seed=1))
    assert not torch.equal(first, _all(decoder, prompt, 30, seed=2))


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_given_settings_that_leave_one_token_when_sampling_then_it_is_the_likeliest(settings: dict[str, float]) -> None:
    decoder, prompt = random_decoder(SMALL), random_tokens(SMALL, 2, 4)
    assert torch.equal(_all(decoder, prompt, 20, **settings), _all(decoder, prompt, 20, temperature=0.0))


@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"),
    [
        (None, None, {0, 1, 2, 3}),
        (2, None, {0, 1}),
        (None, 0.75, {0, 1}),
        (None, 0.85, {0, 1, 2}),
        (100, 1.0, {0, 1, 2, 3}),
    ],
)
def test_given_limits_when_drawing_then_only_the_allowed_tokens_come_and_in_proportion(
    top_k: int | None, top_p: float | None, allowed: set[int]
) -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = chances.log().expand(20_000, 4)
    drawn = choose(logits, 1.0, top_k, top_p, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == allowed
    kept = chances[sorted(allowed)]
    shares = drawn.bincount(minlength=4)[sorted(allowed)] / len(drawn)
    torch.testing.assert_close(shares, kept / kept.sum(), rtol=0, atol=0.02)


def test_given_a_prompt_and_length_that_fill_the_model_when_generating_then_it_works_and_one_more_is_refused() -> None:
    decoder, prompt = random_decoder(SMALL), random_tokens(SMALL, 1, 60)
    assert _all(decoder, prompt, 4).shape == (1, 4)
    with pytest.raises(ConfigError, match=r"60 prompt tokens \+ max_new_tokens=5 .*=64; write max_new_tokens=4 "):
        _all(decoder, prompt, 5)


def test_given_an_empty_prompt_when_generating_then_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt is empty"):
        _all(random_decoder(SMALL), torch.zeros(1, 0, dtype=torch.int64), 5)
