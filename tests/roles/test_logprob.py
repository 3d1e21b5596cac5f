"""Chunked logprobs and entropies: LP-1 to LP-4 of `roles.logprob`, against full logits in float64."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roles import logprob
from roles.logprob import chosen_logprobs

ROWS, WIDTH, VOCAB = 11, 6, 23


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parts = [torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH) * 2, torch.randn(VOCAB)]
    return [part.to(dtype).requires_grad_() for part in parts]


def targets() -> torch.Tensor:
    return torch.arange(ROWS) * 5 % VOCAB


def reference(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    all_logprobs = torch.log_softmax((hidden.double() @ weight.double().T + bias.double()) / temperature, -1)
    chosen = all_logprobs.gather(1, targets()[:, None]).squeeze(1)
    return [chosen, -(all_logprobs.exp() * all_logprobs).sum(-1)]


@given(rows=st.integers(1, ROWS + 1), tokens=st.integers(1, VOCAB), temperature=st.sampled_from([0.5, 1.0, 1.7]))
@settings(max_examples=25, deadline=None)
def test_any_blocks_give_values_and_gradients_of_full_logits(rows: int, tokens: int, temperature: float) -> None:
    hidden, weight, bias = inputs()
    full, height = logprob.LOGITS_AT_ONCE["cpu"], logprob.ROWS_AT_ONCE
    logprob.LOGITS_AT_ONCE["cpu"], logprob.ROWS_AT_ONCE = rows * tokens, rows
    try:
        out = chosen_logprobs(hidden, weight, targets(), temperature=temperature, bias=bias, entropy_gradient=True)
        slopes = [torch.linspace(-1, 2, ROWS), torch.linspace(3, -1, ROWS)]
        grads = torch.autograd.grad(out, (hidden, weight, bias), slopes)
    finally:
        logprob.LOGITS_AT_ONCE["cpu"], logprob.ROWS_AT_ONCE = full, height
    expected = reference(hidden, weight, bias, temperature)
    expected_grads = torch.autograd.grad(expected, (hidden, weight, bias), [s.double() for s in slopes])
    for got, value in zip((*out, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(got.double(), value.double(), rtol=1e-5, atol=1e-5)


def test_entropy_has_a_gradient_only_when_asked() -> None:
    hidden, weight, _ = inputs()
    assert not chosen_logprobs(hidden, weight, targets())[1].requires_grad
    assert chosen_logprobs(hidden, weight, targets(), entropy_gradient=True)[1].requires_grad


def test_certain_tokens_have_entropy_zero_and_finite_gradients() -> None:
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    values, entropy = chosen_logprobs(hidden, weight, torch.tensor([0, 1]), entropy_gradient=True)
    assert values.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    (values.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_no_trained_token_gives_nothing_and_a_gradient_of_zero() -> None:
    hidden, weight, _ = inputs()
    values, entropy = chosen_logprobs(hidden[:0], weight, targets()[:0])
    values.sum().backward()
    assert (len(values), len(entropy)) == (0, 0)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    hidden, weight, bias = inputs(torch.bfloat16)
    values, entropy = chosen_logprobs(hidden, weight, targets(), bias=bias, entropy_gradient=True)
    assert values.dtype == entropy.dtype == torch.float32
    expected = reference(hidden, weight, bias, 1.0)
    torch.testing.assert_close(values.double(), expected[0], rtol=0.02, atol=0.05)
    values.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_bfloat16_gradients_in_blocks_are_as_near_as_in_one_lp2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a hidden state's gradient that were rounded before they are added miss it by their own size."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(96, 32).bfloat16(), (torch.randn(4096, 32) / 8 + 3).bfloat16()
    at = torch.randint(0, 4096, (96,))
    exact = [part.double().requires_grad_() for part in (hidden, weight)]
    torch.log_softmax(exact[0] @ exact[1].T, -1).gather(1, at[:, None]).sum().backward()

    def misses() -> list[float]:
        parts = [part.clone().requires_grad_() for part in (hidden, weight)]
        chosen_logprobs(parts[0], parts[1], at)[0].sum().backward()
        grads = [(part.grad, reference.grad) for part, reference in zip(parts, exact, strict=True)]
        return [float((a.double() - b).norm() / b.norm()) for a, b in grads if a is not None and b is not None]

    whole = misses()
    monkeypatch.setitem(logprob.LOGITS_AT_ONCE, "cpu", 3 * 64)
    monkeypatch.setattr(logprob, "ROWS_AT_ONCE", 3)
    for blocks, one in zip(misses(), whole, strict=True):
        assert blocks < 1.1 * one + 1e-4


@pytest.mark.parametrize(("rows", "tokens"), [(8128, 151936), (7931, 32001), (50, 32001), (9000, 128256)])
def test_rows_of_logits_are_aligned_whatever_their_number_lp1(rows: int, tokens: int) -> None:
    blocks = logprob._Blocks(rows, tokens, torch.device("cuda"))
    assert [tokens.start % logprob.ALIGNED for tokens in blocks.tokens] == [0] * len(blocks.tokens)
    assert blocks.tokens[-1].stop == tokens
    for width in (1, 63, 64, 65, 1000):
        logits = logprob._logits(torch.randn(3, 4), torch.randn(2000, 4), None, slice(0, width))
        assert logits.shape == (3, width)
        assert logits.stride(0) % logprob.ALIGNED == 0
        assert logits.stride(1) == 1


@pytest.mark.parametrize("kept", [0, 50, ROWS * VOCAB])
@pytest.mark.parametrize("limit", [7, 40, ROWS * VOCAB])
def test_no_more_logits_than_the_limits_are_held_lp1(limit: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprob.LOGITS_AT_ONCE, "cpu", limit)
    monkeypatch.setitem(logprob.LOGITS_KEPT, "cpu", kept)
    alive = weakref.WeakSet[torch.Tensor]()
    sizes, most = list[int](), 0
    real = logprob._logits

    def counted(*args: Any) -> torch.Tensor:
        nonlocal most
        logits = real(*args)
        sizes.append(logits.numel())
        alive.add(logits)
        most = max(most, sum(one.numel() for one in alive))
        return logits

    monkeypatch.setattr(logprob, "_logits", counted)
    hidden, weight, _ = inputs()
    values = chosen_logprobs(hidden, weight, targets())[0]
    waiting = sum(one.numel() for one in alive)
    assert waiting <= kept
    values.sum().backward()
    assert max(sizes) <= limit
    assert most <= kept + limit
    assert sum(sizes) == 2 * ROWS * VOCAB - waiting
    assert not alive
    with torch.no_grad():
        chosen_logprobs(hidden, weight, targets())
    assert not alive
