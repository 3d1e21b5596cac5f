"""A receiver in another process of the host: what the session says to a rank, passed on to where its weights lie.

    the rank's process                                            the worker's process
    RemoteReceiver --- calls, answers: length, msgpack ---------> serve(): a thread with a loop, one Receiver

Bytes of weights never come this way: the worker is a rank of the transport itself.

RL-1: the worker listens under a name without a file, for one connection: of the process that it was told of, which the
      kernel vouches for; the rank connects to processes of its own user only. Nothing is decoded before.
RL-2: frames have a limit, calls at once have one, and each call has a deadline. What is no frame ends the connection.
RL-3: the end of either process is known at once to the other: the connection ends with it. All calls that wait raise;
      the worker forgets what is staged and closes its transport.
RL-4: an error of the worker is raised as what it is where the session tells kinds apart, else as SyncError with its
      kind and text.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from sync.layout import LayoutError
from sync.messages import BaseMissing, LayoutMoved, Opened, OpenSpec, PortClosed, Side, Staged
from sync.transport import SyncError, TransportError

if TYPE_CHECKING:
    from torch import Tensor

    from sync.receiver import Receiver

__all__ = ["MAX_FRAME_BYTES", "RemoteReceiver", "Served", "serve"]

MAX_FRAME_BYTES = 256 << 20
"""Of one message. The largest is the layout of a rank: 10 MB for a trillion parameters in 70,000 tensors."""
MAX_CALLS = 8
DESCRIBE_S, LATER_S, CONNECT_S = 60.0, 10.0, 1.0
"""Most seconds that a description may take; that a transfer or a close may take beyond its own deadline; and that a
worker may take to accept."""

T = TypeVar("T")
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # pid, uid, gid: struct ucred
_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (LayoutMoved, LayoutError, BaseMissing, PortClosed, TransportError, SyncError)
}


class _Stage(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    plan_key: str
    sizes: dict[int, int] | None
    base: int | None


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    method: Literal["describe", "open", "stage", "close"]
    what: msgspec.Raw = msgspec.Raw(b"\xc0")


class _Fault(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    text: str
    late: tuple[int, ...] = ()


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    what: msgspec.Raw = msgspec.Raw(b"\xc0")
    fault: _Fault | None = None


# --- the rank's end ---------------------------------------------------------------------------------------------------


class RemoteReceiver:
    """A `sync.receiver.Part` whose receiver is served by another process.

    Args:
        name: for errors.
        ended: told once, when the connection ends without `leave`.
    """

    def __init__(self, name: str, ended: Callable[[SyncError], None]) -> None:
        self._name = name
        self._ended = ended
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._number = 0
        self._deadline_s = 0.0
        self._gone: SyncError | None = None
        self._left = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, address: str) -> None:
        """Raises SyncError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(CONNECT_S)
        try:
            connection.connect("\0" + address)  # its kernel answers at once, or nobody listens
        except OSError as error:
            connection.close()
            raise SyncError(f"{self._name}: its process can't be reached: {error}") from error
        if _peer_of(connection)[1] != os.getuid():
            connection.close()
            raise SyncError(f"{self._name}: another user listens at its address")
        connection.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._reading = asyncio.ensure_future(self._read(reader))

    async def describe(self, known: str) -> Side:
        return await self._asked("describe", known, Side, DESCRIBE_S)

    async def open(self, spec: OpenSpec) -> Opened:
        self._deadline_s = spec.link.deadline_s
        return await self._asked("open", spec, Opened, self._deadline_s + LATER_S)

    async def stage(self, version: int, plan_key: str, sizes: dict[int, int] | None, base: int | None) -> Staged:
        what = _Stage(version=version, plan_key=plan_key, sizes=sizes, base=base)
        return await self._asked("stage", what, Staged, self._deadline_s + LATER_S)

    async def close(self) -> None:
        """Of a process that is gone nothing is left to close (TR-5)."""
        try:
            if self._gone is None:
                await self._asked("close", None, None, self._deadline_s + LATER_S)
        except SyncError:
            if self._gone is None:
                raise

    def take(self, version: int) -> Mapping[str, Tensor]:
        return {}

    def applied(self, version: int, weights: Mapping[str, Tensor], left: Mapping[str, Tensor] | None) -> None:
        """The worker's swap has told its own receiver."""

    async def leave(self) -> None:
        """End the connection, at once: a worker that is stopped reads nothing any more."""
        self._left = True
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is not None:
            await self._reading

    async def _asked(self, method: Any, what: object, kind: type[T] | None, seconds: float) -> T:
        if self._gone is not None or self._writer is None:
            raise self._gone or SyncError(f"{self._name}: its process is not connected")
        self._number += 1
        number = self._number
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._writer.write(_frame(_Call(number=number, method=method, what=_raw(what))))
            async with asyncio.timeout(seconds):
                found: T = msgspec.msgpack.decode(await answer, type=kind)
                return found
        except TimeoutError as error:
            raise SyncError(f"{self._name}: no answer to {method} within {seconds:g} s") from error
        finally:
            del self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = "its process is gone"
        try:
            while True:
                answer = msgspec.msgpack.decode(await _frame_of(reader), type=_Answer)
                waiting = self._waiting.get(answer.number)
                if waiting is None or waiting.done():
                    continue  # whoever asked has gone
                if answer.fault is None:
                    waiting.set_result(answer.what)
                else:
                    waiting.set_exception(_raised(answer.fault, self._name))
        except (EOFError, OSError):  # the usual ends of a connection
            pass
        except (ValueError, msgspec.MsgspecError) as error:
            reason = f"what it says can't be read: {error}"
        self._gone = gone = SyncError(f"{self._name}: {reason}")
        if self._writer is not None:
            self._writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(gone)
        if not self._left:
            self._ended(gone)


