"""What travels on a connection: frames, without sockets.

A frame (little endian):

    prefix  : message bytes u32 | body bytes u64 | number of buffers u32 | flags u32      (20 bytes)
    sizes   : one u64 a buffer
    lease   : u64, only with flag SHARED: the receiver names it when it is done with the block
    message : one record of `messages.py`
    body    : msgpack of arguments or result     } inside a shared block when flag SHARED is set:
    buffers : out-of-band bytes                  } then only its descriptor travels, by SCM_RIGHTS

FR-1: frames come out whole and in the order in which they went in.
FR-2: received bytes go straight into their final buffers. Only the small head of a frame passes through the reader's
      own buffer.
FR-3: a payload larger than the limit raises `Oversize` at the sender, before anything is written.
FR-4: what isn't a frame raises ValueError (`Oversize` for one that announces too much) before memory is taken for it.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from runtime import memory
from runtime.codec import Payload
from runtime.errors import Oversize
from runtime.memory import SHARED_THRESHOLD, Block, receive
from runtime.messages import AnyMessage

MAX_MESSAGE_BYTES = 8 * 2**30
"""Default limit of one message, body and buffers together."""

COPY_IN_THREAD = 4 * 2**20
"""Payloads of at least so many bytes are copied to shared memory in a thread, so that the loop goes on meanwhile."""

PREFIX = struct.Struct("<IQII")
SHARED = 1
_LEASE = struct.Struct("<Q")
_MAX_HEAD = 16 * 2**20
"""Limit of the record in front of a payload; a fault with a long traceback is the largest."""
_MAX_BUFFERS = 1 << 20
_RECEIVE_BYTES = 32 * 1024
"""What is received at once, large buffers aside. Its messages are delivered in one turn of the loop, and whoever waited
for them runs in the next: 256 KiB of small answers would hold a busy controller for 60 ms."""
IOV_MAX = 512

_EMPTY = Payload(b"")
encode_record = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode


class Outgoing:
    """A payload on its way to one or more receivers; copied at most once (ME-4)."""

    __slots__ = ("_share", "is_large", "payload", "sizes")

    def __init__(self, payload: Payload, limit: int) -> None:
        """
        Raises:
            Oversize: the payload is larger than `limit` bytes (FR-3).
        """
        if payload.nbytes > limit:
            raise Oversize(
                f"message of {payload.nbytes} bytes: the limit is {limit}. Send it in parts, or raise the limit: "
                "this_host(max_message_bytes=...)"
            )
        self.payload = payload
        self.sizes: Sequence[int] = [len(b) for b in payload.buffers] if payload.buffers else ()
        self.is_large = payload.nbytes >= SHARED_THRESHOLD
        """Large enough for shared memory, where the connection can carry a descriptor."""
        self._share: _Share | None = None

    def block(self) -> Block:
        """The shared block, filled at the first call. Copies; may run in any thread, also in two at once: a cancelled
        send does not stop its copy. One block is kept then."""
        share = self._share
        block = None if share is None else share.block
        if block is not None:
            return block
        share = _Share(memory.pool.filled([self.payload.body, *(memoryview(b) for b in self.payload.buffers)]))
        with memory.pool.lock:
            if self._share is None or self._share.block is None:
                self._share = share
            block = self._share.block
        assert block is not None
        return block


class _Share:
    """The hold that an Outgoing has on its block: ends with it."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block: Block | None = block

    def __del__(self) -> None:
        block, self.block = self.block, None  # others in the same garbage may still ask for it (ME-7)
        if block is not None:
            block.release()


def head_of(record: bytes, outgoing: Outgoing | None, lease: int | None) -> bytes:
    """All of a frame that stands before its body."""
    if outgoing is None:
        return PREFIX.pack(len(record), 0, 0, 0) + record
    sizes = outgoing.sizes
    head = PREFIX.pack(len(record), len(outgoing.payload.body), len(sizes), 0 if lease is None else SHARED)
    if sizes:
        head += struct.pack(f"<{len(sizes)}Q", *sizes)
    return head + record if lease is None else head + _LEASE.pack(lease) + record


