"""Broadcast between GPUs with NCCL (RCCL on ROCm), inside a host and between hosts. The numbered calls are those of
`sync.transport`.

Like `gloo`: trainer rank 0 hosts a TCPStore, every (owner, set of sinks) has a communicator of its own, each bucket is
one broadcast, and both sides have a ring of `slots` buffers. Unlike there nobody waits on the host: packing, broadcast
and storing follow each other on streams, and the host looks at events until the last one has passed.

NC-1: communicators are made, and tried, in `open`; a version starts no new one and allocates nothing (TR-7).
NC-2: the default group and its communicators are never touched.
NC-3: a broadcast whose peer is gone never ends by itself: `abort` and the deadline abort the communicator, which frees
      the GPU. The process goes on; torch's own watchdog, which would end it, is off for these groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sync.plan import Bucket
from sync.transport import (
    LATER_S,
    Link,
    ReceiverTransport,
    SenderTransport,
    TransportError,
    resized,
    tensors_of,
    wait_until,
)
from sync.transports.store import PROOF, host_store

__all__ = ["Receiver", "Sender"]


class _Communicators:
    """The communicators of one rank, by (owner, sinks), and its ring of buffers."""

    def __init__(self, link: Link, where: str, address: str, *, sender: bool) -> None:
        self._link = link
        self._where = where
        self._sender = sender
        self._stopped = False
        self._passed: list[tuple[Bucket, torch.cuda.Event]] = []
        self._works: dict[int, Any] = {}
        self._marks = torch.cuda.Stream()
        self._groups: dict[tuple[int, tuple[int, ...]], Any] = {}
        slots = min(link.slots, len(link.buckets))
        self._ring = [torch.empty(link.slot_bytes, dtype=torch.uint8, device="cuda") for _ in range(slots)]
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=link.deadline_s)
        try:
            store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
            self.proof = bytes(store.get(PROOF))
            for bucket in link.buckets:
                members = (bucket.owner, bucket.sinks)
                if members not in self._groups:
                    self._groups[members] = self._joined(store, bucket, timeout)
        except TransportError:
            self.stop()
            raise
        except (RuntimeError, dist.DistError) as error:
            self.stop()
            raise TransportError(
                f"nccl: {where}: not all ranks met at {address} within {link.deadline_s:g} s: {error}"
            ) from error

    def slot(self, place: int, bucket: Bucket) -> Tensor:
        """Memory of the bucket at `place` among those of this rank; free once the stream has passed what used it."""
        before = self._works.pop(place - len(self._ring), None)
        if before is not None and self._sender:
            before.wait()  # the stream waits, not the host
        return self._ring[place % len(self._ring)][: bucket.num_bytes]

    def start(self, place: int, bucket: Bucket) -> Any:
        """Broadcast, behind what this stream has been told so far."""
        memory = self._ring[place % len(self._ring)][: bucket.num_bytes]
        work = self._groups[bucket.owner, bucket.sinks].broadcast([memory], _from_root())
        self._works[place] = work
        return work

    def mark(self, bucket: Bucket, work: Any = None) -> None:
        """Remember where a bucket ends: with a broadcast, or at this point of the stream."""
        if work is None:
            self._passed.append((bucket, torch.cuda.current_stream().record_event()))
            return
        with torch.cuda.stream(self._marks):  # so that the next bucket is packed beside the broadcast
            work.wait()
            self._passed.append((bucket, self._marks.record_event()))

    def finish(self) -> None:
        """Wait until the stream has passed all marks. Raises TransportError with the first bucket that it has not."""
        marks, self._passed = self._passed, []
        for bucket, event in marks:
            over = partial(self._is_over, event)
            if not wait_until(over, self._link.deadline_s + (0 if self._sender else LATER_S)):
                self.stop()
                raise TransportError.of_late(
                    f"nccl: {self._where}: {_told(bucket)} did not pass within {self._link.deadline_s:g} s; a peer is "
                    f"stuck or the deadline is too short for the network (deadline_s)",
                    bucket.sinks if self._sender and len(bucket.sinks) == 1 else (),
                )
            self.check(bucket)
        self._works.clear()

    def _is_over(self, event: torch.cuda.Event) -> bool:
        return self._stopped or event.query()

    def check(self, bucket: Bucket) -> None:
        if self._stopped:
            raise TransportError(f"nccl: {self._where}: stopped before {_told(bucket)} was there")

    def stop(self) -> None:
        """Abort the communicators; kernels that wait for peers end."""
        if self._stopped:
            return
        self._stopped = True
        for group in self._groups.values():
            group.abort()

    def _joined(self, store: dist.Store, bucket: Bucket, timeout: timedelta) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        name = f"{bucket.owner}:{','.join(map(str, bucket.sinks))}"
        rank = 0 if self._sender else 1 + bucket.sinks.index(self._link.rank)
        with _without_watchdog():
            group = nccl(dist.PrefixStore(name, store), rank, 1 + len(bucket.sinks), options)
        trial = torch.full((16,), 7 if self._sender else 0, dtype=torch.uint8, device="cuda")
        group.broadcast([trial], _from_root()).wait()
        event = torch.cuda.Event()
        event.record()
        if not wait_until(event.query, self._link.deadline_s) or int(trial.sum()) != 7 * 16:
            group.abort()
            raise TransportError(
                f"nccl: {self._where}: a trial broadcast from trainer rank {bucket.owner} did not pass"
            )
        return group


class _without_watchdog:
    """NC-3: these variables are read when a group is made, and are put back for the groups of others."""

    _OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._OFF}
        os.environ.update(self._OFF)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Sender(SenderTransport):
    """Calls 1 to 5."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._store: dist.TCPStore | None = None
        self._communicators: _Communicators | None = None

    def host(self) -> str:
        self._store, address = host_store(self.link)
        return address

    def open(self, address: str) -> bytes:
        where = f"trainer rank {self.link.rank}"
        self._communicators = made = _Communicators(self.link, where, address, sender=True)
        return made.proof

    def buffer(self, version: int, bucket: Bucket) -> Tensor:
        communicators = _live(self._communicators)
        communicators.check(bucket)
        return communicators.slot(bucket.place, bucket)

    def put(self, version: int, bucket: Bucket) -> None:
        communicators = _live(self._communicators)
        communicators.mark(bucket, communicators.start(bucket.place, bucket))

    def drain(self, version: int) -> None:
        _live(self._communicators).finish()

    def abort(self) -> None:
        communicators, self._communicators = self._communicators, None
        if communicators is not None:
            communicators.stop()

    def close(self) -> None:
        self.abort()
        self._store = None


