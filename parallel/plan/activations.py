"""What a decoder's forward pass leaves for its backward pass, by formula, and what stands beside it meanwhile.

The rules are those of this code as torch runs it without compilation: which tensors autograd keeps. (Korthikanti et
al., 2022, arXiv:2205.05198, count in the same way for their layer.) Tests hold the sums against dry runs, where each
tensor is followed from its making to its end.

All results are bytes on one rank for one microbatch. T is its tokens, S the tokens that a rank holds between blocks (T,
or T / tp with sequence parallelism), c and p the bytes of a number in computing and in what is worked out precisely.
"""

from dataclasses import dataclass, replace

from models.config import LOSS_CHUNK, ModelConfig
from parallel.balance import padded_length
from parallel.config import BYTES, Config, recompute_interval
from parallel.layout import Layout, microbatch_count
from parallel.plan.expert_traffic import expected_rows, own_tokens


@dataclass(frozen=True)
class Sizes:
    """The numbers that the formulas are made of, for one rank."""

    tokens: int
    """T."""
    piece: int
    """S."""
    hidden: int
    query: int
    """Channels of this rank's query heads."""
    key_value: int
    """Channels of its key (or value) heads."""
    heads: int
    head_dim: int
    inner: int
    """Its channels of the feed-forward block."""
    vocabulary: int
    """Its rows of the output weight."""
    compute: int
    precise: int
    gathers: bool
    """Whether a block's input is gathered from pieces of the sequence."""

    @property
    def stream(self) -> int:
        """Hidden states between blocks: c S h."""
        return self.compute * self.piece * self.hidden

    @property
    def whole_stream(self) -> int:
        """Hidden states inside blocks: c T h."""
        return self.compute * self.tokens * self.hidden


