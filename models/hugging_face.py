"""Our configuration as a Hugging Face one, for parity tests and export. Parameter names are equal already."""

from typing import Any

from models.config import ModelConfig, RopeScaling
from models.errors import ConfigError


def architecture(config: ModelConfig) -> str:
    """The Hugging Face model type that computes what this configuration says: llama, mistral, qwen2 or qwen3.

    Raises ConfigError where no public family has this mix of options.
    """
    if config.qk_norm and not config.mlp_bias and config.attention_bias == config.attention_output_bias:
        return "qwen3"
    if config.qk_norm:
        raise ConfigError("No Hugging Face family has model.qk_norm=true with these biases (Qwen3: all four or none).")
    if config.attention_bias and not config.attention_output_bias and not config.mlp_bias:
        return "qwen2"
    if config.sliding_window is not None and not config.attention_bias and not config.mlp_bias:
        return "mistral"
    if config.sliding_window is None and config.attention_bias == config.attention_output_bias:
        return "llama"
    raise ConfigError(
        f"No Hugging Face family has attention_bias={config.attention_bias}, "
        f"attention_output_bias={config.attention_output_bias}, mlp_bias={config.mlp_bias} and "
        f"sliding_window={config.sliding_window} together."
    )


def config_dict(config: ModelConfig) -> dict[str, Any]:
    """The contents of Hugging Face's config.json for this decoder (transformers 5: rotary settings in one place)."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if config.rope.scaling != RopeScaling.none:
        rope |= {"rope_type": str(config.rope.scaling), "factor": config.rope.factor}
    if config.rope.scaling in (RopeScaling.llama3, RopeScaling.yarn):
        rope["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    if config.rope.scaling == RopeScaling.llama3:
        rope |= {"low_freq_factor": config.rope.low_freq_factor, "high_freq_factor": config.rope.high_freq_factor}
    if config.rope.scaling == RopeScaling.yarn:
        rope |= {"beta_fast": config.rope.beta_fast, "beta_slow": config.rope.beta_slow}
        if config.rope.attention_factor is not None:
            rope["attention_factor"] = config.rope.attention_factor
    family = architecture(config)
    result = {
        "model_type": family,
        "architectures": [family.capitalize() + "ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "hidden_act": "silu",
    }
    if family in ("llama", "qwen3"):
        result["attention_bias"] = config.attention_bias
    if family == "llama":
        result["mlp_bias"] = config.mlp_bias
    if config.sliding_window is not None:
        result["sliding_window"] = config.sliding_window
    if config.sliding_window is not None and family.startswith("qwen"):
        result |= {"use_sliding_window": True, "max_window_layers": 0}
    return result
