"""Shared blocks of memory for payloads on one host: one copy for n receivers, used again when the last is done.

    sender     take -> fill -> lend to n receivers ......... idle -> fill -> ...
    receiver                map -> values -> last value gone, tells the sender

ME-1: a block has no name in any file system. It is a memfd that travels as a file descriptor (SCM_RIGHTS), so the
      kernel frees it with its last mapping, whatever way the processes end.
ME-2: only its sender can write a block, through one mapping made before it was sealed. It writes again only after every
      receiver has said that its last value is gone; a block whose receiver vanished, or was inherited by a forked
      child of it, is never written again.
ME-3: receivers map it copy-on-write: values are writable, a write copies one page and stays private.
ME-4: one block serves any number of receivers; it is copied into once.
ME-5: the number of live values isn't bounded by RLIMIT_NOFILE: a receiver's mapping keeps no descriptor, and a sender
      keeps at most `MAX_LENT`.
ME-6: idle blocks are at most `MAX_IDLE_BYTES` in all, and go after `IDLE_SECONDS` (`trim`).
ME-7: memory is unmapped, and its descriptor closed, with the last reference to it and never earlier: not under a copy,
      and not by the garbage collector while something in the same garbage can still use it (`_ends_with`).
ME-8: holds and leases may end in finalizers, which run in any thread and in the middle of any method of the pool.

Why blocks are used again: the first write to 64 MB of fresh shared memory costs eight times the copy itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SHARED_THRESHOLD = 256 * 1024
"""Payloads of at least so many bytes go through shared memory on one host; smaller ones through the socket, where
copying is cheaper than making a block and mapping it."""

ALIGNMENT = 64
"""Each buffer starts at a multiple of this, enough for any dtype and for vector loads."""

MAX_IDLE_BYTES = max(512 * 2**20, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 16)
"""Enough for one very large payload: making 1 GB of fresh shared memory takes from half a second to several, depending
on the moods of the kernel (and of the hypervisor, where there is one); writing it again takes a tenth of a second."""
MAX_LENT = 128
"""Lent blocks that a sender hopes to get back, of `MAX_IDLE_BYTES` in all. Beyond it the oldest is given up: its
receivers keep it for long."""
IDLE_SECONDS = 10.0

_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_MAP_POPULATE = 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = None
_MAP_FAILED = ctypes.c_void_p(-1).value


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes lie in a block, and the size of all."""
    result = []
    end = 0
    for size in sizes:
        result.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return result, end


