"""Tensor and sequence parallelism: column and row splits of every layer, vocabulary splits of embedding and loss.

Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053) and its sequence parallelism (Korthikanti et al., 2022,
arXiv:2205.05198). Parameters become DTensors over the tp axis, which say where each block belongs; all arithmetic is on
the local blocks, so that every collective is one that stands here. Per layer these are two all-reduces forward and two
backward of (batch, seq, hidden), or with sequence parallelism as many pairs of all-gather and reduce-scatter.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from models.attention import Attention
from models.decoder import Decoder, DecoderLayer, OutputLayer
from models.feed_forward import FeedForward
from models.lora import adapted, adapter_of
from models.moe import MixtureOfExperts
from models.norm import RMSNorm, rms_norm
from models.router import Decision, Router
from parallel.async_tensor import gather_matmul, matmul_scatter, open_symmetric_memory
from parallel.collectives import all_reduce, enter_tensor_parallel, leave_tensor_parallel
from parallel.config import ParallelismConfig
from parallel.layout import piece
from parallel.loss import GatheredVocabulary, VocabularyShard
from parallel.sharded import block_parameter, local


def split_tensors(decoder: Decoder, mesh: DeviceMesh, parallelism: ParallelismConfig) -> list[str]:
    """Split a decoder on the meta device over the one-dimensional `mesh`.

    Returns the names of parameters that every rank holds whole but of whose gradient it has only a part; see
    `sum_partial_gradients`.
    """
    sequence_parallel = parallelism.sequence_parallel
    axis = _Axis(mesh, sequence_parallel, parallelism.async_tp)
    if parallelism.async_tp:
        open_symmetric_memory(mesh)
    _split_vocabulary(decoder, axis, parallelism.loss_parallel)
    for layer in decoder.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        _split_attention(layer.self_attn, axis)
        if isinstance(layer.mlp, MixtureOfExperts):
            _split_mixture(layer.mlp, axis)
        else:
            _split_feed_forward(layer.mlp, axis)
        axis.hold_whole(layer.input_layernorm, partial=sequence_parallel)
        axis.hold_whole(layer.post_attention_layernorm, partial=sequence_parallel)
    axis.hold_whole(decoder.model.norm, partial=sequence_parallel)
    partial = set(axis.partial)
    return [name for name, parameter in decoder.named_parameters() if parameter in partial]


@torch.no_grad()
def sum_partial_gradients(model: nn.Module, names: list[str], group: ProcessGroup) -> None:
    """Complete the gradients of parameters that tp ranks hold whole, in one packed all-reduce per step."""
    if not names:
        return
    parameters = dict(model.named_parameters())
    gradients = [local(gradient) for name in names if (gradient := parameters[name].grad) is not None]
    if not gradients:  # of weights that stand still
        return
    summed = all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), group)
    for gradient, part in zip(gradients, summed.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class _Axis:
    """The tp axis while a decoder is being split over it."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool, asynchronous: bool) -> None:
        self.mesh, self.sequence, self.asynchronous = mesh, sequence_parallel, asynchronous
        self.group: ProcessGroup = mesh.get_group()
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        self.partial: list[nn.Parameter] = []

    def place(self, module: nn.Module, kind: type, name: str, placement: Placement, partial: bool = False) -> None:
        """Replace a parameter by its block on this rank, and the module's class by one that works on blocks."""
        whole = module._parameters[name]
        if whole is None:
            return
        parameter = block_parameter(whole, self.mesh, [placement])
        module._parameters[name] = parameter
        module.__class__ = kind
        if partial:
            self.partial.append(parameter)

    def hold_whole(self, norm: RMSNorm | None, partial: bool) -> None:
        """Every rank holds the norm; its gradient is partial where each rank sees other tokens or heads."""
        if norm is not None:
            self.place(norm, _Norm, "weight", Replicate(), partial)

    def enter_before(self, module: nn.Module) -> None:
        """The module's input is taken from all ranks to each rank's own part of the weights."""
        module.register_forward_pre_hook(lambda _, args: (self.enter(args[0]), *args[1:]))

    def enter_columns(self, module: Any, columns: list[nn.Linear]) -> None:
        """The module's input is taken from all ranks to their own columns, which `module.project` works out."""
        if self.asynchronous:
            module.project = partial(_gathered_products, columns, self.group)
        else:
            self.enter_before(module)

    def leave_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        """The ranks' products of their inputs with their columns of a weight, summed."""
        return matmul_scatter(x, weight, self.group) if self.asynchronous else self.leave(F.linear(x, weight))

    def enter(self, x: Tensor) -> Tensor:
        return enter_tensor_parallel(x, self.group, self.sequence)

    def leave(self, x: Tensor) -> Tensor:
        return leave_tensor_parallel(x, self.group, self.sequence)


def _split_columns(linear: nn.Linear, axis: _Axis) -> None:
    """Each rank makes its own outputs."""
    axis.place(linear, _Linear, "weight", Shard(0))
    axis.place(linear, _Linear, "bias", Shard(0))
    if (adapter := adapter_of(linear)) is not None:
        axis.place(adapter[0], _Linear, "weight", Replicate(), partial=True)
        axis.place(adapter[1], _Linear, "weight", Shard(0))


