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

Why blocks are used again: the first write to 64 MB of fresh shared memory costs eight times the copy itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
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
        "_address",
        "_closer",
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
        self._address = 0
        self.fd = os.memfd_create("tutti", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closer: Any = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, capacity)

    def fill(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Copy the buffers in, each at its offset. The GIL is free meanwhile."""
        starts, _ = offsets([len(b) for b in buffers])
        if self._address:
            for start, buffer in zip(starts, buffers, strict=True):
                _copy(self._address + start, buffer)
            return
        for start, buffer in zip(starts, buffers, strict=True):  # fresh pages are cheaper to write than to fault in
            written = 0
            while written < len(buffer):
                written += os.pwrite(self.fd, memoryview(buffer)[written:], start + written)
        self._address = _map(self.fd, self.capacity, mmap.MAP_SHARED | _MAP_POPULATE)
        self._closer.detach()
        self._closer = weakref.finalize(self, _close, self.fd, self._address, self.capacity)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def hold(self) -> Block:
        with self._pool.lock:
            self.holds += 1
        return self

    def release(self) -> None:
        """Undo one `hold`, or the one it was made with."""
        with self._pool.lock:
            self.holds -= 1
            self._pool.settle(self)

    def lend(self) -> None:
        """A receiver gets it."""
        with self._pool.lock:
            self.leases += 1

    def come_back(self) -> None:
        """A receiver is done with it."""
        with self._pool.lock:
            self.leases -= 1
            self._pool.settle(self)

    def close(self) -> None:
        """Give it up; receivers keep their mappings."""
        self._closer()


class Pool:
    """The blocks of this process. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may run in the middle of a method
        self._idle: dict[int, list[Block]] = {}
        self._lent: dict[Block, None] = {}
        """Not held here any more, oldest first."""
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

    def settle(self, block: Block) -> None:
        """Decide where a block belongs after its counts have changed; called under the lock."""
        if block.holds:
            return
        if block.leases and not block.spoiled:
            if block not in self._lent:
                self._lent[block] = None
                self.lent_bytes += block.capacity
            while len(self._lent) > MAX_LENT or self.lent_bytes > MAX_IDLE_BYTES:
                self.spoil(next(iter(self._lent)))
            return
        if block in self._lent:
            del self._lent[block]
            self.lent_bytes -= block.capacity
        if block.spoiled or self.idle_bytes + block.capacity > MAX_IDLE_BYTES:
            block.close()
            return
        block.idle_since = time.monotonic()
        self._idle.setdefault(block.capacity, []).append(block)
        self.idle_bytes += block.capacity

    def spoil(self, block: Block) -> None:
        """Never write this block again: a receiver vanished without a word, or keeps it for long (ME-2)."""
        with self.lock:
            block.spoiled = True
            self.settle(block)

    def trim(self, seconds: float = IDLE_SECONDS) -> None:
        """Free what has been idle for so long."""
        with self.lock:
            limit = time.monotonic() - seconds
            for capacity, blocks in list(self._idle.items()):
                keep = [b for b in blocks if b.idle_since > limit]
                self.idle_bytes -= capacity * (len(blocks) - len(keep))
                for block in blocks[: len(blocks) - len(keep)]:
                    block.close()
                if keep:
                    self._idle[capacity] = keep
                else:
                    del self._idle[capacity]

    def _take(self, capacity: int) -> Block:
        with self.lock:
            blocks = self._idle.get(capacity)
            if blocks:
                block = blocks.pop()
                self.idle_bytes -= capacity
                block.holds = 1
                return block
        return Block(self, capacity)


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
        address = _map(fd, nbytes, mmap.MAP_PRIVATE)
    finally:
        os.close(fd)
    mapping = (ctypes.c_ubyte * nbytes).from_address(address)
    # Views keep `mapping` alive; when the last value over it is gone, so is the mapping.
    weakref.finalize(mapping, _unmap, address, nbytes, done, _forks).atexit = False
    view = memoryview(mapping).cast("B")
    return [view[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _map(fd: int, nbytes: int, flags: int) -> int:
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping a shared block of {nbytes} bytes: {os.strerror(error)}")
    return int(address)


def _unmap(address: int, nbytes: int, done: Callable[[], None] | None, forks: int) -> None:
    _libc.munmap(address, nbytes)
    if done is not None and forks == _forks:
        done()


def _close(fd: int, address: int, nbytes: int) -> None:
    os.close(fd)
    _libc.munmap(address, nbytes)


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


def _copy(address: int, source: Any) -> None:
    """Copy bytes (of anything contiguous, also read-only) to an address, without the GIL."""
    buffer = _Buffer()
    _get_buffer(source, buffer, 0)
    try:
        _libc.memcpy(address, buffer.buf, buffer.len)
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
