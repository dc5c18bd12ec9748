"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685): W stands still, and B and A of W x + alpha / rank B A x learn.

Names are those of PEFT: `...q_proj.lora_A.weight` (rank, inputs) and `...q_proj.lora_B.weight` (outputs, rank).
"""

from typing import Any, cast

from torch import Tensor, nn

from models.config import LoRAConfig, ModelConfig

PREFIX = "base_model.model."
"""What PEFT's files have before every name."""


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return adapted(self, x, super().forward(x))


def add_adapters(module: nn.Module, lora: LoRAConfig) -> None:
    """Freeze every parameter of a module and put an adapter beside each linear layer whose name is a target."""
    module.requires_grad_(False)
    for name, linear in list(module.named_modules()):
        if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in lora.targets:
            linear.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False)
            linear.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False)
            linear.adapter_scale = lora.alpha / lora.rank  # type: ignore[assignment]
            linear.__class__ = AdaptedLinear


def adapter_of(linear: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """A and B of a linear layer's adapter, if it has one."""
    parts = linear._modules.get("lora_A"), linear._modules.get("lora_B")
    return cast(tuple[nn.Linear, nn.Linear], parts) if parts[0] is not None else None


def adapted(linear: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y, what a linear layer makes of x without its adapter, with what the adapter adds, if there is one."""
    adapter = adapter_of(linear)
    return y if adapter is None else y + adapter[1](adapter[0](x)) * cast(float, linear.adapter_scale)


def peft_config(config: ModelConfig, base: str) -> dict[str, Any]:
    """The contents of PEFT's adapter_config.json; `base` says where the weights that stand still are."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(config.lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
