"""What one rank sends in one optimizer step, by formula: per axis and operation, the number of calls and the bytes.

Counted as ring algorithms send (Patarasuk and Yuan, 2009): of a tensor of S bytes on n ranks, each rank sends
S (n - 1) / n for an all-gather or a reduce-scatter and twice that for an all-reduce. S is the whole tensor. Tests hold
every row against the collectives of a real step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.config import LOSS_CHUNK, ModelConfig, note_columns
from models.counts import end_shapes, is_expert, layer_shapes
from parallel.balance import held_in_ring, padded_length, ring_and_ulysses
from parallel.config import BYTES, Config, ContextMethod, FloatType, recompute_interval
from parallel.layout import AXES, Layout, expert_mesh_sizes, mesh_layout, microbatch_count
from parallel.plan.expert_traffic import (
    RoutedRows,
    expected_rows,
    expert_elements,
    mixture_traffic,
    must_count,
    recomputed_mixtures,
)
from parallel.stages import rank_of, split_layers, splits_backward, stage_count, stages_of

Add = Callable[[str, str, float, int], None]
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
    if is_expert(name):
        return None
    if module in ("k_proj", "v_proj") and model.num_key_value_heads % tp:
        return None
    if module in _COLUMNS:
        return 0
    return 1 if module in ("o_proj", "down_proj") and kind == "weight" else None


def is_partial(name: str, model: ModelConfig, tp: int, sequence_parallel: bool) -> bool:
    """Whether tp ranks that hold a parameter whole each have only a part of its gradient."""
    if is_expert(name) or split_dim(name, model, tp) is not None:
        return False
    return sequence_parallel or any(part in name for part in ("q_norm", "k_norm", "k_proj", "v_proj", "mlp.gate."))


def ring_bytes(operation: str, size: int, ranks: int) -> int:
    """Bytes a rank sends for an operation on a tensor of `size` bytes over `ranks`."""
    return (2 if operation == "all_reduce" else 1) * size * (ranks - 1) // ranks


@dataclass(frozen=True)
class Part:
    """What a pipeline rank holds: the numbers of its layers, and whether the first and the last stage are among it."""

    layers: list[int]
    first: bool
    last: bool

    @staticmethod
    def of(config: Config, pp_rank: int) -> "Part":
        """The part of a pipeline rank; without a pipeline, everything."""
        split, mine = split_layers(config.model, config.parallelism), stages_of(pp_rank, config.parallelism)
        return Part([layer for stage in mine for layer in split[stage]], 0 in mine, len(split) - 1 in mine)

    def ends(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of its parameters outside layers; with tied embeddings the last stage has the embedding too."""
        embedding = self.first or (self.last and model.tie_word_embeddings)
        shapes = end_shapes(model)
        return {name: shape for name, shape in shapes.items() if (embedding if "embed" in name else self.last)}


def traffic(
    config: Config, layout: Layout, pp_rank: int = 0, cp_rank: int | None = None, routed: RoutedRows | None = None
) -> list[Traffic]:
    """All collectives and messages of forward and backward of one step, as a rank of pipeline rank `pp_rank` sees them.

    Left out are clipping's few bytes, and those with which a pipeline opens its connections in the first step. Ranks of
    a ring of context ranks do not all send the same: `cp_rank` is by default the last, which sends most. With packed
    documents a ring sends less than is said here, by what is in them. `routed` are the rows that a real step's routing
    has sent; without it experts are taken to be busy alike.
    """
    rows: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()

    mesh = mesh_layout(layout, config.parallelism.zero)
    ranks_of = {axis: getattr(mesh, axis) for axis in AXES} | {"cp": layout.cp, "world": layout.world}
    experts = expert_mesh_sizes(layout, config.parallelism.zero)
    ranks_of |= dict(zip(("expert_replicate", "expert_dp", "ep", "etp"), experts[1:], strict=True))

    def add(axis: str, operation: str, size: float, calls: int) -> None:
        ranks = ranks_of[axis]
        if ranks > 1 and calls:
            rows[axis, operation] += calls
            whole = operation in ("send", "all_to_all")  # these are told what leaves the rank
            sent[axis, operation] += round(calls * (size if whole else ring_bytes(operation, int(size), ranks)))

    microbatches = microbatch_count(config, layout)
    part = Part.of(config, pp_rank)
    _tensor_parallel(config, layout, part, microbatches, add)
    if layout.pp > 1:
        _pipeline(config, layout, part, pp_rank, microbatches, add)
    if layout.cp > 1:
        for operation, calls, size in _context(config, layout, part, layout.cp - 1 if cp_rank is None else cp_rank):
            rows["cp", operation] += calls * microbatches
            sent["cp", operation] += size * microbatches
    if config.model.moe.num_experts:
        here = [layer for layer in part.layers if config.model.has_experts(layer)]
        mixture_traffic(config, layout, here, routed or expected_rows(config, layout, here), add)
        notes = config.model.num_hidden_layers * note_columns(config.model) * 8
        add("world", "all_reduce", notes, 1 + must_count(config, layout))
    _zero(config, layout, ranks_of, part, microbatches, add)
    for axis in ("dp_replicate", "dp_shard"):
        add(axis, "all_reduce", 8, 1)  # the number of valid tokens
    return [Traffic(axis, operation, rows[axis, operation], sent[axis, operation]) for axis, operation in rows]


