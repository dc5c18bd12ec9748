"""Mixtures of experts and their axes, and when experts are worth spreading."""

from collections.abc import Iterator
from dataclasses import replace

from models.errors import ConfigError, nearest
from parallel.config import BYTES, Config, MuonConfig
from parallel.layout import Layout, divisors, microbatch_count, resolve
from parallel.plan.expert_traffic import expert_elements, must_count
from parallel.plan.problems import Fault
from parallel.plan.rules.run import adamw_for
from parallel.plan.traffic import traffic


def split(config: Config, layout: Layout) -> Iterator[Fault]:
    """What experts ask of the ranks that they are dealt out over."""
    parallelism, moe, ep, etp = config.parallelism, config.model.moe, layout.ep, layout.etp
    inner = layout.dp_shard * layout.cp * layout.tp
    if not moe.num_experts:
        for axis, size in (("ep", ep), ("etp", etp), ("ep_nodes", parallelism.ep_nodes)):
            if size != 1:
                message = f"parallelism.{axis}={size}: model={config.model.name} has no experts."
                yield Fault("experts-none", message, {f"parallelism.{axis}": [1]})
        return
    if moe.num_experts % ep:
        legal = [n for n in divisors(moe.num_experts) if inner % (n * etp) == 0]
        yield Fault(
            "experts-split",
            f"parallelism.ep={ep} must divide model.moe.num_experts={moe.num_experts}, since experts are dealt out "
            f"whole{', and there are more ranks than experts' if ep > moe.num_experts else ''}; it can be one of "
            f"{legal}.",
            {"parallelism.ep": nearest(legal, ep)},
        )
    if moe.intermediate_size % etp:
        legal = [n for n in divisors(inner // ep) if moe.intermediate_size % n == 0]
        yield Fault(
            "experts-width",
            f"parallelism.etp={etp} must divide model.moe.intermediate_size={moe.intermediate_size}, the width of an "
            f"expert; it can be one of {legal}.",
            {"parallelism.etp": nearest(legal, etp)},
        )
    shards = layout.expert_dp if parallelism.zero else 1
    if config.model.hidden_size % shards:
        yield Fault(
            "experts-zero",
            f"parallelism.zero={parallelism.zero} splits experts along model.hidden_size={config.model.hidden_size} "
            f"over expert_dp = dp_shard * cp * tp / (ep * etp) = {shards} ranks, which does not divide.",
            {"parallelism.zero": [0], "parallelism.ep": nearest(divisors(moe.num_experts), ep)},
        )
    if parallelism.ep_nodes < 1 or ep % parallelism.ep_nodes:
        yield Fault(
            "experts-nodes",
            f"parallelism.ep_nodes={parallelism.ep_nodes} must divide parallelism.ep={ep}, so that every node has as "
            f"many ranks of a group; it can be one of {divisors(ep)}.",
            {"parallelism.ep_nodes": nearest(divisors(ep), parallelism.ep_nodes)},
        )
    elif parallelism.ep_nodes > 1 and config.cluster.devices_per_node is not None:
        inside = ep // parallelism.ep_nodes * etp
        if config.cluster.devices_per_node % inside:
            yield Fault(
                "experts-nodes",
                f"parallelism.ep_nodes={parallelism.ep_nodes}: the {inside} ranks (ep={ep} / ep_nodes * etp={etp}) "
                f"that exchange first must share a node, and cluster.devices_per_node="
                f"{config.cluster.devices_per_node} is no multiple of that.",
                {"parallelism.ep_nodes": nearest(divisors(ep), parallelism.ep_nodes)},
            )


def routing(config: Config, layout: Layout) -> Iterator[Fault]:
    """What routing asks of sequences and of the optimizer."""
    moe, data = config.model.moe, config.data
    if not moe.num_experts or data.seq_len < 1 or moe.num_experts_per_tok < 1:
        return
    share = moe.num_experts / (data.seq_len * moe.num_experts_per_tok)
    if moe.capacity_factor is not None and 0.0 < moe.capacity_factor < share:
        yield Fault(
            "experts-capacity",
            f"model.moe.capacity_factor={moe.capacity_factor} gives an expert less than one token of a sequence "
            f"(capacity_factor * data.seq_len={data.seq_len} * num_experts_per_tok={moe.num_experts_per_tok} / "
            f"num_experts={moe.num_experts}); it must be {share:g} or more, or null.",
            {"model.moe.capacity_factor": [share, 1.25, None]},
        )
    if config.parallelism.recompute == "selective:ops":
        yield Fault(
            "experts-recompute",
            "parallelism.recompute=selective:ops asks the backward pass for the same operations in the same order, and "
            "experts gather their own weights (FSDP2) in another.",
            {"parallelism.recompute": ["selective:attention", "selective:mlp", "full"]},
        )
    if isinstance(config.optimizer, MuonConfig):
        yield Fault(
            "experts-muon",
            "optimizer=muon has no rule for stacks of experts.",
            {"optimizer": [adamw_for(config.optimizer)]},
        )


def costs(config: Config, layout: Layout) -> Iterator[Fault]:
    """What is legal and costly."""
    moe = config.model.moe
    if moe.num_experts and moe.num_experts_per_tok == 1 and moe.norm_topk_prob and not moe.balance_loss:
        yield Fault(
            "experts-one-weight",
            "model.moe.num_experts_per_tok=1 with model.moe.norm_topk_prob=true weighs every token's expert with 1, so "
            "that the router has no gradient and never learns. model.moe.norm_topk_prob=false weighs it with its "
            "probability (Switch Transformers).",
        )
    if must_count(config, layout):
        yield Fault(
            "experts-count",
            f"model.moe.balance_scope=global_batch needs the load of the whole step before the first backward pass: "
            f"with {microbatch_count(config, layout)} microbatches a step takes one forward pass more, about a third "
            f"more computing. balance_scope=sequence or microbatch needs none, nor does one microbatch.",
        )


def advice(config: Config, layout: Layout) -> Iterator[Fault]:
    """Experts over ranks against experts on every rank, by the bytes that each keeps and sends."""
    if layout.ep == 1:
        return
    alone = replace(config, parallelism=replace(config.parallelism, ep=1, ep_nodes=1))
    try:
        other = resolve(alone.parallelism, layout.world, config.cluster.nodes)
    except ConfigError:
        return
    if config.parallelism.zero and config.model.hidden_size % other.expert_dp:
        return
    kept, sent = [], []
    for chosen, grid in ((config, layout), (alone, other)):
        kept.append(_expert_bytes(chosen, grid))
        sent.append(sum(row.bytes_sent for row in traffic(chosen, grid)))
    better = "experts on every rank send less" if sent[1] < sent[0] else "experts over ranks send less too"
    yield Fault(
        "experts-spread",
        f"parallelism.ep={layout.ep}: a rank keeps {kept[0] / 1e9:.3g} GB of expert weights and gradients while it "
        f"computes and sends {sent[0] / 1e9:.3g} GB a step if experts are busy alike; with ep=1 {kept[1] / 1e9:.3g} GB "
        f"and {sent[1] / 1e9:.3g} GB. If the latter fit, {better}.",
    )


def _expert_bytes(config: Config, layout: Layout) -> int:
    """Weights in the compute type and gradients in the reduce type of all experts that a rank works with."""
    zero, precision = config.parallelism.zero, config.precision
    layers = [expert_elements(config, layout, layer) for layer in config.model.mixtures]
    weights = max(layers) if zero == 3 else sum(layers) // layout.pp
    gradients = max(layers) if zero >= 2 else sum(layers) // layout.pp
    return weights * BYTES[precision.compute] + gradients * BYTES[precision.reduce]
