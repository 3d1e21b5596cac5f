"""Packing: PK-1 to PK-5 of `roles.packing`, as properties over random batches and as cases worked out by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roles.packing import fill, pack, plan, unpack
from roles.types import RankBatch, TrainSample


def sample_of(prompt: int, completion: int, tag: int = 0) -> TrainSample:
    """Every token of every sample gets its own id, so that losing, doubling or shifting one shows."""
    ids = tag * 1000 + np.arange(prompt + completion, dtype=np.int32)
    return TrainSample(
        token_ids=ids,
        prompt_length=prompt,
        rollout_logprobs=-ids[prompt:].astype(np.float32),
        advantages=ids[prompt:].astype(np.float32) / 2,
    )


batches = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=40).filter(
    lambda sizes: any(completion for _, completion in sizes)
)
settings_of_step = st.tuples(st.integers(1, 5), st.integers(100, 400), st.integers(1, 4))


def trained(batch: RankBatch) -> list[int]:
    return [int(t) for update in batch.updates for micro in update for t in micro.token_ids[micro.mask]]


@given(batches, settings_of_step)
@settings(max_examples=60, deadline=None)
def test_every_trained_token_is_in_exactly_one_micro_batch(
    sizes: list[tuple[int, int]], knobs: tuple[int, int, int]
) -> None:
    world, budget, updates = knobs
    samples = [sample_of(p, c, tag) for tag, (p, c) in enumerate(sizes)]
    ranks = pack(samples, world=world, token_budget=budget, updates=min(updates, len(samples)))
    seen = sorted(token for rank in ranks for token in trained(rank))
    assert seen == sorted(int(t) for s in samples for t in s.token_ids[s.prompt_length :])


@given(batches, settings_of_step)
@settings(max_examples=60, deadline=None)
def test_ranks_have_equal_counts_and_global_denominators(
    sizes: list[tuple[int, int]], knobs: tuple[int, int, int]
) -> None:
    world, budget, updates = knobs
    samples = [sample_of(p, c, tag) for tag, (p, c) in enumerate(sizes)]
    ranks = pack(samples, world=world, token_budget=budget, updates=min(updates, len(samples)))
    for update in range(len(ranks[0].updates)):
        micros = [micro for rank in ranks for micro in rank.updates[update]]
        assert len({len(rank.updates[update]) for rank in ranks}) == 1
        assert {rank.num_tokens[update] for rank in ranks} == {sum(int(m.mask.sum()) for m in micros)}
        assert {rank.num_sequences[update] for rank in ranks} == {sum(int(m.mask.any(1).sum()) for m in micros)}


@given(batches, settings_of_step, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_micro_batches_keep_the_budget_and_come_in_the_count_asked_for(
    sizes: list[tuple[int, int]], knobs: tuple[int, int, int], multiple: int
) -> None:
    world, budget, updates = knobs
    samples = [sample_of(p, c, tag) for tag, (p, c) in enumerate(sizes)]
    updates = min(updates, len(samples))
    layout = plan(samples, world=world, token_budget=budget, updates=updates, multiple=multiple)
    for ranks, loads in zip(layout.updates, layout.tokens, strict=True):
        costs = [sum(len(samples[i].token_ids) for i in chunk) for chunks in ranks for chunk in chunks]
        assert all(cost <= budget for cost in costs)
        assert all(len(chunks) % multiple == 0 for chunks in ranks)
        if any(costs):
            assert max(loads) - min(loads) <= max(costs) * max(len(chunks) for chunks in ranks)


@given(batches, settings_of_step)
@settings(max_examples=60, deadline=None)
def test_columns_are_about_predicting_the_token_they_stand_at(
    sizes: list[tuple[int, int]], knobs: tuple[int, int, int]
) -> None:
    world, budget, updates = knobs
    samples = [sample_of(p, c, tag) for tag, (p, c) in enumerate(sizes)]
    for rank in pack(samples, world=world, token_budget=budget, updates=min(updates, len(samples))):
        for micro in (micro for update in rank.updates for micro in update):
            assert not micro.mask[:, 0].any()
            assert np.array_equal(micro.rollout_logprobs[micro.mask], -micro.token_ids[micro.mask].astype(np.float32))
            assert np.array_equal(micro.advantages[micro.mask], micro.token_ids[micro.mask] / np.float32(2))
            assert not micro.rollout_logprobs[~micro.mask].any()
            beyond = np.arange(micro.token_ids.shape[1]) >= micro.lengths[:, None]
            assert not (micro.mask & beyond).any()
            assert not micro.token_ids[beyond].any()


@given(batches, settings_of_step)
@settings(max_examples=60, deadline=None)
def test_unpack_returns_values_in_the_order_of_the_samples(
    sizes: list[tuple[int, int]], knobs: tuple[int, int, int]
) -> None:
    world, budget, updates = knobs
    samples = [sample_of(p, c, tag) for tag, (p, c) in enumerate(sizes)]
    layout = plan(samples, world=world, token_budget=budget, updates=min(updates, len(samples)))
    values = [
        [[m.token_ids.astype(np.float32) for m in update] for update in rank.updates] for rank in fill(samples, layout)
    ]
    for sample, value in zip(samples, unpack(samples, layout, values), strict=True):
        assert np.array_equal(value, sample.token_ids[sample.prompt_length :].astype(np.float32))


def test_example_of_the_module_docstring() -> None:
    samples = [sample_of(1, length - 1, tag) for tag, length in enumerate([3, 8, 2, 4, 3])]
    layout = plan(samples, world=2, token_budget=8, updates=1)
    assert layout.updates == ((((1,), (0,)), ((4, 2), (3,))),)
    assert layout.tokens == ((11, 9),)


def test_last_micro_batch_is_not_left_nearly_empty() -> None:
    # 9 sequences of 10 tokens, budget 80: greedy would make 8 + 1; two ranks take 5 + 4 with the same count.
    layout = plan([sample_of(5, 5, i) for i in range(9)], world=2, token_budget=80, updates=1)
    assert [len(chunk) for chunks in layout.updates[0] for chunk in chunks] == [5, 4]


def test_ranks_of_a_mixed_batch_have_alike_work() -> None:
    rng = np.random.default_rng(0)
    samples = [sample_of(30, int(n), i) for i, n in enumerate(rng.integers(5, 60, 256))]
    layout = plan(samples, world=2, token_budget=2048, updates=1)
    assert max(layout.tokens[0]) < 1.05 * min(layout.tokens[0])


def test_updates_keep_groups_whole_and_in_order() -> None:
    # 4 groups of 3: two updates get groups 0, 1 and 2, 3.
    layout = plan([sample_of(4, 1 + i, i) for i in range(12)], world=1, token_budget=1000, updates=2)
    members = [sorted(i for chunks in ranks for chunk in chunks for i in chunk) for ranks in layout.updates]
    assert members == [list(range(6)), list(range(6, 12))]


def test_sequence_longer_than_the_budget_is_refused_with_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens, \[trainer\] token_budget is 10; raise it"):
        plan([sample_of(1, 4), sample_of(1, 10)], world=1, token_budget=10, updates=1)


def with_routes(sample: TrainSample, layers: int = 2, k: int = 2) -> TrainSample:
    """Each position's experts are its token id, so that a shifted one shows."""
    ids = sample.token_ids[:-1].astype(np.uint16)
    return msgspec.structs.replace(sample, routes=np.broadcast_to(ids[:, None, None], (len(ids), layers, k)).copy())