def by_group(rows: list[Traffic], config: Config, layout: Layout) -> list[Traffic]:
    """The same by group of ranks: torch has one group of all ranks, so that axes over all of them cannot be told apart.

    They are the row `world`. Only experts make several such axes.
    """
    if not config.model.moe.num_experts:
        return rows
    grid, experts = mesh_layout(layout, config.parallelism.zero), expert_mesh_sizes(layout, config.parallelism.zero)
    sizes = {axis: getattr(grid, axis) for axis in AXES if axis != "cp"}
    sizes |= dict(zip(("expert_replicate", "expert_dp", "ep", "etp"), experts[1:], strict=True))
    added: dict[tuple[str, str], Traffic] = {}
    for row in rows:
        axis = "world" if sizes.get(row.axis) == layout.world else row.axis
        same = added.get((axis, row.operation), Traffic(axis, row.operation, 0, 0))
        total = Traffic(axis, row.operation, same.calls + row.calls, same.bytes_sent + row.bytes_sent)
        added[axis, row.operation] = total
    return list(added.values())


def _pipeline(config: Config, layout: Layout, part: Part, pp_rank: int, microbatches: int, add: Add) -> None:
    """Per microbatch, a stage sends its output on and its input's gradient back, where its neighbour is another rank.

    Ranks with equal tp coordinates talk: each sends the whole (micro_batch, seq_len, hidden), or with sequence
    parallelism its piece of the sequence. A tied embedding's two holders send each other its gradient once a step: what
    they hold of it, by the rank that has most rows.
    """
    model, data, parallelism = config.model, config.data, config.parallelism
    length = _part_length(config) // (layout.tp if parallelism.sequence_parallel else 1)
    hidden = data.micro_batch * length * model.hidden_size * BYTES[config.precision.compute]
    stages = stage_count(parallelism)
    neighbours = [other for stage in stages_of(pp_rank, parallelism) for other in (stage - 1, stage + 1)]
    away = [other for other in neighbours if 0 <= other < stages and rank_of(other, parallelism) != pp_rank]
    onward = [stage + 1 for stage in stages_of(pp_rank, parallelism) if stage + 1 in away]
    add("pp", "send", hidden, (len(away) + len(onward) * must_count(config, layout)) * microbatches)
    if model.tie_word_embeddings and part.first != part.last:
        rows = -(-model.vocab_size // layout.tp)
        shards = layout.dp_shard * layout.cp if parallelism.zero else 1
        add("pp", "send", -(-rows // shards) * model.hidden_size * BYTES[config.precision.master], 1)


def _tensor_parallel(config: Config, layout: Layout, part: Part, microbatches: int, add: Add) -> None:
    """Two crossings per block and direction, one for the embedding and one for the output layer.

    A crossing of (micro_batch, seq_len, hidden) is an all-reduce on one of its two sides, or with sequence parallelism
    a reduce-scatter on one and an all-gather on the other.
    """
    model, data, parallelism = config.model, config.data, config.parallelism
    tokens, compute = data.micro_batch * _part_length(config), BYTES[config.precision.compute]
    # A mixture of experts is no block that is crossed so; its shared experts are one.
    mixtures = [layer for layer in part.layers if config.model.has_experts(layer)]
    shared = len(mixtures) if model.moe.shared_intermediate_size else 0
    blocks = 2 * len(part.layers) - len(mixtures) + shared
    crossings = (2 * blocks + part.first + part.last) * microbatches
    # A recomputed layer makes its way once more up to the last result that is needed: all but the feed-forward's sum,
    # unless dropout comes after it.
    again = _recomputed(config, part.layers)
    mixed = recomputed_mixtures(config, mixtures)
    shared_again = len(mixed) if shared else 0
    entered = (2 * len(again) - len([layer for layer in again if layer in mixed]) + shared_again) * microbatches
    summed = len([layer for layer in again if layer not in mixed]) if model.dropout else 0
    left = (len(again) + shared_again + summed) * microbatches
    if must_count(config, layout):  # a forward pass more, without the output layer
        entered += blocks * microbatches
        left += (blocks + part.first) * microbatches
    if parallelism.sequence_parallel:
        add("tp", "all_gather", tokens * model.hidden_size * compute, crossings + entered)
        add("tp", "reduce_scatter", tokens * model.hidden_size * compute, crossings + left)
    else:
        add("tp", "all_reduce", tokens * model.hidden_size * compute, crossings + left)
    for start in range(0, tokens if part.last else 0, LOSS_CHUNK):
        chunk = min(LOSS_CHUNK, tokens - start)
        if parallelism.loss_parallel:
            precise = 8 if config.precision.compute == FloatType.float64 else 4
            add("tp", "all_reduce", chunk * precise, microbatches)
            add("tp", "all_reduce", 2 * chunk * precise, microbatches)
        else:
            columns = -(-model.vocab_size // layout.tp) * layout.tp
            add("tp", "all_gather", chunk * columns * compute, microbatches)
    shards = layout.dp_shard * layout.cp if parallelism.zero else 1
    named = [*part.ends(model).items(), *(item for n in part.layers for item in layer_shapes(model, n).items())]
    partial = [
        math.prod((-(-shape[0] // shards), *shape[1:]))
        for name, shape in named
        if is_partial(name, model, layout.tp, parallelism.sequence_parallel)
    ]
    if partial:
        add("tp", "all_reduce", sum(partial) * BYTES[config.precision.master], 1)


def _context(config: Config, layout: Layout, part: Part, cp_rank: int) -> Iterator[tuple[str, int, int]]:
    """Operation, calls and bytes that one rank sends for the attention of a microbatch in its layers.

    Keys and values of h heads and t tokens are 2 h t head_dim numbers. A ring sends them once forward and once
    backward, and the gradients of what it was sent back; gathering sends them forward and as many gradients backward;
    an all-to-all has the queries too, the results go back by another, and both go the other way backward.
    """
    model, parallelism = config.model, config.parallelism
    ring, ulysses = ring_and_ulysses(parallelism)
    layers = len(part.layers)
    redone = part.layers if parallelism.recompute == "selective:attention" else _recomputed(config, part.layers)
    again = len(redone) + layers * must_count(config, layout)
    length = padded_length(config.data.seq_len, parallelism)
    token = config.data.micro_batch * model.head_dim * BYTES[config.precision.compute]  # of one head, all sequences
    heads, held = model.num_attention_heads // layout.tp, max(model.num_key_value_heads // layout.tp, 1)
    if ulysses > 1:
        held = max(held, ulysses)
        there, back = (
            ring_bytes("all_to_all", count * length // layout.cp * token, ulysses)
            for count in (heads + 2 * held, heads)
        )
        yield "all_to_all", 2 * (2 * layers + again), (2 * layers + again) * (there + back)
    if parallelism.cp_method == ContextMethod.all_gather:
        size = ring_bytes("all_gather", 2 * held * length * token, ring)
        yield "all_gather", layers + again, (layers + again) * size
        yield "reduce_scatter", layers, layers * size
    elif ring > 1:
        pair = 2 * held // ulysses * token
        rank, window = cp_rank // ulysses, model.sliding_window
        parts = held_in_ring((0,), length, window, ring)
        others = [other for other in range(ring) if other != rank]
        out = [_sent(parts[rank], parts[other], window) for other in others]
        returned = [_sent(parts[other], parts[rank], window) for other in others]
        calls = (2 * layers + again) * sum(count > 0 for count in out) + layers * sum(count > 0 for count in returned)
        yield "send", calls, pair * ((2 * layers + again) * sum(out) + layers * sum(returned))


def _sent(keys: tuple[range, ...], queries: tuple[range, ...], window: int | None) -> int:
    """Keys of one ring rank that another's queries see: of each piece its end, from the first key that the next of the
    other's pieces reaches back to.
    """
    total = 0
    for piece in keys:
        later = [query.start for query in queries if query.start >= piece.stop]
        if later:
            oldest = piece.start if window is None else min(later) - window + 1
            total += max(piece.stop - max(piece.start, oldest), 0)
    return total


def _part_length(config: Config) -> int:
    """Tokens of a sequence that a context rank holds."""
    return padded_length(config.data.seq_len, config.parallelism) // config.parallelism.cp


def _recomputed(config: Config, layers: list[int]) -> list[int]:
    """Which layers are worked out again as a whole; single blocks end before their sum and send nothing more."""
    mode = config.parallelism.recompute
    if mode == "selective:ops":
        return layers
    interval = recompute_interval(mode)
    return [] if interval is None else [layer for layer in layers if layer % interval == 0]


def _zero(config: Config, layout: Layout, ranks_of: dict[str, int], part: Part, microbatches: int, add: Add) -> None:
    """Gathers of parameters and sums of gradients, per FSDP2 group: each layer, its experts, and the ends."""
    model, zero = config.model, config.parallelism.zero
    if layout.pp > 1 and splits_backward(config.parallelism):
        zero = min(zero, 1)  # gathered, and reduced, once a step
    ends = part.ends(model)
    first = {name: shape for name, shape in ends.items() if "embed" in name}
    last = {name: shape for name, shape in ends.items() if name not in first}
    counting = must_count(config, layout)

    def gather_and_reduce(elements: int, passes: int, split: str, replicated: str) -> None:
        # A pass that counts gathers what is freed after use for every microbatch, and once what is kept.
        gathers = 1
        if zero == 3:
            gathers = passes * microbatches + counting * (microbatches if passes == 2 else 1)
        add(split, "all_gather", elements * BYTES[config.precision.compute], gathers)
        add(split, "reduce_scatter", elements * BYTES[config.precision.reduce], microbatches if zero >= 2 else 1)
        add(replicated, "all_reduce", elements // ranks_of[split] * BYTES[config.precision.reduce], 1)

    groups = [(layer_shapes(model, layer), 2) for layer in part.layers]
    # Gathered for forward and again for backward, but for the last group, which the backward pass begins with.
    if not model.tie_word_embeddings:
        groups += [(first, 2), (last, 1)]
    else:  # each stage has its own, also where both are here
        groups += [(ends, 2), *([(first, 2)] if layout.pp > 1 and part.first and part.last else [])]
    for shapes, passes in groups:
        if not shapes:
            continue
        kept = {name: shape for name, shape in shapes.items() if not is_expert(name)}
        elements = sum(_padded(name, shape, config, layout, ranks_of["dp_shard"]) for name, shape in kept.items())
        gather_and_reduce(elements, passes, "dp_shard", "dp_replicate")
    for layer in [layer for layer in part.layers if config.model.has_experts(layer)]:
        gather_and_reduce(expert_elements(config, layout, layer), 2, "expert_dp", "expert_replicate")


def _padded(name: str, shape: tuple[int, ...], config: Config, layout: Layout, shards: int) -> int:
    """Elements of this tp rank's block, its first dimension filled up to a multiple of the shards."""
    block = list(shape)
    dim = split_dim(name, config.model, layout.tp)
    if dim is not None:
        block[dim] = -(-block[dim] // layout.tp)
    block[0] = -(-block[0] // shards) * shards
    return math.prod(block)