class Receiver(ReceiverTransport):
    """Calls 2 and 6."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._communicators: _Communicators | None = None

    def open(self, address: str) -> bytes:
        where = f"rollout rank {self.link.rank}"
        self._communicators = made = _Communicators(self.link, where, address, sender=False)
        return made.proof

    def fetch(self, version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        communicators, slots = _live(self._communicators), self.link.slots
        buckets = [resized(bucket, sizes) for bucket in self.link.buckets]
        works = {place: communicators.start(place, bucket) for place, bucket in enumerate(buckets[:slots])}
        for place, bucket in enumerate(buckets):
            communicators.check(bucket)
            works.pop(place).wait()  # the stream waits, not the host
            yield bucket, communicators.slot(place, bucket)
            communicators.mark(bucket)
            ahead = place + slots
            if ahead < len(buckets):
                works[ahead] = communicators.start(ahead, buckets[ahead])
        communicators.finish()

    def abort(self) -> None:
        communicators, self._communicators = self._communicators, None
        if communicators is not None:
            communicators.stop()

    close = abort


def _from_root() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _told(bucket: Bucket) -> str:
    return (
        f"bucket {bucket.index} ({tensors_of(bucket)}) from trainer rank {bucket.owner} to rollout ranks "
        f"{list(bucket.sinks)}"
    )


def _live(communicators: _Communicators | None) -> _Communicators:
    if communicators is None:
        raise TransportError("nccl: the transport is closed; open the session again")
    return communicators
