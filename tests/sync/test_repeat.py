"""RP-1, RP-2 and SH-5 on the host: buckets that are packed, and stored, again without looking at them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sync.pack
from sync.layout import Entry, Layout
from sync.memory import allocate
from sync.pack import Packer
from sync.plan import make_plan
from sync.repeat import Repeats
from sync.shadow import Shadow
from sync.transport import SyncError

SHAPES = {"a": (7, 5), "square": (6, 6), "b": (300, 400), "norm": (3,), "empty": (0, 4)}
LAYOUT = Layout(tuple(Entry.whole(name, shape, "float32") for name, shape in SHAPES.items()))
PLAN = make_plan([LAYOUT], [LAYOUT], bucket_bytes=1 << 18)
ROOM = allocate(PLAN.largest_bucket)


def versions(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in range(count)]


def packed(weight: Callable[[str], Tensor], repeats: Repeats | None) -> tuple[list[bytes], dict[int, tuple[int, ...]]]:
    packer = Packer(weight, LAYOUT.parts, "here", repeats=repeats)
    found = []
    for bucket in PLAN.buckets:
        ROOM.zero_()
        packer.pack(bucket, ROOM[: bucket.num_bytes])
        found.append(bytes(ROOM[: bucket.num_bytes].numpy()))
    return found, packer.digests()


@pytest.fixture
def slices(monkeypatch):
    """How many segments have been looked up."""
    seen = []
    true = sync.pack._slice

    def counted(weight, held, segment, where):
        seen.append(segment.name)
        return true(weight, held, segment, where)

    monkeypatch.setattr(sync.pack, "_slice", counted)
    return seen


def test_bucket_is_packed_again_by_the_same_copies_with_what_the_weights_are_now(slices):
    live = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    repeats = Repeats()
    for count, version in enumerate(versions(3)):
        for name, tensor in version.items():
            live[name].copy_(tensor)
        slices.clear()
        assert packed(live.__getitem__, repeats) == packed(version.__getitem__, None)
        segments = sum(len(bucket.segments) for bucket in PLAN.buckets)
        assert len(slices) == (segments if count else 2 * segments)  # those of the fresh one, and at first of ours


def test_weight_that_has_moved_is_packed_from_where_it_is():
    """RP-1"""
    first, second = versions(2)
    repeats = Repeats()
    packed(first.__getitem__, repeats)
    mixed = {**first, "b": second["b"]}
    assert packed(mixed.__getitem__, repeats) == packed(mixed.__getitem__, None)


def test_weights_that_are_made_on_asking_are_held_until_they_are_packed():
    """RP-1: what is made anew for every asking may lie where another one did, here in turns in two places"""
    repeats = Repeats()
    places = [{n: torch.empty(s) for n, s in SHAPES.items()} for _ in range(2)]
    asked = dict.fromkeys(SHAPES, 0)
    for version in versions(6):

        def made(name: str, now: dict[str, Tensor] = version) -> Tensor:
            asked[name] += 1
            here, there = (places[(asked[name] + turn) % 2][name] for turn in (0, 1))
            there.fill_(float("nan"))  # what was handed out before is gone
            return here.copy_(now[name])

        assert packed(made, repeats) == packed(version.__getitem__, None)


def test_weight_in_another_shape_or_with_other_strides_is_looked_at_again():
    (version,) = versions(1)
    repeats = Repeats()
    packed(version.__getitem__, repeats)
    for other in ({**version, "a": version["a"].t().contiguous().t()}, {**version, "square": version["square"].t()}):
        assert packed(other.__getitem__, repeats) == packed(other.__getitem__, None)
    for as_other in (version["b"].double(), version["b"].view(torch.int32)):
        with pytest.raises(SyncError, match="b: here: the layout says float32"):
            packed({**version, "b": as_other}.__getitem__, repeats)


def test_bucket_with_a_copy_that_torch_made_is_not_repeated(slices):
    """RP-2: a view that is not contiguous"""
    (version,) = versions(1)
    live = {**version, "a": version["a"].t().contiguous().t()}
    repeats = Repeats()
    expected = packed(version.__getitem__, None)
    for _ in range(2):
        slices.clear()
        assert packed(live.__getitem__, repeats) == expected
        assert "a" in slices


@pytest.fixture
def placed(monkeypatch):
    """Names of segments whose place has been looked up."""
    seen = []
    true = Shadow._place

    def counted(self, segment, memory):
        seen.append(segment.name)
        return true(self, segment, memory)

    monkeypatch.setattr(Shadow, "_place", counted)
    return seen


def stored(version: dict[str, Tensor], repeats: Repeats | None, spare: dict[str, Tensor]) -> dict[str, Tensor]:
    packer = Packer(version.__getitem__, LAYOUT.parts, "here")
    shadow = Shadow(LAYOUT, 1, "there", spare, repeats=repeats)
    found = {}
    for bucket in PLAN.buckets:
        packer.pack(bucket, ROOM[: bucket.num_bytes])
        found[bucket.index] = tuple(shadow.add(bucket, ROOM[: bucket.num_bytes]))
    shadow.check_complete()
    assert found == packer.digests()
    return shadow.weights()


def test_version_is_stored_again_in_either_of_two_sets_of_tensors_that_take_turns(placed):
    """SH-5: nothing is looked up from the third version on"""
    repeats = Repeats()
    live: dict[str, Tensor] = {}
    spare: dict[str, Tensor] = {}
    for count, version in enumerate(versions(6)):
        placed.clear()
        live, spare = stored(version, repeats, spare), live
        assert bool(placed) == (count < 2)
        assert all(torch.equal(live[name], tensor) for name, tensor in version.items())
        if count > 1:
            assert not any(live[name] is spare[name] for name in version)


def test_tensors_that_are_not_those_of_before_are_looked_at(placed):
    """SH-5"""
    first, second = versions(2)
    repeats = Repeats()
    spare = stored(first, repeats, {})
    other = {**spare, "b": torch.zeros(400, 300).t()}  # of the right shape, and not contiguous
    placed.clear()
    got = stored(second, repeats, other)
    assert "b" in placed
    assert got["b"] is not other["b"]
    assert all(torch.equal(got[name], tensor) for name, tensor in second.items())


def test_bucket_that_is_missing_is_told_also_when_the_others_were_stored_again():
    (version,) = versions(1)
    repeats = Repeats()
    spare = stored(version, repeats, {})
    shadow = Shadow(LAYOUT, 2, "there", spare, repeats=repeats)
    shadow.add(PLAN.buckets[0], ROOM[: PLAN.buckets[0].num_bytes])
    with pytest.raises(SyncError, match="incomplete after the last bucket: b"):
        shadow.check_complete()
