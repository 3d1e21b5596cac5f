"""DE-1 to DE-3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sync.delta import FAR, apply, difference
from sync.formats import Scaling
from sync.layout import Box
from sync.quantise import largest, quantised, scales_of


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


@pytest.mark.parametrize(("wire", "most"), [("bfloat16", 0.15), ("float8_e4m3fn", 0.025)])
def test_hundred_updates_leave_the_same_bits_as_the_weights_themselves(wire, most):
    """DE-1: steps of an optimizer's size on weights with float32 masters, as bfloat16 and as codes with their scales:
    a tenth of the changes"""
    master = torch.randn(160, 128, generator=torch.Generator().manual_seed(3)) * 0.02
    steps = torch.Generator().manual_seed(4)
    held = packed(master, wire)
    before = held.copy()
    sizes = []
    for _ in range(100):
        master += 1e-6 * torch.randn(master.shape, generator=steps).sign()
        after = packed(master, wire)
        delta = difference(before, after)
        assert delta is not None
        apply(delta, held)
        sizes.append(len(delta))
        before = after
    assert np.array_equal(held, before)
    assert sorted(sizes)[50] < most * len(held)  # a block whose largest value changes has new codes all over


def packed(master: Tensor, wire: str) -> np.ndarray:
    """Bytes as they travel: bfloat16, or codes and scales of blocks."""
    if wire == "bfloat16":
        return master.to(torch.bfloat16).view(torch.uint8).reshape(-1).numpy().copy()
    box, shape, scaling = Box.whole(master.shape), (160, 128), Scaling("block", "s")
    scales = scales_of(largest(master.to(torch.bfloat16), box, shape, scaling), wire, scaling)
    codes = quantised(master.to(torch.bfloat16), scales, box, shape, wire, scaling)
    parts = [codes.view(torch.uint8).reshape(-1), scales.view(torch.uint8).reshape(-1)]
    return torch.cat(parts).numpy().copy()


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
