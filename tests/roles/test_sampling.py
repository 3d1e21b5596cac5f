"""Promises of roles/sampling.py."""

from __future__ import annotations

import math

import pytest
import torch

from roles.sampling import (
    RowParameters,
    check_sampling,
    completion_seed,
    sample,
    sampling_logits,
    seed_tensor,
    uniforms,
)
from roles.types import Sampling


def rows(count: int, **parameters: float) -> RowParameters:
    return RowParameters.of([Sampling(**parameters)] * count)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, parameters: RowParameters, first_seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(logits)
    seeds = seed_tensor([completion_seed(7, 0, first_seed + i) for i in range(count)])
    return sample(logits, parameters, seeds, torch.zeros(count, dtype=torch.int64))


def test_completion_seed_differs_in_each_of_its_four_parts_and_has_64_bits() -> None:
    seeds = {completion_seed(a, b, c, d) for a in range(4) for b in range(4) for c in range(4) for d in range(4)}
    assert len(seeds) == 256
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) >= 2**63  # the top bit is used


def test_completion_seed_never_changes_between_releases() -> None:
    assert completion_seed(0, 0, 0, 0) == completion_seed(0, 0, 0)
    assert completion_seed(1, 2, 3, 4) == 0xC77BDD159511C85D


def test_uniforms_are_a_function_of_seed_and_index_alone() -> None:
    seeds = seed_tensor([completion_seed(1, 0, i) for i in range(64)])
    indices = torch.arange(64) % 5
    crowd = uniforms(seeds, indices)
    alone = torch.cat([uniforms(seeds[i : i + 1], indices[i : i + 1]) for i in range(64)])
    assert torch.equal(crowd, alone)


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    # 64 seeds x 256 tokens = 16384 numbers. Standard error of the mean: sqrt(1/12/16384) = 0.00226; the largest
    # distance of the empirical CDF passes 1.95/sqrt(16384) = 0.0152 once in 1000 draws.
    seeds = seed_tensor(range(64)).repeat_interleave(256)
    numbers = uniforms(seeds, torch.arange(256).repeat(64))
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 4 * 0.00226
    ordered = numbers.sort().values
    distance = (ordered - (torch.arange(16384) + 0.5) / 16384).abs().max()
    assert float(distance) < 0.0152
    pairs = numbers.view(64, 256)
    correlation = torch.corrcoef(torch.stack([pairs[:, :-1].flatten(), pairs[:, 1:].flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.03


def test_logprob_is_under_the_tempered_distribution_sa1() -> None:
    # softmax([0, ln 4] / 2) = softmax([0, ln 2]) = [1/3, 2/3]
    logits = torch.tensor([[0.0, math.log(4.0)]]).repeat(50, 1)
    tokens, logprobs = draw(logits, rows(50, temperature=2.0))
    expected = torch.where(tokens == 0, math.log(1 / 3), math.log(2 / 3))
    torch.testing.assert_close(logprobs, expected.float())
    assert set(tokens.tolist()) == {0, 1}


def test_top_k_keeps_exactly_k_and_renormalises_sa1() -> None:
    # Probabilities .1 .4 .2 .3: the two likeliest are 1 and 3, renormalised 4/7 and 3/7.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(60, 1)
    tokens, logprobs = draw(logits, rows(60, top_k=2))
    assert set(tokens.tolist()) == {1, 3}
    expected = torch.where(tokens == 1, math.log(4 / 7), math.log(3 / 7))
    torch.testing.assert_close(logprobs, expected.float())


def test_top_k_ties_go_to_the_lower_id() -> None:
    kept = torch.isfinite(sampling_logits(torch.zeros(1, 5), rows(1, top_k=2)))
    assert kept.tolist() == [[True, True, False, False, False]]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Probabilities .1 .4 .2 .3, sorted .4 .3 .2 .1: 0.65 is reached by the first two, 0.75 needs the third.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert torch.isfinite(sampling_logits(logits, rows(1, top_p=0.65))).tolist() == [[False, True, False, True]]
    assert torch.isfinite(sampling_logits(logits, rows(1, top_p=0.75))).tolist() == [[False, True, True, True]]
    assert torch.isfinite(sampling_logits(logits, rows(1, top_p=1e-6))).tolist() == [[False, True, False, False]]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    # top-k 2 leaves .4 and .3 = 4/7 and 3/7: 0.55 is reached by the first alone (4/7 = .571), though .4 < 0.55.
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    kept = torch.isfinite(sampling_logits(logits, rows(1, top_k=2, top_p=0.55)))
    assert kept.tolist() == [[False, True, False, False]]


def test_top_p_of_one_keeps_the_least_likely_token_of_a_large_vocabulary() -> None:
    logits = torch.cat([torch.zeros(1, 50_000), torch.full((1, 1), -40.0)], dim=1)
    mixed = RowParameters.of([Sampling(top_p=1.0), Sampling(top_p=0.5)])
    assert bool(torch.isfinite(sampling_logits(logits.repeat(2, 1), mixed))[0].all())


def test_greedy_is_the_argmax_with_logprob_zero_sa1() -> None:
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits, rows(16, temperature=0.0))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logprobs, torch.zeros(16))


def test_a_row_is_drawn_alike_alone_and_among_rows_with_other_filters_sa2() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(24, 300, generator=generator)
    kinds = [Sampling(), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(temperature=0.0), Sampling(temperature=0.3)]
    mixed = [kinds[i % len(kinds)] for i in range(24)]
    seeds = seed_tensor([completion_seed(3, 1, i) for i in range(24)])
    indices = torch.arange(24)
    tokens, logprobs = sample(logits, RowParameters.of(mixed), seeds, indices)
    for i, row in enumerate(mixed):
        one = slice(i, i + 1)
        token, logprob = sample(logits[one], RowParameters.of([row]), seeds[one], indices[one])
        assert token.item() == tokens[i].item()
        assert logprob.item() == logprobs[i].item()


def test_frequencies_follow_the_distribution() -> None:
    # 20000 draws of p = .1 .2 .3 .4: standard error at most sqrt(.25/20000) = .0035; five of them.
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    tokens, _ = draw(probabilities.log().repeat(20_000, 1), rows(20_000))
    frequency = torch.bincount(tokens, minlength=4) / 20_000
    assert float((frequency - probabilities).abs().max()) < 0.0177


def test_impossible_tokens_are_never_drawn_sa3() -> None:
    logits = torch.full((5000, 8), -torch.inf)
    logits[:, 2] = 0.0
    logits[:, 6] = -60.0  # as good as never, yet possible
    tokens, logprobs = draw(logits, rows(5000))
    assert set(tokens.tolist()) <= {2, 6}
    assert bool(torch.isfinite(logprobs).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_without_a_distribution_are_an_error_that_names_the_row_sa3(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match=r"1 of 3 rows .first: row 1.*diverged"):
        draw(logits, rows(3))


def test_bfloat16_logits_give_float32_logprobs_of_the_same_numbers() -> None:
    logits = torch.randn(8, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    tokens, logprobs = draw(logits, rows(8))
    again, reference = draw(logits.float(), rows(8))
    assert logprobs.dtype == torch.float32
    assert torch.equal(tokens, again)
    assert torch.equal(logprobs, reference)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e-38),
        ("temperature", 2e6),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2**63),
        ("max_tokens", 0),
    ],
)
def test_meaningless_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"sampling.{field}: expected .* got {value}"):
        check_sampling(Sampling(**{field: value}))  # type: ignore[arg-type]
