"""Sockets between processes: addresses, listening, connecting, and moving bytes over Unix, TCP and TLS alike.

    unix:/run/folder/controller          processes of one host; descriptors can travel
    tcp://10.0.0.5:41234/JOB             any host; JOB keeps handles of one job out of another

SO-1: a TCP port is bound to 0 and published, never chosen before and bound later.
SO-2: nothing listens outside the networks that the job allows; `Trust.check_listen` decides before the socket exists.
SO-3: nothing here blocks: a TCP connection is being made while the caller goes on.
SO-4: the other end of a TCP connection that vanishes without a word is noticed within `KEEPALIVE_SECONDS`, also while
      nothing is sent. A slow or stopped process is not mistaken for one: its kernel answers.
SO-5: a process without descriptors or memory for another connection says so, and looks again after a while; those who
      connect wait, and what goes on over the connections that there are is not disturbed.
"""

from __future__ import annotations

import array
import asyncio
import errno
import functools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.errors import ConnectionRefused

if TYPE_CHECKING:
    import ssl

    from runtime.auth import Tls, Trust

Pieces = Sequence[bytes | memoryview]

KEEPALIVE_SECONDS = 2
ACCEPT_AGAIN_SECONDS = 0.5
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_log = logging.getLogger(__name__)
_FDS_PER_RECEIVE = 64
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * _FDS_PER_RECEIVE)


class Address(NamedTuple):
    """An address taken apart."""

    scheme: str
    """`unix` or `tcp`."""
    host: str = ""
    port: int = 0
    path: str = ""
    """Of the socket file for `unix`, name of the job for `tcp`."""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}" + (f"/{self.path}" if self.path else "")

    @property
    def job(self) -> str:
        """Name of the job that the process belongs to."""
        return os.path.basename(os.path.dirname(self.path)) if self.scheme == "unix" else self.path


def parse_address(text: str) -> Address:
    """
    Raises:
        ValueError: not an address.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return Address("unix", path=rest)
    if scheme == "tcp" and rest.startswith("//"):
        place, _, path = rest[2:].partition("/")
        host, colon, port = place.rpartition(":")
        if colon and host and port.isdecimal() and int(port) < 2**16:
            return Address("tcp", host.strip("[]"), int(port), path)
    raise ValueError(f"address {text!r}: expected unix:/path or tcp://host:port")


def unix_address(path: str) -> str:
    """The address of a socket file."""
    return str(Address("unix", path=path))


class Stream:
    """A connected, non-blocking socket of the same host."""

    carries_descriptors = True
    any_thread = True
    """Whether one thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, pieces: Pieces, descriptor: int | None) -> int:
        """Gathered write of what the kernel takes now; the descriptor travels with its first byte.

        Raises:
            BlockingIOError: nothing now.
        """
        if descriptor is None:
            return self._sock.sendmsg(pieces) if len(pieces) > 1 else self._sock.send(pieces[0])
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes())
        try:
            return self._sock.sendmsg(pieces, [rights])
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # too many in flight: go on when the receiver has taken some
                raise BlockingIOError(error.errno, error.strerror) from None
            raise

    def receive(self, targets: list[memoryview]) -> tuple[int, Sequence[int]]:
        """Scattered read of what is there: bytes (0 at the end of the stream) and the descriptors that came along.

        Raises:
            BlockingIOError: nothing now.
            OSError: the connection broke, or descriptors were lost.
        """
        count, ancillary, flags, _ = self._sock.recvmsg_into(targets, _ANCILLARY_BYTES)
        if not ancillary:
            return count, ()
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, "descriptors of a message were lost; raise the limit of open files")
        return count, descriptors

    def has_more(self) -> bool:
        """Whether bytes wait that the kernel no longer tells of."""
        return False

    def close(self) -> None:
        self._sock.close()


class TcpStream(Stream):
    """A connected socket between hosts."""

    carries_descriptors = False

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
            sock.setsockopt(socket.IPPROTO_TCP, option, 1)

    def receive(self, targets: list[memoryview]) -> tuple[int, Sequence[int]]:
        return self._sock.recvmsg_into(targets)[0], ()


