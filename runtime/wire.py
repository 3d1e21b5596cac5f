"""Frames over Unix sockets, tensors beside them.

A frame on the wire (little endian):

    prefix  : message bytes u32 | body bytes u64 | number of buffers u32 | flags u32      (20 bytes)
    sizes   : one u64 a buffer
    message : one record of `messages.py`
    body    : msgpack of arguments or result     } inside a shared block when flag SHARED is set:
    buffers : out-of-band bytes                  } then only its descriptor travels, by SCM_RIGHTS

WI-1: frames arrive whole and in the order sent.
WI-2: received bytes go straight into their final buffers (`recvmsg_into`); what is sent is gathered (`sendmsg`), never
      joined. Only the small head of a frame passes through the connection's own buffer.
WI-3: a payload larger than the limit raises `Oversize` at the sender, before anything is written; the connection stays
      good.
WI-4: a malformed frame closes the connection, and only it.
WI-5: `send` never blocks. What the kernel does not take waits in a list, whose size the mailboxes of the receivers
      bound.

Assumed: all methods are called on the thread of the loop.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from runtime.codec import Payload
from runtime.errors import ConnectionRefused, Oversize
from runtime.memory import SHARED_THRESHOLD, Block, receive
from runtime.messages import AnyMessage, Message

MAX_MESSAGE_BYTES = 8 * 2**30
"""Default limit of one message, body and buffers together."""

_PREFIX = struct.Struct("<IQII")
_SHARED = 1
_MAX_HEAD = 16 * 2**20
"""Limit of the record in front of a payload; a fault with a long traceback is the largest."""
_MAX_BUFFERS = 1 << 20
_RECEIVE_BYTES = 256 * 1024
_JOIN_BELOW = 4096
"""Pieces below this size are joined before they are written: one copy is cheaper than one more iovec."""
_IOV_MAX = 512
_FDS_PER_RECEIVE = 64

_EMPTY = Payload(b"")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode


class Outgoing:
    """A payload on its way to one or more receivers; copied at most once (ME-4)."""

    __slots__ = ("_block", "payload", "sizes")

    def __init__(self, payload: Payload, limit: int) -> None:
        """
        Raises:
            Oversize: the payload is larger than `limit` bytes (WI-3).
        """
        if payload.nbytes > limit:
            raise Oversize(
                f"message of {payload.nbytes} bytes: the limit is {limit}. Send it in parts, or raise the limit: "
                "this_host(max_message_bytes=...)"
            )
        self.payload = payload
        self.sizes = [len(b) for b in payload.buffers]
        self._block: Block | None = None

    @property
    def shared(self) -> bool:
        """Whether it goes through shared memory."""
        return self.payload.nbytes >= SHARED_THRESHOLD

    def block(self) -> Block:
        """The shared block, made at the first call. Copies; may run in any thread."""
        if self._block is None:
            self._block = Block([self.payload.body, *(memoryview(b) for b in self.payload.buffers)])
        return self._block


class Connection:
    """One end of a stream of frames."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Connection, Any, Payload], None],
        on_lost: Callable[[Connection], None],
        limit: int = MAX_MESSAGE_BYTES,
    ) -> None:
        sock.setblocking(False)
        self.limit = limit
        self.peer: Any = None
        """Whatever the user of the connection wants to find again in its callbacks."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._closed = False
        self._out: deque[tuple[bytes | memoryview, Block | None]] = deque()
        self._flush_scheduled = False
        self._writing = False
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._partial: _Partial | None = None
        self._fds: deque[int] = deque()
        self._loop.add_reader(sock.fileno(), self._on_readable)

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, message: Message, outgoing: Outgoing | None = None) -> None:
        """Send a frame (WI-5). A closed connection drops it: whoever waits learns from `on_lost`."""
        if self._closed:
            return
        record = _encode(message)
        if outgoing is None:
            self._put(_PREFIX.pack(len(record), 0, 0, 0) + record)
        else:
            payload, sizes = outgoing.payload, outgoing.sizes
            shared = outgoing.shared
            head = _PREFIX.pack(len(record), len(payload.body), len(sizes), _SHARED if shared else 0)
            if sizes:
                head += struct.pack(f"<{len(sizes)}Q", *sizes)
            if shared:
                self._out.append((head + record, outgoing.block()))
            elif not sizes and len(payload.body) < _JOIN_BELOW:
                self._put(b"".join((head, record, payload.body)))
            else:
                self._put(head + record)
                self._put(payload.body)
                for buffer in payload.buffers:
                    if len(buffer):
                        self._out.append((memoryview(buffer).cast("B"), None))
        if not self._flush_scheduled and not self._writing:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close at once; what was not written yet is dropped. `on_lost` is not called."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._out.clear()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def flush(self) -> None:
        """Write what the kernel takes now."""
        if not self._closed:
            self._flush()

    async def drained(self) -> None:
        """Wait until all that was sent is in the kernel, or the connection is closed."""
        while self._out and not self._closed:
            self.flush()
            await asyncio.sleep(0.001 if self._out else 0)

    # Writing

    def _put(self, piece: bytes | memoryview) -> None:
        if self._out and len(piece) < _JOIN_BELOW:
            last, block = self._out[-1]
            if block is None and type(last) is bytes and len(last) < _JOIN_BELOW:
                self._out[-1] = (last + piece, None)
                return
        self._out.append((piece, None))

    def _flush(self) -> None:
        self._flush_scheduled = False
        out = self._out
        while out and not self._closed:
            pieces: list[bytes | memoryview] = []
            ancillary: list[tuple[int, int, bytes]] = []
            for piece, block in out:
                if block is not None:
                    if pieces:
                        break  # a descriptor travels with the first byte of a call, so its frame starts a new one
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [block.fd]).tobytes())]
                pieces.append(piece)
                if len(pieces) == _IOV_MAX:
                    break
            try:
                sent = self._sock.sendmsg(pieces, ancillary)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    break  # too many descriptors in flight: go on when the receiver has taken some
                self._lose()
                return
            while sent:
                piece, _ = out[0]
                if sent >= len(piece):
                    sent -= len(piece)
                    out.popleft()
                else:
                    out[0] = (memoryview(piece)[sent:], None)
                    sent = 0
        if bool(out) != self._writing and not self._closed:
            self._writing = bool(out)
            if self._writing:
                self._loop.add_writer(self._sock.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._sock.fileno())

    # Reading

    def _on_readable(self) -> None:
        partial = self._partial
        targets = partial.missing() if partial is not None else [self._view[self._filled :]]
        try:
            count, ancillary, flags, _ = self._sock.recvmsg_into(targets, socket.CMSG_SPACE(4 * _FDS_PER_RECEIVE))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._lose()
            return
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                for fd in fds:
                    os.set_inheritable(fd, False)
                self._fds.extend(fds)
        if count == 0 or flags & socket.MSG_CTRUNC:
            self._lose()
            return
        try:
            if partial is not None:
                if partial.advance(count):
                    self._partial = None
                    self._deliver(partial.record, partial.payload())
            else:
                self._filled += count
                self._parse()
        except (ValueError, OSError) as error:  # WI-4
            self._refuse(error)

    def _parse(self) -> None:
        """Take all complete frames out of the buffer; begin the direct reception of an incomplete one."""
        start = 0
        while not self._closed and self._partial is None:
            available = self._filled - start
            if available < _PREFIX.size:
                break
            record_bytes, body_bytes, num_buffers, flags = _PREFIX.unpack_from(self._buffer, start)
            if record_bytes > _MAX_HEAD or num_buffers > _MAX_BUFFERS:
                raise ValueError(f"frame head of {record_bytes} bytes with {num_buffers} buffers")
            head = _PREFIX.size + 8 * num_buffers + record_bytes
            if available < head:
                self._make_room(start, head)
                return
            sizes = struct.unpack_from(f"<{num_buffers}Q", self._buffer, start + _PREFIX.size)
            if body_bytes + sum(sizes) > self.limit:
                raise ValueError(f"frame of {body_bytes + sum(sizes)} bytes, limit {self.limit}")
            at = start + head
            record = _decode(self._view[at - record_bytes : at])
            if flags & _SHARED:
                if not self._fds:
                    raise ValueError("frame announces a shared block that did not come")
                body, *buffers = receive(self._fds.popleft(), [body_bytes, *sizes])
                start = at
                self._deliver(record, Payload(body, buffers))
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
        rest = self._filled - start
        if start and rest:
            self._buffer[:rest] = self._buffer[start : self._filled]
        self._filled = rest

    def _make_room(self, start: int, need: int) -> None:
        rest = bytes(self._view[start : self._filled])
        if need > len(self._buffer):
            self._view.release()
            self._buffer = bytearray(need + _RECEIVE_BYTES)
            self._view = memoryview(self._buffer)
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)

    def _deliver(self, record: Any, payload: Payload) -> None:
        self._on_message(self, record, payload)

    def _refuse(self, error: Exception) -> None:
        self._loop.call_exception_handler(
            {"message": f"closed a connection after a malformed frame: {error}", "exception": error}
        )
        self._lose()

    def _lose(self) -> None:
        if not self._closed:
            self.close()
            self._on_lost(self)


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
        return [self._views[i] for i in range(min(len(self._views), _IOV_MAX))]

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


class Listener:
    """The listening socket of a process. `on_connection` gets each accepted socket."""

    def __init__(self, address: str, on_connection: Callable[[socket.socket], None]) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._on_connection = on_connection
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path = path_of(address)
        self._sock.bind(self._path)
        os.chmod(self._path, 0o600)
        self._sock.listen(512)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            self._on_connection(sock)

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if os.path.exists(self._path):
            os.unlink(self._path)


def address_of(path: str) -> str:
    """Addresses are texts with a scheme, so that others can follow: `unix:/path`."""
    return f"unix:{path}"


def path_of(address: str) -> str:
    """
    Raises:
        ValueError: the address is not of a Unix socket.
    """
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path:
        raise ValueError(f"address {address!r}: expected unix:/path, got scheme {scheme!r}")
    return path


def connect(address: str) -> socket.socket:
    """Connect to a process of this host. Local connections complete at once or not at all.

    Raises:
        ConnectionRefused: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path_of(address))
    except OSError as error:
        sock.close()
        raise ConnectionRefused(f"no process answers at {address}: {error.strerror}. It has stopped or died") from error
    return sock
