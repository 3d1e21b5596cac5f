"""DE-1 to DE-3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sync.delta import FAR, apply, difference


@given(st.data())
def test_delta_turns_the_old_bytes_into_the_new_ones_exactly(data):
    size = 2 * data.draw(st.integers(1, 300))
    before = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8).copy()
    after = before.copy()
    for place in data.draw(st.lists(st.integers(0, size - 1), max_size=20)):
        after[place] ^= data.draw(st.integers(1, 255))
    delta = difference(before, after, gain=1e9)
    assert delta is not None
    apply(delta, before)
    assert np.array_equal(before, after)


@pytest.mark.parametrize("places", [[0], [FAR - 1], [FAR], [FAR + 1], [0, 3 * FAR, 3 * FAR + 1], [5 * FAR + 7], []])
def test_changes_far_from_each_other_are_found_again(places):
    before = np.zeros(2 * (6 * FAR), np.uint8)
    after = before.copy()
    after.view(np.uint16)[places] = 9
    delta = difference(before, after)
    assert delta is not None
    assert len(delta) < 100
    apply(delta, before)
    assert np.array_equal(before, after)


def test_hundred_updates_leave_the_same_bits_as_the_weights_themselves():
    """DE-1: steps of an optimizer's size on bfloat16 weights with float32 masters"""
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(20_000, generator=generator) * 0.02
    held = master.to(torch.bfloat16).view(torch.uint8).numpy().copy()
    before = held.copy()
    sizes = []
    for _ in range(100):
        master += 1e-6 * torch.randn(20_000, generator=generator).sign()
        after = master.to(torch.bfloat16).view(torch.uint8).numpy().copy()
        delta = difference(before, after)
        assert delta is not None
        apply(delta, held)
        sizes.append(len(delta))
        before = after
    assert np.array_equal(held, before)
    assert max(sizes) < 0.15 * len(held)


def test_delta_that_gains_nothing_is_not_made():
    """DE-3"""
    before, after = np.zeros(64, np.uint8), np.full(64, 7, np.uint8)
    assert difference(before, after) is None
    with pytest.raises(ValueError, match="64 and 62 bytes: expected equal multiples of 2"):
        difference(before, after[:62])


@pytest.mark.parametrize("damage", [lambda d: d[:4], lambda d: d[:-2], lambda d: np.roll(d, 1)])
def test_damaged_delta_never_writes_outside(damage):
    before = np.zeros(64, np.uint8)
    after = before.copy()
    after[60] = 1
    delta = difference(before, after)
    assert delta is not None
    with pytest.raises(ValueError, match="delta: "):
        apply(damage(delta).copy(), before)
