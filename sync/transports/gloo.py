"""Broadcast over sockets with gloo: works between hosts, on CPU memory. The numbered calls are those of
`sync.transport`.

Trainer rank 0 hosts a TCPStore; every (owner, set of sinks) of the plan gets a process group of its own, built over
that store without touching the default group, so that trainer ranks hear only of what they send. All buckets are
announced at once, in plan order, and waited for one by one: the network never idles while a bucket is verified.

GL-1: groups are built, and buckets announced, in plan order on every rank; no two ranks ever wait for each other
      crosswise.
GL-2: store and pairs listen on `link.interface` only (TR-6).
GL-3: gloo can't cancel an operation. `abort` ends the waiting at once; the operation itself ends when the peers do or
      at the deadline, and its group and memory stay alive, unused, until then. A stopped group is never used again
      (TR-4).
"""

from __future__ import annotations

import fcntl
import mmap
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sync.plan import Bucket
from sync.transport import Link, ReceiverTransport, SenderTransport, TransportError, tensors_of

__all__ = ["Receiver", "Sender"]


class _Groups:
    """The process groups of one rank, by (owner, sinks)."""

    def __init__(self, link: Link, where: str, address: str) -> None:
        self._link = link
        self._where = where
        self._stopped = False
        self._change = threading.Condition()
        self._under_way: list[dist.Work] = []
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=link.deadline_s)
        try:
            store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
            self.proof = bytes(store.get("proof"))
            device = dist.ProcessGroupGloo.create_device(interface=link.interface)
            self._by_members: dict[tuple[int, tuple[int, ...]], Any] = {}
            for bucket in link.buckets:
                members = (bucket.owner, bucket.sinks)
                if members not in self._by_members:
                    self._by_members[members] = _group(store, device, members, self._rank_in(bucket), timeout)
        except RuntimeError as error:
            raise TransportError(
                f"gloo: {where}: not all ranks met at {address} within {link.deadline_s:g} s: {error}"
            ) from error

    def _rank_in(self, bucket: Bucket) -> int:
        return 0 if self._where.startswith("trainer") else 1 + bucket.sinks.index(self._link.rank)

    def transfer(self, memory: Sequence[tuple[Bucket, memoryview]]) -> Iterator[tuple[Bucket, memoryview]]:
        """Broadcast every bucket from its owner; yields each when it is done here."""
        ends = time.monotonic() + self._link.deadline_s
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        futures: list[torch.futures.Future[Any]] = []
        for bucket, part in memory:
            tensor = torch.frombuffer(part, dtype=torch.uint8)
            work = self._by_members[bucket.owner, bucket.sinks].broadcast([tensor], options)
            self._under_way.append(work)
            future = work.get_future()
            future.add_done_callback(self._wake)
            futures.append(future)
        for (bucket, part), work, future in zip(memory, list(self._under_way), futures, strict=True):
            # The future, not the work: its callbacks run before the work calls itself completed.
            is_over = partial(self._is_over, future)
            with self._change:
                ended = self._change.wait_for(is_over, max(0.0, ends - time.monotonic()))
            if self._stopped:
                raise TransportError(f"gloo: {self._where}: stopped before {_told(bucket)} was there")
            if not ended:
                raise TransportError(
                    f"gloo: {self._where}: {_told(bucket)} did not pass within {self._link.deadline_s:g} s; a peer is "
                    f"stuck or the deadline is too short for the network (deadline_s)"
                )
            try:
                work.wait()
            except RuntimeError as error:
                text = str(error).partition(". This is typically")[0]  # gloo's advice is longer than its fact
                raise TransportError(f"gloo: {self._where}: {_told(bucket)} did not pass: {text}") from error
            yield bucket, part
        self._under_way.clear()

    def _is_over(self, future: torch.futures.Future[Any]) -> bool:
        return self._stopped or future.done()

    def _wake(self, _: object = None) -> None:
        with self._change:
            self._change.notify_all()

    def stop(self) -> None:
        """Stop waiting. What gloo still does keeps its group and memory until it ends by itself (GL-3)."""
        self._stopped = True
        self._wake()
        _ENDING[:] = [groups for groups in (*_ENDING, self) if groups.busy]

    @property
    def busy(self) -> bool:
        return any(not work.is_completed() for work in self._under_way)


_ENDING: list[_Groups] = []
"""Stopped groups with operations that gloo has not let go of. Dropping a group waits for its operations, so nobody
does."""


def _told(bucket: Bucket) -> str:
    return (
        f"bucket {bucket.index} ({tensors_of(bucket)}) from trainer rank {bucket.owner} to rollout ranks "
        f"{list(bucket.sinks)}"
    )


class Sender(SenderTransport):
    """Calls 1 to 5. Packs into private memory: the snapshot."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._store: dist.TCPStore | None = None
        self._groups: _Groups | None = None
        self._memory = _private_memory(link.buckets)

    def host(self) -> str:
        address = address_of(self.link.interface)
        listener = socket.create_server((address, 0), backlog=128)
        port = int(listener.getsockname()[1])
        timeout = timedelta(seconds=self.link.deadline_s)
        self._store = dist.TCPStore(
            address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._store.set("proof", secrets.token_hex(16))
        return f"{address}:{port}"

    def open(self, address: str) -> bytes:
        self._groups = groups = _Groups(self.link, f"trainer rank {self.link.rank}", address)
        return groups.proof

    def buffer(self, version: int, bucket: Bucket) -> memoryview:
        return self._memory[bucket.index]

    def seal(self, version: int) -> None:
        pass  # a receiver sees nothing before `push`

    def push(self, version: int) -> None:
        for _ in _live(self._groups).transfer([(b, self._memory[b.index]) for b in self.link.buckets]):
            pass

    def abort(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.stop()

    def close(self) -> None:
        self.abort()
        self._store = None
        self._memory = {}


class Receiver(ReceiverTransport):
    """Calls 2 and 6. One private copy of this rank's buckets, overwritten by the next `fetch`."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._groups: _Groups | None = None
        self._memory = _private_memory(link.buckets)

    def open(self, address: str) -> bytes:
        self._groups = groups = _Groups(self.link, f"rollout rank {self.link.rank}", address)
        return groups.proof

    def fetch(self, version: int) -> Iterator[tuple[Bucket, memoryview]]:
        yield from _live(self._groups).transfer([(b, self._memory[b.index]) for b in self.link.buckets])

    def abort(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.stop()

    def close(self) -> None:
        self.abort()
        self._memory = {}


def address_of(interface: str) -> str:
    """IPv4 address of a network interface of this host. Raises TransportError when it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise TransportError(
                f"gloo: network interface {interface!r} has no IPv4 address here ({error.strerror}); set [sync] "
                f"interface to one of {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _group(
    store: dist.Store, device: Any, members: tuple[int, tuple[int, ...]], rank: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    owner, sinks = members
    gloo: Any = dist.ProcessGroupGloo  # its options have no types
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timeout
    name = f"{owner}:{','.join(map(str, sinks))}"
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 1 + len(sinks), options)


def _private_memory(buckets: Sequence[Bucket]) -> dict[int, memoryview]:
    """Bucket index -> page-aligned memory; given back when its last view goes."""
    return {b.index: memoryview(mmap.mmap(-1, b.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) for b in buckets}


def _live(groups: _Groups | None) -> _Groups:
    if groups is None:
        raise TransportError("gloo: the transport is closed; open the session again")
    return groups
