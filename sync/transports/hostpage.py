"""A page of memory that the ranks of one host share: who has packed and who has taken how much. Used by `shm` and
`ipc`.

It is a memfd that trainer rank 0 makes and the others open through /proc/<pid>/fd/<n>:

    | proof | packed[trainer] | taken[trainer][rollout] | waits[rollout] | what else the transport keeps there |

HP-1: a counter has one writer and only rises: `version << 32 | buckets`, buckets counted among those of their owner, in
      plan order. Whoever waits for a counter therefore never misses a change.
HP-2: every rank handles buckets in plan order, so that the earliest bucket that is not taken everywhere can always
      move: no set of ranks can wait for each other in a circle.
HP-3: a rollout rank that itself waits for a bucket is not late: of those that have not taken a bucket, the ones are to
      blame that have a bucket and do nothing with it.
HP-4: a memfd has no name and no file: the kernel frees it with the last process that maps it (TR-5), and it is not
      bound to the size of /dev/shm, which containers keep at 64 MiB. It is sealed against a change of size.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import time

from sync.plan import ALIGN, Bucket
from sync.transport import LATER_S, Link, TransportError, tensors_of, wait_until

__all__ = ["HostPage", "make_page"]

_PROOF_BYTES = 16
_COUNTER = struct.Struct("<q")


def make_page(link: Link, extra_bytes: int) -> int:
    """A new page with `extra_bytes` behind the counters; returns its file descriptor."""
    fd = os.memfd_create("tutti-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _header_bytes(link) + extra_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.pwrite(fd, secrets.token_bytes(_PROOF_BYTES), 0)
    os.pwrite(fd, _COUNTER.pack(-1) * _num_counters(link), _PROOF_BYTES)
    return fd


class HostPage:
    """The mapping of one rank."""

    def __init__(self, link: Link, name: str, where: str, address: str, extra_bytes: int) -> None:
        self._link = link
        self._name = f"{name}: {where}"
        self._stopped = False
        try:
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                f"{self._name}: can't open the memory of trainer rank 0 at {address}: {error.strerror}"
            ) from error
        try:
            size, found = _header_bytes(link) + extra_bytes, os.fstat(fd).st_size
            if size != found:
                raise TransportError(f"{self._name}: the shared memory has {found} bytes, the plan needs {size}")
            self.memory = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED))
        finally:
            os.close(fd)

    @property
    def proof(self) -> bytes:
        return bytes(self.memory[:_PROOF_BYTES])

    @property
    def extra(self) -> memoryview:
        """What lies behind the counters, aligned."""
        return self.memory[_header_bytes(self._link) :]

    def set_packed(self, owner: int, version: int, count: int) -> None:
        _COUNTER.pack_into(self.memory, self._packed_at(owner), version << 32 | count)

    def set_taken(self, owner: int, sink: int, version: int, count: int) -> None:
        _COUNTER.pack_into(self.memory, self._taken_at(owner, sink), version << 32 | count)

    def has_packed(self, bucket: Bucket, version: int, count: int) -> bool:
        """Whether `wait_packed` would not wait."""
        return bool(_COUNTER.unpack_from(self.memory, self._packed_at(bucket.owner))[0] >= version << 32 | count)

    def have_taken(self, bucket: Bucket, version: int, count: int) -> bool:
        """Whether `wait_taken` would not wait."""
        least, unpack = version << 32 | count, _COUNTER.unpack_from
        return all(unpack(self.memory, self._taken_at(bucket.owner, sink))[0] >= least for sink in bucket.sinks)

    def wait_packed(self, bucket: Bucket, version: int, count: int) -> None:
        """Until the owner has packed `count` of its buckets for this version. Raises TransportError."""
        least = version << 32 | count
        waits = self._waits_at(self._link.rank)
        _COUNTER.pack_into(self.memory, waits, 1)
        if not self._reaches(self._packed_at(bucket.owner), least, self._link.deadline_s + LATER_S):
            what = f"trainer rank {bucket.owner} has not packed {_told(bucket)} of version {version}"
            raise TransportError(f"{self._name}: {what} within {self._link.deadline_s:g} s")
        _COUNTER.pack_into(self.memory, waits, 0)

    def wait_taken(self, bucket: Bucket, version: int, count: int) -> None:
        """Until every sink of a bucket has taken it. Raises TransportError."""
        least, ends = version << 32 | count, time.monotonic() + self._link.deadline_s
        for sink in bucket.sinks:
            if self._reaches(self._taken_at(bucket.owner, sink), least, ends - time.monotonic()):
                continue
            late = self._late(bucket, least)
            if not late:  # they wait for another trainer rank, which knows more and is given the time to say so
                self._reaches(self._taken_at(bucket.owner, sink), least, LATER_S / 2)
            who = f"rollout rank {late[0] if late else sink}"
            text = f"{self._name}: {who} has not taken {_told(bucket)} of version {version} within"
            raise TransportError.of_late(f"{text} {self._link.deadline_s:g} s", late)

    def stop(self) -> None:
        """Wake whoever waits on this mapping."""
        self._stopped = True

    def _reaches(self, at: int, least: int, seconds: float) -> bool:
        """Wait for a counter; False at the deadline. Raises TransportError when it was stopped."""
        unpack, memory = _COUNTER.unpack_from, self.memory
        there = wait_until(lambda: unpack(memory, at)[0] >= least or self._stopped, seconds)
        if self._stopped:
            raise TransportError(f"{self._name}: stopped; open the session again")
        return there

    def _late(self, bucket: Bucket, least: int) -> tuple[int, ...]:
        """HP-3"""
        count = _COUNTER.unpack_from
        return tuple(
            sink
            for sink in bucket.sinks
            if count(self.memory, self._taken_at(bucket.owner, sink))[0] < least
            and count(self.memory, self._waits_at(sink))[0] != 1
        )

    def _packed_at(self, owner: int) -> int:
        return _PROOF_BYTES + owner * _COUNTER.size

    def _taken_at(self, owner: int, sink: int) -> int:
        index = self._link.num_senders + owner * self._link.num_sinks + sink
        return _PROOF_BYTES + index * _COUNTER.size

    def _waits_at(self, sink: int) -> int:
        return _PROOF_BYTES + (self._link.num_senders * (1 + self._link.num_sinks) + sink) * _COUNTER.size


def _num_counters(link: Link) -> int:
    return link.num_senders * (1 + link.num_sinks) + link.num_sinks


def _told(bucket: Bucket) -> str:
    return f"bucket {bucket.index} ({tensors_of(bucket)})"


def _header_bytes(link: Link) -> int:
    size = _PROOF_BYTES + _num_counters(link) * _COUNTER.size
    return -(-size // ALIGN) * ALIGN