class TlsStream(TcpStream):
    """The same, encrypted. The handshake of TLS happens within the first reads and writes."""

    any_thread = False

    def __init__(self, sock: socket.socket, tls: Tls, *, dialled: bool) -> None:
        super().__init__(sock)
        self._context = _context(tls, server=not dialled)
        self._dialled = dialled
        self._tls: ssl.SSLSocket | None = None

    def send(self, pieces: Pieces, descriptor: int | None) -> int:
        return self._now(lambda tls: tls.send(pieces[0]))

    def receive(self, targets: list[memoryview]) -> tuple[int, Sequence[int]]:
        return self._now(lambda tls: tls.recv_into(targets[0])), ()

    def has_more(self) -> bool:
        return self._tls is not None and self._tls.pending() > 0

    def _now(self, operation: Callable[[ssl.SSLSocket], int]) -> int:
        import ssl

        if self._tls is None:  # first use: the connection has been made, or not
            number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number))
            self._sock = self._tls = self._context.wrap_socket(
                self._sock, server_side=not self._dialled, do_handshake_on_connect=False
            )
        try:
            return operation(self._tls)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError(errno.EAGAIN, "TLS waits") from error


@functools.cache
def _context(tls: Tls, *, server: bool) -> ssl.SSLContext:
    return tls.context(server=server)


def stream_of(sock: socket.socket, trust: Trust, *, dialled: bool) -> Stream:
    """The stream over a connected socket: TLS when it is TCP and the job has certificates.

    Raises:
        OSError: the connection is gone, or certificates can't be used.
    """
    if sock.family == socket.AF_UNIX:
        return Stream(sock)
    return TcpStream(sock) if trust.tls is None else TlsStream(sock, trust.tls, dialled=dialled)


class Listener:
    """The listening socket of a process. `on_connection` gets each accepted socket."""

    def __init__(self, address: str, trust: Trust, on_connection: Callable[[socket.socket], None]) -> None:
        """
        Raises:
            ValueError: not an address, or one where this job must not listen (SO-2).
            OSError: it can't be bound; the message says which.
        """
        self._loop = asyncio.get_running_loop()
        self._on_connection = on_connection
        wanted = parse_address(address)
        trust.check_listen(wanted)
        if wanted.scheme == "unix":
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where: Any = wanted.path
        else:
            self._sock = socket.socket(socket.AF_INET6 if ":" in wanted.host else socket.AF_INET, socket.SOCK_STREAM)
            where = (wanted.host, wanted.port)
        try:
            self._sock.bind(where)
        except OSError as error:
            self._sock.close()
            raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from error
        if wanted.scheme == "unix":
            os.chmod(wanted.path, 0o600)
        else:
            wanted = wanted._replace(port=self._sock.getsockname()[1])
        self._path = wanted.path if wanted.scheme == "unix" else ""
        self.address = str(wanted)
        """Where it listens in fact (SO-1)."""
        self._sock.listen(512)
        self._sock.setblocking(False)
        self._again: asyncio.TimerHandle | None = None
        self._look()

    def _look(self) -> None:
        self._again = None
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._pause(error)
                return
            self._on_connection(sock)

    def _pause(self, error: OSError) -> None:
        """SO-5. The socket stays readable: looking at once would take all of the loop's time."""
        _log.warning(
            "%s: another process can't connect: %s. Raise the limit of open files (ulimit -n)",
            self.address,
            error.strerror,
        )
        self._loop.remove_reader(self._sock.fileno())
        self._again = self._loop.call_later(ACCEPT_AGAIN_SECONDS, self._look)

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        if self._path and os.path.exists(self._path):
            os.unlink(self._path)


def dial(address: str) -> socket.socket:
    """A socket to a process: connected over Unix, being connected over TCP (SO-3).

    Raises:
        ConnectionRefused: nobody listens there.
        ValueError: not an address.
    """
    wanted = parse_address(address)
    if wanted.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        where: Any = wanted.path
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in wanted.host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        where = (wanted.host, wanted.port)
    try:
        sock.connect(where)
    except BlockingIOError:
        pass
    except OSError as error:
        sock.close()
        raise ConnectionRefused(f"no process answers at {address}: {error.strerror}. It has stopped or died") from error
    return sock
