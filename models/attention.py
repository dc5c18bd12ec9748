"""Grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245), block by block under a mask of models/mask.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.kernels import kernel_for, of_keys, of_queries
from models.mask import AttentionMask, Block
from models.norm import RMSNorm
from models.rotary import rotate

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Attention of query, key and value (batch, heads, seq, head_dim) under a mask, as an `Attention` is given it."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Softmax attention, and the log-sum-exp of each query's scores.

    Query (batch, heads, queries, head_dim) on key and value (batch, key_value_heads, keys, head_dim); results of the
    query's shape and (batch, heads, queries). Only the first has a gradient. Memory does not grow with the product of
    queries and keys. Every query must see a key.
    """
    return _Attend.apply(query, key, value, mask)


def attend_alone(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """`attend` of whole sequences in one process; plain causal attention by whatever kernel torch finds fastest."""
    if mask.plain and query.shape[2] == key.shape[2]:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return attend(query, key, value, mask)[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        partial = Partial(query, key, value, mask)
        out = partial.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, partial.lse)
        ctx.mask = mask
        ctx.mark_non_differentiable(partial.lse)
        return out, partial.lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse = ctx.saved_tensors
        gradients = Gradients(query, grads[0], out, lse)
        key_grad, value_grad = zeros_of(key), zeros_of(value)
        gradients.add(key, value, (*ctx.mask.squares, *ctx.mask.rectangles), key_grad, value_grad)
        return gradients.query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None


class Partial:
    """What queries have seen so far: `out` and `lse`, in float32 or better, to which blocks of other keys are added."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> None:
        self.query = query
        self.kernel = kernel_for(query)
        batch, heads, length, size = query.shape
        # Heads of a token side by side in memory, so that the output projection takes them as they lie.
        self.out = query.new_zeros((batch, length, heads, size), dtype=_precise(query.dtype)).transpose(1, 2)
        self.lse = query.new_full(query.shape[:-1], float("-inf"), dtype=self.out.dtype)
        for block, out, lse in self._blocks(key, value, mask.squares):
            of_queries(self.out, block).copy_(out)
            of_queries(self.lse, block).copy_(lse)
        self.add(key, value, mask.rectangles)

    def add(self, key: Tensor, value: Tensor, blocks: tuple[Block, ...]) -> None:
        """Let the queries see more keys."""
        for block, out, lse in self._blocks(key, value, blocks):
            merge(of_queries(self.out, block), of_queries(self.lse, block), out, lse)

    def _blocks(self, key: Tensor, value: Tensor, blocks: tuple[Block, ...]) -> Any:
        for call in self.kernel.calls(blocks):
            for block, (out, lse) in zip(call, self.kernel.forward(self.query, key, value, call), strict=True):
                yield block, out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add, in place, the attention of the same queries on other keys: softmax over both is their mean, weighted by
    exp(lse) (Rabe and Staats, 2021, arXiv:2112.05682).
    """
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp().unsqueeze(-1)).add_(more * (more_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


class Gradients:
    """The backward pass over blocks in any order: `query_grad` sums up here, those of keys where the caller says."""

    def __init__(self, query: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        self.query, self.grad, self.out, self.lse = query, grad, out, lse
        self.kernel = kernel_for(query)
        self.query_grad = zeros_of(query)

    def add(self, key: Tensor, value: Tensor, blocks: tuple[Block, ...], key_grad: Tensor, value_grad: Tensor) -> None:
        """Add the blocks' shares to the query's gradient and to those of the given keys and values."""
        for call in self.kernel.calls(blocks):
            self._add_call(key, value, call, key_grad, value_grad)

    def _add_call(self, key: Tensor, value: Tensor, call: list[Block], key_grad: Tensor, value_grad: Tensor) -> None:
        # By itself, so that one call's results are gone when the next one's are made.
        results = self.kernel.backward(self.grad, self.query, key, value, self.out, self.lse, call)
        for block, (of_query, of_key, of_value) in zip(call, results, strict=True):
            of_queries(self.query_grad, block).add_(of_query)
            of_keys(key_grad, block).add_(of_key)
            of_keys(value_grad, block).add_(of_value)


def zeros_of(x: Tensor) -> Tensor:
    """Zeros of x's shape, in float32 or better, to sum up gradients in."""
    return x.new_zeros(x.shape, dtype=_precise(x.dtype))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


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
        self.attend: Attend = attend_alone

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, seq, heads * head_dim) of x (batch, seq, hidden)."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        """(batch, seq, hidden) to (batch, seq, hidden); `mask` is what `attend` takes."""
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in self.project(x))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = rotate(query, rotary), rotate(key, rotary)
        if cache is not None:
            key, value = cache.extend(key, value)
        return self.o_proj(self.attend(query, key, value, mask).transpose(1, 2).flatten(-2))
