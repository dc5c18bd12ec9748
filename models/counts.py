"""How many parameters and floating-point operations a decoder has, by formula."""

import math
from collections.abc import Callable
from typing import TypeVar

from models.config import ModelConfig

T = TypeVar("T")
Linears = dict[str, tuple[tuple[int, ...], bool]]
"""Shape of a linear map's weight, and whether it has a bias."""


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a decoder layer, under its name within the layer."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    linears: Linears = {
        "self_attn.q_proj": ((query, hidden), config.attention_bias),
        "self_attn.k_proj": ((key_value, hidden), config.attention_bias),
        "self_attn.v_proj": ((key_value, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, query), config.attention_output_bias),
    }
    if config.has_experts(layer):
        linears |= _expert_shapes(config)
    else:
        linears |= _feed_forward_shapes("mlp", hidden, inner, config.mlp_bias)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    for name, (shape, bias) in linears.items():
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _feed_forward_shapes(name: str, hidden: int, inner: int, bias: bool) -> Linears:
    return {
        f"{name}.gate_proj": ((inner, hidden), bias),
        f"{name}.up_proj": ((inner, hidden), bias),
        f"{name}.down_proj": ((hidden, inner), bias),
    }


def _expert_shapes(config: ModelConfig) -> Linears:
    hidden, moe = config.hidden_size, config.moe
    stacked = _feed_forward_shapes("mlp.experts", hidden, moe.intermediate_size, False)
    linears: Linears = {"mlp.gate": ((moe.num_experts, hidden), False)}
    linears |= {name: ((moe.num_experts, *shape), bias) for name, (shape, bias) in stacked.items()}
    if moe.shared_intermediate_size:
        linears |= _feed_forward_shapes("mlp.shared_experts", hidden, moe.shared_intermediate_size, False)
    return linears


def for_each_layer(config: ModelConfig, of: Callable[[int], T]) -> list[T]:
    """`of` every layer's number, asked once for layers that are alike: dense ones, and those of experts."""
    found: dict[bool, T] = {}
    kinds = [config.has_experts(layer) for layer in range(config.num_hidden_layers)]
    for layer, kind in enumerate(kinds):
        if kind not in found:
            found[kind] = of(layer)
    return [found[kind] for kind in kinds]


def is_expert(name: str) -> bool:
    """Whether a parameter is a stack over experts."""
    return "mlp.experts." in name


def end_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter outside the layers; a tied output weight is the embedding's."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the whole decoder, under its full name."""
    shapes = end_shapes(config)
    for layer, own in enumerate(for_each_layer(config, lambda layer: layer_shapes(config, layer))):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def adapter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every adapter's parameters (models/lora.py), under their full names; empty without adapters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(config).items() if config.lora.rank else ():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.rpartition(".")[2] in config.lora.targets:
            shapes[f"{layer}.lora_A.weight"] = (config.lora.rank, shape[1])
            shapes[f"{layer}.lora_B.weight"] = (shape[0], config.lora.rank)
    return shapes


def parameters_per_layer(config: ModelConfig) -> list[int]:
    """Parameters of every decoder layer."""
    return for_each_layer(config, lambda layer: sum(map(math.prod, layer_shapes(config, layer).values())))


def active_parameters_per_layer(config: ModelConfig) -> list[int]:
    """Parameters of every decoder layer that one token meets: of a mixture's experts only those it is sent to."""
    idle = config.moe.num_experts - config.moe.num_experts_per_tok
    unused = idle * 3 * config.hidden_size * config.moe.intermediate_size
    counts = parameters_per_layer(config)
    return [count - unused * config.has_experts(layer) for layer, count in enumerate(counts)]


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole decoder; a tied embedding counts once."""
    return sum(map(math.prod, end_shapes(config).values())) + sum(parameters_per_layer(config))


def active_parameter_count(config: ModelConfig) -> int:
    """Parameters that one token meets, embedding and output layer included; of a dense decoder all."""
    return sum(map(math.prod, end_shapes(config).values())) + sum(active_parameters_per_layer(config))


def attended_pairs(config: ModelConfig, seq_len: int, causal: bool) -> int:
    """Query-key pairs of one sequence and one head: seq_len^2, or causal only those a token may see."""
    if not causal:
        return seq_len * seq_len
    window = min(config.sliding_window or seq_len, seq_len)
    return window * (window + 1) // 2 + (seq_len - window) * window


def forward_flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> float:
    """Floating-point operations of a forward pass per token, a multiply-add counting two.

    Matrix products only: the projections, the output layer, attention's two products over `attended_pairs`, and of a
    mixture of experts the router and the experts that a token is sent to (none dropped).
    The *full* convention (causal=False; PaLM's appendix B, Megatron's formula) counts the masked half of the scores
    too; the *causal* one counts what a causal kernel has to do. Tables in papers use either: name which.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention = hidden * (query + 2 * key_value) + query * hidden
    products = 2 * 2 * query * attended_pairs(config, seq_len, causal) / seq_len
    feed_forward = sum(_feed_forward_weights(config, layer) for layer in range(config.num_hidden_layers))
    layers = config.num_hidden_layers * (2 * attention + products) + 2 * feed_forward
    return layers + 2 * hidden * config.vocab_size


def _feed_forward_weights(config: ModelConfig, layer: int) -> int:
    """Weights that one token is multiplied with in a layer's feed-forward."""
    hidden, moe = config.hidden_size, config.moe
    if not config.has_experts(layer):
        return 3 * hidden * config.intermediate_size
    chosen = moe.num_experts_per_tok * moe.intermediate_size + moe.shared_intermediate_size
    return hidden * moe.num_experts + 3 * hidden * chosen


def training_flops_per_token(config: ModelConfig, seq_len: int, causal: bool = True) -> float:
    """Forward and backward (twice the forward) per token; recomputed work does not count: model FLOPs."""
    return 3 * forward_flops_per_token(config, seq_len, causal)
