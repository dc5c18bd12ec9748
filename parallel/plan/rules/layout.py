"""World and batch arithmetic: axes make up the ranks there are, and a step is dealt out evenly."""

from collections.abc import Iterator
from typing import Any

from models.errors import ConfigError, nearest
from parallel.config import Config
from parallel.layout import AXES, Layout, divisors, resolve
from parallel.plan.network import nodes_spanned
from parallel.plan.problems import Fault


def world(config: Config, ranks: int) -> Iterator[Fault]:
    """The axes' product is the number of ranks, the same on every node."""
    nodes = config.cluster.nodes
    if nodes < 1 or ranks < 1:
        return  # said elsewhere
    try:
        resolve(config.parallelism, ranks, nodes)
    except ConfigError as error:
        yield Fault("world", str(error), _world_tries(config, ranks))


def _world_tries(config: Config, ranks: int) -> dict[str, list[Any]]:
    parallelism, nodes = config.parallelism, config.cluster.nodes
    tries: dict[str, list[Any]] = {}
    if ranks % nodes:
        tries["cluster.nodes"] = [*nearest(divisors(ranks), nodes)][:4]
    sizes = {axis: getattr(parallelism, axis) for axis in AXES}
    for axis in ("tp", "pp", "cp", "dp_replicate"):
        if sizes[axis] == 1:
            continue
        others = 1
        for other in AXES:
            if other not in (axis, "dp_shard"):
                others *= max(sizes[other], 1)
        legal = nearest(divisors(ranks // others) if ranks % others == 0 else divisors(ranks), sizes[axis])
        if axis == "tp":  # rather within a node
            per_node = ranks // nodes
            legal = [size for size in legal if per_node % size == 0] or legal
        tries[f"parallelism.{axis}"] = [*legal][:6]
    if sizes["dp_shard"] != -1:
        tries = {"parallelism.dp_shard": [-1]} | tries
    for axis in ("ep", "etp"):
        if getattr(parallelism, axis) != 1:
            tries[f"parallelism.{axis}"] = [*nearest(divisors(ranks), getattr(parallelism, axis))][:6]
    return tries


def batch(config: Config, layout: Layout) -> Iterator[Fault]:
    """global_batch must be a whole number of microbatches on every data rank."""
    data, dp = config.data, layout.dp
    if min(data.seq_len, data.global_batch, data.micro_batch) < 1 or data.global_batch % (data.micro_batch * dp) == 0:
        return
    unit = data.micro_batch * dp
    below, above = data.global_batch // unit * unit, -(-data.global_batch // unit) * unit
    micro = divisors(data.global_batch // dp) if data.global_batch % dp == 0 else []
    yield Fault(
        "batch",
        f"data.global_batch={data.global_batch} must be a multiple of data.micro_batch={data.micro_batch} * {dp} data "
        f"ranks (dp_replicate={layout.dp_replicate} * dp_shard={layout.dp_shard}) = {unit}.",
        {
            "data.global_batch": [
                size for size in nearest([below, above, *_rounds(unit, above, layout.pp)], data.global_batch) if size
            ],
            "data.micro_batch": sorted(micro, key=lambda size: abs(size - data.micro_batch))[:3],
        },
    )


def _rounds(unit: int, above: int, pp: int) -> list[int]:
    """Batches of whole rounds of a pipeline."""
    return [-(-above // (unit * pp)) * unit * pp] if pp > 1 else []


def costs(config: Config, layout: Layout) -> Iterator[Fault]:
    """Which axes run over slow wires, and group sizes that are often blamed."""
    per_node = config.cluster.devices_per_node
    meant = config.recipe.devices
    if meant is not None and layout.world != meant and config.cluster.device not in ("auto", "cpu"):
        yield Fault(
            "recipe-devices",
            f"recipe={config.recipe.name} is meant for {meant} devices, and the cluster has {layout.world} "
            f"(cluster.nodes={config.cluster.nodes} * devices_per_node={per_node}).",
        )
    if per_node is None:
        return
    spanned = nodes_spanned(layout, "dp_shard", per_node)
    if layout.dp & (layout.dp - 1):
        steps = (layout.dp - 1).bit_length()
        yield Fault(
            "dp-power-of-two",
            f"{layout.dp} data ranks are no power of two. A ring does not care (each rank sends "
            f"{layout.dp - 1}/{layout.dp} of the data, as ever); a tree takes {steps} rounds, what {1 << steps} ranks "
            "would take. Nothing is lost but that.",
        )
    if config.parallelism.zero == 3 and spanned > 1 and layout.dp_shard > per_node:
        yield Fault(
            "zero3-between-nodes",
            f"parallelism.zero=3 gathers every layer over dp_shard={layout.dp_shard} ranks on {spanned} nodes, twice a "
            f"microbatch. dp_replicate={layout.dp_shard * layout.tp // per_node} with "
            f"dp_shard={per_node // layout.tp or 1} would gather within a node, and hold the weights of fewer shards.",
        )
