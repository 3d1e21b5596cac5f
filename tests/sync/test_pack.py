"""PK-1 to PK-4 and DG-1, without processes."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sync.digest import combine, digest64
from sync.layout import Box, Entry, Layout
from sync.pack import Shadow, pack, tensor_over
from sync.plan import Bucket, Segment
from sync.transport import SyncError


def segment(shape: tuple[int, ...], dtype: str = "float32", cast_from: str = "float32") -> Segment:
    return Segment("w", Box.whole(shape), dtype, cast_from, 0, shape)


def packed(tensor: torch.Tensor, dtype: str = "float32") -> tuple[memoryview, Segment, int]:
    one = segment(tuple(tensor.shape), dtype, str(tensor.dtype).removeprefix("torch."))
    memory = memoryview(bytearray(one.num_bytes))
    return memory, one, pack(tensor, one.box, one, memory, "trainer rank 0, version 1")


def test_strided_weight_is_packed_row_major():
    tensor = torch.arange(12.0).view(3, 4).t()
    memory, one, _ = packed(tensor)
    assert bytes(memory) == bytes(tensor.contiguous().numpy().tobytes())
    assert torch.equal(tensor_over(memory, 0, "float32", one.box.shape), tensor)


def test_weight_that_requires_grad_is_packed_without_a_graph():
    memory, _, _ = packed(torch.nn.Parameter(torch.ones(4)))
    assert bytes(memory) == torch.ones(4).numpy().tobytes()


def test_cast_clips_what_the_target_can_not_hold():
    memory, _, _ = packed(torch.tensor([1e9, -1e9, 1.5]), "float16")
    assert tensor_over(memory, 0, "float16", (3,)).tolist() == [65504.0, -65504.0, 1.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_cast_refuses_what_is_not_finite_and_names_tensor_and_rank(value):
    with pytest.raises(SyncError, match=r"^w: trainer rank 0, version 1: box \[0:2\] holds values that are not finite"):
        packed(torch.tensor([1.0, value]), "bfloat16")


def test_weight_that_is_not_what_the_layout_said_is_refused():
    one = segment((2, 3))
    with pytest.raises(SyncError, match=r"w: here: the layout says float32 \[2, 3\], the weight is float32 \[3, 2\]"):
        pack(torch.zeros(3, 2), one.box, one, memoryview(bytearray(24)), "here")


def shadow_of(shape: tuple[int, ...]) -> Shadow:
    return Shadow(Layout((Entry.whole("w", shape, "float32"),)), 7, "rollout rank 3")


@given(st.data())
def test_any_flipped_bit_is_found_and_named(data):
    memory, one, digest = packed(torch.arange(64.0))
    memory[data.draw(st.integers(0, 255))] ^= 1 << data.draw(st.integers(0, 7))
    bucket = Bucket(0, 2, (3,), 0, one.num_bytes, (one,))
    with pytest.raises(SyncError, match=r"^w: rollout rank 3, version 7: .* digest .*, trainer rank 2 packed"):
        shadow_of((64,)).add(bucket, memory, [digest])


def test_missing_bucket_is_named():
    half = Segment("w", Box((0,), (32,)), "float32", "float32", 0, (64,))
    memory = memoryview(bytearray(128))
    shadow = shadow_of((64,))
    shadow.add(Bucket(0, 0, (3,), 0, 128, (half,)), memory, [digest64(memory)])
    with pytest.raises(SyncError, match=r"rollout rank 3, version 7: incomplete .* w \(32 elements\)"):
        shadow.check_complete()


def test_read_only_memory_is_viewed_without_a_copy_and_kept_alive():
    mapping = mmap.mmap(-1, 4096)
    writer = memoryview(mapping)
    view = tensor_over(writer.toreadonly(), 64, "float32", (2,))
    writer[64:68] = torch.tensor([2.5]).numpy().tobytes()
    assert view[0].item() == 2.5
    with pytest.raises(BufferError):
        mapping.close()  # the tensor holds it


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


def test_combined_digest_depends_on_the_order():
    assert combine([1, 2]) != combine([2, 1])
    assert combine([]) == combine(())
