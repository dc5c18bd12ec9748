"""How many parameters and floating-point operations a decoder has, by formula."""

from models.config import ModelConfig


def parameters_per_layer(config: ModelConfig) -> int:
    """Parameters of one decoder layer."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention = hidden * (query + 2 * key_value) + query * hidden
    attention += (query + 2 * key_value) * config.attention_bias + hidden * config.attention_output_bias
    attention += 2 * head_dim * config.qk_norm
    feed_forward = 3 * hidden * config.intermediate_size
    feed_forward += (2 * config.intermediate_size + hidden) * config.mlp_bias
    return attention + feed_forward + 2 * hidden


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole decoder; a tied embedding counts once."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return embeddings + config.num_hidden_layers * parameters_per_layer(config) + config.hidden_size


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
