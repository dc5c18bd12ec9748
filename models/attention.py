"""Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) and the description of who sees whom."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.norm import RMSNorm
from models.rotary import rotate


@dataclass(frozen=True)
class AttentionMask:
    """Who sees whom: always causal, optionally a sliding window, optionally within a packed document only.

    `document_ids` is int64 (batch, seq), equal for tokens of one document, or None. `allowed` is the same statement as
    a bool tensor (batch or 1, 1, queries, keys), or None where plain causal attention needs no tensor.
    """

    window: int | None = None
    document_ids: Tensor | None = None
    allowed: Tensor | None = None

    @staticmethod
    def build(
        queries: int, keys: int, device: torch.device, window: int | None = None, document_ids: Tensor | None = None
    ) -> "AttentionMask":
        """The mask of the last `queries` of `keys` tokens (fewer queries than keys: the rest are in a cache)."""
        if document_ids is None and queries == keys and (window is None or window >= keys):
            return AttentionMask(window)
        key = torch.arange(keys, device=device)
        query = torch.arange(keys - queries, keys, device=device).unsqueeze(-1)
        allowed = key <= query
        if window is not None:
            allowed = allowed & (query - key < window)
        allowed = allowed[None, None]
        if document_ids is not None:
            same = document_ids[:, keys - queries :].unsqueeze(-1) == document_ids.unsqueeze(-2)
            allowed = allowed & same.unsqueeze(1)
        return AttentionMask(window, document_ids, allowed)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """Softmax attention: query (batch, heads, queries, head_dim) on key and value (batch, kv_heads, keys, head_dim)."""
    grouped = query.shape[1] != key.shape[1]
    if mask.allowed is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    # No fused kernel takes both a mask and grouped heads; unfused, all scores would stand in memory.
    copies = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(copies, dim=1) if grouped else x for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.allowed)


class KeyValueCache:
    """The keys and values of the tokens one attention layer has seen, for generation."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (batch, kv_heads, new, head_dim) and return all that is held."""
        self.key = key if self.key is None else torch.cat((self.key, key), dim=2)
        self.value = value if self.value is None else torch.cat((self.value, value), dim=2)
        return self.key, self.value

    def __len__(self) -> int:
        return 0 if self.key is None else self.key.shape[2]


class Attention(nn.Module):
    """Projections, rotation, attention, output projection. Parameter names are those of Hugging Face."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: AttentionMask, cache: KeyValueCache | None = None
    ) -> Tensor:
        """(batch, seq, hidden) to (batch, seq, hidden)."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = rotate(query, rotary), rotate(key, rotary)
        if cache is not None:
            key, value = cache.extend(key, value)
        return self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(-2))
