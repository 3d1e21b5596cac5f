"""FO-1 to FO-3, QU-1 to QU-3, DG-2: worked values, and shards that equal slices of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sync.agree import agreed
from sync.digest import key_of, mix64
from sync.formats import CODE_LIMIT, Scaling
from sync.layout import Box, Entry, Layout, LayoutError
from sync.memory import allocate
from sync.messages import Largest
from sync.pack import Packer, measure
from sync.plan import make_plan
from sync.quantise import largest, quantised, scales_of
from sync.shadow import Shadow
from sync.transport import SyncError

BLOCK = Scaling("block", "w.scale", (4, 8))


def whole(weight: torch.Tensor, scaling: Scaling, dtype: str = "float8_e4m3fn") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a full tensor."""
    box, shape = Box.whole(weight.shape), tuple(weight.shape)
    scales = scales_of(largest(weight, box, shape, scaling), dtype, scaling)
    return quantised(weight, scales, box, shape, dtype, scaling), scales


def test_worked_values_of_a_block():
    # largest 896 -> scale 2: 896 -> 448, 2 -> 1, 3 -> 1.5, 0.01 -> 0.005 (nearest code 0.0048828125 = 2.5 * 2^-9: to
    # even)
    codes, scales = whole(torch.tensor([[896.0, -2.0, 3.0, 0.0]]), Scaling("block", "s", (1, 4)))
    assert scales.tolist() == [[2.0]]
    assert codes.to(torch.float32).tolist() == [[448.0, -1.0, 1.5, 0.0]]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (17.0, 16.0),  # between 16 and 18: a tie, to the even mantissa
        (19.0, 20.0),  # between 18 and 20: a tie, to the even mantissa
        (17.1, 18.0),
        (2.0**-9, 2.0**-9),  # the smallest code
        (2.0**-10, 0.0),  # half of it: a tie, to even
        (1.0001 * 2.0**-10, 2.0**-9),
        (-448.0, -448.0),
    ],
)
def test_codes_are_rounded_to_nearest_and_ties_to_even(value, code):
    codes, scales = whole(torch.tensor([[value, 448.0]]), Scaling("block", "s", (1, 2)))
    assert scales.item() == 1.0
    assert codes.to(torch.float32)[0, 0].item() == code


def test_powers_of_two_are_rounded_up_so_that_nothing_is_clipped():
    power = Scaling("block", "s", (1, 1), "ue8m0")
    _, scales = whole(torch.tensor([[448.0, 449.0, 896.0, 1.0, 0.0]]), power)
    # 1 / 448 = 2^-8.8 -> 2^-8; 1e-12 / 448 = 2^-48.7 -> 2^-48
    assert scales.tolist() == [[1.0, 2.0, 2.0, 2.0**-8, 2.0**-48]]


def test_fnuz_has_a_limit_of_its_own_and_its_not_a_number_is_never_made():
    codes, scales = whole(torch.tensor([[240.0, -240.0, -1e-9]]), Scaling("tensor", "s"), "float8_e4m3fnuz")
    assert scales.tolist() == [[1.0]]
    assert codes.to(torch.float32).tolist() == [[240.0, -240.0, 0.0]]
    assert 0x80 not in codes.view(torch.uint8)


def test_values_beyond_an_agreed_scale_are_clipped_before_they_are_cast():
    """QU-2: torch's casts beyond the range differ between versions: NaN in some, the limit in others"""
    box = Box.whole((1, 3))
    codes = quantised(torch.tensor([[1e6, -1e6, 1.0]]), torch.ones(1, 1), box, (1, 3), "float8_e4m3fn", BLOCK)
    assert codes.to(torch.float32).tolist() == [[448.0, -448.0, 1.0]]


def test_channels_and_tensors_are_blocks_too():
    """FO-2"""
    weight = torch.tensor([[448.0, 1.0], [4.48, 0.0]])
    assert whole(weight, Scaling("channel", "s"))[1].flatten().tolist() == pytest.approx([1.0, 0.01])
    assert whole(weight, Scaling("tensor", "s"))[1].tolist() == [[1.0]]


