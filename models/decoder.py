"""The decoder of the Llama family: embedding, layers, final norm, output layer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Attention, KeyValueCache
from models.config import ModelConfig
from models.dropout import Dropout, DropoutKey
from models.errors import refuse_flaws
from models.feed_forward import FeedForward
from models.lora import add_adapters
from models.loss import WholeVocabulary, linear_cross_entropy
from models.mask import AttentionMask
from models.moe import MixtureOfExperts, RoutingStep
from models.norm import RMSNorm
from models.rotary import rotary_tables

MaskOf = Callable[[int, int, int | None, Tensor | np.ndarray | None], Any]
"""The mask of so many queries and keys, a window and document ids, for the layers' `attend`."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            MixtureOfExperts(config, index)
            if config.has_experts(index)
            else FeedForward(config, config.intermediate_size)
        )
        self.attention_dropout = Dropout(config.dropout, f"layers.{index}.self_attn")
        self.mlp_dropout = Dropout(config.dropout, f"layers.{index}.mlp")

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Any,
        dropout_key: DropoutKey | None = None,
        cache: KeyValueCache | None = None,
        routing: RoutingStep | None = None,
    ) -> Tensor:
        """(batch, seq, hidden) to (batch, seq, hidden)."""
        told = (dropout_key, routing) if isinstance(self.mlp, MixtureOfExperts) else ()
        # No names for the blocks' results: they would be held while the next one works.
        x = x + self.attention_dropout(self.self_attn(self.input_layernorm(x), rotary, mask, cache), dropout_key)
        return x + self.mlp_dropout(self.mlp(self.post_attention_layernorm(x), *told), dropout_key)


class OutputLayer(nn.Linear):
    """The output weight: logits, or, given labels, the sum of token losses without the logits ever being whole."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.vocabulary = WholeVocabulary()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """(batch, seq, hidden) to (batch, seq, vocabulary), or with int64 labels (batch, seq) to a scalar."""
        return self.output(x, self.weight, labels)

    def output(self, x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """`forward` with the rows of the weight that are here."""
        if labels is None:
            return self.vocabulary.whole(F.linear(x, weight))
        return linear_cross_entropy(x.flatten(0, -2), weight, labels.flatten(), vocabulary=self.vocabulary)


class DecoderBody(nn.Module):
    """Everything below the output layer; named `model` in the decoder so that names equal Hugging Face's."""

    def __init__(self, config: ModelConfig, layers: Iterable[int], embedding: bool, norm: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if embedding else None
        self.embedding_dropout = Dropout(config.dropout, "embed_tokens")
        # By its number in the whole decoder, so that a layer is named the same whatever else is here.
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config, index) for index in layers})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if norm else None
        self.mask_of: MaskOf = AttentionMask.of_sequence

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        document_ids: Tensor | np.ndarray | None,
        dropout_key: DropoutKey | None,
        caches: Sequence[KeyValueCache] | None,
        routing: RoutingStep | None,
    ) -> Tensor:
        if not x.is_floating_point():
            assert self.embed_tokens is not None
            x = self.embedding_dropout(self.embed_tokens(x), dropout_key)
        rotary = rotary_tables(self.config.rope, self.config.head_dim, positions, x.dtype)
        length, cached = positions.shape[1], len(caches[0]) if caches else 0
        mask = self.mask_of(length, cached + length, self.config.sliding_window, document_ids)
        for index, layer in enumerate(self.layers.values()):
            x = layer(x, rotary, mask, dropout_key, caches[index] if caches else None, routing)
        return x if self.norm is None else self.norm(x)


class Decoder(nn.Module):
    """A decoder language model, or a stage of one. Parameter names are those of Hugging Face Llama, Mistral and Qwen.

    A stage has some of the layers; only the `first` embeds tokens, only the `last` has final norm and output layer. A
    last stage with tied embeddings has the embedding's weight too, since it is the output weight.
    """

    def __init__(
        self, config: ModelConfig, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        refuse_flaws(config.flaws())
        self.config = config
        layers = range(config.num_hidden_layers) if layers is None else layers
        self.model = DecoderBody(config, layers, first or (last and config.tie_word_embeddings), last)
        self.lm_head = OutputLayer(config) if last else None
        self.tie_weights()
        if config.lora.rank:
            add_adapters(self, config.lora)

    def tie_weights(self) -> None:
        """Make a tied output weight the embedding's; again after `to_empty`, which makes them two."""
        if self.config.tie_word_embeddings and self.lm_head is not None:
            assert self.model.embed_tokens is not None
            self.lm_head.weight = self.model.embed_tokens.weight

    def part(self, layers: Iterable[int], first: bool, last: bool) -> "Decoder":
        """A stage of this decoder: the modules are shared, not copied."""
        part = Decoder(self.config, (), first=False, last=False)
        part.model.mask_of = self.model.mask_of
        part.model.layers.update({str(index): self.model.layers[str(index)] for index in layers})
        if first or (last and self.config.tie_word_embeddings):
            part.model.embed_tokens = self.model.embed_tokens
        if last:
            part.model.norm, part.lm_head = self.model.norm, self.lm_head
        return part

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | np.ndarray | None = None,
        labels: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        routing: RoutingStep | None = None,
    ) -> Tensor:
        """int64 tokens (batch, seq) to logits (batch, seq, vocabulary), or with labels to the sum of token losses.

        A stage that is not the first takes hidden states (batch, seq, hidden) for tokens, and needs `positions`; one
        that is not the last returns them.

        `positions` count within each document (default: from 0, or from the end of the caches); `document_ids` (batch,
        seq) keep attention within a document; labels are already shifted: labels[:, i] is what follows tokens[:, i].
        `routing` makes mixtures of experts balance and take notes, as in training; `dropout_key` then says which tokens
        these are.
        """
        if positions is None:
            cached = len(caches[0]) if caches else 0
            positions = torch.arange(cached, cached + tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.model(tokens, positions, document_ids, dropout_key, caches, routing)
        return x if self.lm_head is None or (routing and routing.counting) else self.lm_head(x, labels)