def sizes(config: Config, layout: Layout) -> Sizes:
    """The sizes of a microbatch on each rank of a layout."""
    model, data, tp = config.model, config.data, layout.tp
    compute = BYTES[config.precision.compute]
    tokens = data.micro_batch * padded_length(data.seq_len, config.parallelism) // layout.cp
    sequence = config.parallelism.sequence_parallel and tp > 1
    return Sizes(
        tokens=tokens,
        piece=tokens // tp if sequence else tokens,
        hidden=model.hidden_size,
        query=model.num_attention_heads // tp * model.head_dim,
        key_value=max(model.num_key_value_heads // tp, 1) * model.head_dim,
        heads=model.num_attention_heads // tp,
        head_dim=model.head_dim,
        inner=-(-model.intermediate_size // tp),
        vocabulary=-(-model.vocab_size // tp),
        compute=compute,
        precise=max(compute, 4),
        gathers=sequence,
    )


def norm_kept(size: Sizes, channels: int | None = None, tokens: int | None = None, rows: int = 1) -> int:
    """RMSNorm: its input in precise numbers, the normalised input in numbers of computing, and the scale per row."""
    channels = size.hidden if channels is None else channels
    tokens = size.piece if tokens is None else tokens
    return tokens * (channels * (size.precise + size.compute) + rows * size.precise)


def norm_backward(size: Sizes) -> int:
    """What RMSNorm's backward pass makes on the way: five times its input in precise numbers, as seen in dry runs."""
    return 5 * size.precise * size.piece * size.hidden


def dropout_temporary(size: Sizes) -> int:
    """Eleven words of 64 bits for every four elements while a mask is drawn (models/random.py), as seen in dry runs."""
    return 11 * 8 * size.piece * size.hidden // 4


def attention_kept(model: ModelConfig, size: Sizes) -> int:
    """Inside the attention block: its input gathered, rotated queries and keys, values, the result, its log-sum-exp."""
    c, tokens = size.compute, size.tokens
    kept = c * tokens * (2 * size.query + 2 * size.key_value) + size.precise * tokens * size.heads
    if model.qk_norm:
        for channels in (size.query, size.key_value):
            kept += norm_kept(size, channels, tokens, channels // size.head_dim)
    if size.gathers:
        kept += size.whole_stream
    return kept


def feed_forward_kept(size: Sizes) -> int:
    """Inside the gated block: its input gathered, gate, activated gate, up, and their product."""
    return (size.whole_stream if size.gathers else 0) + 4 * size.compute * size.tokens * size.inner


def mixture_rows(config: Config, layout: Layout) -> int:
    """Rows that a rank's experts get in a microbatch when all are busy alike, those of all etp ranks."""
    sent = expected_rows(config, layout, [0]).gathered // (microbatch_count(config, layout) * layout.etp)
    return sent * layout.etp


def exchange_buffers(config: Config, layout: Layout) -> int:
    """Where all mixtures of a rank lay out what they send, receive and gather over etp, made once and used again."""
    if config.model.moe.num_experts == 0:
        return 0
    rows = mixture_rows(config, layout)
    rows = 2 * rows // layout.etp + (rows if layout.etp > 1 else 0)
    return BYTES[config.precision.compute] * rows * config.model.hidden_size


def mixture_kept(config: Config, layout: Layout, size: Sizes) -> int:
    """Inside a mixture of experts that are busy alike: rows at their experts, what those make, and what comes back.

    With a capacity rows are as many as there is room for. Shared experts count as the gated block that they are.
    """
    moe, c = config.model.moe, size.compute
    tokens = own_tokens(config, layout)
    inner = moe.intermediate_size // layout.etp
    kept = c * mixture_rows(config, layout) * (size.hidden + 4 * inner)
    kept += c * tokens * moe.num_experts_per_tok * size.hidden
    kept += size.precise * tokens * (size.hidden + 3 * moe.num_experts)  # the router works precisely
    if moe.shared_intermediate_size:
        kept += feed_forward_kept(replace(size, inner=-(-moe.shared_intermediate_size // layout.tp)))
    return kept


def mixture_temporary(config: Config, layout: Layout, size: Sizes, recomputed: bool) -> int:
    """What its backward pass makes on the way: gradients of what came back from experts, twice; or, once that has been
    let go, those of experts' gate and up, or gate and results. Where it is worked out again it holds, before anything
    comes back, results of experts (and of each, where they have rows of their own number) and two hidden states.
    """
    moe, c = config.model.moe, size.compute
    rows = mixture_rows(config, layout)
    back = c * own_tokens(config, layout) * moe.num_experts_per_tok * size.hidden
    inner = moe.intermediate_size // layout.etp
    inside = c * rows * (inner + max(inner, size.hidden))
    again = (1 if moe.capacity_factor is not None else 2) * c * rows * size.hidden + 2 * size.stream
    return max(2 * back, inside - back, again - back if recomputed else 0)


@dataclass(frozen=True)
class LayerActivations:
    """One layer, one microbatch."""

    kept: int
    """From its forward pass to its backward pass."""
    again: int
    """What its backward pass first works out once more, beside what was kept."""
    temporary: int
    """The most that its backward pass needs beside all of that: gradients of activations."""
    at_norm: int
    """What it needs (which may be less than nothing) once the block's own results are let go, in the norm before it."""
    at_experts: int = 0
    """What it needs when it comes to its experts, and their weights are gathered."""


def layer_activations(config: Config, layout: Layout, layer: int) -> LayerActivations:
    """What a decoder layer keeps under the config's recompute mode."""
    model, size, mode = config.model, sizes(config, layout), config.parallelism.recompute
    mixture = model.has_experts(layer)
    attention = attention_kept(model, size)
    feed_forward = mixture_kept(config, layout, size) if mixture else feed_forward_kept(size)
    dropout = 2 * size.stream if model.dropout else 0
    norms = 2 * norm_kept(size) + dropout
    # Their results, inputs of the blocks: a gathered copy may stand in for them, and experts keep rows of their own.
    attention_input = 0 if size.gathers else size.stream
    own_rows = mixture and (
        model.moe.shared_intermediate_size == 0 or (size.compute == size.precise and layout.tp == 1)
    )
    block_input = 0 if size.gathers or own_rows else size.stream
    everything = norms + attention_input + attention + block_input + feed_forward
    interval = recompute_interval(mode)
    recomputed = interval is not None and layer % interval == 0
    inner = size.compute * size.tokens * size.inner
    at_experts = 0
    if mixture:
        temporary = mixture_temporary(config, layout, size, recomputed)
        rows, tokens = mixture_rows(config, layout), own_tokens(config, layout)
        at_experts = size.stream + size.compute * (rows - tokens * model.moe.num_experts_per_tok) * size.hidden
    else:  # gradients of gate and up, or of their product beside that of the block's result
        temporary = inner + max(inner, size.whole_stream if size.gathers else 0)
    temporary += size.stream
    at_norm = norm_backward(size) + size.stream - feed_forward - block_input
    if recomputed:
        if model.dropout:
            temporary = max(temporary, dropout_temporary(size) + 2 * size.stream)
        # Where the norm works in other numbers, everything is beside the layer's input.
        shared = size.stream if size.compute == size.precise else 0
        return LayerActivations(size.stream, everything - shared, temporary, at_norm, at_experts)
    if mode == "selective:attention":
        # The block keeps what it is given, after it has been gathered.
        kept = norms + (size.whole_stream if size.gathers else size.stream) + block_input + feed_forward
        return LayerActivations(kept, 0, temporary, at_norm, at_experts)
    if mode == "selective:mlp":
        given = size.whole_stream if size.gathers and not mixture else size.stream
        kept = norms + attention_input + attention + given
        again = feed_forward + block_input - given
        return LayerActivations(kept, again, temporary, at_norm, at_experts)
    if mode == "selective:ops":
        products = size.compute * size.tokens * (2 * size.query + 2 * size.key_value + 2 * size.hidden + 2 * size.inner)
        kept = size.stream + products + size.precise * size.tokens * size.heads
        return LayerActivations(kept, everything - kept, temporary, at_norm, at_experts)
    return LayerActivations(everything, 0, temporary, at_norm, at_experts)


def between_halves(config: Config, layout: Layout, layer: int) -> int:
    """What a layer holds between the halves of a split backward pass: gradients that those of weights are made from.

    They are those of the results of every projection and of both norms.
    """
    moe, size, c = config.model.moe, sizes(config, layout), sizes(config, layout).compute
    results = size.whole_stream if size.gathers else size.stream
    attention = c * size.tokens * (size.query + 2 * size.key_value) + results
    if not config.model.has_experts(layer):
        return attention + 2 * c * size.tokens * size.inner + results + 2 * size.stream
    experts = c * mixture_rows(config, layout) * (2 * moe.intermediate_size // layout.etp + size.hidden)
    # What came back from experts was for the router's weights of them, and is let go.
    back = c * own_tokens(config, layout) * moe.num_experts_per_tok * size.hidden
    return attention + experts - back + 2 * size.stream


def shared_kept(size: Sizes) -> int:
    """What all layers of a stage share for a microbatch: rotary tables. Masks are lists of blocks (models/mask.py)."""
    return 2 * size.compute * size.tokens * size.head_dim


@dataclass(frozen=True)
class LossActivations:
    """Final norm, output layer and loss of one microbatch."""

    kept: int
    """Until its backward pass: the norm, and the gradients that the loss has worked out already."""
    forward: int
    """Beside that, while logits exist."""
    backward: int
    """Beside that, while those gradients are scaled."""


def loss_activations(config: Config, layout: Layout) -> LossActivations:
    """The end of the last stage."""
    size = sizes(config, layout)
    c, accumulate = size.compute, size.precise
    weight = size.vocabulary * size.hidden
    columns = size.vocabulary
    if layout.tp > 1 and not config.parallelism.loss_parallel:
        columns *= layout.tp
    chunk = min(LOSS_CHUNK, size.tokens)
    logits, coarse = accumulate * chunk * columns, c < accumulate
    product = c * max(chunk * size.hidden, weight)
    own = c * chunk * size.vocabulary if coarse else 0
    hidden = size.whole_stream + (size.stream if size.gathers else 0)
    return LossActivations(
        kept=norm_kept(size) + size.whole_stream + accumulate * weight,
        forward=hidden + max(2 * logits, logits + own + product),
        backward=size.whole_stream + accumulate * weight + (c * weight if coarse else 0),
    )
