"""Broadcast over sockets with gloo: works between hosts, on CPU memory. The numbered calls are those of
`sync.transport`.

Trainer rank 0 hosts a TCPStore; every (owner, set of sinks) of the plan gets a process group of its own, built over
that store without touching the default group, so that trainer ranks hear only of what they send. Each bucket is one
broadcast. Both sides have a ring of `slots` buffers, so that the network moves one bucket while the next is packed and
the one before is verified.

GL-1: groups are built, and buckets announced, in plan order on every rank; no two ranks ever wait for each other
      crosswise.
GL-2: store and pairs listen on `link.interface` only (TR-6).
GL-3: gloo can't cancel an operation. `abort` ends the waiting at once; the operation itself ends when the peers do or
      at the deadline, and its group and memory stay alive, unused, until then. A stopped group is never used again
      (TR-4).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sync.memory import allocate
from sync.plan import Bucket
from sync.transport import LATER_S, Link, ReceiverTransport, SenderTransport, TransportError, resized, tensors_of
from sync.transports.store import PROOF, host_store

__all__ = ["Receiver", "Sender"]


class _Groups:
    """The process groups of one rank, by (owner, sinks), and its ring of buffers."""

    def __init__(self, link: Link, where: str, address: str) -> None:
        self._link = link
        self._where = where
        self._is_owner = where.startswith("trainer")
        self._stopped = False
        self._change = threading.Condition()
        self._under_way: dict[int, tuple[Bucket, dist.Work, torch.futures.Future[Any]]] = {}
        slots = min(link.slots, len(link.buckets))
        self._ring = [allocate(link.slot_bytes) for _ in range(slots)]
        host, _, port = address.rpartition(":")
        # gloo's own deadline stands behind ours, which tells more.
        timeout = timedelta(seconds=link.deadline_s + 2 * LATER_S)
        try:
            store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
            self.proof = bytes(store.get(PROOF))
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

    def slot(self, place: int, bucket: Bucket) -> Tensor:
        """Memory of the bucket at `place` among those of this rank."""
        return self._ring[place % len(self._ring)][: bucket.num_bytes]

    def start(self, place: int, bucket: Bucket) -> None:
        """Announce a bucket: the owner's buffer holds it, the others' will."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = self._by_members[bucket.owner, bucket.sinks].broadcast([self.slot(place, bucket)], options)
        future = work.get_future()
        self._under_way[place] = bucket, work, future
        # The callback runs on a thread of the group and must not hold it: dropped there, it would join itself.
        future.add_done_callback(partial(_notify, self._change))

    def finish(self, place: int) -> None:
        """Wait until the bucket at `place` has passed; nothing to wait for if it was never announced."""
        if self._stopped:
            raise TransportError(f"gloo: {self._where}: stopped; open the session again")
        if place not in self._under_way:
            return
        bucket, work, future = self._under_way[place]
        with self._change:
            # The future, not the work: its callbacks run before the work calls itself completed.
            seconds = self._link.deadline_s + (0 if self._is_owner else LATER_S)
            ended = self._change.wait_for(lambda: self._stopped or future.done(), seconds)
        if self._stopped:
            raise TransportError(f"gloo: {self._where}: stopped before {_told(bucket)} was there")
        if not ended:
            raise TransportError.of_late(
                f"gloo: {self._where}: {_told(bucket)} did not pass within {self._link.deadline_s:g} s; a peer is "
                f"stuck or the deadline is too short for the network (deadline_s)",
                bucket.sinks if self._is_owner and len(bucket.sinks) == 1 else (),
            )
        try:
            work.wait()
        except RuntimeError as error:
            text = str(error).partition(". This is typically")[0]  # gloo's advice is longer than its fact
            raise TransportError(f"gloo: {self._where}: {_told(bucket)} did not pass: {text}") from error
        self._under_way.pop(place, None)

    def finish_all(self) -> None:
        for place in sorted(self._under_way):
            self.finish(place)

    def stop(self) -> None:
        """Stop waiting. What gloo still does keeps its group and memory until it ends by itself (GL-3)."""
        self._stopped = True
        _notify(self._change)
        _ENDING[:] = [groups for groups in (*_ENDING, self) if groups.busy]

    @property
    def busy(self) -> bool:
        return any(not work.is_completed() for _, work, _ in list(self._under_way.values()))

    def _rank_in(self, bucket: Bucket) -> int:
        return 0 if self._is_owner else 1 + bucket.sinks.index(self._link.rank)


def _notify(change: threading.Condition, _: object = None) -> None:
    with change:
        change.notify_all()


_ENDING: list[_Groups] = []
"""Stopped groups with operations that gloo has not let go of. Dropping a group waits for its operations, so nobody
does."""


def _told(bucket: Bucket) -> str:
    return (
        f"bucket {bucket.index} ({tensors_of(bucket)}) from trainer rank {bucket.owner} to rollout ranks "
        f"{list(bucket.sinks)}"
    )


class Sender(SenderTransport):
    """Calls 1 to 5."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._store: dist.TCPStore | None = None
        self._groups: _Groups | None = None

    def host(self) -> str:
        self._store, address = host_store(self.link)
        return address

    def open(self, address: str) -> bytes:
        self._groups = groups = _Groups(self.link, f"trainer rank {self.link.rank}", address)
        return groups.proof

    def buffer(self, version: int, bucket: Bucket) -> Tensor:
        groups = _live(self._groups)
        groups.finish(bucket.place - self.link.slots)
        return groups.slot(bucket.place, bucket)

    def put(self, version: int, bucket: Bucket) -> None:
        _live(self._groups).start(bucket.place, bucket)

    def drain(self, version: int) -> None:
        _live(self._groups).finish_all()

    def abort(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.stop()

    def close(self) -> None:
        self.abort()
        self._store = None


class Receiver(ReceiverTransport):
    """Calls 2 and 6."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._groups: _Groups | None = None

    def open(self, address: str) -> bytes:
        self._groups = groups = _Groups(self.link, f"rollout rank {self.link.rank}", address)
        return groups.proof

    def fetch(self, version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        groups, buckets = _live(self._groups), [resized(bucket, sizes) for bucket in self.link.buckets]
        for place, bucket in enumerate(buckets[: self.link.slots]):
            groups.start(place, bucket)
        for place, bucket in enumerate(buckets):
            groups.finish(place)
            yield bucket, groups.slot(place, bucket)
            ahead = place + self.link.slots
            if ahead < len(buckets):
                groups.start(ahead, buckets[ahead])

    def abort(self) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.stop()

    close = abort


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


def _live(groups: _Groups | None) -> _Groups:
    if groups is None:
        raise TransportError("gloo: the transport is closed; open the session again")
    return groups
