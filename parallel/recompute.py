"""Activation recomputation: what is thrown away after the forward pass and made again in the backward pass.

`full` keeps only each layer's input (Chen et al., 2016, arXiv:1604.06174), `full:n` that of every n-th layer and all of
the others. `selective:attention` and `selective:mlp` redo one block of each layer. `selective:ops` keeps the results of
matrix products and attention, which are dear to make, and redoes everything between them. Dropout masks are functions
of the step and the place, so no random state has to be kept: gradients are bitwise those of `none`.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.decoder import Decoder, DecoderLayer
from parallel.config import recompute_interval

_KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)


def apply_recompute(decoder: Decoder, mode: str) -> None:
    """Make a decoder's layers recompute what `mode` says."""
    n = recompute_interval(mode)
    for layer in decoder.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        if n is not None and layer.index % n == 0:
            _recompute(layer)
        elif mode == "selective:attention":
            _recompute(layer.self_attn)
        elif mode == "selective:mlp":
            _recompute(layer.mlp)
        elif mode == "selective:ops":
            _recompute(layer, context_fn=partial(create_selective_checkpoint_contexts, _policy))


def _recompute(module: nn.Module, **options: Any) -> None:
    # The instance's forward, not a wrapper module: names of parameters stay what they are.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().split(".")[0] if isinstance(operation, torch._ops.OpOverload) else ""
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