class FrameReader:
    """Bytes to messages: ask for `targets`, read into them, say how much came with `received`."""

    def __init__(
        self,
        deliver: Callable[[Any, Payload], None],
        done_with: Callable[[int], None],
        limit: int,
    ) -> None:
        """
        Args:
            deliver: gets each record with its payload.
            done_with: told of a lease, in any thread, when the values over its block are gone.
        """
        self._deliver = deliver
        self._done_with = done_with
        self._limit = limit
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._partial: _Partial | None = None
        self._descriptors: deque[int] = deque()
        self._closed = False

    def targets(self) -> list[memoryview]:
        """Where the next bytes go."""
        return self._partial.missing() if self._partial is not None else [self._view[self._filled :]]

    def received(self, count: int, descriptors: Any) -> None:
        """So many bytes have come, and these descriptors with them.

        Raises:
            ValueError, MemoryError, OSError: FR-4; the reader can't go on.
        """
        if descriptors:
            self._descriptors.extend(descriptors)
        partial = self._partial
        if partial is None:
            self._filled += count
            self._parse()
        elif partial.advance(count):
            self._partial = None
            self._deliver(partial.record, partial.payload())

    def close(self) -> None:
        """Deliver nothing more."""
        self._closed = True
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _parse(self) -> None:
        """Take all complete frames out of the buffer; begin the direct reception of an incomplete one."""
        start = 0
        try:
            while not self._closed and self._partial is None:
                available = self._filled - start
                if available < PREFIX.size:
                    break
                record_bytes, body_bytes, num_buffers, flags = PREFIX.unpack_from(self._buffer, start)
                if record_bytes > _MAX_HEAD or num_buffers > _MAX_BUFFERS or flags > SHARED:
                    raise ValueError(f"frame head of {record_bytes} bytes with {num_buffers} buffers, flags {flags}")
                head = PREFIX.size + 8 * num_buffers + 8 * flags + record_bytes
                if available < head:
                    start = self._make_room(start, head)
                    return
                sizes: tuple[int, ...] = ()
                if num_buffers:
                    sizes = struct.unpack_from(f"<{num_buffers}Q", self._buffer, start + PREFIX.size)
                if body_bytes + sum(sizes) > self._limit:
                    raise Oversize(f"frame of {body_bytes + sum(sizes)} bytes, limit {self._limit}")
                at = start + head
                record = _decode(self._view[at - record_bytes : at])
                if flags:
                    start = at
                    self._deliver(record, self._map(at - record_bytes - 8, [body_bytes, *sizes]))
                elif not num_buffers and available >= head + body_bytes:
                    start = at + body_bytes
                    self._deliver(record, Payload(bytes(self._view[at:start])) if body_bytes else _EMPTY)
                else:
                    partial = _Partial(record, body_bytes, sizes)
                    start = at + partial.fill(self._view[at : self._filled])
                    if partial.done:
                        self._deliver(record, partial.payload())
                    else:
                        self._partial = partial
        finally:
            rest = self._filled - start
            if start and rest:
                self._buffer[:rest] = self._buffer[start : self._filled]
            self._filled = rest

    def _map(self, at: int, sizes: list[int]) -> Payload:
        if not self._descriptors:
            raise ValueError("frame announces a shared block that did not come")
        (lease,) = _LEASE.unpack_from(self._buffer, at)
        body, *buffers = receive(self._descriptors.popleft(), sizes, lambda: self._done_with(lease))
        return Payload(body, buffers)

    def _make_room(self, start: int, need: int) -> int:
        """Put the beginning of a frame where all of its head fits; returns where it begins now."""
        if need <= len(self._buffer):
            return start  # the caller moves it to the front
        rest = bytes(self._view[start : self._filled])
        self._view.release()
        self._buffer = bytearray(need + _RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)
        return 0


class _Partial:
    """A frame whose body and buffers are being received in place."""

    __slots__ = ("_buffers", "_views", "record")

    def __init__(self, record: Any, body_bytes: int, sizes: tuple[int, ...]) -> None:
        self.record = record
        self._buffers = [bytearray(size) for size in (body_bytes, *sizes)]
        self._views = deque(memoryview(b) for b in self._buffers if b)

    @property
    def done(self) -> bool:
        return not self._views

    def missing(self) -> list[memoryview]:
        return [self._views[i] for i in range(min(len(self._views), IOV_MAX))]

    def advance(self, count: int) -> bool:
        """Note that so many bytes were received; True when the frame is complete."""
        while count:
            size = len(self._views[0])
            if count < size:
                self._views[0] = self._views[0][count:]
                break
            self._views.popleft()
            count -= size
        return not self._views

    def fill(self, data: memoryview) -> int:
        """Copy what has already been received; returns the bytes taken."""
        taken = 0
        while self._views and taken < len(data):
            target = self._views[0]
            part = data[taken : taken + len(target)]
            target[: len(part)] = part
            taken += len(part)
            self.advance(len(part))
        return taken

    def payload(self) -> Payload:
        return Payload(memoryview(self._buffers[0]), self._buffers[1:])
