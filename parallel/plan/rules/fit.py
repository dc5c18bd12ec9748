"""Whether a rank's memory fits its device, by the formulas of plan/memory.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from models.errors import nearest
from parallel.config import RECOMPUTE_MODES, Config
from parallel.devices import DEVICES
from parallel.layout import Layout, divisors
from parallel.plan.memory import RESERVED_BYTES, SLACK, Memory, rank_memory
from parallel.plan.problems import Fault
from parallel.plan.weights import rank_layers
from parallel.stages import splits_backward, stages_of


def worst(config: Config, layout: Layout) -> tuple[int, Memory]:
    """The pipeline rank that holds most: of those with as many layers of each kind and the same ends, an outer one.

    Of ranks that are alike the first has most in flight, or with a schedule that goes back and forth the last; a
    schedule from a file may do anything.
    """
    last_stage = layout.pp * config.parallelism.virtual_stages - 1
    ranks = [*range(layout.pp)]
    if config.parallelism.pp_schedule != "csv":
        alike: dict[tuple[int, int, bool, bool], list[int]] = {}
        for rank in ranks:
            stages, layers = stages_of(rank, config.parallelism), rank_layers(config, rank)
            mixtures = sum(config.model.has_experts(layer) for layer in layers)
            alike.setdefault((len(layers), mixtures, 0 in stages, last_stage in stages), []).append(rank)
        ranks = sorted({rank for group in alike.values() for rank in (group[0], group[-1])})
    return max(((rank, rank_memory(config, layout, rank)) for rank in ranks), key=lambda pair: pair[1].total)


def fits(config: Config, layout: Layout) -> Iterator[Fault]:
    """What tensors alone need is not more than the device has."""
    device = DEVICES.get(config.cluster.device)
    if device is None:
        return
    rank, memory = worst(config, layout)
    if memory.total > device.memory_bytes:
        yield Fault("memory", _message(rank, memory, memory.total, device.memory_bytes, config), _tries(config, layout))


def tight(config: Config, layout: Layout) -> Iterator[Fault]:
    """With what no tensor accounts for it still fits."""
    device = DEVICES.get(config.cluster.device)
    if device is None:
        return
    rank, memory = worst(config, layout)
    if memory.total <= device.memory_bytes < memory.needed:
        extra = (
            f" With {SLACK:.0%} that the allocator holds and {RESERVED_BYTES / 1e9:.1f} GB of context it may not fit."
        )
        yield Fault("memory-tight", _message(rank, memory, memory.needed, device.memory_bytes, config) + extra)


def _message(rank: int, memory: Memory, size: int, limit: int, config: Config) -> str:
    kinds = ("parameters", "gradients", "optimizer", "gathered", "communication", "activations", "loss")
    parts = ", ".join(f"{kind} {getattr(memory, kind) / 1e9:.1f}" for kind in kinds if getattr(memory, kind) > 5e7)
    return (
        f"a rank at {rank} along pp needs {size / 1e9:.1f} GB and cluster.device={config.cluster.device} has "
        f"{limit / 1e9:.1f} ({parts}; at its peak, {memory.moment}; data.micro_batch={config.data.micro_batch}, "
        f"parallelism.recompute={config.parallelism.recompute}, zero={config.parallelism.zero})."
    )


def _tries(config: Config, layout: Layout) -> dict[str, list[Any]]:
    """Cheapest first: shards, recomputation, smaller microbatches, more ways of splitting, more nodes."""
    parallelism, data = config.parallelism, config.data
    tries: dict[str, list[Any]] = {}
    if layout.dp_shard > 1 and parallelism.zero < 3:
        tries["parallelism.zero"] = [zero for zero in (1, 2, 3) if zero > parallelism.zero]
    if not (layout.pp > 1 and splits_backward(parallelism)):
        cheap = [mode for mode in ("selective:mlp", "selective:ops", "full") if mode in RECOMPUTE_MODES]
        tries["parallelism.recompute"] = [mode for mode in cheap if mode != parallelism.recompute]
    smaller = [size for size in divisors(data.micro_batch) if size < data.micro_batch]
    if smaller:
        tries["data.micro_batch"] = [*smaller[::-1]][:2]
    for axis in ("tp", "pp"):
        size = getattr(layout, axis)
        larger = [other for other in divisors(layout.world // (layout.world // (size * layout.dp))) if other > size]
        tries[f"parallelism.{axis}"] = [*nearest(larger, size)][:2]
    tries["cluster.nodes"] = [config.cluster.nodes * 2, config.cluster.nodes * 4]
    return {key: values for key, values in tries.items() if values}


def recompute_costs(config: Config, layout: Layout) -> Iterator[Fault]:
    """Recomputation that nothing calls for."""
    device = DEVICES.get(config.cluster.device)
    if device is None or config.parallelism.recompute != "full":
        return
    other = replace(config, parallelism=replace(config.parallelism, recompute="none"))
    _, memory = worst(other, layout)
    if memory.needed <= device.memory_bytes:
        yield Fault(
            "recompute-needless",
            f"parallelism.recompute=full makes a step's computing a third longer, and without it a rank needs "
            f"{memory.needed / 1e9:.1f} of the {device.memory_bytes / 1e9:.1f} GB. Write parallelism.recompute=none.",
        )