def test_routes_of_a_part_of_the_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] have no recorded routes, sample 0 has"):
        pack([with_routes(sample_of(3, 2)), sample_of(3, 2)], world=1, token_budget=10)
    short = with_routes(sample_of(3, 2))
    assert short.routes is not None
    short.routes = short.routes[1:]
    with pytest.raises(ValueError, match=r"shape \[3, 2, 2\], expected .* = \[4, 2, 2\]"):
        pack([short], world=1, token_budget=10)


def test_what_a_critic_needs_lines_up_with_the_tokens() -> None:
    sample = sample_of(3, 2)
    sample.values, sample.returns = np.array([0.5, 0.6], np.float32), np.array([1, 2], np.float32)
    micro = pack([sample], world=1, token_budget=10)[0].updates[0][0]
    assert micro.values is not None
    assert micro.returns is not None
    assert micro.values[micro.mask].tolist() == [0.5, np.float32(0.6)]
    assert micro.returns[micro.mask].tolist() == [1, 2]


def test_rank_without_sequences_gets_padding_micro_batches_that_train_nothing() -> None:
    ranks = pack([sample_of(3, 2)], world=3, token_budget=100)
    assert [int(rank.updates[0][0].mask.sum()) for rank in ranks] == [2, 0, 0]
    assert ranks[2].updates[0][0].token_ids.shape == (1, 1)
    assert ranks[2].num_tokens == [2]


