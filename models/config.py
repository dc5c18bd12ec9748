"""The shape of a decoder, as plain immutable data, and the rules a shape must keep."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import ceil, inf

from models.errors import Flaw, nearest

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


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (models/lora.py)."""

    rank: int = 0
    """0 has none and trains the weights themselves; above 0 only the adapters are trained."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """The layers that have one."""


class RouterScore(StrEnum):
    softmax = "softmax"
    sigmoid = "sigmoid"


class BalanceScope(StrEnum):
    microbatch = "microbatch"
    sequence = "sequence"
    global_batch = "global_batch"


class DropOrder(StrEnum):
    probability = "probability"
    position = "position"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward: how tokens choose experts, and what keeps experts busy alike.

    Where the numbers do not fit together, `flaws` says how.
    """

    num_experts: int = 0
    """Experts of a layer; 0 is a dense model."""
    num_experts_per_tok: int = 2
    intermediate_size: int = 0
    """Width of one expert."""
    shared_intermediate_size: int = 0
    """Width of the feed-forward that every token takes besides its experts; 0 is none."""
    dense_layers: list[int] = field(default_factory=list)
    """Layers that keep a dense feed-forward of model.intermediate_size."""
    score: RouterScore = RouterScore.softmax
    """What makes the router's logits comparable: over all experts (Mixtral), or each by itself (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """The weights of a token's experts sum to 1."""
    routed_scaling_factor: float = 1.0
    """Multiplies the weights (DeepSeek-V3)."""
    num_groups: int = 1
    """Group-limited routing (DeepSeek-V3): experts in so many groups of equal size, ..."""
    top_groups: int = 1
    """... of which a token uses those whose two best experts score highest together."""
    jitter: float = 0.0
    """The router's input is multiplied by noise in [1 - jitter, 1 + jitter] during training (Switch Transformers)."""
    capacity_factor: float | None = None
    """During training an expert takes at most capacity_factor * seq_len * num_experts_per_tok / num_experts tokens of a
    sequence, rounded up, and drops the others; None drops nothing."""
    drop_order: DropOrder = DropOrder.probability
    """Which tokens an expert that is full drops: the least probable, or the last of the sequence."""
    balance_loss: float = 0.0
    """Load-balancing loss: coefficient of num_experts * sum of load share * mean probability, summed over layers."""
    balance_scope: BalanceScope = BalanceScope.global_batch
    """Over which tokens the load share is taken."""
    z_loss: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE), summed over layers."""
    bias_update_rate: float = 0.0
    """Auxiliary-loss-free balancing: after a step a bias that only the choice sees moves by this much, up for experts
    below the mean load and down for those above."""

    def flaws(self, layers: int) -> Iterator[Flaw]:
        """The rules that these numbers do not keep in a decoder of so many layers."""
        experts, chosen = self.num_experts, self.num_experts_per_tok
        if experts == 0:
            usual = MoEConfig()
            changed = [key.name for key in fields(self) if getattr(self, key.name) != getattr(usual, key.name)]
            if changed:
                listed = ", ".join(f"model.moe.{key}={getattr(self, key)}" for key in changed)
                yield Flaw(
                    f"{listed}: model.moe.num_experts=0 is a dense model, and no other key of model.moe does anything "
                    f"there.",
                    {f"model.moe.{key}": [getattr(usual, key)] for key in changed},
                )
            return
        if experts < 2 or self.intermediate_size < 1 or self.shared_intermediate_size < 0:
            yield Flaw(
                f"model.moe.num_experts={experts} must be 0 or at least 2, model.moe.intermediate_size="
                f"{self.intermediate_size} at least 1 and model.moe.shared_intermediate_size="
                f"{self.shared_intermediate_size} not negative."
            )
            return
        groups = [n for n in range(1, experts + 1) if experts % n == 0]
        if self.num_groups not in groups:
            yield Flaw(
                f"model.moe.num_groups={self.num_groups} must divide model.moe.num_experts={experts}, so that groups "
                f"are alike.",
                {"model.moe.num_groups": nearest(groups, self.num_groups)},
            )
        elif not 1 <= self.top_groups <= self.num_groups:
            yield Flaw(
                f"model.moe.top_groups={self.top_groups} must be 1 to model.moe.num_groups={self.num_groups}.",
                {"model.moe.top_groups": nearest(range(1, self.num_groups + 1), self.top_groups)},
            )
        else:
            within = experts // self.num_groups * self.top_groups
            if not 1 <= chosen <= within:
                yield Flaw(
                    f"model.moe.num_experts_per_tok={chosen} must be 1 to {within}, the experts that a token may "
                    f"choose from (num_experts={experts} / num_groups={self.num_groups} * top_groups="
                    f"{self.top_groups}).",
                    {"model.moe.num_experts_per_tok": nearest(range(1, within + 1), chosen)},
                )
        named = sorted(set(self.dense_layers) & set(range(layers)))
        if named != self.dense_layers or len(self.dense_layers) == layers:
            yield Flaw(
                f"model.moe.dense_layers={self.dense_layers} must name layers from 0 to {layers - 1} in their order, "
                f"each once and not all (model.num_hidden_layers={layers}).",
                {"model.moe.dense_layers": [named[: layers - 1], []]},
            )
        if self.capacity_factor is not None and not 0.0 < self.capacity_factor < inf:
            yield Flaw(
                f"model.moe.capacity_factor={self.capacity_factor} must be above 0, or null to drop nothing.",
                {"model.moe.capacity_factor": [1.25, None]},
            )
        if self.capacity_factor is None and self.drop_order != DropOrder.probability:
            yield Flaw(
                f"model.moe.drop_order={self.drop_order} needs a capacity, and model.moe.capacity_factor=null.",
                {"model.moe.capacity_factor": [1.25], "model.moe.drop_order": [DropOrder.probability]},
            )
        if not 0.0 <= self.jitter < 1.0:
            yield Flaw(f"model.moe.jitter={self.jitter} must lie in [0, 1).", {"model.moe.jitter": [0.0]})
        for key, usually in (("balance_loss", 0.01), ("z_loss", 0.0), ("bias_update_rate", 0.0)):
            if not 0.0 <= getattr(self, key) < inf:
                yield Flaw(
                    f"model.moe.{key}={getattr(self, key)} must not be negative, and must be finite.",
                    {f"model.moe.{key}": [usually]},
                )
        if not 0.0 < self.routed_scaling_factor < inf:
            yield Flaw(
                f"model.moe.routed_scaling_factor={self.routed_scaling_factor} must be above 0.",
                {"model.moe.routed_scaling_factor": [1.0]},
            )

    def counts_first(self, microbatches: int) -> bool:
        """Whether a step of so many microbatches begins with a forward pass that only finds out its load."""
        balances = self.num_experts > 0 and self.balance_loss > 0.0
        return balances and self.balance_scope == BalanceScope.global_batch and microbatches > 1

    def capacity(self, seq_len: int) -> int | None:
        """The most tokens of a sequence that an expert takes; None where nothing is dropped."""
        if self.capacity_factor is None:
            return None
        return min(ceil(self.capacity_factor * seq_len * self.num_experts_per_tok / self.num_experts), seq_len)


ROUTING_SCALARS = ("balance_loss", "z_loss", "router_entropy", "dropped", "bias_range", "sent")
"""What is noted of a layer's router in a training step besides the load of each expert: the two losses before their
coefficients, the entropy summed over tokens, assignments dropped, the distance between the highest and the lowest bias,
rows sent to other ranks."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family; field names are those of Hugging Face configurations.

    Where the numbers do not fit together, `flaws` says how.
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
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts in place of its feed-forward."""
        return self.moe.num_experts > 0 and layer not in self.moe.dense_layers

    @property
    def mixtures(self) -> list[int]:
        """The layers with a mixture of experts."""
        return [layer for layer in range(self.num_hidden_layers) if self.has_experts(layer)]

    def flaws(self) -> Iterator[Flaw]:
        """The rules that these numbers do not keep."""
        sizes = [
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "max_position_embeddings"),
        ]
        missing = [key for key in sizes if getattr(self, key) < 1]
        for key in missing:
            tries = [1, 2, max(self.num_attention_heads, 1)]
            yield Flaw(f"model.{key}={getattr(self, key)} must be at least 1.", {f"model.{key}": tries})
        if missing:
            return
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            legal = [n for n in range(1, heads + 1) if heads % n == 0]
            yield Flaw(
                f"model.num_key_value_heads={groups} must divide model.num_attention_heads={heads}, so that every "
                f"key/value head serves the same number of query heads.",
                {"model.num_key_value_heads": nearest(legal, groups)},
            )
        if self.head_dim % 2:
            yield Flaw(
                f"model.head_dim={self.head_dim} must be even, since the rotary embedding turns pairs.",
                {"model.head_dim": [self.head_dim + 1]},
            )
        if not 0.0 <= self.dropout < 1.0:
            yield Flaw(f"model.dropout={self.dropout} must lie in [0, 1).", {"model.dropout": [0.0]})
        if self.sliding_window is not None and self.sliding_window < 1:
            yield Flaw(
                f"model.sliding_window={self.sliding_window} must be at least 1 (a token sees itself), or null for no "
                f"limit.",
                {"model.sliding_window": [None]},
            )
        if not 0.0 < self.rms_norm_eps < inf:
            yield Flaw(
                f"model.rms_norm_eps={self.rms_norm_eps} must be above 0, and finite.", {"model.rms_norm_eps": [1e-5]}
            )
        if not 0.0 <= self.initializer_range < inf:
            yield Flaw(
                f"model.initializer_range={self.initializer_range} must not be negative, and must be finite.",
                {"model.initializer_range": [0.02]},
            )
        yield from self._rotary_flaws()
        yield from self._adapter_flaws()
        yield from self.moe.flaws(self.num_hidden_layers)
        if self.moe.num_experts and self.mlp_bias:
            yield Flaw("model.mlp_bias=true: experts have no biases.", {"model.mlp_bias": [False]})

    def _rotary_flaws(self) -> Iterator[Flaw]:
        rope = self.rope
        if not 0.0 < rope.theta < inf:
            yield Flaw(f"model.rope.theta={rope.theta} must be above 0, and finite.", {"model.rope.theta": [10000.0]})
        if rope.low_freq_factor >= rope.high_freq_factor:
            yield Flaw(
                f"model.rope.low_freq_factor={rope.low_freq_factor} must be below model.rope.high_freq_factor="
                f"{rope.high_freq_factor}.",
                {"model.rope.low_freq_factor": [rope.high_freq_factor / 4]},
            )
        needs_original = rope.scaling in (RopeScaling.llama3, RopeScaling.yarn)
        if needs_original and rope.original_max_position_embeddings < 1:
            yield Flaw(
                f"model.rope.scaling={rope.scaling} needs model.rope.original_max_position_embeddings, the length "
                f"before scaling; it is {rope.original_max_position_embeddings}.",
                {"model.rope.original_max_position_embeddings": [self.max_position_embeddings]},
            )
        if rope.scaling != RopeScaling.none and not 1.0 <= rope.factor < inf:
            yield Flaw(
                f"model.rope.factor={rope.factor} must be at least 1 with scaling on.", {"model.rope.factor": [1.0]}
            )

    def _adapter_flaws(self) -> Iterator[Flaw]:
        lora, attention = self.lora, LORA_TARGETS[:4]
        if lora.rank < 0 or lora.alpha <= 0.0:
            yield Flaw(
                f"model.lora.rank={lora.rank} must be 0 (no adapters) or more, and model.lora.alpha={lora.alpha} above "
                f"0.",
                {"model.lora.rank": [0, 8]} if lora.rank < 0 else {"model.lora.alpha": [16.0]},
            )
        if lora.rank and (not lora.targets or any(name not in LORA_TARGETS for name in lora.targets)):
            yield Flaw(
                f"model.lora.targets={list(lora.targets)} must be some of {', '.join(LORA_TARGETS)}.",
                {"model.lora.targets": [list(attention)]},
            )
        if lora.rank and self.moe.num_experts and {*LORA_TARGETS[4:]} & {*lora.targets}:
            yield Flaw(
                f"model.lora.targets={list(lora.targets)}: experts have no adapters.",
                {"model.lora.targets": [list(attention)]},
            )


def note_columns(config: ModelConfig) -> int:
    """Columns of a router's notes: the load of each expert, then `ROUTING_SCALARS`."""
    return config.moe.num_experts + len(ROUTING_SCALARS)
