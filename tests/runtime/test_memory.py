"""ME-1 to ME-5 of runtime/memory.py."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from runtime.memory import ALIGNMENT, Block, offsets, receive


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("memfd:tutti" in line for line in file)


def test_buffers_are_aligned_and_do_not_overlap():
    starts, size = offsets([1, 64, 0, 65])
    assert starts == [0, ALIGNMENT, 2 * ALIGNMENT, 2 * ALIGNMENT]
    assert size == 4 * ALIGNMENT


def test_one_block_serves_several_receivers_who_can_not_see_each_others_writes():
    array = np.arange(10_000)
    block = Block([b"head", memoryview(array.data).cast("B")])
    views = [receive(os.dup(block.fd), [4, array.nbytes]) for _ in range(2)]
    first, second = (np.frombuffer(buffer, array.dtype) for _, buffer in views)
    first[:] = 0
    assert np.array_equal(second, array)
    assert bytes(views[1][0]) == b"head"


def test_a_block_is_sealed():
    block = Block([b"x" * 10])
    with pytest.raises(PermissionError):
        os.pwrite(block.fd, b"y", 0)


def test_memory_is_freed_with_the_last_value_and_no_descriptor_stays():
    descriptors = len(os.listdir("/proc/self/fd"))
    block = Block([bytes(100_000)])
    (view,) = receive(os.dup(block.fd), [100_000])
    array = np.frombuffer(view, np.uint8)[10:]
    block.close()
    del view
    gc.collect()
    assert mappings() == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert array.sum() == 0
    del array
    gc.collect()
    assert mappings() == 0


def test_a_block_smaller_than_announced_is_refused():
    block = Block([b"x"])
    with pytest.raises(ValueError, match="expected 128 bytes, got 64"):
        receive(os.dup(block.fd), [65])