def test_update_without_trained_tokens_has_no_micro_batches() -> None:
    ranks = pack([sample_of(3, 0), sample_of(3, 2)], world=2, token_budget=100, updates=2)
    assert [[len(update) for update in rank.updates] for rank in ranks] == [[0, 1], [0, 1]]
    assert ranks[0].num_tokens == [0, 2]
    assert ranks[0].num_sequences == [0, 1]


def test_malformed_batches_are_refused_with_what_to_change() -> None:
    with pytest.raises(ValueError, match="none of the 1 sequences has a token to train on"):
        pack([sample_of(3, 0)], world=1, token_budget=10)
    with pytest.raises(ValueError, match="lower \\[trainer\\] updates_per_step"):
        pack([sample_of(3, 1)], world=1, token_budget=10, updates=2)
    with pytest.raises(ValueError, match="sample 0 has prompt_length 0"):
        pack([sample_of(0, 3)], world=1, token_budget=10)
    bad = sample_of(3, 2)
    bad.advantages = bad.advantages[:1]
    with pytest.raises(ValueError, match="2 completion tokens, 2 rollout logprobs and 1 advantages"):
        pack([bad], world=1, token_budget=10)


def test_ages_and_reference_logprobs_reach_the_columns_of_their_tokens() -> None:
    samples = [sample_of(2, 3, tag=0), sample_of(1, 2, tag=1)]
    for sample in samples:
        sample.ages = np.arange(1, sample.completion_length + 1, dtype=np.int32)
        sample.reference_logprobs = -sample.ages.astype(np.float32)
    (rank,) = pack(samples, world=1, token_budget=100, updates=1)
    (micro,) = rank.updates[0]
    assert micro.reference_logprobs is not None
    assert micro.ages.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 0, 0]]
    assert micro.reference_logprobs.tolist() == [[0, 0, -1, -2, -3], [0, -1, -2, 0, 0]]


def test_samples_with_and_without_reference_logprobs_are_refused_together() -> None:
    samples = [sample_of(2, 3), sample_of(2, 3)]
    samples[0].reference_logprobs = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="some samples have reference_logprobs and some have none"):
        pack(samples, world=1, token_budget=100, updates=1)
    samples[1].reference_logprobs = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="sample 1 has 3 completion tokens and 2 reference_logprobs"):
        pack(samples, world=1, token_budget=100, updates=1)


def test_masked_tokens_are_read_but_not_trained_or_counted_pk1() -> None:
    sample = sample_of(2, 4)
    sample.mask = np.array([True, False, False, True])
    alone = sample_of(1, 2, tag=1)
    alone.mask = np.zeros(2, bool)
    (rank,) = pack([sample, alone], world=1, token_budget=64)
    (micro,) = rank.updates[0]
    assert micro.token_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert micro.mask.tolist() == [[False, False, True, False, False, True]]
    assert micro.rollout_logprobs.tolist() == [[0, 0, -2, 0, 0, -5]]
    assert micro.advantages.tolist() == [[0, 0, 1, 0, 0, 2.5]]
    assert (rank.num_tokens, rank.num_sequences) == ([2], [1])


def test_a_mask_of_another_length_is_refused() -> None:
    sample = sample_of(2, 4)
    sample.mask = np.ones(3, bool)
    with pytest.raises(ValueError, match="4 completion tokens and 3 mask"):
        pack([sample], world=1, token_budget=64)
