"""Our configuration and parameter names as Hugging Face's, and theirs as ours, for parity tests, export and import.

Names are equal but for experts, which are stacked here and stand one by one in published checkpoints.
"""

from typing import Any

from models.config import ModelConfig, MoEConfig, RopeConfig, RopeScaling
from models.counts import is_expert
from models.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_CLASSES = {"qwen3_moe": "Qwen3Moe"}


def published_names(config: ModelConfig, name: str) -> list[str]:
    """The names that a parameter has in a published checkpoint: for a stack of experts one for each, in order."""
    mixtral = config.moe.num_experts > 0 and architecture(config) == "mixtral"
    if not is_expert(name):
        return [name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral else name]
    layer, _, linear = name.partition(".mlp.experts.")
    if not mixtral:
        return [f"{layer}.mlp.experts.{expert}.{linear}" for expert in range(config.moe.num_experts)]
    linear = f"{_MIXTRAL[linear.removesuffix('.weight')]}.weight"
    return [f"{layer}.block_sparse_moe.experts.{expert}.{linear}" for expert in range(config.moe.num_experts)]


def architecture(config: ModelConfig) -> str:
    """The Hugging Face model type that computes what this configuration says.

    One of llama, mistral, qwen2, qwen3, mixtral and qwen3_moe. Raises ConfigError where no public family has this mix
    of options.
    """
    if config.moe.num_experts:
        return _mixture(config)
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


def _mixture(config: ModelConfig) -> str:
    moe, plain = config.moe, MoEConfig()
    names = ("score", "shared_intermediate_size", "num_groups", "routed_scaling_factor", "bias_update_rate")
    own = [name for name in names if getattr(moe, name) != getattr(plain, name)]
    if own:
        values = ", ".join(f"model.moe.{name}={getattr(moe, name)}" for name in own)
        raise ConfigError(f"Neither Mixtral nor Qwen3-MoE has {values}, so no Hugging Face model computes this.")
    if config.qk_norm and config.attention_bias == config.attention_output_bias:
        return "qwen3_moe"
    if not (config.qk_norm or config.attention_bias or config.attention_output_bias or moe.dense_layers):
        if not moe.norm_topk_prob:
            raise ConfigError("Mixtral's weights sum to 1. Write model.moe.norm_topk_prob=true.")
        return "mixtral"
    raise ConfigError(
        f"No Hugging Face family has experts with qk_norm={config.qk_norm}, attention_bias={config.attention_bias}, "
        f"attention_output_bias={config.attention_output_bias} and moe.dense_layers={moe.dense_layers} together "
        f"(Mixtral: none of them; Qwen3-MoE: qk_norm)."
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
        "architectures": [_CLASSES.get(family, family.capitalize()) + "ForCausalLM"],
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
    if family in ("mixtral", "qwen3_moe"):
        result |= {
            "num_experts" if family == "qwen3_moe" else "num_local_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.num_experts_per_tok,
            "router_aux_loss_coef": config.moe.balance_loss,
        }
    if family == "mixtral":  # all of its feed-forwards are experts
        result["intermediate_size"] = config.moe.intermediate_size
    if family == "qwen3_moe":
        result |= {
            "moe_intermediate_size": config.moe.intermediate_size,
            "mlp_only_layers": list(config.moe.dense_layers),
            "norm_topk_prob": config.moe.norm_topk_prob,
        }
    if family in ("llama", "qwen3", "qwen3_moe"):
        result["attention_bias"] = config.attention_bias
    if family == "llama":
        result["mlp_bias"] = config.mlp_bias
    if config.sliding_window is not None:
        result["sliding_window"] = config.sliding_window
    if config.sliding_window is not None and family.startswith("qwen"):
        result |= {"use_sliding_window": True, "max_window_layers": 0}
    return result


def config_from(published: dict[str, Any], name: str) -> ModelConfig:
    """The decoder that a Hugging Face config.json describes, whichever version of transformers wrote it.

    Raises ConfigError for a family, an activation or a mix of layers that this decoder does not compute.
    """
    family = published.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"model_type={family} is none of the families that can be imported: {', '.join(FAMILIES)}.")
    if published.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act={published['hidden_act']}: the feed-forward of this decoder is SwiGLU (silu).")
    window = published.get("sliding_window")
    if family.startswith("qwen"):
        window = window if published.get("use_sliding_window", False) else None
        full = published.get("max_window_layers", 0)
        if window is not None and full:
            raise ConfigError(f"max_window_layers={full}: here all layers have a sliding window or none has.")
    elif family == "llama":
        window = None
    heads = published["num_attention_heads"]
    bias = family == "qwen2" or published.get("attention_bias", False)
    return ModelConfig(
        name=name,
        vocab_size=published["vocab_size"],
        hidden_size=published["hidden_size"],
        intermediate_size=published["intermediate_size"],
        num_hidden_layers=published["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=published.get("num_key_value_heads") or heads,
        head_dim=published.get("head_dim") or published["hidden_size"] // heads,
        max_position_embeddings=published["max_position_embeddings"],
        rms_norm_eps=published.get("rms_norm_eps", 1e-6),
        rope=_rope_from(published),
        qk_norm=family.startswith("qwen3"),
        attention_bias=bias,
        attention_output_bias=bias and family != "qwen2",
        mlp_bias=published.get("mlp_bias", False),
        sliding_window=window,
        tie_word_embeddings=published.get("tie_word_embeddings", False),
        initializer_range=published.get("initializer_range", 0.02),
        moe=_moe_from(published),
    )


def _moe_from(published: dict[str, Any]) -> MoEConfig:
    family = published["model_type"]
    if family not in ("mixtral", "qwen3_moe"):
        return MoEConfig()
    layers, every = range(published["num_hidden_layers"]), published.get("decoder_sparse_step", 1)
    own = family == "mixtral"
    dense = [] if own else [n for n in layers if n in published.get("mlp_only_layers", []) or (n + 1) % every]
    return MoEConfig(
        num_experts=published.get("num_local_experts") or published["num_experts"],
        num_experts_per_tok=published["num_experts_per_tok"],
        intermediate_size=published["intermediate_size" if own else "moe_intermediate_size"],
        dense_layers=dense,
        norm_topk_prob=own or published.get("norm_topk_prob", False),
        balance_loss=published.get("router_aux_loss_coef", 0.0),
    )


def _rope_from(published: dict[str, Any]) -> RopeConfig:
    """transformers 5 has `rope_parameters`; 4 had `rope_theta` and `rope_scaling`, whose type was once `type`."""
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.get("rope_theta", published.get("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in set(RopeScaling):
        raise ConfigError(f"rope_type={kind} is none of default, {', '.join(set(RopeScaling) - {RopeScaling.none})}.")
    names = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    given = {name: rope[name] for name in names if rope.get(name) is not None}
    original = rope.get("original_max_position_embeddings") or published["max_position_embeddings"]
    needs = kind in (RopeScaling.llama3, RopeScaling.yarn)
    return RopeConfig(
        theta=theta,
        scaling=RopeScaling(kind),
        original_max_position_embeddings=original if needs else 0,
        **given,
    )
