"""torch.compile of each decoder layer: what stands between products of matrices becomes a few kernels.

A layer at a time, so that one compilation serves them all and the hooks that gather and reduce parameters stay outside.
Left out of the graph, and run as ever: collectives, attention other than plain causal, mixtures of experts, dropout,
and generation as a whole. Shapes are fixed; another shape (a validation batch) is compiled besides.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.decoder import Decoder, DecoderLayer
from models.dropout import Dropout
from models.errors import ConfigError
from models.moe import MixtureOfExperts

COMPILATIONS = 64
"""Of one piece of code: dense and expert layers, training and evaluation, each with a few shapes."""


def compile_layers(decoder: Decoder, device: torch.device, plain: bool) -> None:
    """Compile a decoder's layers where they stand; `plain` says that attention is of whole, causal sequences.

    To be called last, with everything installed. Raises ConfigError where there is no compiler.
    """
    if device.type == "cpu":
        _need_compiler()
    torch._dynamo.config.recompile_limit = COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # by itself torch would go on without, and say little
    for layer in decoder.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        for module in layer.modules():
            if isinstance(module, MixtureOfExperts) or (isinstance(module, Dropout) and module.probability):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        if not plain:
            layer.self_attn.attend = torch.compiler.disable(layer.self_attn.attend)
        # The instance's forward, not a wrapper module: names of parameters stay what they are.
        layer.forward = _compiled(layer.forward)  # type: ignore[method-assign]


def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's forward, compiled but for generation, where every token makes keys and values of another length."""
    compiled = torch.compile(forward, dynamic=False)

    def either(
        x: Tensor, rotary: Any, mask: Any, dropout_key: Any = None, cache: Any = None, routing: Any = None
    ) -> Tensor:
        return (compiled if cache is None else forward)(x, rotary, mask, dropout_key, cache, routing)

    return either


def _need_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "trainer.compile=true needs a C++ compiler on a CPU, and none is found (g++, or what the variable CXX "
            "names). Install one, or write trainer.compile=false."
        ) from None
