"""Loss on the validation split: what a batch adds, and the means over the whole."""

import math

import torch
from torch import Tensor

from parallel.loss import valid_tokens


def batch_sums(loss: Tensor, labels: Tensor, bytes_per_token: Tensor | None) -> Tensor:
    """Loss in nats, valid tokens, and the bytes they stand for: float64 (3,), to be added over batches and ranks."""
    tokens = valid_tokens(labels)
    text = torch.zeros_like(tokens)
    if bytes_per_token is not None:
        text = bytes_per_token[labels.clamp_min(0)].where(labels >= 0, 0).sum()
    return torch.stack([loss.double(), tokens.double(), text.double()])


def means(sums: Tensor) -> dict[str, float]:
    """Nats per token, perplexity and, for text, nats per byte, which does not depend on the tokenizer."""
    loss, tokens, text = sums.tolist()
    mean = loss / max(tokens, 1.0)
    result = {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": tokens}
    return result if text == 0.0 else result | {"loss_per_byte": loss / text}
