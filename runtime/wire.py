"""A connection between two processes: proven first, then frames both ways.

    dial/accept -> (TLS) -> proof of the secret -> open -> closed
                   `send` already takes messages; they leave when the other side has proven itself

WI-1: messages arrive whole and in the order sent.
WI-2: what is sent is gathered (`sendmsg`), never joined; see `frames.py` for what is received.
WI-3: `send` never waits for the other side. What the kernel does not take waits in a list, whose size the mailboxes of
      the receivers bound.
WI-4: a peer that doesn't prove itself in time, or sends what isn't a frame, loses its connection, and only that.
WI-5: a shared block that was sent is used again only after the receiver has given it back (ME-2).
WI-6: a message is written at once, unless it follows another within `BURST_SECONDS`: those of a burst leave together at
      the end of the turn of the loop, or earlier when they are `GATHERED_MESSAGES` or `GATHERED_BYTES`, so that the
      receiver works while the sender goes on.

Assumed: all methods are called on the thread of the loop, but `send`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from runtime import memory
from runtime.auth import Handshake, Reason, Refusals, Trust
from runtime.codec import Payload
from runtime.errors import Oversize, PeerRefused
from runtime.frames import IOV_MAX, MAX_MESSAGE_BYTES, FrameReader, Outgoing, encode_record, head_of
from runtime.memory import Block
from runtime.messages import Message, Returned
from runtime.sockets import Pieces, Stream, stream_of

_JOIN_BELOW = 4096
"""Pieces below this size are joined before they are written: one copy is cheaper than one more iovec."""

BURST_SECONDS = 50e-6
GATHERED_MESSAGES = 32
GATHERED_BYTES = 64 * 1024
"""See WI-6."""

LATE_SECONDS = 0.5
"""A deadline that our own loop sees so much too late says nothing about the peer."""


class _Lent(NamedTuple):
    """A shared block on its way, and the number by which the receiver gives it back."""

    lease: int
    block: Block


class Connection:
    """One end of a stream of frames."""

    def __init__(
        self,
        sock: socket.socket,
        trust: Trust,
        on_message: Callable[[Connection, Any, Payload], None],
        on_lost: Callable[[Connection], None],
        *,
        dialled: bool,
        limit: int = MAX_MESSAGE_BYTES,
        refusals: Refusals | None = None,
    ) -> None:
        """
        Args:
            sock: connected, or being connected (`sockets.dial`).
            dialled: this end began the connection.
            refusals: counts what is wrong with the peer.

        Raises:
            OSError: the certificates of the job can't be used.
        """
        self.peer: Any = None
        """Whatever the user of the connection wants to find again in its callbacks."""
        self.reason = ""
        """Why it was lost, when that is more than the end of the other side."""
        self._stream: Stream = stream_of(sock, trust, dialled=dialled)
        self._loop = asyncio.get_running_loop()
        self.on_message = on_message
        """Takes what arrives."""
        self._on_lost = on_lost
        self._refusals = refusals or Refusals()
        self._limit = limit
        self._closed = False
        self._dialled = dialled
        self._reader: FrameReader
        self._lock = threading.Lock()
        """Of what `send` touches: what waits to be written, and the socket while it is written."""
        self._out: deque[tuple[bytes | memoryview, _Lent | None]] = deque()
        self._gathered = 0
        """Messages in `_out` that nobody has tried to write yet."""
        self._gathered_bytes = 0
        self._turn_ends = False
        """A callback at the end of this turn of the loop will write what has been gathered."""
        self._written_at = 0.0
        self._blocked = True
        """Nothing can be written: the kernel is full, or the other side has not proven itself."""
        self._broken = False
        self._writing = False
        """The loop tells when the kernel takes more."""
        self._thread = threading.get_ident()
        self._lent: dict[int, Block] = {}
        self._num_lent = 0
        self._returned: deque[int] = deque()
        """Leases of the other side whose values are gone here."""
        self._handshake: Handshake | None = Handshake(trust.secret, dialled=dialled)
        self._proof_out = self._handshake.start()
        self._proof_in = b""
        self._seconds = trust.handshake_seconds
        self._expiry: asyncio.TimerHandle | None = None
        if not dialled:  # whoever dials waits for as long as the other process lives: its loop may be busy
            self._expire_later()
        self._loop.add_reader(self._stream.fileno(), self._prove)
        if dialled:
            self._loop.add_writer(self._stream.fileno(), self._prove)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def proven(self) -> bool:
        """The other side has shown that it knows the secret."""
        return self._handshake is None

    def shares(self, outgoing: Outgoing) -> bool:
        """Whether this payload crosses as a shared block: a large one, on one host."""
        return outgoing.is_large and self._stream.carries_descriptors

    def send(self, message: Message, outgoing: Outgoing | None = None, *, more: bool = False) -> None:
        """Send a message, from any thread (WI-3). A closed connection drops it: whoever waits learns from `on_lost`.

        Args:
            more: another message will soon follow from the loop; it may leave together with that one (WI-6).
        """
        record = encode_record(message)
        on_loop = threading.get_ident() == self._thread
        with self._lock:
            if self._closed:
                return
            self._put_frame(record, outgoing)
            self._gathered += 1
            self._gathered_bytes += len(record) + (0 if outgoing is None else outgoing.payload.nbytes)
            if self._blocked:
                return
            if not (on_loop or self._stream.any_thread):
                self._tell_loop(self._flush)
                return
            now = time.perf_counter()
            gathers = on_loop and (more or self._turn_ends or now - self._written_at < BURST_SECONDS)
            if not gathers or self._gathered >= GATHERED_MESSAGES or self._gathered_bytes >= GATHERED_BYTES:
                self._write()
                self._written_at = now
        if self._blocked or self._broken:
            if on_loop:
                self._after_write()
            else:
                self._tell_loop(self._after_write)
        elif gathers and not self._turn_ends:
            self._turn_ends = True
            self._loop.call_soon(self._end_turn)

    def close(self) -> None:
        """Close at once; what was not written yet is dropped. `on_lost` is not called."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.remove_reader(self._stream.fileno())
            self._loop.remove_writer(self._stream.fileno())
            self._stream.close()
            dropped = [lent for _, lent in self._out if lent is not None]
            self._out.clear()
        if self._expiry is not None:
            self._expiry.cancel()
        for lent in dropped:
            lent.block.release()
        for block in self._lent.values():
            memory.pool.spoil(block)
        self._lent.clear()
        if self._handshake is None:
            self._reader.close()
            del self._reader  # its buffer; the object may be kept for what it says about the end

    def flush(self) -> None:
        """Write what the kernel takes now."""
        if not self._closed and self._handshake is None:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._write()
        self._after_write()

    def _end_turn(self) -> None:
        self._turn_ends = False
        if self._gathered and not self._blocked:
            self._flush()

    async def drained(self) -> None:
        """Wait until all that was sent is in the kernel, or the connection is closed."""
        while self._out and not self._closed:
            self.flush()
            await asyncio.sleep(0.001 if self._out else 0)

    # The proof

    def _prove(self) -> None:
        """Go on with the handshake as far as the socket allows (AU-1)."""
        handshake = self._handshake
        assert handshake is not None
        try:
            while not handshake.done or self._proof_out:
                if self._proof_out:
                    self._proof_out = self._proof_out[self._stream.send([self._proof_out], None) :]
                    continue
                part = bytearray(handshake.needs - len(self._proof_in))
                count, descriptors = self._stream.receive([memoryview(part)])
                for descriptor in descriptors:
                    os.close(descriptor)
                if not count:
                    if self._dialled:
                        raise PeerRefused("it closed the connection during the handshake: it has another secret")
                    self._lose()  # whoever looked in and left has done no harm
                    return
                self._proof_in += part[:count]
                if len(self._proof_in) == handshake.needs:
                    self._proof_out += handshake.feed(self._proof_in)
                    self._proof_in = b""
        except BlockingIOError:
            # The few bytes of a handshake always fit: what is missing must come from the other side.
            self._loop.remove_writer(self._stream.fileno())
            return
        except PeerRefused as error:
            self._refuse("unauthenticated", error)
            return
        except OSError as error:
            if self._dialled:
                self.reason = str(error)
                self._lose()
            else:
                self._refuse("unauthenticated", error)
            return
        self._open()

    def _open(self) -> None:
        self._handshake = None
        if self._expiry is not None:
            self._expiry.cancel()
        self._reader = FrameReader(self._deliver, self._done_with, self._limit)
        self._loop.remove_writer(self._stream.fileno())
        self._loop.add_reader(self._stream.fileno(), self._on_readable)
        self._blocked = False
        self._flush()
        if not self._closed and self._stream.has_more():
            self._on_readable()

    def _expire_later(self) -> None:
        self._expiry = self._loop.call_later(self._seconds, self._expire, self._loop.time() + self._seconds)

    def _expire(self, due: float) -> None:
        if self._loop.time() - due > LATE_SECONDS:
            self._expire_later()
        else:
            self._refuse("slow", f"no proof of the secret within {self._seconds} s")

    # Writing, under the lock

    def _put_frame(self, record: bytes, outgoing: Outgoing | None) -> None:
        if outgoing is None:
            self._put(head_of(record, None, None))
            return
        payload = outgoing.payload
        if outgoing.is_large and self._stream.carries_descriptors:
            self._num_lent += 1
            lent = _Lent(self._num_lent, outgoing.block().hold())
            self._out.append((head_of(record, outgoing, lent.lease), lent))
            return
        head = head_of(record, outgoing, None)
        if not outgoing.sizes and len(payload.body) < _JOIN_BELOW:
            self._put(head + payload.body)
            return
        self._put(head)
        self._put(payload.body)
        for buffer in payload.buffers:
            if len(buffer):
                self._out.append((memoryview(buffer).cast("B"), None))

    def _put(self, piece: bytes | memoryview) -> None:
        if len(piece) < _JOIN_BELOW and self._out:
            last, lent = self._out[-1]
            if lent is None and type(last) is bytes and len(last) < _JOIN_BELOW:
                self._out[-1] = (last + piece, None)
                return
        self._out.append((piece, None))

    def _write(self) -> None:
        """Write what the kernel takes; `_after_write` draws the consequences, on the loop."""
        self._gathered = self._gathered_bytes = 0
        out = self._out
        while out:
            piece, lent = out[0]
            pieces: Pieces = (piece,) if len(out) == 1 else self._first_pieces()
            if lent is not None:
                self._lend(lent)
            try:
                sent = self._stream.send(pieces, None if lent is None else lent.block.fd)
            except OSError as error:
                if lent is not None:
                    self._was_not_sent(lent)
                if not isinstance(error, BlockingIOError | InterruptedError):
                    self._broken = True
                break
            if lent is not None:
                lent.block.release()
            while sent:
                piece, _ = out[0]
                if sent >= len(piece):
                    sent -= len(piece)
                    out.popleft()
                else:
                    out[0] = (memoryview(piece)[sent:], None)
                    sent = 0
        self._blocked = bool(out)

    def _first_pieces(self) -> Pieces:
        """What one call of the kernel may take."""
        pieces: list[bytes | memoryview] = []
        for piece, lent in self._out:
            if lent is not None and pieces:
                break  # a descriptor travels with the first byte of a call, so its frame starts a new one
            pieces.append(piece)
            if len(pieces) == IOV_MAX:
                break
        return pieces

    def _after_write(self) -> None:
        """Watch the socket as long as the kernel is full; lose a broken one."""
        if self._closed:
            return
        if self._broken:
            self._lose()
        elif self._blocked != self._writing:
            self._writing = self._blocked
            if self._writing:
                self._loop.add_writer(self._stream.fileno(), self._flush)
            else:
                self._loop.remove_writer(self._stream.fileno())

    def _tell_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection with it
            self._loop.call_soon_threadsafe(function)

    # Reading

    def _on_readable(self) -> None:
        reader, stream = self._reader, self._stream
        try:
            while True:
                try:
                    count, descriptors = stream.receive(reader.targets())
                except (BlockingIOError, InterruptedError):
                    return
                except OSError:
                    count = 0
                if not count:
                    self._lose()
                    return
                reader.received(count, descriptors)
                if self._closed or not stream.has_more():
                    return
        except Oversize as error:
            self._refuse("oversized", error)
        except (ValueError, MemoryError, OSError) as error:  # WI-4
            self._refuse("malformed", error)

    def _deliver(self, record: Any, payload: Payload) -> None:
        if type(record) is Returned:
            for lease in record.leases:
                block = self._lent.pop(lease, None)
                if block is not None:
                    block.come_back()
        else:
            self.on_message(self, record, payload)

    # Shared blocks

    def _lend(self, lent: _Lent) -> None:
        """The frame is about to leave with its descriptor. Before it has: when another thread sends it, the loop may
        have the block back before the kernel returns."""
        self._lent[lent.lease] = lent.block
        lent.block.lend()

    def _was_not_sent(self, lent: _Lent) -> None:
        """The frame still waits, and holds its block."""
        if self._lent.pop(lent.lease, None) is not None:
            lent.block.come_back()

    def _done_with(self, lease: int) -> None:
        """Called by whoever lets go of the last value, in any thread."""
        self._returned.append(lease)
        self._tell_loop(self._give_back)

    def _give_back(self) -> None:
        if self._returned:
            leases = [self._returned.popleft() for _ in range(len(self._returned))]
            self.send(Returned(leases))

    # The end

    def _refuse(self, reason: Reason, error: object) -> None:
        self.reason = str(error)
        self._refusals.note(
            reason, "a process of this host" if self._stream.carries_descriptors else "a TCP peer", error
        )
        self._lose()

    def drop(self) -> None:
        """End as if the network had failed: both ends lose it."""
        self._lose()

    def _lose(self) -> None:
        if not self._closed:
            self.close()
            self._on_lost(self)
