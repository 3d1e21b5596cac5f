"""ME-7 and ME-8 of runtime/memory.py: who can end the life of memory, and when. A fault here is a SIGSEGV, so what can
meet one runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from runtime import memory
from runtime.codec import Payload
from runtime.frames import Outgoing
from runtime.memory import Block, Pool


def survives(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"


@pytest.fixture
def pool():
    pool = Pool()
    yield pool
    pool.trim(0.0)


def test_a_large_call_after_one_that_failed_me7():
    """The failed one lies in a cycle of exception and frames; the collector finds it with the block that it sent."""
    survives("""
        import asyncio, gc
        import numpy as np
        from runtime import Actor, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def step(self, batch: np.ndarray, fails: bool) -> int:
                if fails:
                    raise ValueError("no memory")
                return int(batch.sum())

        async def main():
            async with this_host() as host:
                workers = await (await host.spawn_procs({"rank": 2})).spawn("worker", Worker)
                for _ in range(3):
                    try:
                        await workers.step.call(np.zeros(1 << 20, np.uint8), True)
                    except ValueError:
                        pass
                    gc.collect()
                    sums = await workers.step.call(np.ones(1 << 20, np.uint8), False)
                    assert list(sums.values()) == [1 << 20] * 2

        if __name__ == "__main__":
            asyncio.run(main())
    """)


def test_a_payload_in_garbage_gives_back_a_block_that_can_be_filled_again_me7():
    survives("""
        import gc
        from runtime import memory
        from runtime.codec import Payload
        from runtime.frames import Outgoing

        def garbage():
            outgoing = Outgoing(Payload(b"", [memoryview(bytes(1 << 20))]), 1 << 30)
            outgoing.block()
            cycle = [outgoing]
            cycle.append(cycle)

        garbage()
        gc.collect()
        assert memory.pool.idle_bytes == 1 << 20
        outgoing = Outgoing(Payload(b"", [memoryview(b"b" * (1 << 20))]), 1 << 30)
        outgoing.block()
        assert memory.pool.idle_bytes == 0
    """)


def test_a_payload_in_garbage_that_is_asked_for_its_block_once_more_fills_another_me7():
    survives("""
        import gc
        from runtime import memory
        from runtime.codec import Payload
        from runtime.frames import Outgoing

        outgoing = Outgoing(Payload(b"", [memoryview(bytes(1 << 20))]), 1 << 30)
        first = outgoing.block()
        outgoing._share.__del__()  # the collector's order: its finalizer first, then that of who still sends it
        assert first.holds == 0
        block = outgoing.block().hold()
        assert block.holds == 2
        assert memory.pool.filled([bytes(1 << 20)]) is not block
    """)


def test_values_in_garbage_can_be_used_by_its_finalizers_me7():
    survives("""
        import gc, os
        from runtime.memory import Pool, receive

        seen = []

        class User:
            def __del__(self):
                self.view[:4] = b"here"
                seen.append(bytes(self.view[:8]))

        ended = []
        block = Pool().filled([b"a" * 300_000])
        user = User()
        user.view, = receive(os.dup(block.fd), [300_000], lambda: ended.append(len(seen)))
        user.self = user
        del user
        gc.collect()
        assert (seen, ended) == ([b"hereaaaa"], [1])
    """)


def test_a_block_that_is_closed_under_a_copy_keeps_its_memory_until_the_copy_is_done_me7():
    survives("""
        from runtime import memory

        block = memory.pool.filled([b"a" * 300_000])
        copy = memory._copy

        def closing_first(*args):
            block.close()
            return copy(*args)

        memory._copy = closing_first
        block.fill([b"b" * 300_000])
    """)


def test_a_closed_block_and_what_does_not_fit_are_refused_me7(pool):
    block = pool.filled([b"a" * 300_000])
    with pytest.raises(ValueError, match="400000 bytes into a block of 327680"):
        block.fill([bytes(400_000)])
    with pytest.raises(ValueError, match="40000 items has 320000 bytes"):
        block.fill([memoryview(np.zeros(40_000).data)])
    block.close()
    with pytest.raises(ValueError, match="into a block of 0"):
        block.fill([b"b"])
    block.release()
    assert pool.idle_bytes == 0


def test_holds_that_end_in_the_middle_of_a_method_are_counted_after_it_me8(pool, monkeypatch):
    idle, held = [pool.filled([bytes(300_000)]) for _ in range(2)]
    idle.release()
    close = Block.close

    def interrupted(block: Block) -> None:
        held.release()
        close(block)

    monkeypatch.setattr(Block, "close", interrupted)
    pool.trim(0.0)
    monkeypatch.undo()
    assert pool.filled([bytes(300_000)]) is held
    assert pool.idle_bytes == 0


def test_a_block_that_is_spoiled_while_idle_is_not_filled_again_me7(pool):
    block = pool.filled([bytes(300_000)])
    block.release()
    pool.spoil(block)
    assert pool.idle_bytes == 0
    assert pool.filled([bytes(300_000)]) is not block


def test_two_copies_at_once_of_one_payload_leave_one_block_me4(monkeypatch):
    outgoing = Outgoing(Payload(b"", [memoryview(os.urandom(300_000))]), 1 << 30)
    blocks = []
    filled = memory.pool.filled

    def meanwhile(buffers):
        monkeypatch.undo()
        blocks.append(outgoing.block())  # another thread is done first
        return filled(buffers)

    monkeypatch.setattr(memory.pool, "filled", meanwhile)
    assert [outgoing.block()] == blocks
    assert blocks[0].holds == 1
