"""Flat micro-batches: FL-1 to FL-3 of `roles.flat`."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roles.flat import flatten
from roles.packing import pack
from tests.roles.test_packing import batches, sample_of, settings_of_step, with_routes


@given(batches, settings_of_step, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_flat_positions_predict_their_targets_and_carry_their_routes(
    sizes: list[tuple[int, int]], knobs: tuple[int, int, int], multiple: int
) -> None:
    world, budget, updates = knobs
    samples = [with_routes(sample_of(p, c, tag)) for tag, (p, c) in enumerate(sizes)]
    for rank in pack(samples, world=world, token_budget=budget, updates=min(updates, len(samples))):
        for micro in (micro for update in rank.updates for micro in update):
            flat = flatten(micro, multiple=multiple)
            total = len(flat.token_ids)
            assert total % multiple == 0
            assert total <= max(1, int((micro.lengths - 1).sum())) + multiple
            assert flat.starts[0] == 0
            assert flat.starts[-1] == total
            assert flat.longest == max(np.diff(flat.starts))
            assert np.array_equal(flat.targets, micro.token_ids[micro.mask])
            assert np.array_equal(flat.token_ids[flat.chosen] + 1, flat.targets)  # ids rise by one in a sample
            assert np.array_equal(flat.positions[flat.starts[:-1]], np.zeros(len(flat.starts) - 1))
            assert flat.routes is not None
            assert len(flat.routes) == total
            assert np.array_equal(flat.routes[flat.chosen, 0, 0], flat.token_ids[flat.chosen].astype(np.uint16))


def test_example_of_the_module_docstring() -> None:
    flat = flatten(pack([sample_of(2, 2), sample_of(1, 2, 1)], world=1, token_budget=10)[0].updates[0][0])
    assert flat.token_ids.tolist() == [0, 1, 2, 1000, 1001]
    assert flat.positions.tolist() == [0, 1, 2, 0, 1]
    assert flat.starts.tolist() == [0, 3, 5]
    assert flat.chosen.tolist() == [1, 2, 3, 4]


def test_tokens_of_the_environment_are_computed_and_not_chosen() -> None:
    sample = sample_of(2, 4)
    sample.mask = np.array([True, False, False, True])
    flat = flatten(pack([sample], world=1, token_budget=10)[0].updates[0][0])
    assert flat.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert flat.targets.tolist() == [2, 5]
