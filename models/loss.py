"""Token losses of the output layer, in chunks, so that full logits never stand in memory."""

from typing import Any

import torch
from torch import Tensor

from models.config import LOSS_CHUNK

IGNORE = -100
"""The label of a position that has no loss, as in torch and Hugging Face."""


class WholeVocabulary:
    """One process holds every row of the output weight. (parallel/loss.py has those whose rows are spread over ranks.)

    The logits a rank makes from its rows pass through `logits`; gradients with respect to those go back through `own`.
    """

    def whole(self, own: Tensor) -> Tensor:
        """All logits, from those of this rank's rows; for generation."""
        return own

    def logits(self, own: Tensor) -> Tensor:
        """The logits that the loss works on, from those of this rank's rows."""
        return own

    def own(self, x: Tensor) -> Tensor:
        """The part of something like `logits` that belongs to this rank's rows."""
        return x

    def local(self, labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Column of each label in `logits` (0 where it is elsewhere), and whether it is here at all."""
        return labels, torch.ones_like(labels, dtype=torch.bool)

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise maximum over all that hold other columns."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Elementwise sum over all that hold other columns."""
        return x


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of `hidden @ weight.T` against labels, `chunk` tokens at a time.

    Gradients are worked out in the forward pass, while a chunk's logits exist (the idea of Hsu et al., 2024, "Liger
    Kernel", arXiv:2410.10989): memory is one chunk of logits, and no matrix product is done twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        vocabulary: WholeVocabulary,
        train: bool,
    ) -> Tensor:
        accumulate = torch.float64 if weight.dtype == torch.float64 else torch.float32
        hidden_grad = torch.empty_like(hidden) if train and ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=accumulate) if train and ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=accumulate, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part, target = hidden[start : start + chunk], labels[start : start + chunk]
            valid = target != IGNORE
            logits = vocabulary.logits(part @ weight.T).to(accumulate)
            logits = logits - vocabulary.maximum(_row_maximum(logits)).unsqueeze(-1)
            column, here = vocabulary.local(target.where(valid, 0), logits.shape[-1])
            here &= valid
            picked = _pick(logits, column).where(here, 0.0)
            probabilities = logits.exp_()
            normaliser, picked = vocabulary.total(torch.stack((probabilities.sum(-1), picked)))
            loss += (normaliser.log() - picked).where(valid, 0.0).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            # d loss / d logits = softmax - one_hot, and nothing where there is no label.
            probabilities *= valid.to(accumulate).div(normaliser).unsqueeze(-1)
            if probabilities.shape[-1]:
                probabilities.scatter_add_(-1, column.unsqueeze(-1), -here.to(accumulate).unsqueeze(-1))
            logits_grad = vocabulary.own(probabilities).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[start : start + chunk] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad += logits_grad.T @ part
            del logits, probabilities, logits_grad  # or they would stand beside those of the next chunk
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return (
            # In the loss's precision: 1 / tokens rounded to bfloat16 would scale all gradients below by up to 0.4 %.
            None if hidden_grad is None else (hidden_grad.to(scale.dtype) * scale).to(hidden_grad.dtype),
            None if weight_grad is None else (weight_grad * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )


def _row_maximum(logits: Tensor) -> Tensor:
    # A rank that holds no row of the vocabulary has an empty row of logits, which has no maximum.
    return logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], float("-inf"))


def _pick(logits: Tensor, column: Tensor) -> Tensor:
    return logits.gather(-1, column.unsqueeze(-1)).squeeze(-1) if logits.shape[-1] else logits.new_zeros(column.shape)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = LOSS_CHUNK, vocabulary: WholeVocabulary | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label], labels of `IGNORE` counting nothing.

    hidden (tokens, hidden_size), weight (vocabulary, hidden_size), labels int64 (tokens,); a scalar in float32, or
    float64 where the weight is float64. The mean is the caller's: only he knows the valid tokens of the whole step.
    """
    vocabulary = WholeVocabulary() if vocabulary is None else vocabulary
    return LinearCrossEntropy.apply(hidden, weight, labels, chunk, vocabulary, torch.is_grad_enabled())
