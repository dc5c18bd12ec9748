"""Data parallelism and ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054) on FSDP2's `fully_shard`: one knob.

    zero=3  parameters are gathered for each forward and backward and freed again; gradients as with zero=2
    zero=2  parameters are gathered once a step and kept; gradients reduce-scatter per microbatch
    zero=1  parameters likewise; gradients stay whole and reduce-scatter once a step; the optimizer state is split
    zero=0  nothing is split: the same with shards of one rank, replicated over all data ranks

The paper's stages 1 and 2 keep parameters whole for good; here every stage holds master weights in shards and gathers
them at the first use in a step, which costs one all-gather a step and saves their memory between steps. Gradients are
summed in `precision.reduce`, never averaged: FSDP2's own division is off. With `offload`, master weights, their
gradients and the optimizer state live in the host's memory and the update runs there.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from models.decoder import Decoder, DecoderLayer
from models.moe import MixtureOfExperts
from parallel.config import ParallelismConfig, PrecisionConfig
from parallel.precision import DTYPES
from parallel.stages import splits_backward

# The embedding's output is a view where ranks gather it along the sequence; nothing here writes into it.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def shard(
    decoder: Decoder,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    parallelism: ParallelismConfig,
    precision: PrecisionConfig,
) -> None:
    """Split a decoder's parameters over the (dp_replicate, dp_shard) mesh: a group per layer, and ends of their own.

    Experts are groups of their own over the (dp_replicate, expert_dp) `expert_mesh`, split along the hidden size: there
    may be more shards than experts on a rank, and ep and etp split the other two dimensions.
    """
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce])
    # A split backward pass needs the parameters of several microbatches at once: they are gathered once a step.
    keep = parallelism.zero < 3 or (parallelism.pp > 1 and splits_backward(parallelism))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": not keep}
    if parallelism.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for layer in decoder.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mlp, MixtureOfExperts):
            by_hidden = {
                layer.mlp.experts.gate_proj.weight: Shard(2),
                layer.mlp.experts.up_proj.weight: Shard(2),
                layer.mlp.experts.down_proj.weight: Shard(1),
            }
            own = {"mesh": expert_mesh, "shard_placement_fn": by_hidden.get}
            fully_shard(layer.mlp.experts, **options | own)
        fully_shard(layer, **options)
    if not decoder.config.tie_word_embeddings:
        if decoder.model.embed_tokens is not None:
            fully_shard(decoder.model.embed_tokens, **options)
        if decoder.model.norm is not None and decoder.lm_head is not None:
            # Used last in the forward and first in the backward pass: freeing it between would only gather it again.
            fully_shard([decoder.model.norm, decoder.lm_head], **options | {"reshard_after_forward": False})
    fully_shard(decoder, **options)
    layers = [_units(layer) for layer in decoder.model.layers.values()]
    if parallelism.pp > 1 and not keep:
        _stay_within_the_microbatch(decoder, [unit for units in layers for unit in units])
    _prefetch(layers, parallelism.prefetch)
    for module in _groups(decoder):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo and NCCL alike: a plain sum


def _units(layer: nn.Module) -> list[FSDPModule]:
    """A layer's groups in the order in which they are used."""
    return [module for module in layer.modules() if isinstance(module, FSDPModule)]


def _prefetch(layers: list[list[FSDPModule]], ahead: int) -> None:
    """Gather parameters of the next `ahead` layers while one computes; FSDP2 by itself looks one ahead, late."""
    for index, units in enumerate(layers):
        if ahead:
            after = [unit for units in layers[index + 1 : index + 1 + ahead] for unit in units]
            before = [unit for units in layers[max(index - ahead, 0) : index] for unit in units]
            units[0].set_modules_to_forward_prefetch([*units[1:], *after])
            units[0].set_modules_to_backward_prefetch([*units[1:], *before[::-1]])


def _stay_within_the_microbatch(decoder: Decoder, layers: list[FSDPModule]) -> None:
    """Let a backward pass gather ahead what comes before in its stage, and the stage's first group nothing.

    FSDP2 by itself goes by the order of the forward passes, and with several microbatches under way what came before
    is at times a group of another one's. Naming a group that is there already gathers nothing.
    """
    body = decoder.model
    ends = [decoder] if decoder.config.tie_word_embeddings else [body.embed_tokens, body.norm]
    order = [module for module in (ends[0], *layers, *ends[1:]) if isinstance(module, FSDPModule)]
    for group, before in zip(order, [order[0], *order], strict=False):
        group.set_modules_to_backward_prefetch([before])


def before_microbatch(decoder: nn.Module, zero: int, last: bool) -> None:
    """Tell FSDP2 what the backward pass that comes next does with gradients and gathered parameters."""
    if isinstance(decoder, FSDPModule):
        decoder.set_requires_gradient_sync(last or zero >= 2)
        decoder.set_requires_all_reduce(last)  # over replicas once a step, of what was reduced over shards
        decoder.set_reshard_after_backward(last or zero == 3)


def add_to_sums(decoder: nn.Module) -> None:
    """Add gradients that have just been made to their sums in `precision.reduce`.

    FSDP2 does so in hooks, which the half of a backward pass that is for weights does not call: several in a row would
    add up in the type of computing.
    """
    if isinstance(decoder, FSDPModule):
        for module in _groups(decoder):
            for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]
                for parameter in group.fsdp_params:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _groups(decoder: nn.Module) -> list[FSDPModule]:
    return [module for module in decoder.modules() if isinstance(module, FSDPModule)]
