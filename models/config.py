"""The shape of a decoder, as plain immutable data, and the rules a shape must keep."""

from dataclasses import dataclass, field
from enum import StrEnum

from models.errors import ConfigError

LOSS_CHUNK = 2048
"""Tokens whose logits exist at a time in the loss."""


class RopeScaling(StrEnum):
    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched beyond the length it was trained for."""

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling.none
    factor: float = 1.0
    """How many times longer than `original_max_position_embeddings` the context may become."""
    original_max_position_embeddings: int = 0
    """The length before scaling; needed by `llama3` and `yarn`."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above original/low_freq_factor are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below original/high_freq_factor stay as they are."""
    beta_fast: float = 32.0
    """`yarn`: dimensions that turn more often than this over the original length stay as they are."""
    beta_slow: float = 1.0
    """`yarn`: dimensions that turn less often than this over the original length are stretched by `factor`."""
    attention_factor: float | None = None
    """`yarn`: multiplies cosine and sine; None means 0.1 ln(factor) + 1 (YaRN paper, section 3.4)."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family; field names are those of Hugging Face configurations.

    Raises ConfigError from `check` where the numbers do not fit together.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotation (Qwen3)."""
    attention_bias: bool = False
    """A bias on the query, key and value projections (Qwen2)."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """A token attends to itself and the window - 1 tokens before it (Mistral); None is no limit."""
    tie_word_embeddings: bool = False
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each residual branch during training."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream use it over sqrt(2 layers)."""

    def check(self) -> None:
        """Raise ConfigError where the numbers do not fit together."""
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, key) < 1:
                raise ConfigError(f"model.{key}={getattr(self, key)} must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads:
            legal = [n for n in range(1, self.num_attention_heads + 1) if self.num_attention_heads % n == 0]
            raise ConfigError(
                f"model.num_key_value_heads={self.num_key_value_heads} must divide "
                f"model.num_attention_heads={self.num_attention_heads}, so that every key/value head serves the same "
                f"number of query heads. Write one of {legal}."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} must be even, since the rotary embedding turns pairs. "
                f"Write {self.head_dim + 1}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout={self.dropout} must lie in [0, 1).")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(
                f"model.sliding_window={self.sliding_window} must be at least 1 (a token sees "
                "itself), or null for no limit."
            )
        if self.rms_norm_eps <= 0.0 or self.initializer_range < 0.0:
            raise ConfigError(
                f"model.rms_norm_eps={self.rms_norm_eps} must be above 0 and model.initializer_range="
                f"{self.initializer_range} not below."
            )
        if self.rope.theta <= 0.0 or self.rope.low_freq_factor >= self.rope.high_freq_factor:
            raise ConfigError(
                f"model.rope.theta={self.rope.theta} must be above 0, and low_freq_factor={self.rope.low_freq_factor} "
                f"below high_freq_factor={self.rope.high_freq_factor}."
            )
        needs_original = self.rope.scaling in (RopeScaling.llama3, RopeScaling.yarn)
        if needs_original and self.rope.original_max_position_embeddings < 1:
            raise ConfigError(
                f"model.rope.scaling={self.rope.scaling} needs model.rope.original_max_position_embeddings, the length "
                f"before scaling; it is {self.rope.original_max_position_embeddings}."
            )
        if self.rope.scaling != RopeScaling.none and self.rope.factor < 1.0:
            raise ConfigError(f"model.rope.factor={self.rope.factor} must be at least 1 with scaling on.")