def capacity_for(nbytes: int) -> int:
    """The size of the block for so many bytes: few sizes, so that blocks fit again, and at most a quarter wasted."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


class Block:
    """Shared memory that this process fills and others map. `Pool.filled` makes and reuses them."""

    __slots__ = (
        "__weakref__",
        "_closer",
        "_memory",
        "_pool",
        "capacity",
        "fd",
        "holds",
        "idle_since",
        "leases",
        "spoiled",
    )

    def __init__(self, pool: Pool, capacity: int) -> None:
        """
        Raises:
            OSError: no memory left (ENOSPC, ENOMEM) or no descriptor left (EMFILE).
        """
        self._pool = pool
        self.capacity = capacity
        self.holds = 1
        """Uses on this side: whoever may still send it, and frames that wait to be written."""
        self.leases = 0
        """Receivers that have it."""
        self.spoiled = False
        self.idle_since = 0.0
        self._memory: ctypes.Array[ctypes.c_ubyte] | None = None
        self.fd = os.memfd_create("tutti", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closer = _ends_with(self, os.close, self.fd)
        os.ftruncate(self.fd, capacity)

    @property
    def closed(self) -> bool:
        return not self._closer.alive

    def fill(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Copy the buffers in, each at its offset. The GIL is free meanwhile.

        Raises:
            OSError: as `Block`.
            ValueError: they don't fit, or the block is closed.
        """
        starts, nbytes = offsets([len(b) for b in buffers])
        if self.closed or nbytes > self.capacity:
            raise ValueError(f"{nbytes} bytes into a block of {0 if self.closed else self.capacity}")
        memory = self._memory  # this copy's own reference: a block that is closed meanwhile does not pull it away
        if memory is not None:
            address = ctypes.addressof(memory)
            for start, buffer in zip(starts, buffers, strict=True):
                _copy(address + start, buffer, len(buffer))
            return
        for start, buffer in zip(starts, buffers, strict=True):  # fresh pages are cheaper to write than to fault in
            written = 0
            while written < len(buffer):
                written += os.pwrite(self.fd, memoryview(buffer)[written:], start + written)
        self._memory, address = _map(self.fd, self.capacity, mmap.MAP_SHARED | _MAP_POPULATE)
        _ends_with(self._memory, _libc.munmap, address, self.capacity)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def hold(self) -> Block:
        with self._pool.lock:
            self.holds += 1
        return self

    def release(self) -> None:
        """Undo one `hold`, or the one it was made with. Also from finalizers (ME-8)."""
        self._pool.ended(self, hold=True)

    def lend(self) -> None:
        """A receiver gets it. Whoever lends it holds it."""
        with self._pool.lock:
            self.leases += 1

    def come_back(self) -> None:
        """A receiver is done with it. Also from finalizers (ME-8)."""
        self._pool.ended(self, hold=False)

    def close(self) -> None:
        """Give it up; receivers keep their mappings."""
        self._closer()
        self._memory = None


