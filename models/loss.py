"""Token losses of the output layer, in chunks, so that full logits never stand in memory."""

from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""The label of a position that has no loss, as in torch and Hugging Face."""


class WholeVocabulary:
    """One process holds every row of the output weight. (parallel/ has the one whose rows are spread over ranks.)"""

    def local(self, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Row of each label in the local weight, and whether it is here at all."""
        return labels, torch.ones_like(labels, dtype=torch.bool)

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise maximum over all holders of rows."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Elementwise sum over all holders of rows."""
        return x


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of `hidden @ weight.T` against labels, `chunk` tokens at a time.

    Gradients are worked out in the forward pass, while a chunk's logits exist (the idea of Hsu et al., 2024, "Liger
    Kernel", arXiv:2410.10989): memory is one chunk of logits, and no matrix product is done twice.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, vocabulary: WholeVocabulary
    ) -> Tensor:
        accumulate = torch.float64 if weight.dtype == torch.float64 else torch.float32
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=accumulate) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=accumulate, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part, target = hidden[start : start + chunk], labels[start : start + chunk]
            valid = target != IGNORE
            logits = (part @ weight.T).to(accumulate)
            logits -= vocabulary.maximum(logits.amax(-1)).unsqueeze(-1)
            row, here = vocabulary.local(target.where(valid, 0), weight.shape[0])
            picked = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1).where(here, 0.0)
            probabilities = logits.exp_()
            normaliser = vocabulary.total(probabilities.sum(-1))
            loss += (normaliser.log() - vocabulary.total(picked)).where(valid, 0.0).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            # d loss / d logits = softmax - one_hot, and nothing where there is no label.
            probabilities *= valid.to(accumulate).div(normaliser).unsqueeze(-1)
            probabilities.scatter_add_(-1, row.unsqueeze(-1), -(here & valid).to(accumulate).unsqueeze(-1))
            logits_grad = probabilities.to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[start : start + chunk] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad += logits_grad.T @ part
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return (
            None if hidden_grad is None else hidden_grad * scale.to(hidden_grad.dtype),
            None if weight_grad is None else (weight_grad * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 2048, vocabulary: WholeVocabulary | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label], labels of `IGNORE` counting nothing.

    hidden (tokens, hidden_size), weight (vocabulary, hidden_size), labels int64 (tokens,); a scalar in float32, or
    float64 where the weight is float64. The mean is the caller's: only he knows the valid tokens of the whole step.
    """
    vocabulary = WholeVocabulary() if vocabulary is None else vocabulary
    return LinearCrossEntropy.apply(hidden, weight, labels, chunk, vocabulary)
