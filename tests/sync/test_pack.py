"""PK-1 to PK-3, SH-1 to SH-3, MM-1, MM-2 and DG-1, without processes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sync.digest import digest64
from sync.layout import Box, Entry, Layout
from sync.memory import allocate, copy_hashed, digest_of, empty, move_hashed, over, view
from sync.pack import Packer
from sync.plan import Bucket, Segment
from sync.shadow import Shadow
from sync.transport import SyncError


def bucket_of(*segments: Segment) -> Bucket:
    return Bucket(0, 2, (3,), 0, segments[-1].offset + segments[-1].num_bytes, segments)


def packed(tensor: Tensor, dtype: str = "float32") -> tuple[Tensor, Bucket, list[int]]:
    shape, held = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    bucket = bucket_of(Segment("w", Box.whole(shape), dtype, held, 0, shape))
    memory = allocate(bucket.num_bytes)
    parts = {"w": (Entry.whole("w", shape, held),)}
    packer = Packer(lambda _: tensor, parts, "trainer rank 0, version 1")
    packer.pack(bucket, memory)
    return memory, bucket, list(packer.digests()[0])


def shadow_of(shape: tuple[int, ...], spare: dict[str, Tensor] | None = None) -> Shadow:
    return Shadow(Layout((Entry.whole("w", shape, "float32"),)), 7, "rollout rank 3", spare)


def test_strided_weight_is_packed_row_major():
    tensor = torch.arange(12.0).view(3, 4).t()
    memory, _, _ = packed(tensor)
    assert bytes(memory.numpy()) == bytes(tensor.contiguous().numpy().tobytes())
    assert torch.equal(view(memory, 0, "float32", (4, 3)), tensor)


def test_weight_that_requires_grad_is_packed_without_a_graph():
    memory, _, _ = packed(torch.nn.Parameter(torch.ones(4)))
    assert bytes(memory.numpy()) == torch.ones(4).numpy().tobytes()


def test_cast_clips_what_the_target_can_not_hold():
    memory, _, _ = packed(torch.tensor([1e9, -1e9, 1.5]), "float16")
    assert view(memory, 0, "float16", (3,)).tolist() == [65504.0, -65504.0, 1.5]


def test_cast_clips_at_a_limit_that_its_source_can_not_hold():
    memory, _, _ = packed(torch.tensor([1e9, -1e9, 65504.0], dtype=torch.bfloat16), "float16")
    assert view(memory, 0, "float16", (3,)).tolist() == [65504.0, -65504.0, 65504.0]
    memory, _, _ = packed(torch.tensor([1.5, -65504.0], dtype=torch.float16), "bfloat16")
    assert view(memory, 0, "bfloat16", (2,)).tolist() == [1.5, -65536.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_cast_refuses_what_is_not_finite_and_names_tensor_and_rank(value):
    with pytest.raises(SyncError, match=r"^w: trainer rank 0, version 1: box \[0:2\] holds values that are not finite"):
        packed(torch.tensor([1.0, value]), "bfloat16")


def test_weight_that_is_not_what_the_layout_said_is_refused():
    bucket = bucket_of(Segment("w", Box.whole((2, 3)), "float32", "float32", 0, (2, 3)))
    parts = {"w": (Entry.whole("w", (2, 3), "float32"),)}
    memory = allocate(24)
    with pytest.raises(SyncError, match=r"w: here: the layout says float32 \[2, 3\], the weight is float32 \[3, 2\]"):
        Packer(lambda _: torch.zeros(3, 2), parts, "here").pack(bucket, memory)
    with pytest.raises(SyncError, match=r"w: here: the layout has 1 boxes of it and `weight\(\)` returned 2 tensors"):
        Packer(lambda _: [torch.zeros(2, 3)] * 2, parts, "here").pack(bucket, memory)


@given(st.data())
def test_any_flipped_bit_changes_the_digest_of_what_is_stored(data):
    """SH-2"""
    memory, bucket, digests = packed(torch.arange(64.0))
    assert shadow_of((64,)).add(bucket, memory) == digests
    memory[data.draw(st.integers(0, 255))] ^= 1 << data.draw(st.integers(0, 7))
    assert shadow_of((64,)).add(bucket, memory) != digests


@pytest.mark.parametrize("columns", [slice(0, 3), slice(3, 8)])
def test_columns_of_a_tensor_are_hashed_like_the_bucket_they_came_in(columns):
    """SH-2: the place of a segment in its tensor need not be contiguous"""
    values = torch.arange(32.0).view(4, 8)
    box = Box((0, columns.start), (4, columns.stop))
    bucket = bucket_of(Segment("w", box, "float32", "float32", 0, (4, 8)))
    memory = allocate(bucket.num_bytes)
    packer = Packer(lambda _: values, {"w": (Entry.whole("w", (4, 8), "float32"),)}, "here")
    packer.pack(bucket, memory)
    shadow = shadow_of((4, 8))
    assert tuple(shadow.add(bucket, memory)) == packer.digests()[0]
    assert torch.equal(shadow.weights()["w"][:, columns], values[:, columns])


def test_missing_bucket_is_named():
    half = Segment("w", Box((0,), (32,)), "float32", "float32", 0, (64,))
    shadow = shadow_of((64,))
    shadow.add(bucket_of(half), allocate(128))
    with pytest.raises(SyncError, match=r"rollout rank 3, version 7: incomplete .* w \(32 elements\)"):
        shadow.check_complete()


def test_version_is_staged_in_the_memory_that_is_spare_and_never_in_the_transport_s():
    """SH-1, SH-3"""
    memory, bucket, _ = packed(torch.arange(64.0))
    spare = {"w": torch.zeros(64)}
    shadow = shadow_of((64,), spare)
    shadow.add(bucket, memory)
    memory.zero_()
    assert shadow.weights()["w"].data_ptr() == spare["w"].data_ptr()
    assert torch.equal(spare["w"], torch.arange(64.0))
    for other in (torch.zeros(63), torch.zeros(64, dtype=torch.float64), torch.zeros(128)[::2]):
        shadow = shadow_of((64,), {"w": other})
        shadow.add(bucket, memory)
        assert shadow.weights()["w"].data_ptr() != other.data_ptr()


def test_memory_is_viewed_without_a_copy_and_kept_alive():
    """MM-1"""
    mapping = mmap.mmap(-1, 4096)
    writer = memoryview(mapping)
    seen = view(over(writer), 64, "float32", (2,))
    writer[64:68] = torch.tensor([2.5]).numpy().tobytes()
    assert seen[0].item() == 2.5
    with pytest.raises(BufferError):
        mapping.close()  # the tensor holds it


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 512 << 10, (512 << 10) + 1, (3 << 20) + 7])
def test_copy_is_whole_and_its_digest_is_that_of_the_bytes(num_bytes):
    """MM-2, around the size of a piece"""
    source = allocate(num_bytes).random_(0, 256)
    target = allocate(num_bytes)
    assert copy_hashed(target, source) == digest_of(source)
    assert torch.equal(target, source)


@given(st.binary(min_size=2, max_size=200), st.data())
def test_digest_depends_on_content_order_and_length(content, data):
    digest = digest64(memoryview(content))
    assert digest == digest64(memoryview(bytearray(content)))
    assert digest != digest64(memoryview(content + b"\0"))
    assert digest != digest64(memoryview(content[:-1]))
    i = data.draw(st.integers(0, len(content) - 2))
    swapped = bytearray(content)
    swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
    assert (digest == digest64(memoryview(swapped))) == (swapped == content)


def test_digest_of_long_memory_is_the_same_in_steps():
    long = memoryview(bytes(range(256)) * (40 << 10))  # 10 MiB, more than one step
    import xxhash

    assert digest64(long) == xxhash.xxh3_64_intdigest(long)


def test_large_memory_is_of_huge_pages_where_the_system_has_them():
    """MM-3"""
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no huge pages on request")
    tensor = empty((3, 1 << 20), "bfloat16", torch.device("cpu"))
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (torch.bfloat16, (3, 1 << 20), True)
    assert "hg" in flags_of(tensor.data_ptr())
    assert tuple(empty((0, 4), "float32", torch.device("cpu")).shape) == (0, 4)


def flags_of(address: int) -> list[str]:
    """VmFlags of the mapping at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(x, 16) for x in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("num_bytes", [1, 65536, 65537, (512 << 10) + 3])
def test_equal_addresses_are_only_hashed(num_bytes):
    memory = allocate(num_bytes).random_(0, 256)
    before = memory.clone()
    assert move_hashed(memory.data_ptr(), memory.data_ptr(), num_bytes) == digest_of(memory)
    assert torch.equal(memory, before)
