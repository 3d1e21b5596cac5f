"""Shared memory on one host: trainer ranks pack straight into one arena, rollout ranks read it in place. Start here to
learn how a transport is written; the numbered calls are those of `sync.transport`.

The arena is a memfd that trainer rank 0 makes and the others open through /proc/<pid>/fd/<n>:

    | header: proof, then one version stamp per (slot, trainer rank) | slot 0: all buckets | slot 1: all buckets |

Version v lives in slot v % 2, so packing v+1 never touches what a late rank still reads of v (TR-2). A stamp is cleared
before the first byte of a version is packed and set after the last: a reader that finds another version there reads
nothing. A memfd has no name and no file: the kernel frees it with the last process that maps it (TR-5), and it is not
bound to the size of /dev/shm, which containers keep at 64 MiB. Receivers map it read-only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterator

from sync.plan import ALIGN, Bucket
from sync.transport import Link, ReceiverTransport, SenderTransport, TransportError, tensors_of

__all__ = ["Receiver", "Sender"]

_PROOF_BYTES = 16
_STAMP = struct.Struct("<q")
_NO_VERSION = -1


class _Arena:
    """The mapping of one rank, and where things are in it."""

    def __init__(self, link: Link, fd: int, *, writable: bool) -> None:
        self._link = link
        size, found = _size(link), os.fstat(fd).st_size
        if size != found:
            raise TransportError(f"shm: the arena has {found} bytes, the plan of this rank needs {size}")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.memory = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, protection))

    def bucket(self, version: int, bucket: Bucket) -> memoryview:
        start = _header_bytes(self._link) + (version % 2) * self._link.arena_bytes + bucket.start
        return self.memory[start : start + bucket.num_bytes]

    def stamp_of(self, version: int, sender: int) -> int:
        return int(_STAMP.unpack_from(self.memory, self._stamp_at(version, sender))[0])

    def stamp(self, version: int, sender: int, value: int) -> None:
        _STAMP.pack_into(self.memory, self._stamp_at(version, sender), value)

    def _stamp_at(self, version: int, sender: int) -> int:
        return _PROOF_BYTES + ((version % 2) * self._link.num_senders + sender) * _STAMP.size


class Sender(SenderTransport):
    """Calls 1 to 5."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._hosted: int | None = None
        self._arena: _Arena | None = None

    def host(self) -> str:
        self._hosted = fd = os.memfd_create("tutti-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = _size(self.link)
        os.ftruncate(fd, size)
        # Sealed against a change of size, so that no rank can be hit by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, secrets.token_bytes(_PROOF_BYTES), 0)
        os.pwrite(fd, _STAMP.pack(_NO_VERSION) * (2 * self.link.num_senders), _PROOF_BYTES)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def open(self, address: str) -> bytes:
        self._arena = _mapped(self.link, address, writable=True)
        return bytes(self._arena.memory[:_PROOF_BYTES])

    def buffer(self, version: int, bucket: Bucket) -> memoryview:
        arena = _live(self._arena)
        arena.stamp(version, self.link.rank, _NO_VERSION)
        return arena.bucket(version, bucket)

    def seal(self, version: int) -> None:
        _live(self._arena).stamp(version, self.link.rank, version)

    def push(self, version: int) -> None:
        _live(self._arena)  # the receivers read where the buckets were packed

    def abort(self) -> None:
        self._arena = None  # freed when the last view of it goes; nothing here ever waits

    def close(self) -> None:
        self.abort()
        if self._hosted is not None:
            os.close(self._hosted)
            self._hosted = None


class Receiver(ReceiverTransport):
    """Calls 2 and 6."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._arena: _Arena | None = None

    def open(self, address: str) -> bytes:
        self._arena = _mapped(self.link, address, writable=False)
        return bytes(self._arena.memory[:_PROOF_BYTES])

    def fetch(self, version: int) -> Iterator[tuple[Bucket, memoryview]]:
        for bucket in self.link.buckets:
            arena = _live(self._arena)
            found = arena.stamp_of(version, bucket.owner)
            if found != version:
                raise TransportError(
                    f"shm: rollout rank {self.link.rank}: trainer rank {bucket.owner} has not finished packing version "
                    f"{version} ({tensors_of(bucket)}): its slot is stamped {found}"
                )
            yield bucket, arena.bucket(version, bucket)

    def abort(self) -> None:
        self._arena = None

    close = abort


def _header_bytes(link: Link) -> int:
    return -(-(_PROOF_BYTES + 2 * link.num_senders * _STAMP.size) // ALIGN) * ALIGN


def _size(link: Link) -> int:
    return _header_bytes(link) + 2 * link.arena_bytes


def _mapped(link: Link, address: str, *, writable: bool) -> _Arena:
    try:
        fd = os.open(address, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"shm: can't open the arena of trainer rank 0 at {address}: {error.strerror}") from error
    try:
        return _Arena(link, fd, writable=writable)
    finally:
        os.close(fd)


def _live(arena: _Arena | None) -> _Arena:
    if arena is None:
        raise TransportError("shm: the transport is closed; open the session again")
    return arena
