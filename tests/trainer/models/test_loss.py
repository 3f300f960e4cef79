"""The loss in chunks is the loss, and holds no more logits than it says."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.models.loss import HeadLoss, head_cross_entropy, label_log_probs

N, D, V = 30, 8, 97


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def inputs(dtype: torch.dtype, labels_that_count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(labels_that_count)
    hidden = torch.randn(2, N // 2, D, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, D, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[labels_that_count:] = -100
    return hidden, weight, labels.view(2, N // 2)


def loss_and_gradients(
    dtype: torch.dtype, count: int, chunk: int, autocast: bool, fused: Any = None
) -> list:
    hidden, weight, labels = inputs(dtype, count)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = head_cross_entropy(hidden, weight, labels, chunk, fused)
    (loss * 3.0).backward()
    assert loss.dtype == torch.float32
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("count", [N, 17, 0])
@pytest.mark.parametrize("rows", [1, 7, 29])
def test_equal_to_the_plain_loss(count: int, rows: int) -> None:
    plain = loss_and_gradients(torch.float32, count, N * V, False)
    chunked = loss_and_gradients(torch.float32, count, rows * V + 5, False)
    for ours, theirs in zip(chunked, plain, strict=True):  # float32 rounding; measured 2e-7
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["chunks", "compiled", "by label"])
def test_soft_caps_are_those_of_all_logits(way: str) -> None:
    """Of logits beyond the cap, where its slope is far from 1."""
    cap, found = 2.0, []
    for whole in (True, False):
        hidden, weight, labels = inputs(torch.float32, 17)
        if whole:
            logits = cap * torch.tanh(hidden @ weight.T / cap)
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        elif way == "by label":
            loss = -label_log_probs(hidden, weight, labels, chunk=7 * V, cap=cap).sum() / 17
        else:
            fused = compiled() if way == "compiled" else None
            loss = head_cross_entropy(hidden, weight, labels, 7 * V, fused, cap)
        (loss * 3.0).backward()
        found.append([loss.detach(), hidden.grad, weight.grad])
    assert (hidden @ weight.T).abs().max() > cap
    for ours, theirs in zip(*found, strict=True):  # float32 rounding
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_in_two_parts(dtype: torch.dtype) -> None:
    """As a pipeline of the zero-bubble schedule asks for the gradients."""
    expected = loss_and_gradients(dtype, 17, 7 * V, False)[1:]
    hidden, weight, labels = inputs(dtype, 17)
    loss = head_cross_entropy(hidden, weight, labels, 7 * V) * 3.0
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0].clone()
    second = torch.autograd.grad(loss, weight)[0]
    for ours, theirs in zip((first, second), expected, strict=True):
        assert torch.equal(ours, theirs)


def compiled() -> Any:
    """By a compiler that takes no time: what matters is that it finds one graph."""
    loss = HeadLoss()
    loss.compile(backend="aot_eager", fullgraph=True)
    return loss._fused


@pytest.mark.parametrize("count", [N, 17, 0])
def test_compiled_it_is_the_same_loss(count: int) -> None:
    plain = loss_and_gradients(torch.float32, count, N * V, False)
    fused = loss_and_gradients(torch.float32, count, 7 * V, False, compiled())
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert head_cross_entropy(*inputs(torch.float32, count), 7 * V, compiled()) == fused[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("autocast", [True, False])
def test_in_bf16_as_exact_as_the_plain_loss(autocast: bool, fused: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    exact = loss_and_gradients(torch.float32, N, N * V, False)
    plain = loss_and_gradients(dtype, N, N * V, autocast)
    chunked = loss_and_gradients(dtype, N, 4 * V, autocast, compiled() if fused else None)
    for ours, theirs, truth in zip(chunked, plain, exact, strict=True):
        assert ours.dtype == theirs.dtype
        error = (theirs.float() - truth).norm()
        assert (ours.float() - truth).norm() <= 1.5 * error + 1e-6 * truth.norm()


def test_no_more_logits_than_a_chunk() -> None:
    hidden, weight, labels = inputs(torch.float32, N)
    with Largest() as largest:
        head_cross_entropy(hidden, weight, labels, 20 * V).backward()
        assert largest.elements == 15 * V  # two chunks of the same size
    with Largest() as largest, torch.no_grad():
        head_cross_entropy(hidden, weight, labels, 2 * V)
        assert largest.elements == V * D  # the weight: no gradients are made


@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_head_gets_no_gradient_and_none_is_made(fused: bool) -> None:
    expected = loss_and_gradients(torch.float32, 17, 7 * V, False)
    hidden, weight, labels = inputs(torch.float32, 17)
    weight.requires_grad_(False)
    loss = head_cross_entropy(hidden, weight, labels, 7 * V, compiled() if fused else None)
    assert loss.grad_fn is not None
    of_hidden, of_weight = loss.grad_fn.next_functions[0][0].saved_tensors  # type: ignore
    assert of_hidden.shape == (N, D)
    assert of_weight is None
    (loss * 3.0).backward()
    assert weight.grad is None
    torch.testing.assert_close(loss.detach(), expected[0])
    torch.testing.assert_close(hidden.grad, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rows", [1, 7, N])
def test_log_probabilities_by_label_are_those_of_all_logits(rows: int, frozen: bool) -> None:
    """Whatever each label weighs in the loss; and no more logits at a time than it says."""
    found = []
    factors = torch.linspace(-2, 3, N)
    for whole in (True, False):
        hidden, weight, labels = inputs(torch.float32, 17)
        weight.requires_grad_(not frozen)
        with Largest() as largest:
            if whole:
                every = (hidden.flatten(0, 1) @ weight.T).log_softmax(1)
                each = every.gather(1, labels.flatten()[:, None].clamp(min=0))[:, 0]
                each = each * (labels.flatten() != -100)
            else:
                each = label_log_probs(hidden, weight, labels, chunk=rows * V)
            (each * factors).sum().backward()
        assert whole or rows == N or largest.elements <= max(rows * V, V * D)
        found.append([each.detach(), hidden.grad, weight.grad])
    torch.testing.assert_close(found[1], found[0])
    assert (found[1][2] is None) == frozen
    assert (found[1][0][17:] == 0).all()
