"""Activation recomputation: what is thrown away after the forward pass and made again in the backward pass.

`full` keeps only each layer's input (Chen et al., 2016, arXiv:1604.06174), `full:n` that of every n-th layer and all of
the others. `selective:attention` and `selective:mlp` redo one block of each layer. `selective:ops` keeps the results of
matrix products and attention, which are dear to make, and redoes everything between them. Dropout masks are functions
of the step and the place, so no random state has to be kept: gradients are bitwise those of `none`.

Experts are refused with `selective:ops` (plan/rules/experts.py): they gather weights of their own in the middle of the
layer, and not alike in both passes.

Ring attention is many partial results per layer, more with every rank; `selective:ops` keeps none of those and works
out attention again.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.decoder import Decoder, DecoderLayer
from parallel.config import recompute_interval

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
)


def apply_recompute(decoder: Decoder, mode: str, keep_attention: bool = True) -> None:
    """Make a decoder's layers recompute what `mode` says; `keep_attention` is for `selective:ops`."""
    n = recompute_interval(mode)
    policy = partial(_policy, _PRODUCTS + _ATTENTION if keep_attention else _PRODUCTS)
    for layer in decoder.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        if n is not None and layer.index % n == 0:
            _recompute(layer)
        elif mode == "selective:attention":
            _recompute(layer.self_attn)
        elif mode == "selective:mlp":
            _recompute(layer.mlp)
        elif mode == "selective:ops":
            _recompute(layer, context_fn=partial(create_selective_checkpoint_contexts, policy))


def _recompute(module: nn.Module, **options: Any) -> None:
    # The instance's forward, not a wrapper module: names of parameters stay what they are.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **options)


def _policy(kept: tuple[str, ...], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.name().split(".")[0] if isinstance(operation, torch._ops.OpOverload) else ""
    return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE
