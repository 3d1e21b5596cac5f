"""Actors for the tests of this room: bare transports, and a trainer and a rollout of a few plain tensors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from runtime import Actor, endpoint
from sync.layout import Entry, Layout
from sync.messages import Largest, Manifest, Opened, OpenSpec, Side, Staged
from sync.plan import Bucket, Plan, make_plan
from sync.ports import ReceiverPort, SenderPort
from sync.receiver import Receiver
from sync.transport import (
    Link,
    ReceiverTransport,
    SenderTransport,
    SyncError,
    TransportName,
    receiver_transport,
    sender_transport,
)

SHAPES = {"model.embed.weight": (37, 8), "model.layers.0.mlp.weight": (16, 24), "model.norm.weight": (24,)}
"""37 rows do not divide by 2; 24 values of the norm are fewer than a bucket."""


def values(name: str, version: int) -> Tensor:
    """The weights of a version: neighbours, names and versions differ, also in bfloat16, exact up to 256."""
    numel = torch.Size(SHAPES[name]).numel()
    return ((torch.arange(numel, dtype=torch.float32) * 3 + 17 * version + 5 * len(name)) % 251).view(SHAPES[name])


def nudged(name: str, version: int) -> Tensor:
    """Weights of which few values change from version to version."""
    tensor = values(name, 0).clone()
    tensor.view(-1)[version % 7 :: 11] = version
    return tensor


def sharded(rank: int, size: int) -> Layout:
    """Rows in chunks of ceil(rows / size), as FSDP2 shards them."""
    entries = []
    for name, shape in SHAPES.items():
        step = -(-shape[0] // size)
        entries.append(Entry.rows(name, shape, "float32", min(rank * step, shape[0]), min((rank + 1) * step, shape[0])))
    return Layout(tuple(entries))


def wanted(dtype: str = "float32") -> Layout:
    """Everything, with a head tied to the embedding."""
    entries = [Entry.whole(name, shape, dtype) for name, shape in SHAPES.items()]
    head = Entry.whole("lm_head.weight", SHAPES["model.embed.weight"], dtype)
    return Layout((*entries, head), derived={"lm_head.weight": "model.embed.weight"})


def toy_plan(senders: int = 2, sinks: int = 2) -> Plan:
    return make_plan([sharded(r, senders) for r in range(senders)], [wanted()] * sinks, bucket_bytes=512)


def shm_spec(plan: Plan, digest: str, buckets: tuple[Bucket, ...], address: str = "") -> OpenSpec:
    """Of the only rank of a side, by shared memory, with a slot for each bucket."""
    link = Link(
        rank=0,
        num_senders=1,
        num_sinks=1,
        buckets=buckets,
        slots=len(plan.buckets),
        slot_bytes=plan.largest_bucket,
        deadline_s=5.0,
    )
    return OpenSpec(transport="shm", plan_key=plan.key, layout_digest=digest, link=link, address=address)


def byte_of(version: int, bucket: int) -> int:
    return (version * 31 + bucket * 7) % 251


class TransportSender(Actor):
    """The trainer's half of a transport, without ports."""

    def __init__(self, name: TransportName, deadline_s: float, slots: int, rank: int) -> None:
        plan = toy_plan()
        link = Link(
            rank=rank,
            num_senders=2,
            num_sinks=2,
            buckets=plan.sent_by(rank),
            slots=slots,
            slot_bytes=plan.largest_bucket,
            deadline_s=deadline_s,
        )
        self.half = sender_transport(name, link)

    @endpoint
    async def host(self) -> str:
        return await asyncio.to_thread(self.half.host)

    @endpoint
    async def open(self, address: str) -> bytes:
        return await asyncio.to_thread(self.half.open, address)

    @endpoint(concurrency=2)
    async def send(self, version: int) -> None:
        def run() -> None:
            for bucket in self.half.link.buckets:
                self.half.buffer(version, bucket).fill_(byte_of(version, bucket.index))
                self.half.put(version, bucket)
            self.half.drain(version)

        await asyncio.to_thread(run)

    @endpoint(concurrency=2)
    async def abort(self) -> None:
        self.half.abort()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self.half.close)

    @endpoint
    async def default_group_is_there(self) -> bool:
        return dist.is_initialized()


