"""The chunked loss of the output layer against torch's own on whole logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.decoder import Decoder
from models.loss import IGNORE, linear_cross_entropy
from tests.small import SMALL, random_decoder, random_tokens

TOKENS, HIDDEN, VOCABULARY = 23, 6, 31


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=draw)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
@pytest.mark.parametrize("ignored", [[], [0, 3, 4, 22], list(range(7, 14))], ids=["none", "some", "a whole chunk"])
def test_given_any_chunk_and_mask_when_compared_then_value_and_both_gradients_are_torchs(
    chunk: int, ignored: list[int]
) -> None:
    hidden, weight, labels = _inputs()
    labels[ignored] = IGNORE
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="sum") * 0.7
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, chunk) * 0.7
    gradients = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for gradient, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-13)


def test_given_only_ignored_labels_when_worked_out_then_loss_and_gradients_are_zero() -> None:
    hidden, weight, labels = _inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), 7)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.all(hidden.grad == 0)
    assert torch.all(weight.grad == 0)


def test_given_large_logits_when_worked_out_then_nothing_overflows() -> None:
    hidden, weight, labels = (part.detach() for part in _inputs(torch.float32))
    loss = linear_cross_entropy(hidden * 1e4, weight, labels, 7)
    assert torch.isfinite(loss)
    torch.testing.assert_close(loss, F.cross_entropy(hidden * 1e4 @ weight.T, labels, reduction="sum"))


def test_given_bfloat16_when_worked_out_then_the_sum_is_float32_and_gradients_have_the_parameters_type() -> None:
    hidden, weight, labels = _inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, 7)
    loss.backward()
    exact_hidden, exact_weight = (part.detach().double().requires_grad_() for part in (hidden, weight))
    exact = F.cross_entropy(exact_hidden @ exact_weight.T, labels, reduction="sum")
    exact.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    for part, right in ((hidden, exact_hidden), (weight, exact_weight)):
        assert part.grad is not None
        assert right.grad is not None
        assert part.grad.dtype == torch.bfloat16
        assert (part.grad - right.grad).norm() < 0.02 * right.grad.norm()


class _Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_given_many_tokens_when_trained_then_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    with _Largest() as largest:
        linear_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk=8).backward()
    assert largest.elements == 8 * 1000


def test_given_labels_when_a_decoder_runs_then_it_returns_the_sum_over_its_logits() -> None:
    decoder: Decoder = random_decoder(SMALL, torch.float64)
    tokens, labels = random_tokens(SMALL, 2, 12), random_tokens(SMALL, 2, 12, seed=2)
    labels[0, 3:7] = IGNORE
    expected = F.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(decoder(tokens, labels=labels), expected)


def test_given_bfloat16_and_an_awkward_divisor_when_differentiated_then_no_gradient_is_scaled_wrongly() -> None:
    # 1 / 2100 rounded to bfloat16 is 0.15 % off, the same way for every element.
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=draw).bfloat16() for size in (300, 97))
    labels = torch.randint(97, (300,), generator=draw)
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.detach().to(dtype).clone().requires_grad_() for x in (hidden, weight)]
        (linear_cross_entropy(*inputs, labels) / 2100).backward()
        gradients.append([x.grad.double() for x in inputs])
    for found, expected in zip(*gradients, strict=True):
        assert float((found * expected).sum() / expected.square().sum()) == pytest.approx(1.0, abs=5e-4)


def test_given_no_gradients_wanted_when_evaluated_then_none_is_worked_out() -> None:
    hidden, weight, labels = torch.randn(8, 16), torch.randn(1000, 16, requires_grad=True), torch.zeros(8).long()
    with torch.no_grad(), Sizes() as sizes:
        linear_cross_entropy(hidden, weight, labels)
    # The transpose is a view of the weight; a gradient of it would be as large once more.
    assert sorted(sizes.seen)[-2] <= 8 * 1000


class Sizes(TorchDispatchMode):
    """The sizes of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen += [part.numel() for part in tree_leaves(result) if isinstance(part, torch.Tensor)]
        return result
