"""PL-1 to PL-6, against a ground truth that gathers the full tensor and slices it, byte for byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sync.layout import ITEM_BYTES, Box, Entry, Layout
from sync.memory import allocate
from sync.pack import Packer
from sync.plan import ALIGN, Plan, make_plan
from sync.shadow import Shadow

CASTS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("int64", "int64"), ("bool", "bool")]


@st.composite
def shares(draw: Any, shape: tuple[int, ...], ranks: int, *, replicated: bool) -> list[Box]:
    """One box per rank: cuts along one dimension at random places, so shares may be uneven or empty, or everything."""
    if not shape or (replicated and draw(st.booleans())):
        return [Box.whole(shape)] * ranks
    dim = draw(st.integers(0, len(shape) - 1))
    groups = draw(st.integers(1, ranks)) if replicated else ranks
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=groups - 1, max_size=groups - 1)))
    edges = [0, *cuts, shape[dim]]
    parts = [
        Box(
            tuple(a if d == dim else 0 for d in range(len(shape))),
            tuple(b if d == dim else n for d, n in enumerate(shape)),
        )
        for a, b in itertools.pairwise(edges)
    ]
    return [parts[rank % groups] for rank in range(ranks)]


@st.composite
def worlds(draw: Any) -> tuple[list[Layout], list[Layout], dict[str, torch.Tensor], int]:
    num_senders, num_sinks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sources: list[list[Entry]] = [[] for _ in range(num_senders)]
    sinks: list[list[Entry]] = [[] for _ in range(num_sinks)]
    full = {}
    for index in range(draw(st.integers(1, 4))):
        name = f"layers.{index}.weight"
        shape = tuple(draw(st.lists(st.integers(0 if index else 1, 9), min_size=0, max_size=3)))
        held, wanted = draw(st.sampled_from(CASTS))
        for rank, box in enumerate(draw(shares(shape, num_senders, replicated=True))):
            sources[rank].append(Entry(name, box, shape, held))
        for rank, box in enumerate(draw(shares(shape, num_sinks, replicated=True))):
            sinks[rank].append(Entry(name, box, shape, wanted))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 100
        full[name] = values.to(getattr(torch, held))
    bucket_bytes = draw(st.sampled_from([64, 128, 192, 1024, 1 << 20]))
    return [Layout(tuple(e)) for e in sources], [Layout(tuple(e)) for e in sinks], full, bucket_bytes


def carried(plan: Plan, sources: list[Layout], sinks: list[Layout], full: dict[str, torch.Tensor]):
    """Play the plan through plain bytearrays; returns what every sink ends up with."""
    memory = {b.index: allocate(b.num_bytes) for b in plan.buckets}
    digests: dict[int, tuple[int, ...]] = {}
    for rank, source in enumerate(sources):

        def weight(name: str, held: Layout = source) -> torch.Tensor:
            entry = held.by_name[name]
            return full[name][entry.box.slices_in(Box.whole(entry.shape))]

        packer = Packer(weight, source.parts, "here")
        for bucket in plan.sent_by(rank):
            packer.pack(bucket, memory[bucket.index])
        digests |= packer.digests()
    results = []
    for rank, sink in enumerate(sinks):
        shadow = Shadow(sink, 1, f"rollout rank {rank}")
        for bucket in plan.received_by(rank):
            assert tuple(shadow.add(bucket, memory[bucket.index])) == digests[bucket.index]
        shadow.check_complete()
        results.append(shadow.weights())
    return results


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@given(worlds())
def test_every_sink_gets_what_gather_then_slice_gives_byte_for_byte(world):
    sources, sinks, full, bucket_bytes = world
    plan = make_plan(sources, sinks, bucket_bytes=bucket_bytes)
    for sink, weights in zip(sinks, carried(plan, sources, sinks, full), strict=True):
        assert weights.keys() == sink.by_name.keys()
        for name, entry in sink.by_name.items():
            truth = full[name][entry.box.slices_in(Box.whole(entry.shape))].to(getattr(torch, entry.dtype))
            assert weights[name].shape == truth.shape
            assert weights[name].dtype == truth.dtype
            assert raw(weights[name]) == raw(truth)


@given(worlds())
def test_buckets_are_bounded_aligned_owned_and_disjoint_and_no_rank_gets_a_byte_twice(world):
    sources, sinks, _, bucket_bytes = world
    plan = make_plan(sources, sinks, bucket_bytes=bucket_bytes)
    places = dict.fromkeys(range(len(sources)), 0)
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.place == places[bucket.owner]
        places[bucket.owner] += 1
        assert 0 < bucket.num_bytes <= bucket_bytes
        assert bucket.num_bytes <= plan.largest_bucket
        inside = 0
        for segment in bucket.segments:
            assert segment.offset % ALIGN == 0
            assert segment.offset >= inside
            inside = segment.offset + segment.num_bytes
            assert sources[bucket.owner].by_name[segment.name].box.contains(segment.box)
        assert inside == bucket.num_bytes
    for rank, sink in enumerate(sinks):
        received = sum(s.box.numel for b in plan.received_by(rank) for s in b.segments)
        assert received == sum(entry.box.numel for entry in sink.entries)
    assert sum(b.owner == r for r in range(len(sources)) for b in plan.sent_by(r)) == len(plan.buckets)


def test_three_receivers_of_four_shards_read_each_row_once():
    # 24 rows; shards of 6; receiver 1 wants 8:16 = rows 8:12 of shard 1 and 12:16 of shard 2
    sources = [Layout((Entry.rows("w", (24, 2), "float32", a, a + 6),)) for a in (0, 6, 12, 18)]
    sinks = [Layout((Entry.rows("w", (24, 2), "float32", a, a + 8),)) for a in (0, 8, 16)]
    plan = make_plan(sources, sinks, bucket_bytes=1024)
    rows = [(b.owner, b.sinks, s.box.lo[0], s.box.hi[0]) for b in plan.buckets for s in b.segments]
    assert rows == [
        (0, (0,), 0, 6),
        (1, (0,), 6, 8),
        (1, (1,), 8, 12),
        (2, (1,), 12, 16),
        (2, (2,), 16, 18),
        (3, (2,), 18, 24),
    ]


def test_replicated_sources_share_the_load_by_bytes():
    # Data parallel without sharding: 2 ranks hold everything. 4 tensors of 400, 300, 200, 100 bytes: 500 each.
    entries = tuple(Entry.whole(f"w{n}", (n,), "uint8") for n in (400, 300, 200, 100))
    plan = make_plan([Layout(entries)] * 2, [Layout(entries)] * 3, bucket_bytes=1024)
    load = [sum(s.num_bytes for b in plan.sent_by(rank) for s in b.segments) for rank in range(2)]
    assert load == [500, 500]
    assert all(bucket.sinks == (0, 1, 2) for bucket in plan.buckets)


@pytest.mark.parametrize(
    ("numel", "expected"),
    [(16, [64]), (17, [64, 4]), (15, [60]), (0, []), (48, [64, 64, 64])],
    ids=["exactly a bucket", "one element more", "one less", "nothing", "three buckets"],
)
def test_tensors_around_the_size_of_a_bucket(numel, expected):
    layout = [Layout((Entry.whole("w", (numel,), "float32"), Entry.whole("z", (16,), "float32")))]
    plan = make_plan(layout, layout, bucket_bytes=64)
    assert [b.num_bytes for b in plan.buckets if b.segments[0].name == "w"] == expected


def test_rows_wider_than_a_bucket_are_cut_inside_the_row():
    layout = [Layout((Entry.whole("w", (2, 3, 10), "float32"),))]
    plan = make_plan(layout, layout, bucket_bytes=64)  # 16 elements: one row of 10 at a time
    assert [s.box.shape for b in plan.buckets for s in b.segments] == [(1, 1, 10)] * 6
    assert {b.num_bytes for b in plan.buckets} == {40}


def test_key_moves_with_both_sides_and_the_bucket_size_and_nothing_else():
    a, b = (Layout((Entry.whole("w", (8,), d),)) for d in ("float32", "bfloat16"))
    keys = [
        make_plan([a], [a], bucket_bytes=64).key,
        make_plan([a], [b], bucket_bytes=64).key,
        make_plan([a], [a, a], bucket_bytes=64).key,
        make_plan([a, a], [a], bucket_bytes=64).key,
        make_plan([a], [a], bucket_bytes=128).key,
    ]
    assert len(set(keys)) == 5
    assert make_plan([a], [Layout(tuple(reversed(a.entries)))], bucket_bytes=64).key == keys[0]


@pytest.mark.parametrize("bucket_bytes", [0, -64, 100])
def test_bucket_size_that_would_break_alignment_is_refused(bucket_bytes):
    layout = [Layout((Entry.whole("w", (8,), "float32"),))]
    with pytest.raises(ValueError, match="expected a positive multiple of 64"):
        make_plan(layout, layout, bucket_bytes=bucket_bytes)


def test_explain_tells_totals_casts_and_loads():
    source = [Layout((Entry.rows("w", (64, 8), "float32", a, a + 32),)) for a in (0, 32)]
    sink = [Layout((Entry.whole("w", (64, 8), "bfloat16"),))]
    assert make_plan(source, sink, bucket_bytes=4096).explain().splitlines()[1:] == [
        "  cast float32 -> bfloat16: 1.0 KiB",
        "  trainer rank 0 sends 512 B in 1 buckets",
        "  trainer rank 1 sends 512 B in 1 buckets",
        "  rollout rank 0 reads 1.0 KiB in 2 buckets from trainer ranks [0, 1]",
    ]


def test_item_sizes_are_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == dict(ITEM_BYTES)
