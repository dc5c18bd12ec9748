"""Tensor and sequence parallelism."""

from collections.abc import Iterator

from models.errors import nearest
from parallel.config import BYTES, Config
from parallel.devices import DEVICES
from parallel.layout import Layout, divisors
from parallel.plan.network import link_bytes_per_s, nodes_spanned
from parallel.plan.problems import Fault
from parallel.plan.traffic import traffic


def splits(config: Config, layout: Layout) -> Iterator[Fault]:
    """What tp ranks deal out is there to deal out."""
    parallelism, model, tp = config.parallelism, config.model, layout.tp
    if tp == 1:
        for key in ("sequence_parallel", "loss_parallel", "async_tp"):
            if getattr(parallelism, key):
                yield Fault(
                    "tp-needed",
                    f"parallelism.{key}=true needs parallelism.tp above 1.",
                    {f"parallelism.{key}": [False]},
                )
        return
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    if min(heads, key_value_heads) < 1:
        return
    legal = divisors(heads)
    if heads % tp:
        yield Fault(
            "tp-heads",
            f"parallelism.tp={tp} must divide model.num_attention_heads={heads}, since heads are dealt out whole.",
            {"parallelism.tp": nearest(legal, tp)},
        )
    elif key_value_heads % tp and tp % key_value_heads:
        both = [size for size in legal if key_value_heads % size == 0 or size % key_value_heads == 0]
        yield Fault(
            "tp-key-value-heads",
            f"parallelism.tp={tp} must divide model.num_key_value_heads={key_value_heads} or be a multiple of it, so "
            f"that every rank has whole key/value heads or one that is held by several.",
            {"parallelism.tp": nearest(both, tp)},
        )
    if parallelism.async_tp:
        yield from _asynchronous(config, layout)
    if parallelism.sequence_parallel and layout.cp == 1 and config.data.seq_len % tp:
        length = config.data.seq_len
        yield Fault(
            "sequence-parallel",
            f"data.seq_len={length} must be a multiple of parallelism.tp={tp} with sequence_parallel.",
            {
                "data.seq_len": [size for size in nearest([length // tp * tp, -(-length // tp) * tp], length) if size],
                "parallelism.sequence_parallel": [False],
            },
        )
    if parallelism.zero and layout.dp_shard * layout.cp > 1:
        for key in ("vocab_size", "intermediate_size"):
            size = getattr(model, key)
            if size % tp:
                yield Fault(
                    "tp-rows",
                    f"model.{key}={size} must be a multiple of parallelism.tp={tp} where parallelism.zero="
                    f"{parallelism.zero} splits the rows once more.",
                    {f"model.{key}": [-(-size // tp) * tp], "parallelism.zero": [0]},
                )


def _asynchronous(config: Config, layout: Layout) -> Iterator[Fault]:
    off = {"parallelism.async_tp": [False]}
    if not config.parallelism.sequence_parallel:
        yield Fault(
            "async-tp",
            "parallelism.async_tp=true overlaps the gathers and sums of sequence parallelism.",
            {"parallelism.sequence_parallel": [True]} | off,
        )
    if config.cluster.device == "cpu":
        yield Fault("async-tp", "parallelism.async_tp=true works in the memory of GPUs; cluster.device=cpu.", off)
    per_node = config.cluster.devices_per_node or layout.world // config.cluster.nodes
    if per_node % layout.tp:
        yield Fault(
            "async-tp",
            f"parallelism.async_tp=true needs the ranks of parallelism.tp={layout.tp} on a node; it has {per_node}.",
            off,
        )


def costs(config: Config, layout: Layout) -> Iterator[Fault]:
    """Tensor parallelism on slow wires, or done by halves."""
    tp, model, parallelism = layout.tp, config.model, config.parallelism
    if tp == 1:
        return
    per_node = config.cluster.devices_per_node
    spanned = nodes_spanned(layout, "tp", per_node)
    if spanned > 1:
        sent = sum(row.bytes_sent for row in traffic(config, layout) if row.axis == "tp")
        slow, fast = link_bytes_per_s(config.cluster, spanned), link_bytes_per_s(config.cluster, 1)
        seconds = "" if not slow or not fast else f", {sent / slow:.2f} s instead of {sent / fast:.2f} s"
        yield Fault(
            "tp-crosses-nodes",
            f"parallelism.tp={tp} is spread over {spanned} nodes (cluster.devices_per_node={per_node}): a rank sends "
            f"{sent / 1e9:.1f} GB a step over the network{seconds}, and computing waits for all of it. A tp that "
            f"divides {per_node} stays within a node.",
        )
    uneven = [key for key in ("vocab_size", "intermediate_size") if getattr(model, key) % tp]
    for key in uneven:
        size = getattr(model, key)
        yield Fault(
            "tp-uneven",
            f"model.{key}={size} is no multiple of parallelism.tp={tp}: the last rank has "
            f"{size - min((tp - 1) * -(-size // tp), size)} rows and the others {-(-size // tp)}, and wait for nothing "
            f"less.",
        )
    if config.cluster.device not in DEVICES:
        return
    if not parallelism.sequence_parallel:
        stream = config.data.micro_batch * config.data.seq_len * model.hidden_size
        kept = stream * (2 * BYTES[config.precision.compute] + 8) * model.num_hidden_layers // layout.pp
        yield Fault(
            "tp-without-sequence-parallel",
            f"parallelism.sequence_parallel=false: all {tp} tp ranks keep the same norms' inputs, about "
            f"{kept / 1e9:.1f} GB for each microbatch in flight; with true each keeps its {tp}th part, for the same "
            f"traffic.",
        )
    if not parallelism.loss_parallel:
        logits = config.data.micro_batch * config.data.seq_len * model.vocab_size * BYTES[config.precision.compute]
        yield Fault(
            "tp-without-loss-parallel",
            f"parallelism.loss_parallel=false gathers the logits of model.vocab_size={model.vocab_size} on every tp "
            f"rank: {logits / 1e9:.1f} GB a microbatch on the wire; with true each rank keeps its own.",
        )
    if model.num_key_value_heads < tp:
        copies = tp // model.num_key_value_heads
        yield Fault(
            "key-value-copies",
            f"parallelism.tp={tp} is above model.num_key_value_heads={model.num_key_value_heads}: every key/value head "
            f"is held {copies} times, and its projections whole on every rank.",
        )