# --- the worker's end -------------------------------------------------------------------------------------------------


class Served:
    """A receiver that a thread of this process serves.

    Args:
        peer: the process that may connect (RL-1).
    """

    def __init__(self, receiver: Receiver, peer: int) -> None:
        self.address = f"tutti-{os.getpid()}-{secrets.token_hex(8)}"
        self._receiver = receiver
        self._peer = peer
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listening.bind("\0" + self.address)
        self._listening.listen(64)  # whoever else knocks keeps nobody out
        self.thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        while True:
            connection, _ = await loop.sock_accept(self._listening)
            if _peer_of(connection) == (self._peer, os.getuid()):
                break
            connection.close()
        self._listening.close()
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                call = msgspec.msgpack.decode(await _frame_of(reader), type=_Call)
                if len(running) >= MAX_CALLS:
                    raise ValueError(f"more than {MAX_CALLS} calls at once")
                task = asyncio.ensure_future(self._answer(call, writer))
                running.add(task)
                task.add_done_callback(running.discard)
        except (EOFError, OSError, ValueError, msgspec.MsgspecError):
            pass  # RL-3: the other end has gone, or speaks in tongues
        finally:
            await self._receiver.close()
            await asyncio.gather(*running, return_exceptions=True)
            writer.close()

    async def _answer(self, call: _Call, writer: asyncio.StreamWriter) -> None:
        try:
            answer = _Answer(number=call.number, what=_raw(await self._done(call)))
        except Exception as error:  # whatever it is, it is the other end's to judge
            late = error.late if isinstance(error, TransportError) else ()
            kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), "")
            text = str(error) if kind else f"{type(error).__name__}: {error}"
            answer = _Answer(number=call.number, fault=_Fault(kind=kind, text=text, late=late))
        with suppress(OSError):  # the other end has gone
            writer.write(_frame(answer))
            await writer.drain()

    async def _done(self, call: _Call) -> object:
        match call.method:
            case "describe":
                return await self._receiver.describe(msgspec.msgpack.decode(call.what, type=str))
            case "open":
                return await self._receiver.open(msgspec.msgpack.decode(call.what, type=OpenSpec))
            case "stage":
                what = msgspec.msgpack.decode(call.what, type=_Stage)
                return await self._receiver.stage(what.version, what.plan_key, what.sizes, what.base)
            case "close":
                await self._receiver.close()
                return None


def serve(receiver: Receiver, peer: int) -> Served:
    """Serve it to that process, from a thread, until it leaves. `address` of the result is for `RemoteReceiver`."""
    return Served(receiver, peer)


# --- both -------------------------------------------------------------------------------------------------------------


def _raw(what: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(what))


def _frame(what: _Call | _Answer) -> bytes:
    body = msgspec.msgpack.encode(what)
    if len(body) > MAX_FRAME_BYTES:
        raise SyncError(f"a message of {len(body)} bytes to a worker: the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


async def _frame_of(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError at the end, ValueError for what is too long."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes, the limit is {MAX_FRAME_BYTES}")
    return await reader.readexactly(size)


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def _raised(fault: _Fault, name: str) -> Exception:
    if fault.kind == "TransportError":
        return TransportError.of_late(fault.text, fault.late)
    return _KINDS[fault.kind](fault.text) if fault.kind else SyncError(f"{name}: {fault.text}")
