"""What a rank sends for its mixtures of experts in one optimizer step, by formula; rows of parallel/plan/traffic.py.

A layer's forward pass exchanges counts, sends rows to their experts and back, and adds up what balancing needs; its
backward pass sends as many rows again, both ways. Uneven exchanges depend on the routing: give the rows of a real step,
or they are counted as if every expert were chosen as often.
"""

from collections.abc import Callable
from dataclasses import dataclass

from models.config import BalanceScope
from models.counts import is_expert, layer_shapes
from parallel.config import BYTES, Config, recompute_interval
from parallel.layout import Layout, microbatch_count

Add = Callable[[str, str, float, int], None]
_INT, _DOUBLE = 8, 8


@dataclass(frozen=True)
class RoutedRows:
    """Rows of one forward pass over all microbatches and layers of a rank, one way."""

    sent: int
    """Rows that leave the rank over ep for their experts; their gradients come back."""
    received: int
    """Rows that come to the rank's experts from others; their results go back."""
    gathered: int
    """Rows of all etp ranks after they are gathered, each rank's filled up to the fullest one's."""


def own_tokens(config: Config, layout: Layout) -> int:
    """The most tokens of a microbatch that one rank routes."""
    return -(-config.data.micro_batch * config.data.seq_len // (layout.cp * layout.tp))


def must_count(config: Config, layout: Layout) -> bool:
    """Whether a step begins with a forward pass that finds out the load of the global batch."""
    return config.model.moe.counts_first(microbatch_count(config, layout))


def expected_rows(config: Config, layout: Layout, layers: list[int]) -> RoutedRows:
    """Rows where every expert is chosen as often; exact with a capacity, whose shapes do not depend on the routing."""
    moe, ep, etp = config.model.moe, layout.ep, layout.etp
    tokens, passes = own_tokens(config, layout), len(layers) * microbatch_count(config, layout)
    capacity = moe.capacity(config.data.seq_len)
    if capacity is not None:
        rows = moe.num_experts * min(tokens, config.data.micro_batch * capacity)
    else:
        rows = tokens * moe.num_experts_per_tok
    moved = passes * rows * (ep - 1) // ep
    return RoutedRows(moved, moved, passes * etp * rows)


def exchange_bytes(config: Config, layout: Layout) -> float:
    """Bytes over ep in a step for each row that a forward pass sends: there and back, and again for the gradients.

    Layers that are recomputed send theirs a third time, as does a pass that counts.
    """
    layers = len(config.model.mixtures)
    size = config.model.hidden_size * BYTES[config.precision.compute]
    again = len(recomputed_mixtures(config, config.model.mixtures))
    ways = 4 * layers + 2 * again + 2 * layers * must_count(config, layout)
    return size * ways / max(layers, 1)


def mixture_traffic(config: Config, layout: Layout, mixtures: list[int], rows: RoutedRows, add: Add) -> None:
    """Everything that these mixtures of experts send, but for ZeRO's part and the crossings of shared experts over tp.

    An exchange in two hops is counted as one.
    """
    moe, data, hidden = config.model.moe, config.data, config.model.hidden_size
    ep, etp, layers = layout.ep, layout.etp, len(mixtures)
    if not layers:
        return
    microbatches, counting = microbatch_count(config, layout), must_count(config, layout)
    forward = microbatches * layers
    again = microbatches * len(recomputed_mixtures(config, mixtures))
    passes = forward * (1 + counting) + again
    size = hidden * BYTES[config.precision.compute]
    here = moe.num_experts // ep
    if moe.capacity_factor is None:
        add("ep", "all_to_all", (ep - 1) * here * _INT, passes)
        add("etp", "all_gather", etp * ep * here * _INT, passes)
    else:
        columns = own_tokens(config, layout) * moe.num_experts_per_tok * 3 * _DOUBLE
        add("tp", "all_gather", layout.tp * columns, passes)
        add("cp", "all_gather", layout.cp * layout.tp * columns, passes)
    # Rows are those of one forward pass over all layers; a call stands for the mean of them.
    add("ep", "all_to_all", rows.sent * size / forward, passes + forward)
    add("ep", "all_to_all", rows.received * size / forward, passes + forward)
    add("etp", "all_gather", rows.gathered * size / forward, passes + forward)
    add("etp", "reduce_scatter", rows.gathered * size / forward, passes + forward)
    if not config.parallelism.sequence_parallel:
        pieces = -(-data.micro_batch * data.seq_len // (layout.cp * layout.tp)) * layout.tp
        # Results are put together once more where dropout comes after them.
        joined = again if config.model.dropout and config.parallelism.recompute != "selective:mlp" else 0
        add("tp", "all_gather", pieces * size, forward * (2 + counting) + joined)
    if moe.balance_loss:
        balanced = forward + again
        if moe.balance_scope == BalanceScope.global_batch and not counting:
            for axis in ("dp_replicate", "dp_shard", "tp"):  # context ranks are data ranks to these groups
                add(axis, "all_reduce", moe.num_experts * _INT, balanced)
        elif moe.balance_scope != BalanceScope.global_batch:
            sequences = data.micro_batch if moe.balance_scope == BalanceScope.sequence else 1
            for axis in ("cp", "tp"):
                add(axis, "all_reduce", sequences * moe.num_experts * _INT, balanced)


def expert_elements(config: Config, layout: Layout, layer: int) -> int:
    """Elements of a layer's experts that one rank works with."""
    shapes = layer_shapes(config.model, layer)
    total = 0
    for name, shape in shapes.items():
        if is_expert(name):
            inner = config.model.moe.intermediate_size
            total += shape[0] // layout.ep * -(-inner // layout.etp) * config.model.hidden_size
    return total


def recomputed_mixtures(config: Config, mixtures: list[int]) -> list[int]:
    """Which of these mixtures are worked out again, exchanges included."""
    mode = config.parallelism.recompute
    if mode == "selective:mlp":
        return mixtures
    interval = recompute_interval(mode)
    return [] if interval is None else [layer for layer in mixtures if layer % interval == 0]