@given(st.data())
def test_shards_of_any_cut_quantise_to_the_slices_of_the_whole(data):
    """QU-1, PL-8: codes and scales, over rows and columns, also where blocks are cut between trainer ranks"""
    rows, columns = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 20))
    kind = data.draw(st.sampled_from(["block", "channel", "tensor"]))
    scaling = Scaling(kind, "w.scale", (4, 8), data.draw(st.sampled_from(["float32", "ue8m0"])))
    dtype = data.draw(st.sampled_from(list(CODE_LIMIT)))
    seed = data.draw(st.integers(0, 99))
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    codes, scales = whole(weight, scaling, dtype)

    def cuts(size: int, step: int = 1) -> list[tuple[int, int]]:
        inner = data.draw(st.lists(st.integers(0, size // step).map(lambda i: min(i * step, size)), max_size=2))
        return list(itertools.pairwise(sorted({0, *inner, size})))

    axis = data.draw(st.integers(0, 1))
    shape = rows, columns
    sources = [Layout((Entry("w", box_along(axis, a, z, shape), shape, "bfloat16"),)) for a, z in cuts(shape[axis])]
    side = data.draw(st.integers(0, 1))
    step = 1 if kind != "block" else (4, 8)[side]
    sinks = []
    for a, z in cuts((rows, columns)[side], step):
        entry = Entry("w", box_along(side, a, z, (rows, columns)), (rows, columns), dtype, scaling)
        sinks.append(Layout((entry, entry.scales())))
    plan = make_plan(sources, sinks, bucket_bytes=data.draw(st.sampled_from([192, 1 << 20])))
    for sink, got in zip(sinks, carried(plan, sources, sinks, weight), strict=True):
        entry = sink.by_name["w"]
        inside = entry.box.slices_in(Box.whole((rows, columns)))
        assert torch.equal(got["w"].view(torch.uint8), codes[inside].contiguous().view(torch.uint8))
        some = sink.by_name["w.scale"].box.slices_in(Box.whole(scaling.scale_shape((rows, columns))))
        assert torch.equal(got["w.scale"], scales[some])


def box_along(axis: int, a: int, z: int, shape: tuple[int, int]) -> Box:
    return Box((a, 0), (z, shape[1])) if axis == 0 else Box((0, a), (shape[0], z))


def carried(plan, sources, sinks, weight):
    """Measure, agree, pack and stage, without processes; shards are slices of the full weight."""

    def held(rank: int):
        box = sources[rank].by_name["w"].box
        return lambda _: weight[box.slices_in(Box.whole(weight.shape))]

    measured = [
        Largest(name=name, blocks=blocks, values=most.numpy().tobytes())
        for rank in range(len(sources))
        for name, parts in measure(plan.sent_by(rank), held(rank), sources[rank].parts, "here").items()
        for blocks, most in parts
    ]
    common = {
        name: (item.blocks, torch.frombuffer(bytearray(item.values), dtype=torch.float32).view(item.blocks.shape))
        for name, item in agreed(measured).items()
    }
    shadows = [Shadow(sink, 1, f"rollout rank {rank}") for rank, sink in enumerate(sinks)]
    for bucket in plan.buckets:
        memory = allocate(bucket.num_bytes)
        owner = bucket.owner
        packer = Packer(held(owner), sources[owner].parts, "here", common)
        packer.pack(bucket, memory)
        for rank in bucket.sinks:
            assert tuple(shadows[rank].add(bucket, memory)) == packer.digests()[bucket.index]
    for shadow in shadows:
        shadow.check_complete()
    return [shadow.weights() for shadow in shadows]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_refused_with_its_tensor(value):
    """QU-3"""
    weight = torch.ones(4, 8)
    weight[1, 3] = value
    source = [Layout((Entry.whole("w", (4, 8), "float32"),))]
    entry = Entry("w", Box.whole((4, 8)), (4, 8), "float8_e4m3fn", BLOCK)
    sink = [Layout((entry, entry.scales()))]
    with pytest.raises(SyncError, match=r"w: here: box \[0:4, 0:8\] holds values that are not finite"):
        carried(make_plan(source, sink, bucket_bytes=1024), source, sink, weight)


@pytest.mark.parametrize(
    ("held", "wanted", "text"),
    [
        (("float8_e4m3fn", BLOCK), ("float8_e4m3fnuz", BLOCK), "trainer rank 0 holds float8_e4m3fn .* float8_e4m3fnuz"),
        (
            ("float8_e4m3fn", BLOCK),
            ("float8_e4m3fn", Scaling("block", "w.scale", (4, 8), "ue8m0")),
            "one float32 scale per block 4x8 .* wants .* one ue8m0 scale per block 4x8",
        ),
        (("float8_e4m3fn", BLOCK), ("float8_e4m3fn", Scaling("block", "w.scale", (4, 4))), "4x8 .* wants .* 4x4"),
        (("float8_e4m3fn", BLOCK), ("bfloat16", None), "trainer rank 0 holds float8_e4m3fn .* wants bfloat16"),
        (("bfloat16", None), ("float8_e4m3fn", None), "trainer rank 0 holds bfloat16 .* wants float8_e4m3fn"),
    ],
    ids=["codes", "scales", "blocks", "dequantise", "no scales"],
)
def test_formats_that_differ_are_refused_with_both_descriptions(held, wanted, text):
    """FO-3, W7"""
    box = Box.whole((8, 8))
    source = Entry("w", box, (8, 8), held[0], held[1])
    entry = Entry("w", box, (8, 8), wanted[0], wanted[1])
    sink = Layout((entry, entry.scales())) if entry.scaling else Layout((entry,))
    with pytest.raises(LayoutError, match=f"w: .*{text}"):
        make_plan([Layout((source,))], [sink], bucket_bytes=1024)


def test_tile_that_a_rollout_rank_cuts_is_refused_with_the_multiple_to_choose():
    source = Layout((Entry.whole("w", (16, 8), "bfloat16"),))
    entry = Entry.rows("w", (16, 8), "bfloat16", 0, 6)
    cut = Entry("w", entry.box, (16, 8), "float8_e4m3fn", BLOCK)
    with pytest.raises(LayoutError, match=r"w: rollout rank 0 wants .* through blocks; split .* multiples of 4 rows"):
        make_plan([source], [Layout((cut, cut.scales()))], bucket_bytes=1024)


def test_scales_that_are_not_listed_or_listed_otherwise_are_refused():
    source = Layout((Entry.whole("w", (16, 8), "bfloat16"),))
    entry = Entry("w", Box.whole((16, 8)), (16, 8), "float8_e4m3fn", BLOCK)
    for listed in ((), (Entry.whole("w.scale", (4, 2), "float32"),)):
        with pytest.raises(LayoutError, match=r"w\.scale: scales of w are float32 \[0:4, 0:1\] of \[4, 1\],"):
            make_plan([source], [Layout((entry, *listed))], bucket_bytes=1024)


@given(st.binary(max_size=70), st.data())
def test_mixed_digest_depends_on_content_order_and_length(content, data):
    """DG-2"""
    memory = torch.tensor(list(content), dtype=torch.uint8)
    digest = mix64(memory).item()
    words = [int.from_bytes(content[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(content), 8)]
    total = sum(w * key_of(i) for i, w in enumerate(words)) + len(content) * 0xC2B2AE3D27D4EB4F
    assert (digest - total) % 2**64 == 0
    assert mix64(torch.cat([memory, memory.new_zeros(1)])).item() != digest
    words = [int.from_bytes(content[i : i + 4], "little") for i in range(0, len(content), 4)]
    if len(words) > 1:
        i, j = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, len(words) - 1))
        if i != j and words[i] != words[j] and max(i, j) < len(content) // 4:
            swapped = memory.clone()
            left, right = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
            swapped[left], swapped[right] = memory[right], memory[left]
            assert mix64(swapped).item() != digest


def test_quotient_from_a_reciprocal_and_two_corrections_is_that_of_the_division():
    """KF-1: what the kernel does where multiply-add is fused, here in float64, where both its products are exact"""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(1 << 18, generator=generator).mul(0.05)
    values[: 1 << 17] = values[: 1 << 17].bfloat16().float()
    scales = torch.rand(1 << 18, generator=generator).add(0.01).mul(3e-4)
    scales[::2] = values[::2].abs().clamp_min(1e-6) / torch.full_like(values[::2], 448.0) * 1.75  # many ties of codes

    def fused(a, b, c):
        return (a.double() * b.double() + c.double()).float()

    one = torch.ones_like(scales) / scales
    found = values * one
    for _ in range(2):
        found = fused(fused(found, -scales, values), one, found)
    assert torch.equal(found, values / scales)
