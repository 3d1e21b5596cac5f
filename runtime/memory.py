"""Shared blocks of memory for payloads on one host.

ME-1: a block has no name in any file system. It is a memfd that travels as a file descriptor (SCM_RIGHTS), so the
      kernel frees it with its last mapping, whatever way the processes end.
ME-2: a block is written once, then sealed: no receiver can change what another one sees.
ME-3: receivers map it copy-on-write: values are writable, a write copies one page and stays private.
ME-4: one block serves any number of receivers; it is copied into once.
ME-5: a mapping keeps no descriptor open, so the number of live values isn't bounded by RLIMIT_NOFILE.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

SHARED_THRESHOLD = 256 * 1024
"""Payloads of at least so many bytes go through shared memory on one host; smaller ones through the socket, where
copying is cheaper than making a block and mapping it."""

ALIGNMENT = 64
"""Each buffer starts at a multiple of this, enough for any dtype and for vector loads."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_IOV_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes lie in a block, and the size of the block."""
    result = []
    end = 0
    for size in sizes:
        result.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return result, end


class Block:
    """A written, sealed block, owned by the sender until `close`. Also closed when the object goes away."""

    __slots__ = ("__weakref__", "_closer", "fd", "nbytes")

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Copy the buffers in, each at its offset. Releases the GIL while copying.

        Raises:
            OSError: no memory left (ENOSPC, ENOMEM) or no descriptor left (EMFILE).
        """
        starts, self.nbytes = offsets([len(b) for b in buffers])
        self.fd = os.memfd_create("tutti", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closer = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.nbytes)
        for start, buffer in zip(starts, buffers, strict=True):
            written = 0
            while written < len(buffer):
                written += os.pwrite(self.fd, memoryview(buffer)[written:], start + written)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def close(self) -> None:
        """Drop the descriptor; receivers keep their mappings."""
        self._closer()


def receive(fd: int, sizes: Sequence[int]) -> list[memoryview]:
    """Map a block that arrived as a descriptor (which is closed here) and return its buffers, writable (ME-3).

    Raises:
        ValueError: the block is smaller than the sizes say: the sender is broken.
        OSError: the mapping failed.
    """
    starts, nbytes = offsets(sizes)
    try:
        actual = os.fstat(fd).st_size
        if actual < nbytes:
            raise ValueError(f"shared block: expected {nbytes} bytes, got {actual}")
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
        if address == _MAP_FAILED:
            error = ctypes.get_errno()
            raise OSError(error, f"mapping a shared block of {nbytes} bytes: {os.strerror(error)}")
    finally:
        os.close(fd)
    mapping = (ctypes.c_ubyte * nbytes).from_address(address)
    # Views keep `mapping` alive; when the last value over it is gone, so is the mapping.
    weakref.finalize(mapping, _libc.munmap, address, nbytes).atexit = False
    view = memoryview(mapping).cast("B")
    return [view[start : start + size] for start, size in zip(starts, sizes, strict=True)]