def _split_rows(linear: nn.Linear, axis: _Axis) -> None:
    """Each rank has its own inputs; the ranks' results are summed, and the bias is added once, afterwards."""
    axis.place(linear, _RowLinear, "weight", Shard(1))
    axis.place(linear, _RowLinear, "bias", Replicate(), partial=axis.sequence)
    cast(_RowLinear, linear).product = axis.leave_rows
    if (adapter := adapter_of(linear)) is not None:  # B of the parts of A x that ranks have is a part of B A x
        axis.place(adapter[0], _Linear, "weight", Shard(1))
        axis.place(adapter[1], _Linear, "weight", Replicate(), partial=True)
        cast(_RowLinear, linear).product = lambda x, weight: axis.leave(adapted(linear, x, F.linear(x, weight)))


def _split_attention(attention: Attention, axis: _Axis) -> None:
    """Heads are dealt out. With fewer key/value heads than ranks, each rank holds all of them and uses one."""
    _split_columns(attention.q_proj, axis)
    heads = attention.k_proj.out_features // attention.head_dim
    for linear in (attention.k_proj, attention.v_proj):
        if heads % axis.ranks == 0:
            _split_columns(linear, axis)
        else:
            axis.place(linear, _Linear, "weight", Replicate(), partial=True)
            axis.place(linear, _Linear, "bias", Replicate(), partial=True)
            first = axis.rank * heads // axis.ranks * attention.head_dim
            cast(_Linear, linear).rows = slice(first, first + attention.head_dim)
            if (adapter := adapter_of(linear)) is not None:
                axis.place(adapter[0], _Linear, "weight", Replicate(), partial=True)
                axis.place(adapter[1], _Linear, "weight", Replicate(), partial=True)
                cast(_Linear, adapter[1]).rows = cast(_Linear, linear).rows
    _split_rows(attention.o_proj, axis)
    axis.hold_whole(attention.q_norm, partial=True)
    axis.hold_whole(attention.k_norm, partial=True)
    axis.enter_columns(attention, [attention.q_proj, attention.k_proj, attention.v_proj])


def _split_feed_forward(feed_forward: FeedForward, axis: _Axis) -> None:
    _split_columns(feed_forward.gate_proj, axis)
    _split_columns(feed_forward.up_proj, axis)
    _split_rows(feed_forward.down_proj, axis)
    axis.enter_columns(feed_forward, [feed_forward.gate_proj, feed_forward.up_proj])


def _split_mixture(mixture: MixtureOfExperts, axis: _Axis) -> None:
    """Each rank routes tokens of its own, so that the router's gradient is partial. Experts: expert.py."""
    axis.place(mixture.gate, _Router, "weight", Replicate(), partial=True)
    if mixture.shared_experts is not None:
        _split_feed_forward(mixture.shared_experts, axis)


def _split_vocabulary(decoder: Decoder, axis: _Axis, loss_parallel: bool) -> None:
    """Rows of embedding and output weight are dealt out, as far as they are here; a tied weight stays one."""
    embedding, head = decoder.model.embed_tokens, decoder.lm_head
    rows = decoder.config.vocab_size
    if embedding is not None:
        axis.place(embedding, _Embedding, "weight", Shard(0))
        block = cast(_Embedding, embedding)
        block.first_row, block.leave = piece(rows, axis.ranks, axis.rank).start, axis.leave
    if head is not None:
        axis.place(head, _OutputLayer, "weight", Shard(0))
        decoder.tie_weights()
        head.vocabulary = (VocabularyShard if loss_parallel else GatheredVocabulary)(axis.group, rows)
        axis.enter_before(head)


# Each class below computes as its base does, on this rank's blocks of the DTensors.


class _Linear(nn.Linear):
    rows: slice | None = None
    """Of a weight that is held whole: the rows that this rank uses, those of one key or value head."""

    def blocks(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that this rank works with."""
        weight, bias = local(self.weight), _local_bias(self)
        if self.rows is None:
            return weight, bias
        return weight[self.rows], None if bias is None else bias[self.rows]

    def forward(self, x: Tensor) -> Tensor:
        return adapted(self, x, F.linear(x, *self.blocks()))


class _RowLinear(nn.Linear):
    product: Any

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.product(x, local(self.weight)), _local_bias(self)
        return y if bias is None else y + bias


class _Router(Router):
    def forward(self, x: Tensor) -> Decision:
        return self.decide(x, local(self.weight))


class _Norm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local(self.weight), self.eps)


class _OutputLayer(OutputLayer):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.output(x, local(self.weight), labels)


class _Embedding(nn.Embedding):
    first_row: int
    leave: Any

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        row = tokens - self.first_row
        here = (row >= 0) & (row < len(weight))
        if len(weight):  # row 0 stands in for the rows of other ranks
            found = F.embedding(row.where(here, 0), weight).where(here.unsqueeze(-1), 0.0)
        else:  # nothing to look up, but the backward pass must come by here as it does on the other ranks
            found = weight.new_zeros((*tokens.shape, weight.shape[1])) + weight.sum()
        return self.leave(found)


def _local_bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else local(linear.bias)


def _gathered_products(columns: list[nn.Linear], group: ProcessGroup, x: Tensor) -> list[Tensor]:
    """The columns' outputs for the whole sequence, gathered while they are worked out."""
    blocks = [cast(_Linear, linear).blocks() for linear in columns]
    products = gather_matmul(x, [weight for weight, _ in blocks], group)
    return [y if bias is None else y + bias for y, (_, bias) in zip(products, blocks, strict=True)]
