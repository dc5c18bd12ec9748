"""How many parameters and floating-point operations a decoder has, by formula."""

import math

from models.config import ModelConfig


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of one decoder layer, under its name within the layer."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    linears = {
        "self_attn.q_proj": ((query, hidden), config.attention_bias),
        "self_attn.k_proj": ((key_value, hidden), config.attention_bias),
        "self_attn.v_proj": ((key_value, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, query), config.attention_output_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    for name, (shape, bias) in linears.items():
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


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
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    return shapes


def parameters_per_layer(config: ModelConfig) -> int:
    """Parameters of one decoder layer."""
    return sum(math.prod(shape) for shape in layer_shapes(config).values())


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole decoder; a tied embedding counts once."""
    ends = sum(math.prod(shape) for shape in end_shapes(config).values())
    return ends + config.num_hidden_layers * parameters_per_layer(config)


def attended_pairs(config: ModelConfig, seq_len: int, causal: bool) -> int:
    """Query-key pairs of one sequence and one head: seq_len^2, or causal only those a token may see."""
    if not causal:
        return seq_len * seq_len
    window = min(config.sliding_window or seq_len, seq_len)
    return window * (window + 1) // 2 + (seq_len - window) * window


def forward_flops_per_token(config: ModelConfig, seq_len: int, causal: bool) -> float:
    """Floating-point operations of a forward pass per token, a multiply-add counting two.

    Matrix products only: the projections, the output layer, and attention's two products over `attended_pairs`.
    The *full* convention (causal=False; PaLM's appendix B, Megatron's formula) counts the masked half of the scores
    too; the *causal* one counts what a causal kernel has to do. Tables in papers use either: name which.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    weights = hidden * (query + 2 * key_value) + query * hidden + 3 * hidden * config.intermediate_size
    products = 2 * 2 * query * attended_pairs(config, seq_len, causal) / seq_len
    return config.num_hidden_layers * (2 * weights + products) + 2 * hidden * config.vocab_size


def training_flops_per_token(config: ModelConfig, seq_len: int, causal: bool = True) -> float:
    """Forward and backward (twice the forward) per token; recomputed work does not count: model FLOPs."""
    return 3 * forward_flops_per_token(config, seq_len, causal)