class TransportReceiver(Actor):
    """The rollout's half of a transport, without ports."""

    def __init__(self, name: TransportName, deadline_s: float, slots: int, rank: int) -> None:
        plan = toy_plan()
        link = Link(
            rank=rank,
            num_senders=2,
            num_sinks=2,
            buckets=plan.received_by(rank),
            slots=slots,
            slot_bytes=plan.largest_bucket,
            deadline_s=deadline_s,
        )
        self.half = receiver_transport(name, link)

    @endpoint
    async def open(self, address: str) -> bytes:
        return await asyncio.to_thread(self.half.open, address)

    @endpoint(concurrency=2)
    async def fetch(self, version: int, seconds_each: float = 0.0) -> dict[int, bytes]:
        """The bytes of each bucket, in the order in which they came, as they were at the end of `seconds_each`."""

        def run() -> dict[int, bytes]:
            found: dict[int, bytes] = {}
            for bucket, memory in self.half.fetch(version):
                time.sleep(seconds_each)
                found[bucket.index] = bytes(memory.cpu().numpy().data)
            return found

        return await asyncio.to_thread(run)

    @endpoint(concurrency=2)
    async def abort(self) -> None:
        self.half.abort()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self.half.close)


class ToyTrainer(SenderPort, Actor):
    """Holds its rows of `values(name, version)`. Faults are switched on by name."""

    def __init__(self, rank: int, size: int) -> None:
        self.weight_source = self
        self.layout = sharded(rank, size)
        self.version = 0
        self.fault = ""
        self.nudging = False
        """Train by small steps: `nudged` instead of `values`."""

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        entry = self.layout.by_name[name]
        whole = nudged(name, self.version) if self.nudging else values(name, self.version)
        rows = whole[entry.box.lo[0] : entry.box.hi[0]]
        if self.fault == "nan":
            rows[0] = float("nan")
        return rows

    @endpoint
    def train_to(self, version: int) -> None:
        self.version = version

    @endpoint
    def nudge(self) -> None:
        self.nudging = True

    @endpoint
    def break_by(self, fault: str) -> None:
        self.fault = fault

    @endpoint
    def sync_send(
        self, version: int, agreed: list[Largest] | None = None, sizes: dict[int, int] | None = None
    ) -> Manifest:
        if self._sending is not None and self.fault:
            self._break(self._sending.transport)
        return super().sync_send(version, agreed, sizes)

    def _break(self, transport: SenderTransport) -> None:
        """Do the fault between the hashing of a bucket and its being handed over: the first, or the last is lost."""
        put, fault = transport.put, self.fault

        def broken_put(version: int, bucket: Bucket) -> None:
            if bucket == transport.link.buckets[-1 if fault == "lose" else 0]:
                match fault:
                    case "flip a byte":
                        transport.buffer(version, bucket)[5] ^= 16
                    case "reorder":
                        words = transport.buffer(version, bucket)[: bucket.num_bytes // 8 * 8].view(torch.int64)
                        words[:] = words.flip(0)
                    case "tear":
                        transport.buffer(version, bucket)[bucket.num_bytes // 2 :] = 0
                    case "lose":
                        return
                    case "die":
                        os.kill(os.getpid(), signal.SIGKILL)
            put(version, bucket)

        transport.put = broken_put  # type: ignore[method-assign]


class ToyRollout(ReceiverPort, Actor):
    """Serves plain tensors, and counts the steps it decodes meanwhile."""

    def __init__(self, dtype: str = "float32") -> None:
        self.weight_sink = self
        self.layout = wanted(dtype)
        self.weights = {e.name: torch.zeros(e.shape, dtype=getattr(torch, dtype)) for e in self.layout.entries}
        self.version = -1
        self.fault = ""
        self.reached = asyncio.Event()
        self.release = asyncio.Event()

    @property
    def receiver(self) -> Receiver:
        """Of its only part, which the session has asked for."""
        (part,) = self._parts
        assert isinstance(part, Receiver)
        return part

    def weight_layout(self) -> Layout:
        return self.layout

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        if self.fault == "fail in swap":
            raise ValueError("the engine is on fire")
        if self.fault == "keep":
            self.weights, before = dict(weights), self.weights
            self.version = version
            return before
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])
        self.version = version
        return None

    @endpoint
    def serving(self) -> tuple[int, dict[str, Tensor]]:
        return self.version, self.weights

    @endpoint
    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.weights.values()]

    @endpoint
    def port_is_open(self) -> bool:
        return self.receiver.half is not None

    @endpoint(concurrency=4)
    async def sync_fence(self, version: int, reason: str, torn: str = "") -> None:
        if self.fault.endswith("deaf"):
            raise TimeoutError("it does not hear")
        await super().sync_fence(version, reason, torn)

    @endpoint
    def fenced(self) -> str:
        return self.weights_fenced

    @endpoint
    def break_by(self, fault: str) -> None:
        self.fault = fault

    @endpoint
    def spoil(self) -> None:
        """Change a weight in service, as an engine that rearranges what it is given."""
        self.weights["model.norm.weight"].mul_(2)

    @endpoint
    def forget(self) -> None:
        """Hold no version to go on from."""
        self.receiver.held = None

    @endpoint
    def want(self, dtype: str) -> None:
        """Become an engine of another dtype, in place."""
        self.layout = wanted(dtype)
        self.weights = {n: t.to(getattr(torch, dtype)) for n, t in self.weights.items()}

    @endpoint(concurrency=4)
    async def staging(self) -> None:
        """Returns when this rank is held just before it answers that it has staged."""
        await self.reached.wait()

    @endpoint(concurrency=4)
    async def let_go(self) -> None:
        self.release.set()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint(concurrency=4)
    async def sync_layout(self, known: str = "", part: int = 0) -> Side:
        if self.fault == "lose a worker":
            raise SyncError("its process is gone")
        return await super().sync_layout(known, part)

    @endpoint(concurrency=4)
    async def sync_open(self, spec: OpenSpec, part: int = 0) -> Opened:
        if self.fault == "no shared memory" and spec.transport == "shm":
            spec = msgspec.structs.replace(spec, address="/proc/1/fd/999")
        return await super().sync_open(spec, part)

    @endpoint(concurrency=4)
    async def sync_stage(
        self, version: int, plan_key: str, sizes: dict[int, int] | None = None, base: int | None = None, part: int = 0
    ) -> Staged:
        if self.fault.startswith("fail to stage"):
            raise MemoryError("no room for model.norm.weight")
        if self.fault == "stall" and self.receiver.half is not None:
            self._stall(self.receiver.half.transport)
        staged = await super().sync_stage(version, plan_key, sizes, base, part)
        if self.fault == "hold":
            self.reached.set()
            with contextlib.closing(_Reset(self)):
                await self.release.wait()
        return staged

    def _stall(self, transport: ReceiverTransport) -> None:
        """Take the first bucket and then no other, until the transport is told to stop."""
        fetch, abort = transport.fetch, transport.abort
        stopped = threading.Event()

        def stalled_fetch(version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
            for item in fetch(version, sizes):
                yield item
                stopped.wait(60)

        def noticed_abort() -> None:
            stopped.set()
            abort()

        transport.fetch, transport.abort = stalled_fetch, noticed_abort  # type: ignore[method-assign]


class RingRollout(ToyRollout):
    """Can be written over in place; says how much memory it has."""

    room = -1

    def live_weights(self) -> Mapping[str, Tensor]:
        return self.weights

    @endpoint
    def have_room(self, num_bytes: int) -> None:
        self.room = num_bytes

    @endpoint(concurrency=4)
    async def sync_layout(self, known: str = "", part: int = 0) -> Side:
        return msgspec.structs.replace(await super().sync_layout(known, part), room_bytes=self.room)


class _Reset:
    def __init__(self, rollout: ToyRollout) -> None:
        self._rollout = rollout

    def close(self) -> None:
        self._rollout.reached.clear()
        self._rollout.release.clear()
