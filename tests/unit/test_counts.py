"""Parameters and floating-point operations by formula: published numbers, numbers by hand, and the built module."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig, MoEConfig
from models.counts import (
    active_parameter_count,
    attended_pairs,
    forward_flops_per_token,
    parameter_count,
    training_flops_per_token,
)
from models.decoder import Decoder
from tests.small import SMALL, config, options, random_tokens

EXPERTS = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=40)
PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_8b_128k": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_32k": 7_241_732_096,
    # Mixtures: half the bytes that the index of the published bfloat16 checkpoint gives as its total_size.
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    # By hand: 4 x (4 x 256^2 + 8 x 256 + 8 x 3 x 256 x 352 + 2 x 256) + 2 x 260 x 256 + 256.
    "tiny_moe": 9_842_944,
    # By hand: 96 x (4 x 12288^2 + 3 x 12288 x 32768 + 2 x 12288) + 50257 x 12288 + 12288; the paper says 174,600 M.
    "gpt3_175b": 174_566_105_088,
    # By hand: 4 x (4 x 256^2 + 3 x 256 x 704 + 2 x 256) + 2 x 260 x 256 + 256, and 4 x 2 x 256 x 128 fewer.
    "tiny": 3_346_688,
    "tiny_gqa": 3_084_544,
}


def test_given_the_presets_when_listed_then_each_has_a_known_parameter_count() -> None:
    assert set(options("model")) == set(PUBLISHED)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_given_a_preset_when_counted_then_formula_and_module_have_the_published_number(preset: str) -> None:
    model = config(f"model={preset}").model
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in Decoder(model).parameters())
    assert parameter_count(model) == built == PUBLISHED[preset]


ACTIVE = {
    "mixtral_8x7b": 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336,  # 12.9 B, as its authors say
    "mixtral_8x22b": 140_620_634_112 - 56 * 6 * 3 * 6144 * 16384,  # 39 B
    "qwen3_30b_a3b": 30_532_122_624 - 48 * 120 * 3 * 2048 * 768,  # 3.3 B
    "llama2_7b": 6_738_415_616,
}


@pytest.mark.parametrize("preset", ACTIVE)
def test_given_a_mixture_when_counted_then_a_token_meets_the_experts_it_is_sent_to(preset: str) -> None:
    assert active_parameter_count(config(f"model={preset}").model) == ACTIVE[preset]


@pytest.mark.parametrize(
    "change",
    [
        {"moe": EXPERTS},
        {"moe": replace(EXPERTS, shared_intermediate_size=24, dense_layers=[1])},
        {"attention_bias": True},
        {"attention_output_bias": True},
        {"mlp_bias": True},
        {"qk_norm": True},
        {"tie_word_embeddings": True},
        {"head_dim": 32, "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_given_an_option_when_counted_then_the_formula_equals_the_module(change: dict[str, int]) -> None:
    model = replace(SMALL, **change)
    assert parameter_count(model) == sum(parameter.numel() for parameter in Decoder(model).parameters())


def test_given_llama2_7b_when_flops_are_counted_then_both_conventions_give_the_numbers_by_hand() -> None:
    model = config("model=llama2_7b").model
    # Weights in products: 32 x (4 x 4096^2 + 3 x 4096 x 11008) + 32000 x 4096 = 6,607,077,376, two operations each.
    # Scores and values, full: 32 x 4 x 4096 x 4096; causal: 32 x 4 x 4096 x 4097 / 2.
    assert forward_flops_per_token(model, 4096, causal=False) == 13_214_154_752 + 2_147_483_648
    assert forward_flops_per_token(model, 4096, causal=True) == 13_214_154_752 + 1_074_003_968
    assert training_flops_per_token(model, 4096) == 3 * (13_214_154_752 + 1_074_003_968)


@pytest.mark.parametrize(("window", "length"), [(None, 7), (3, 7), (7, 7), (9, 7), (1, 5)])
def test_given_a_window_when_pairs_are_counted_then_the_number_is_that_of_the_mask(
    window: int | None, length: int
) -> None:
    model = replace(SMALL, sliding_window=window)
    seen = sum(k <= q and q - k < (window or length) for q in range(length) for k in range(length))
    assert attended_pairs(model, length, causal=True) == seen
    assert attended_pairs(model, length, causal=False) == length * length


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        replace(SMALL, num_key_value_heads=4, head_dim=32, tie_word_embeddings=True),
        replace(SMALL, moe=replace(EXPERTS, shared_intermediate_size=24, dense_layers=[1])),
    ],
    ids=["gqa", "tied", "experts"],
)
def test_given_a_training_step_when_torch_counts_then_the_full_convention_is_what_it_counts(model: ModelConfig) -> None:
    tokens = random_tokens(model, 2, 32)
    decoder = Decoder(model)
    with sdpa_kernel(SDPBackend.MATH):  # plain products, which the counter knows
        with FlopCounterMode(display=False) as forward:
            decoder(tokens)
        with FlopCounterMode(display=False) as training:
            decoder(tokens, labels=tokens).backward()
    assert forward.get_total_flops() == tokens.numel() * forward_flops_per_token(model, 32, causal=False)
    assert training.get_total_flops() == tokens.numel() * training_flops_per_token(model, 32, causal=False)
