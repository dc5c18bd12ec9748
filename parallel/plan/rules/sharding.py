"""ZeRO, and what it asks of the rest."""

from collections.abc import Iterator

from models.counts import parameter_count
from parallel.config import BYTES, Config, MuonConfig
from parallel.devices import DEVICES
from parallel.layout import AXES, Layout, microbatch_count
from parallel.plan.problems import Fault
from parallel.plan.rules.run import adamw_for
from parallel.plan.traffic import ring_bytes
from parallel.plan.weights import held_parameters, optimizer_elements
from parallel.stages import splits_backward


def sharding(config: Config, layout: Layout) -> Iterator[Fault]:
    """The keys of ZeRO."""
    parallelism, zero = config.parallelism, config.parallelism.zero
    if zero not in (0, 1, 2, 3):
        yield Fault(
            "zero", f"parallelism.zero={zero} must be 0, 1, 2 or 3.", {"parallelism.zero": [max(0, min(zero, 3))]}
        )
    if parallelism.prefetch < 0:
        yield Fault(
            "prefetch", f"parallelism.prefetch={parallelism.prefetch} must be 0 or more.", {"parallelism.prefetch": [0]}
        )
    if parallelism.prefetch > 0 and zero != 3:
        yield Fault(
            "prefetch",
            f"parallelism.prefetch={parallelism.prefetch} is for zero=3, where every layer is gathered when it is "
            f"used; zero={zero} gathers once a step.",
            {"parallelism.prefetch": [0]},
        )
    if parallelism.offload and (config.cluster.device == "cpu" or layout.dp * layout.cp == 1):
        yield Fault(
            "offload",
            f"parallelism.offload=true needs a GPU to offload from and more than one data rank; cluster.device="
            f"{config.cluster.device}, data ranks {layout.dp * layout.cp}.",
            {"parallelism.offload": [False]},
        )
    if isinstance(config.optimizer, MuonConfig) and (layout.tp > 1 or (zero > 0 and layout.dp_shard * layout.cp > 1)):
        yield Fault(
            "muon-split",
            f"optimizer=muon works on whole matrices, which parallelism.tp={layout.tp} and zero={zero} split. With "
            "tp=1 and zero=0 it does.",
            {"parallelism.zero": [0], "parallelism.tp": [1], "optimizer": [adamw_for(config.optimizer)]},
        )


def notes(config: Config, layout: Layout) -> Iterator[Fault]:
    """What lies outside the GPUs."""
    if not config.parallelism.offload:
        return
    held = held_parameters(config, layout, dict.fromkeys(AXES, 0))
    size = (2 * sum(held.values()) + optimizer_elements(config, held)) * BYTES[config.precision.master]
    node = size * (config.cluster.devices_per_node or layout.world // config.cluster.nodes)
    yield Fault(
        "offload-host",
        f"parallelism.offload=true keeps weights, their gradients and the optimizer's state in the host's memory: "
        f"about {node / 1e9:.1f} GB a node, which is not checked. They cross to the GPU and back in every step.",
    )


def costs(config: Config, layout: Layout) -> Iterator[Fault]:
    """What is legal and costly."""
    parallelism, zero = config.parallelism, config.parallelism.zero
    if zero and layout.dp_shard * layout.cp == 1:
        yield Fault(
            "zero-alone",
            f"parallelism.zero={zero} shares nothing out: a shard is one rank (dp_shard=1, cp=1).",
        )
    stage = parameter_count(config.model) // (layout.pp * layout.tp)
    if zero == 0 and layout.dp > 1 and config.cluster.device in DEVICES:
        state = stage * BYTES[config.precision.master] * 2 * (layout.dp - 1) // layout.dp
        yield Fault(
            "zero-0",
            f"parallelism.zero=0 holds the optimizer's state {layout.dp} times; zero=1 would free about "
            f"{state / 1e9:.1f} GB a "
            f"rank and send the same bytes, a reduce-scatter and an all-gather for an all-reduce.",
        )
    if layout.pp == 1 or zero < 2 or layout.dp_shard * layout.cp == 1:
        return
    microbatches = microbatch_count(config, layout)
    if splits_backward(parallelism):
        size = stage * BYTES[config.precision.reduce] / 1e9
        yield Fault(
            "zero-split-backward",
            f"parallelism.zero={zero} with pp_schedule={parallelism.pp_schedule} keeps gradients (about {size:.2f} GB "
            "a rank) and gathered parameters whole within a step, since its backward pass is split: that is the "
            "memory of zero=1.",
        )
    elif zero == 3:
        sent = (
            ring_bytes("all_gather", stage * BYTES[config.precision.compute], layout.dp_shard * layout.cp)
            * 2
            * microbatches
        )
        yield Fault(
            "zero3-pipeline",
            f"parallelism.zero=3 with parallelism.pp={layout.pp} gathers a stage's parameters again for forward and "
            f"backward of each of {microbatches} microbatches: a rank sends about {sent / 1e9:.2f} GB a step, with "
            f"zero=1 {sent / 1e9 / (2 * microbatches):.2f} GB.",
        )