class Pool:
    """The blocks of this process. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._idle: dict[int, dict[Block, None]] = {}
        """By capacity; the last used last."""
        self._lent: dict[Block, None] = {}
        """Not held here any more, oldest first."""
        self._ended: deque[tuple[Block, bool]] = deque()
        """Holds (true) and leases (false) that have ended and are not yet counted (ME-8)."""
        self.idle_bytes = 0
        self.lent_bytes = 0

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    def filled(self, buffers: Sequence[bytes | memoryview]) -> Block:
        """A block with these buffers, held once. Raises OSError as `Block`."""
        block = self._take(capacity_for(offsets([len(b) for b in buffers])[1]))
        try:
            block.fill(buffers)
        except BaseException:
            block.close()
            raise
        return block

    def ended(self, block: Block, *, hold: bool) -> None:
        """A hold or a lease has ended. Never waits: who has the lock may be whom this interrupts (ME-8); then the next
        one to get it counts."""
        self._ended.append((block, hold))
        if self.lock.acquire(blocking=False):
            try:
                self._count_ended()
            finally:
                self.lock.release()

    def spoil(self, block: Block) -> None:
        """Never write this block again: a receiver vanished without a word, or keeps it for long (ME-2)."""
        with self._counted():
            block.spoiled = True
            self._settle(block)

    def trim(self, seconds: float = IDLE_SECONDS) -> None:
        """Free what has been idle for so long."""
        with self._counted():
            limit = time.monotonic() - seconds
            for block in [b for blocks in self._idle.values() for b in blocks if b.idle_since <= limit]:
                self._no_longer_idle(block)
                block.close()

    def _take(self, capacity: int) -> Block:
        with self._counted():
            blocks = self._idle.get(capacity)
            if blocks:
                block = next(reversed(blocks))
                self._no_longer_idle(block)
                block.holds = 1
                return block
        return Block(self, capacity)

    # Under the lock

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """The lock, and what has ended is counted."""
        with self.lock:
            self._count_ended()
            yield

    def _count_ended(self) -> None:
        while self._ended:
            block, hold = self._ended.popleft()
            if hold:
                block.holds -= 1
            else:
                block.leases -= 1
            self._settle(block)

    def _settle(self, block: Block) -> None:
        """Decide where a block belongs after its counts have changed."""
        if block.holds:
            return
        if block.leases and not block.spoiled:
            if block not in self._lent:
                self._lent[block] = None
                self.lent_bytes += block.capacity
            while len(self._lent) > MAX_LENT or self.lent_bytes > MAX_IDLE_BYTES:
                oldest = next(iter(self._lent))
                oldest.spoiled = True
                self._settle(oldest)
            return
        if block in self._lent:
            del self._lent[block]
            self.lent_bytes -= block.capacity
        self._no_longer_idle(block)
        if block.spoiled or block.closed or self.idle_bytes + block.capacity > MAX_IDLE_BYTES:
            block.close()
            return
        block.idle_since = time.monotonic()
        self._idle.setdefault(block.capacity, {})[block] = None
        self.idle_bytes += block.capacity

    def _no_longer_idle(self, block: Block) -> None:
        blocks = self._idle.get(block.capacity, {})
        if block in blocks:
            del blocks[block]
            self.idle_bytes -= block.capacity
            if not blocks:
                del self._idle[block.capacity]


pool = Pool()


def receive(fd: int, sizes: Sequence[int], done: Callable[[], None] | None = None) -> list[memoryview]:
    """Map a block that arrived as a descriptor (which is closed here) and return its buffers, writable (ME-3).

    Args:
        done: called once, in any thread, when the last value over the block is gone; not after a fork (ME-2).

    Raises:
        ValueError: the block is smaller than the sizes say: the sender is broken.
        OSError: the mapping failed.
    """
    starts, nbytes = offsets(sizes)
    try:
        actual = os.fstat(fd).st_size
        if actual < nbytes:
            raise ValueError(f"shared block: expected {nbytes} bytes, got {actual}")
        mapped, address = _map(fd, nbytes, mmap.MAP_PRIVATE)
    finally:
        os.close(fd)
    # Views keep `mapped` alive; when the last value over it is gone, so is the mapping.
    _ends_with(mapped, _unmap, address, nbytes, done, _forks)
    view = memoryview(mapped).cast("B")
    return [view[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _map(fd: int, nbytes: int, flags: int) -> tuple[ctypes.Array[ctypes.c_ubyte], int]:
    """Mapped memory, and its address. The caller says what unmaps it."""
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping a shared block of {nbytes} bytes: {os.strerror(error)}")
    return (ctypes.c_ubyte * nbytes).from_address(address), int(address)


_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes = (ctypes.py_object,)
_untrack.restype = None


def _ends_with(owner: object, end: Callable[..., object], *args: object) -> weakref.finalize[..., Any]:
    """Call `end` when the last reference to `owner` goes (ME-7); not at exit, when other threads may still copy.

    The garbage collector runs the finalizers of weak references to all that it found before the first `__del__` and
    `finally` in it, and these may use `owner`, or give it to somebody who lives. So the collector must not find it:
    then it goes when those who refer to it are gone.
    """
    finalizer = weakref.finalize(owner, end, *args)
    finalizer.atexit = False
    _untrack(owner)
    return finalizer


def _unmap(address: int, nbytes: int, done: Callable[[], None] | None, forks: int) -> None:
    _libc.munmap(address, nbytes)
    if done is not None and forks == _forks:
        done()


class _Buffer(ctypes.Structure):
    """Py_buffer, as far as a plain run of bytes fills it in."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)


def _copy(address: int, source: Any, nbytes: int) -> None:
    """Copy bytes (of anything contiguous, also read-only) to an address, without the GIL."""
    buffer = _Buffer()
    _get_buffer(source, buffer, 0)
    try:
        if buffer.len != nbytes:
            raise ValueError(f"a buffer of {nbytes} items has {buffer.len} bytes")
        _libc.memcpy(address, buffer.buf, nbytes)
    finally:
        _release_buffer(buffer)


_forks = 0


def _before_fork() -> None:
    """The child inherits what is mapped here and may keep it for longer: none of it is reported as done."""
    global _forks
    _forks += 1


def _after_fork_in_child() -> None:
    """The parent goes on to write its blocks; this process begins with none."""
    global pool
    pool = Pool()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
