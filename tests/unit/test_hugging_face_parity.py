"""Our decoder computes what transformers computes from the same weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from models.config import ModelConfig, MoEConfig, RopeConfig, RopeScaling, RouterScore
from models.decoder import Decoder
from models.errors import ConfigError
from models.hugging_face import architecture, config_dict, published_names
from tests.small import SMALL, random_decoder, random_tokens

_LONG = {"original_max_position_embeddings": 16, "factor": 4.0}
FAMILIES = {
    "llama": (SMALL, "llama"),
    "llama tied, biases everywhere": (
        replace(SMALL, tie_word_embeddings=True, attention_bias=True, attention_output_bias=True, mlp_bias=True),
        "llama",
    ),
    "llama rope linear": (replace(SMALL, rope=RopeConfig(scaling=RopeScaling.linear, factor=4.0)), "llama"),
    "llama rope llama3": (
        replace(SMALL, rope=RopeConfig(theta=500.0, scaling=RopeScaling.llama3, low_freq_factor=1.0, **_LONG)),
        "llama",
    ),
    "llama rope yarn": (replace(SMALL, rope=RopeConfig(scaling=RopeScaling.yarn, **_LONG)), "llama"),
    "llama rope yarn with its own factor and betas": (
        replace(
            SMALL,
            rope=RopeConfig(scaling=RopeScaling.yarn, beta_fast=8.0, beta_slow=2.0, attention_factor=1.7, **_LONG),
        ),
        "llama",
    ),
    "mistral": (replace(SMALL, sliding_window=8), "mistral"),
    "mistral multi-query, wide heads": (
        replace(SMALL, sliding_window=1, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-3),
        "mistral",
    ),
    "qwen2": (replace(SMALL, attention_bias=True, tie_word_embeddings=True), "qwen2"),
    "qwen2 with a window": (replace(SMALL, attention_bias=True, sliding_window=8), "qwen2"),
    "qwen3": (replace(SMALL, qk_norm=True), "qwen3"),
    "qwen3 with biases and a window": (
        replace(SMALL, qk_norm=True, attention_bias=True, attention_output_bias=True, sliding_window=8),
        "qwen3",
    ),
}


@pytest.mark.parametrize(("config", "family"), FAMILIES.values(), ids=FAMILIES)
def test_given_the_same_weights_when_run_then_logits_equal_those_of_transformers(
    config: ModelConfig, family: str
) -> None:
    ours = random_decoder(config)
    described = config_dict(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described), attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())  # strict: the names are the same, both ways
    tokens = random_tokens(config, 2, 48)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert described["model_type"] == family
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)


EXPERTS = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=40)
MIXTURES = {
    "mixtral": (replace(SMALL, moe=EXPERTS), "mixtral"),
    "mixtral, one expert, a window": (
        replace(SMALL, moe=replace(EXPERTS, num_experts_per_tok=1), sliding_window=8),
        "mixtral",
    ),
    "qwen3_moe": (replace(SMALL, moe=replace(EXPERTS, num_experts_per_tok=3), qk_norm=True), "qwen3_moe"),
    "qwen3_moe, weights as they are, a dense layer": (
        replace(SMALL, moe=replace(EXPERTS, norm_topk_prob=False, dense_layers=[0]), qk_norm=True),
        "qwen3_moe",
    ),
}


@pytest.mark.parametrize(("config", "family"), MIXTURES.values(), ids=MIXTURES)
def test_given_a_mixture_when_published_and_loaded_then_logits_equal_those_of_transformers(
    config: ModelConfig, family: str, tmp_path: Path
) -> None:
    ours = random_decoder(config)
    tensors = {}
    for name, tensor in ours.state_dict().items():
        names = published_names(config, name)
        tensors |= dict(zip(names, tensor.unbind() if len(names) > 1 else [tensor], strict=True))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(config_dict(config)))
    theirs, said = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert config_dict(config)["model_type"] == family
    tokens = random_tokens(config, 2, 48)
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "mix",
    [
        {"moe": replace(EXPERTS, score=RouterScore.sigmoid)},
        {"moe": replace(EXPERTS, shared_intermediate_size=8)},
        {"moe": replace(EXPERTS, norm_topk_prob=False)},
        {"moe": replace(EXPERTS, dense_layers=[0])},
        {"moe": EXPERTS, "attention_bias": True},
    ],
)
def test_given_a_mixture_that_no_family_has_when_named_then_it_is_refused(mix: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"Hugging Face|Mixtral"):
        architecture(replace(SMALL, **mix))


def test_given_rope_scaling_when_compared_with_none_then_logits_differ() -> None:
    # Otherwise the parity above could not tell the scalings from each other.
    tokens = random_tokens(SMALL, 1, 48)
    ropes = [RopeConfig(), *(FAMILIES[f"llama rope {name}"][0].rope for name in ("linear", "llama3", "yarn"))]
    with torch.no_grad():
        logits = [random_decoder(replace(SMALL, rope=rope))(tokens) for rope in ropes]
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize(
    "mix",
    [
        {"qk_norm": True, "attention_bias": True},
        {"qk_norm": True, "mlp_bias": True},
        {"sliding_window": 8, "mlp_bias": True},
        {"attention_output_bias": True},
    ],
)
def test_given_a_mix_that_no_family_has_when_named_then_it_is_refused(mix: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="No Hugging Face family"):
        architecture(replace(SMALL, **mix))


def test_given_tied_embeddings_when_built_then_both_layers_are_one_parameter() -> None:
    decoder = Decoder(replace(SMALL, tie_word_embeddings=True))
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
