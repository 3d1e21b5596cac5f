"""WI-1 to WI-6 of runtime/wire.py and FR-1 to FR-4 of frames.py, over socket pairs in one process."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from runtime import memory, wire
from runtime.auth import Refusals, Trust
from runtime.codec import Payload
from runtime.errors import ConnectionRefused, Oversize
from runtime.frames import Outgoing
from runtime.memory import SHARED_THRESHOLD
from runtime.messages import Credit, More, Returned, Stop
from runtime.sockets import dial, parse_address, unix_address
from runtime.wire import GATHERED_BYTES, GATHERED_MESSAGES, Connection
from tests.waiting import until

TRUST = Trust(secret=b"s" * 32)


class Pair:
    """Two connections and what arrived at the second."""

    def __init__(self, limit: int = 2**30) -> None:
        left, right = socket.socketpair()
        self.raw = left
        self.got: list[tuple[Any, Payload]] = []
        self.lost: list[str] = []
        self.changed = asyncio.Event()
        self.refusals = Refusals()
        self.left = Connection(
            left, TRUST, self.on_message, lambda _: self.lost.append("left"), dialled=True, limit=limit
        )
        self.right = Connection(
            right, TRUST, self.on_message, self.on_right_lost, dialled=False, limit=limit, refusals=self.refusals
        )

    def on_message(self, connection: Connection, message: Any, payload: Payload) -> None:
        self.got.append((message, payload))
        self.changed.set()

    def on_right_lost(self, connection: Connection) -> None:
        self.lost.append("right")
        self.changed.set()

    async def proven(self) -> None:
        await until(lambda: self.left.proven and self.right.proven, pause=0)

    async def wait(self, count: int) -> None:
        while len(self.got) < count:
            self.changed.clear()
            await self.changed.wait()

    def close(self) -> None:
        self.left.close()
        self.right.close()


@pytest.fixture
async def pair():
    pair = Pair()
    await pair.proven()
    yield pair
    pair.close()


async def test_frames_of_all_sizes_arrive_whole_and_in_order(pair):
    sizes = [0, 1, 100, 4095, 4096, 70_000, SHARED_THRESHOLD - 1, SHARED_THRESHOLD, 3 * SHARED_THRESHOLD]
    rng = np.random.default_rng(0)
    sent = []
    for number, size in enumerate(sizes * 5):
        body, buffer = rng.bytes(size // 3), bytearray(rng.bytes(size - size // 3))
        sent.append((body, buffer))
        pair.left.send(
            More(number, "a", number, size), Outgoing(Payload(body, [memoryview(buffer), memoryview(b"")]), 2**30)
        )
        pair.left.send(Stop(float(number)))
    await pair.wait(2 * len(sent))
    for number, (body, buffer) in enumerate(sent):
        message, payload = pair.got[2 * number]
        assert (message.id, message.nbytes) == (number, len(body) + len(buffer))
        assert bytes(payload.body) == body
        assert [bytes(b) for b in payload.buffers] == [bytes(buffer), b""]
        assert pair.got[2 * number + 1][0] == Stop(float(number))


async def test_the_first_message_of_a_burst_leaves_at_once_and_the_rest_together_wi6(pair, monkeypatch):
    monkeypatch.setattr(wire, "BURST_SECONDS", 60.0)
    pair.left._written_at = -60.0
    writes = []
    send = pair.left._stream.send

    def counted(pieces, fd):
        writes.append(len(pieces))
        return send(pieces, fd)

    monkeypatch.setattr(pair.left._stream, "send", counted)
    pair.left.send(Stop(0.0))
    assert len(writes) == 1
    for number in range(1, 100):
        pair.left.send(Stop(float(number)))
    assert len(writes) == 1 + 99 // GATHERED_MESSAGES
    pair.left.send(Stop(100.0), Outgoing(Payload(b"x" * GATHERED_BYTES), 2**30))
    assert len(writes) == 2 + 99 // GATHERED_MESSAGES
    pair.left.send(Stop(101.0), more=True)
    await pair.wait(102)
    assert [message.grace for message, _ in pair.got] == [float(n) for n in range(102)]


async def test_threads_send_whole_messages_each_in_its_order_wi1(pair):
    def send(first: int) -> None:
        for number in range(first, first + 300):
            outgoing = Outgoing(Payload(b"b" * (number % 7000), [memoryview(bytes(5000))]), 2**30)
            pair.left.send(Stop(float(number)), outgoing)

    with ThreadPoolExecutor(3) as threads:
        sending = [asyncio.wrap_future(threads.submit(send, 1000 * n)) for n in range(3)]
        send(3000)
        await pair.wait(1200)
        await asyncio.gather(*sending)
    numbers = [int(message.grace) for message, _ in pair.got]
    for thread in range(4):
        assert [n for n in numbers if n // 1000 == thread] == list(range(1000 * thread, 1000 * thread + 300))
    assert all(len(payload.body) == number % 7000 for number, (_, payload) in zip(numbers, pair.got, strict=True))


async def test_received_buffers_are_writable(pair):
    for size in (5000, SHARED_THRESHOLD):
        pair.left.send(Stop(0.0), Outgoing(Payload(b"x", [memoryview(bytes(size))]), 2**30))
    await pair.wait(2)
    for _, payload in pair.got:
        memoryview(payload.buffers[0])[0] = 1


async def test_a_frame_cut_into_single_bytes_is_put_together(pair):
    pair.left._blocked = True
    pair.left.send(Credit("actor", 2), Outgoing(Payload(b"body", [memoryview(b"b" * 5000)]), 2**30))
    pieces = b"".join(bytes(piece) for piece, _ in pair.left._out)
    pair.left._out.clear()
    for at in range(len(pieces)):
        pair.raw.send(pieces[at : at + 1])
        if at % 50 == 0:
            await asyncio.sleep(0)
    await pair.wait(1)
    assert pair.got[0][0] == Credit("actor", 2)
    assert bytes(pair.got[0][1].buffers[0]) == b"b" * 5000


async def test_one_block_goes_to_many_receivers(pair):
    outgoing = Outgoing(Payload(b"", [memoryview(bytes(SHARED_THRESHOLD))]), 2**30)
    for _ in range(100):
        pair.left.send(Stop(1.0), outgoing)
    await pair.wait(100)
    assert outgoing.block() is outgoing.block()


async def test_oversize_is_refused_at_the_sender_with_size_and_limit():
    with pytest.raises(Oversize, match=r"message of 2000 bytes: the limit is 1000") as caught:
        Outgoing(Payload(b"x" * 1000, [memoryview(b"y" * 1000)]), 1000)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff" * 64,
        struct.pack("<IQII", 4, 0, 0, 0) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<IQII", 1, 2**40, 0, 0) + b"\x90",
        struct.pack("<IQII", 0, 0, 2**30, 0),
    ],
)
async def test_a_malformed_frame_closes_the_connection_and_only_it(pair, bad):
    other = Pair()
    try:
        pair.raw.send(bad)
        await until(lambda: pair.lost, pause=0.001)
        assert pair.lost[0] == "right"
        assert sum(pair.refusals.count.values()) == 1
        assert set(pair.refusals.count) <= {"malformed", "oversized"}
        other.left.send(Stop(2.0))
        await other.wait(1)
    finally:
        other.close()


async def test_the_end_of_the_other_side_is_told_once(pair):
    pair.left.close()
    await until(lambda: pair.lost, pause=0.001)
    assert pair.lost == ["right"]
    pair.right.send(Stop(0.0))  # dropped
    assert pair.lost == ["right"]


async def test_nothing_is_lost_when_the_kernel_takes_little_at_a_time(pair):
    body = os.urandom(200_000)
    for number in range(50):
        pair.left.send(Stop(float(number)), Outgoing(Payload(body), 2**30))
    await pair.wait(50)
    assert all(bytes(payload.body) == body for _, payload in pair.got)
    assert [m.grace for m, _ in pair.got] == [float(n) for n in range(50)]


async def test_a_block_is_used_again_once_its_receiver_has_let_go_wi5(pair):
    payload = Payload(b"", [memoryview(bytes(SHARED_THRESHOLD))])
    pair.left.send(Stop(0.0), Outgoing(payload, 2**30))
    await pair.wait(1)
    held = pair.got[0][1].buffers[0]
    lent = memory.pool.num_lent
    assert lent >= 1
    pair.left.send(Stop(0.0), Outgoing(Payload(b"", [memoryview(b"x" * SHARED_THRESHOLD)]), 2**30))
    await pair.wait(2)
    assert bytes(held) == bytes(SHARED_THRESHOLD)  # the second payload went elsewhere
    del held
    pair.got.clear()
    await until(lambda: memory.pool.num_lent < lent, pause=0.001)


async def test_a_block_may_come_back_before_the_kernel_says_that_it_was_sent_wi5(pair, monkeypatch):
    outgoing = Outgoing(Payload(b"", [memoryview(bytes(SHARED_THRESHOLD))]), 2**30)
    send = pair.left._stream.send

    def answered_first(pieces, descriptor):
        count = send(pieces, descriptor)
        if descriptor is not None:
            pair.left._deliver(Returned([pair.left._num_lent]), Payload(b""))
        return count

    monkeypatch.setattr(pair.left._stream, "send", answered_first)
    pair.left.send(Stop(0.0), outgoing)
    assert (outgoing.block().leases, outgoing.block().holds) == (0, 1)
    assert not pair.left._lent


async def test_a_block_that_the_kernel_did_not_take_is_not_lent_wi5(pair, monkeypatch):
    def full(pieces, descriptor):
        raise BlockingIOError

    outgoing = Outgoing(Payload(b"", [memoryview(bytes(SHARED_THRESHOLD))]), 2**30)
    with monkeypatch.context() as patch:
        patch.setattr(pair.left._stream, "send", full)
        pair.left.send(Stop(0.0), outgoing)
    assert (outgoing.block().leases, outgoing.block().holds) == (0, 2)
    await pair.wait(1)
    assert (outgoing.block().leases, outgoing.block().holds) == (1, 1)


async def test_a_connection_that_is_lost_spoils_the_blocks_it_lent_wi5(pair):
    pair.left.send(Stop(0.0), Outgoing(Payload(b"", [memoryview(b"a" * SHARED_THRESHOLD)]), 2**30))
    await pair.wait(1)
    held = pair.got[0][1].buffers[0]
    pair.left.close()
    for _ in range(4):  # whatever is filled now is not what the receiver still sees
        memory.pool.filled([b"b" * SHARED_THRESHOLD]).release()
    assert bytes(held) == b"a" * SHARED_THRESHOLD


def test_addresses_have_a_scheme(tmp_path):
    assert str(parse_address("unix:/a/job/c")) == "unix:/a/job/c"
    assert parse_address("unix:/a/job/c").job == parse_address("tcp://127.0.0.1:1/job").job == "job"
    assert str(parse_address("tcp://[::1]:70/job")) == "tcp://[::1]:70/job"
    for bad in ("tcp:host:1", "tcp://host", "tcp://host:x", "tcp://:1", "tcp://host:70000", "http://a:1", "unix:", ""):
        with pytest.raises(ValueError, match="expected unix:/path or tcp://host:port"):
            parse_address(bad)
    with pytest.raises(ConnectionRefused, match="no process answers"):
        dial(unix_address(str(tmp_path / "none")))
