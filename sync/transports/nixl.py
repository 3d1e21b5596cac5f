"""NIXL with UCX: one-sided reads of host memory over RDMA cards, shared memory or TCP, whichever UCX finds. The
numbered calls are those of `sync.transport`.

Trainer rank 0 hosts a TCPStore, where every rank leaves the metadata of its agent. A trainer rank registers a ring of
slots, a rollout rank two buffers, both once. A bucket that is packed is told to its sinks by a message; each reads it
from the slot, and the end of the read tells the owner, so that nobody but the reader touches data on the way.

NX-1: messages carry version and bucket; those of other versions are of no consequence.
NX-2: an agent is used by one thread at a time: the port's, and the trainer's main thread while it packs.
NX-3: `lo` keeps UCX on this host's own interface (TR-6). Any other interface leaves the choice of devices to UCX, whose
      cards are no network interfaces; `UCX_NET_DEVICES` names them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sync.memory import allocate
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


class _Agent:
    """A NIXL agent with its registered memory, and what others have told it."""

    def __init__(self, link: Link, where: str, name: str, address: str, num_bytes: int) -> None:
        self.link = link
        self.where = where
        self._stopped = False
        self._told: dict[tuple[int, int], set[str]] = defaultdict(set)
        """(version, bucket) -> agents that have sent a message about it."""
        self.memory = allocate(num_bytes)
        nixl = _nixl(where, link)
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        self._registered = self._agent.register_memory([(self.memory.data_ptr(), num_bytes, 0, "")], "DRAM")
        host, _, port = address.rpartition(":")
        try:
            timeout = timedelta(seconds=link.deadline_s)
            self._store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
            self.proof = bytes(self._store.get(PROOF))
            self._store.set(name, self._agent.get_agent_metadata())
            self._store.set(f"{name} at", str(self.memory.data_ptr()))
        except RuntimeError as error:
            raise TransportError(
                f"nixl: {where}: not all ranks met at {address} within {link.deadline_s:g} s: {error}"
            ) from error

    def meet(self, name: str) -> int:
        """Know another agent; returns where its memory lies there."""
        try:
            metadata = bytes(self._store.get(name))
            place = int(self._store.get(f"{name} at"))
        except RuntimeError as error:
            text = f"nixl: {self.where}: {name} did not come within {self.link.deadline_s:g} s"
            raise TransportError(text) from error
        self._agent.add_remote_agent(metadata)
        return place

    def tell(self, name: str, version: int, bucket: Bucket) -> None:
        """Send a message about a bucket."""
        try:
            self._agent.send_notif(name, _message(version, bucket))
        except Exception as error:  # nixl's errors share no base class but Exception
            raise TransportError(f"nixl: {self.where}: {name} is gone: {error}") from error

    def read(self, name: str, at: int, into: int, version: int, bucket: Bucket) -> None:
        """Read a bucket from the memory of another agent, which is told when it is done."""
        size = bucket.num_bytes
        local = self._agent.get_xfer_descs([(self.memory.data_ptr() + into, size, 0)], "DRAM")
        remote = self._agent.get_xfer_descs([(at, size, 0)], "DRAM")
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, name, _message(version, bucket))
            state = self._agent.transfer(handle)
            if state == "PROC":
                over = partial(self._is_over, handle)
                if not wait_until(over, self.link.deadline_s + LATER_S):
                    raise TransportError(f"nixl: {self.where}: {_told(bucket)} was not read in time from {name}")
                self.check()
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise TransportError(f"nixl: {self.where}: {name} is gone, {_told(bucket)} was not read: {state}")
            self._agent.release_xfer_handle(handle)
        except TransportError:
            raise
        except Exception as error:  # nixl's errors share no base class but Exception
            text = f"nixl: {self.where}: {name} is gone, {_told(bucket)} was not read: {error}"
            raise TransportError(text) from error
        self.check()

    def wait_told(self, version: int, bucket: Bucket, by: set[str], seconds: float) -> set[str]:
        """Until these agents have sent a message about a bucket; returns those that have not."""
        wait_until(lambda: by <= self._heard(version, bucket) or self._stopped, seconds)
        self.check()
        return by - self._heard(version, bucket)

    def forget(self, version: int) -> None:
        """Drop what was told about other versions."""
        for key in [key for key in self._told if key[0] != version]:
            del self._told[key]

    def check(self) -> None:
        if self._stopped:
            raise TransportError(f"nixl: {self.where}: stopped; open the session again")

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)
        del self._agent

    def _is_over(self, handle: Any) -> bool:
        return self._stopped or self._agent.check_xfer_state(handle) != "PROC"

    def _heard(self, version: int, bucket: Bucket) -> set[str]:
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages:
                about, _, index = message.partition(b" ")
                self._told[int(about), int(index)].add(name)
        return self._told[version, bucket.index]


class Sender(SenderTransport):
    """Calls 1 to 5."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._store: dist.TCPStore | None = None
        self._agent: _Agent | None = None

    def host(self) -> str:
        self._store, address = host_store(self.link)
        return address

    def open(self, address: str) -> bytes:
        slots = max(1, min(self.link.slots, len(self.link.buckets)))
        where = f"trainer rank {self.link.rank}"
        self._agent = agent = _Agent(self.link, where, where, address, slots * self.link.slot_bytes)
        for sink in sorted({sink for bucket in self.link.buckets for sink in bucket.sinks}):
            agent.meet(_sink(sink))
        return agent.proof

    def buffer(self, version: int, bucket: Bucket) -> Tensor:
        agent, slots = _live(self._agent), self.link.slots
        agent.check()
        if bucket.place == 0:
            agent.forget(version)
        if bucket.place >= slots:
            before = self.link.buckets[bucket.place - slots]
            sinks = {_sink(sink): sink for sink in before.sinks}
            late = agent.wait_told(version, before, set(sinks), self.link.deadline_s)
            if late:
                text = f"nixl: {agent.where}: {', '.join(sorted(late))} has not taken {_told(before)} in time"
                raise TransportError.of_late(text, tuple(sinks[name] for name in late))
        start = bucket.place % slots * self.link.slot_bytes
        return agent.memory[start : start + bucket.num_bytes]

    def put(self, version: int, bucket: Bucket) -> None:
        agent = _live(self._agent)
        for sink in bucket.sinks:
            agent.tell(_sink(sink), version, bucket)

    def drain(self, version: int) -> None:
        _live(self._agent)

    def abort(self) -> None:
        if self._agent is not None:
            self._agent.stop()

    def close(self) -> None:
        self.abort()
        agent, self._agent, self._store = self._agent, None, None
        if agent is not None:
            agent.close()


