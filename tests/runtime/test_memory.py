"""ME-1 to ME-6 of runtime/memory.py."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from runtime import memory
from runtime.memory import ALIGNMENT, MAX_LENT, Pool, capacity_for, offsets, receive


def mappings() -> int:
    """Of receivers: private ones."""
    with open("/proc/self/maps") as file:
        return sum("memfd:tutti" in line and " rw-p " in line for line in file)


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.trim(0.0)


def test_buffers_are_aligned_and_do_not_overlap():
    starts, size = offsets([1, 64, 0, 65])
    assert starts == [0, ALIGNMENT, 2 * ALIGNMENT, 2 * ALIGNMENT]
    assert size == 4 * ALIGNMENT


def test_capacities_are_few_and_waste_at_most_a_quarter():
    sizes = range(1, 3_000_000, 977)
    assert all(n <= capacity_for(n) <= n + max(4096, n // 4) for n in sizes)
    assert len({capacity_for(n) for n in sizes}) < 60


def test_one_block_serves_several_receivers_who_can_not_see_each_others_writes(pool):
    array = np.arange(10_000)
    block = pool.filled([b"head", memoryview(array.data).cast("B")])
    views = [receive(os.dup(block.fd), [4, array.nbytes]) for _ in range(2)]
    first, second = (np.frombuffer(buffer, array.dtype) for _, buffer in views)
    first[:] = 0
    assert np.array_equal(second, array)
    assert bytes(views[1][0]) == b"head"


def test_nobody_but_its_sender_can_write_a_block_me2(pool):
    block = pool.filled([b"x" * 10])
    with pytest.raises(PermissionError):
        os.pwrite(block.fd, b"y", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(os.dup(block.fd), block.capacity, mmap.MAP_SHARED)
    for change in (1, 2 * block.capacity):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fd, change)


def test_a_block_is_filled_again_only_after_its_last_receiver_me2(pool):
    block = pool.filled([b"a" * 300_000])
    seen = []
    for _ in range(3):
        block.lend()
        seen.append(receive(os.dup(block.fd), [300_000], block.come_back)[0])
    block.release()
    assert (pool.num_lent, pool.idle_bytes) == (1, 0)
    while seen:
        assert pool.filled([b"b" * 300_000]).fd != block.fd
        assert bytes(seen[0]) == b"a" * 300_000
        del seen[-1]
    assert pool.num_lent == 0
    again = pool.filled([b"c" * 290_000])
    assert again is block  # the same pages: nothing was allocated
    (view,) = receive(os.dup(again.fd), [290_000])
    assert bytes(view) == b"c" * 290_000


def test_what_a_receiver_wrote_is_gone_when_the_block_is_used_again_me3(pool):
    block = pool.filled([b"a" * 300_000])
    block.lend()
    (view,) = receive(os.dup(block.fd), [300_000], block.come_back)
    view[:] = b"w" * 300_000
    block.release()
    del view
    again = pool.filled([b"c" * 300_000])
    assert again is block
    assert bytes(receive(os.dup(again.fd), [300_000])[0]) == b"c" * 300_000


def test_values_inherited_by_a_forked_child_keep_the_block_from_being_used_again_me2(pool):
    block = pool.filled([b"a" * 300_000])
    block.lend()
    (view,) = receive(os.dup(block.fd), [300_000], block.come_back)
    block.release()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0 if bytes(view) == b"a" * 300_000 else 1)
    os.read(ready[0], 1)
    del view
    for _ in range(3):
        pool.filled([b"b" * 300_000])
    os.write(go[1], b"x")
    _, status = os.waitpid(child, 0)
    for end in (*ready, *go):
        os.close(end)
    assert status == 0


def test_a_spoiled_block_is_closed_and_never_comes_back_me2(pool):
    block = pool.filled([b"a" * 300_000])
    block.lend()
    block.release()
    pool.spoil(block)
    block.come_back()  # too late
    assert (pool.num_lent, pool.idle_bytes) == (0, 0)
    assert pool.filled([b"b" * 300_000]) is not block


def test_values_kept_for_long_cost_the_sender_no_descriptors_me5(pool):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    views = []
    for _ in range(MAX_LENT + 50):
        block = pool.filled([b"a" * 5000])
        block.lend()
        views += receive(os.dup(block.fd), [5000], block.come_back)
        block.release()
    assert len(os.listdir("/proc/self/fd")) - before == MAX_LENT == pool.num_lent
    assert all(bytes(view) == b"a" * 5000 for view in views)


def test_lent_blocks_are_bounded_in_bytes_too_me5(pool, monkeypatch):
    monkeypatch.setattr(memory, "MAX_IDLE_BYTES", 1_000_000)
    views = []
    for number in range(5):
        block = pool.filled([bytes([number]) * 400_000])
        block.lend()
        views += receive(os.dup(block.fd), [400_000], block.come_back)
        block.release()
    assert pool.num_lent == 2
    assert pool.lent_bytes <= 1_000_000
    assert [bytes(view[:1]) for view in views] == [bytes([n]) for n in range(5)]
    del views, block
    gc.collect()
    assert (pool.num_lent, pool.lent_bytes) == (0, 0)


def test_idle_blocks_are_bounded_and_freed_me6(pool, monkeypatch):
    monkeypatch.setattr(memory, "MAX_IDLE_BYTES", 1_000_000)
    before = len(os.listdir("/proc/self/fd"))
    for block in [pool.filled([bytes(400_000)]) for _ in range(5)]:
        block.release()
    assert 0 < pool.idle_bytes <= 1_000_000
    pool.trim(0.0)
    assert pool.idle_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_freed_with_the_last_value_and_no_descriptor_stays():
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    block = Pool().filled([bytes(100_000)])
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
    block = Pool().filled([b"x"])
    with pytest.raises(ValueError, match="expected 8192 bytes, got 4096"):
        receive(os.dup(block.fd), [8192])
