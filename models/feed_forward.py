"""The gated feed-forward block: SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)). Parameter names are those of Hugging Face."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to (batch, seq, hidden)."""
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What gates, and what is gated: (batch, seq, intermediate) each."""
        return self.gate_proj(x), self.up_proj(x)
