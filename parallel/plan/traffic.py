"""What one rank sends in one optimizer step, by formula: per axis and operation, the number of calls and the bytes.

Counted as ring algorithms send (Patarasuk and Yuan, 2009): of a tensor of S bytes on n ranks, each rank sends
S (n - 1) / n for an all-gather or a reduce-scatter and twice that for an all-reduce. S is the whole tensor. Tests hold
every row against the collectives of a real step.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from models.config import LOSS_CHUNK, ModelConfig
from models.counts import end_shapes, layer_shapes
from parallel.config import Config, FloatType, recompute_interval
from parallel.layout import Layout

BYTES = {FloatType.float64: 8, FloatType.float32: 4, FloatType.bfloat16: 2}
Add = Callable[[str, str, int, int], None]
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")


@dataclass(frozen=True)
class Traffic:
    """One kind of collective over one axis in a step: how many calls, and the bytes that a rank sends in all."""

    axis: str
    operation: str
    calls: int
    bytes_sent: int


def split_dim(name: str, model: ModelConfig, tp: int) -> int | None:
    """The dimension of a parameter that tp ranks split: 0 for columns and vocabularies, 1 for rows, None if none."""
    module, kind = name.split(".")[-2:]
    if module in ("k_proj", "v_proj") and model.num_key_value_heads % tp:
        return None
    if module in _COLUMNS:
        return 0
    return 1 if module in ("o_proj", "down_proj") and kind == "weight" else None


def is_partial(name: str, model: ModelConfig, tp: int, sequence_parallel: bool) -> bool:
    """Whether tp ranks that hold a parameter whole each have only a part of its gradient."""
    if split_dim(name, model, tp) is not None:
        return False
    return sequence_parallel or any(part in name for part in ("q_norm", "k_norm", "k_proj", "v_proj"))


def ring_bytes(operation: str, size: int, ranks: int) -> int:
    """Bytes a rank sends for an operation on a tensor of `size` bytes over `ranks`."""
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) // ranks


def traffic(config: Config, layout: Layout) -> list[Traffic]:
    """All collectives of forward and backward of one step, as one rank sees them (clipping's few bytes left out)."""
    rows: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()

    def add(axis: str, operation: str, size: int, calls: int) -> None:
        ranks = getattr(mesh, axis)
        if ranks > 1 and calls:
            rows[axis, operation] += calls
            sent[axis, operation] += calls * ring_bytes(operation, size, ranks)

    zero = config.parallelism.zero
    mesh = layout if zero else Layout(tp=layout.tp, dp_replicate=layout.dp)
    microbatches = config.data.global_batch // (config.data.micro_batch * layout.dp)
    _tensor_parallel(config, layout, microbatches, add)
    if layout.dp > 1:
        _zero(config, layout, mesh, microbatches, add)
    for axis in ("dp_replicate", "dp_shard"):
        add(axis, "all_reduce", 8, 1)  # the number of valid tokens
    return [Traffic(axis, operation, rows[axis, operation], sent[axis, operation]) for axis, operation in rows]


def _tensor_parallel(config: Config, layout: Layout, microbatches: int, add: Add) -> None:
    """Two crossings per block and direction, one for the embedding and one for the output layer.

    A crossing of (micro_batch, seq_len, hidden) is an all-reduce on one of its two sides, or with sequence parallelism
    a reduce-scatter on one and an all-gather on the other.
    """
    model, data, parallelism = config.model, config.data, config.parallelism
    tokens, compute = data.micro_batch * data.seq_len, BYTES[config.precision.compute]
    crossings = 2 * (2 * model.num_hidden_layers + 1) * microbatches
    # A recomputed layer makes its way once more up to the last result that is needed: all but the feed-forward's sum.
    again = _recomputed_layers(config) * microbatches
    if parallelism.sequence_parallel:
        add("tp", "all_gather", tokens * model.hidden_size * compute, crossings + 2 * again)
        add("tp", "reduce_scatter", tokens * model.hidden_size * compute, crossings + again)
    else:
        add("tp", "all_reduce", tokens * model.hidden_size * compute, crossings + again)
    for start in range(0, tokens, LOSS_CHUNK):
        chunk = min(LOSS_CHUNK, tokens - start)
        if parallelism.loss_parallel:
            precise = 8 if config.precision.compute == FloatType.float64 else 4
            add("tp", "all_reduce", chunk * precise, microbatches)
            add("tp", "all_reduce", 2 * chunk * precise, microbatches)
        else:
            columns = -(-model.vocab_size // layout.tp) * layout.tp
            add("tp", "all_gather", chunk * columns * compute, microbatches)
    shards = layout.dp_shard if parallelism.zero else 1
    named = [*end_shapes(model).items(), *list(layer_shapes(model).items()) * model.num_hidden_layers]
    partial = [
        math.prod((-(-shape[0] // shards), *shape[1:]))
        for name, shape in named
        if is_partial(name, model, layout.tp, parallelism.sequence_parallel)
    ]
    if partial:
        add("tp", "all_reduce", sum(partial) * BYTES[config.precision.master], 1)


def _recomputed_layers(config: Config) -> int:
    """How many layers are worked out again as a whole; single blocks end before their sum and send nothing more."""
    mode, layers = config.parallelism.recompute, config.model.num_hidden_layers
    if mode == "selective:ops":
        return layers
    interval = recompute_interval(mode)
    return 0 if interval is None else -(-layers // interval)


def _zero(config: Config, layout: Layout, mesh: Layout, microbatches: int, add: Add) -> None:
    """Gathers of parameters and sums of gradients, per FSDP2 group: each layer, and the ends."""
    model, zero = config.model, config.parallelism.zero
    ends = end_shapes(model)
    first = {"model.embed_tokens.weight": ends["model.embed_tokens.weight"]}
    last = {name: shape for name, shape in ends.items() if name not in first}
    groups = [(layer_shapes(model), 2)] * model.num_hidden_layers
    # Gathered for forward and again for backward, but for the last group, which the backward pass begins with.
    groups += [(ends, 2)] if model.tie_word_embeddings else [(first, 2), (last, 1)]
    for shapes, passes in groups:
        elements = sum(_padded(name, shape, config, layout, mesh.dp_shard) for name, shape in shapes.items())
        gathers = {0: 1, 1: 1, 2: 1, 3: passes * microbatches}[zero]
        reductions = microbatches if zero >= 2 else 1
        add("dp_shard", "all_gather", elements * BYTES[config.precision.compute], gathers)
        add("dp_shard", "reduce_scatter", elements * BYTES[config.precision.reduce], reductions)
        add("dp_replicate", "all_reduce", elements // mesh.dp_shard * BYTES[config.precision.reduce], 1)


def _padded(name: str, shape: tuple[int, ...], config: Config, layout: Layout, shards: int) -> int:
    """Elements of this tp rank's block, its first dimension filled up to a multiple of the shards."""
    block = list(shape)
    dim = split_dim(name, config.model, layout.tp)
    if dim is not None:
        block[dim] = -(-block[dim] // layout.tp)
    block[0] = -(-block[0] // shards) * shards
    return math.prod(block)