class Receiver(ReceiverTransport):
    """Calls 2 and 6."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._agent: _Agent | None = None
        self._rings: dict[int, int] = {}
        """Trainer rank -> address of its ring in its process."""

    def open(self, address: str) -> bytes:
        where = f"rollout rank {self.link.rank}"
        self._agent = agent = _Agent(self.link, where, where, address, max(1, self.link.slot_bytes))
        for owner in sorted({bucket.owner for bucket in self.link.buckets}):
            self._rings[owner] = agent.meet(f"trainer rank {owner}")
        return agent.proof

    def fetch(self, version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        agent = _live(self._agent)
        agent.forget(version)
        for bucket in (resized(bucket, sizes) for bucket in self.link.buckets):
            owner = f"trainer rank {bucket.owner}"
            if agent.wait_told(version, bucket, {owner}, self.link.deadline_s + LATER_S):
                raise TransportError(f"nixl: {agent.where}: {owner} has not packed {_told(bucket)} in time")
            at = self._rings[bucket.owner] + bucket.place % self.link.slots * self.link.slot_bytes
            agent.read(owner, at, 0, version, bucket)
            yield bucket, agent.memory[: bucket.num_bytes]

    def abort(self) -> None:
        if self._agent is not None:
            self._agent.stop()

    def close(self) -> None:
        self.abort()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()


def _nixl(where: str, link: Link) -> Any:
    """The package, told before its first use where it may listen (NX-3)."""
    if link.interface == "lo":
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        import nixl
    except ImportError as error:
        raise TransportError(f"nixl: {where}: the package is not there ({error}); pip install tutti[nixl]") from error
    return nixl


def _message(version: int, bucket: Bucket) -> bytes:
    return f"{version} {bucket.index}".encode()


def _sink(rank: int) -> str:
    return f"rollout rank {rank}"


def _told(bucket: Bucket) -> str:
    return f"bucket {bucket.index} ({tensors_of(bucket)})"


def _live(agent: _Agent | None) -> _Agent:
    if agent is None:
        raise TransportError("nixl: the transport is closed; open the session again")
    return agent
