"""How long a plan must take at least, and how long it takes on modelled links. Pure: no process, no clock.

BO-1: bounds hold for any schedule. receive: no rank reads faster than its own link. send: all bytes that leave trainer
      hosts leave through trainer links; with relays each byte leaves once. cast: trainer memory is read once.
BO-2: `simulate` plays the real plan, bucket by bucket, each link carrying one bucket at a time at its full rate and in
      the order of the plan; its result is never below the bounds.
BO-3: trainer ranks stand on hosts of their own, rollout ranks on hosts behind them, `ranks_per_host` each; ranks of one
      host reach each other inside it.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from sync.layout import ITEM_BYTES
from sync.plan import Bucket, Plan

__all__ = ["Bounds", "Links", "Simulated", "lower_bounds", "simulate"]


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates in bytes per second, each way. The defaults are 400 Gb/s network cards and NVLink of H200 hosts."""

    ranks_per_host: int = 8
    network: float = 50e9
    """Of one rank to other hosts."""
    inside: float = 367e9
    """Of one rank to ranks of its host."""
    cast: float = 2.45e12
    """At which a trainer rank reads weights to pack, cast and hash them."""
    verify: float = 2.45e12
    """At which a rollout rank reads what arrived to check it."""
    transfer_seconds: float = 20e-6
    """Fixed cost of one transfer."""
    one_host: bool = False
    """All ranks of both sides share a host."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Lower bounds in seconds (BO-1)."""

    receive: float
    send: float
    """When every rollout rank is served by trainer ranks."""
    send_relayed: float
    """When rollout ranks pass on what replicas want alike."""
    cast: float

    def of(self, *, relay: bool) -> float:
        """The one that binds."""
        return max(self.receive, self.send_relayed if relay else self.send, self.cast)


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of a simulation."""

    seconds: float
    bound: float
    """The lower bound that binds, in seconds."""
    transfers: int

    @property
    def efficiency(self) -> float:
        """Bound over time: 1 can't be beaten."""
        return self.bound / self.seconds if self.seconds else 1.0


def lower_bounds(plan: Plan, links: Links) -> Bounds:
    """The bounds of a plan on these links."""
    rate = links.inside if links.one_host else links.network
    read = [sum(b.num_bytes for b in plan.received_by(rank)) for rank in range(plan.num_sinks)]
    copies = sum(b.num_bytes * len(b.sinks) for b in plan.buckets)
    source = sum(_source_bytes(b) for b in plan.buckets)
    senders = max(1, plan.num_senders)
    return Bounds(
        receive=max(read, default=0) / rate,
        send=copies / (senders * rate),
        send_relayed=sum(b.num_bytes for b in plan.buckets) / (senders * rate),
        cast=source / (senders * links.cast),
    )


def simulate(plan: Plan, links: Links, *, relay: bool = False, depth: int = 2) -> Simulated:
    """Play a plan through (BO-2).

    Args:
        relay: a bucket that several sinks want goes to the first of them, which passes it on, and so forth.
        depth: buckets that an owner packs ahead of what it has sent.
    """
    world = _World(plan, links, depth)
    for bucket in plan.buckets:
        hops = [bucket.sinks] if relay else [(sink,) for sink in _rotated(bucket)]
        for hop in hops:
            world.offer(_Transfer(bucket, hop))
    seconds = world.run()
    return Simulated(seconds=seconds, bound=lower_bounds(plan, links).of(relay=relay), transfers=world.transfers)


def _rotated(bucket: Bucket) -> tuple[int, ...]:
    """Owners begin with different sinks, so that they don't queue up before the same one."""
    start = bucket.owner % len(bucket.sinks)
    return bucket.sinks[start:] + bucket.sinks[:start]


def _source_bytes(bucket: Bucket) -> int:
    return sum(s.box.numel * ITEM_BYTES[s.cast_from] for s in bucket.segments if not s.scales_of)


class _Transfer(msgspec.Struct):
    bucket: Bucket
    sinks: tuple[int, ...]
    """The sink that reads it now, then those that it is passed on to."""
    ready: float = 0.0


class _World:
    """Ranks as nodes: trainers first, then rollout ranks. A node sends one transfer at a time and receives one."""

    def __init__(self, plan: Plan, links: Links, depth: int) -> None:
        self.transfers = 0
        self._links = links
        self._depth = depth
        self._senders = plan.num_senders
        nodes = plan.num_senders + plan.num_sinks
        self._queues: list[deque[_Transfer]] = [deque() for _ in range(nodes)]
        self._sending = [0.0] * nodes
        self._receiving = [0.0] * nodes
        self._packed_at: dict[int, float] = {}
        self._packer = [0.0] * plan.num_senders
        self._ended: list[deque[float]] = [deque(maxlen=depth) for _ in range(plan.num_senders)]
        """When the last transfers of an owner ended: packing waits for the one `depth` before."""

    def offer(self, transfer: _Transfer) -> None:
        self._queues[transfer.bucket.owner].append(transfer)

    def run(self) -> float:
        heap = [(0.0, node) for node, queue in enumerate(self._queues) if queue]
        heapq.heapify(heap)
        end = 0.0
        while heap:
            key, node = heapq.heappop(heap)
            found = self._next(node)
            if found is None:
                continue
            start, position = found
            if start > key:
                heapq.heappush(heap, (start, node))
                continue
            end = max(end, self._carry(node, start, position, heap))
            if self._queues[node]:
                heapq.heappush(heap, (self._sending[node], node))
        return end

    def _next(self, node: int) -> tuple[float, int] | None:
        """The earliest start among the transfers that a node may begin now, and its place in the queue."""
        best: tuple[float, int] | None = None
        seen: set[int] = set()
        for position, transfer in enumerate(self._queues[node]):
            seen.add(transfer.bucket.index)
            if len(seen) > self._depth:
                break
            sink = self._senders + transfer.sinks[0]
            ready = self._packed(transfer.bucket) if node < self._senders else transfer.ready
            start = max(ready, self._sending[node], self._receiving[sink])
            if best is None or start < best[0]:
                best = start, position
        return best

    def _packed(self, bucket: Bucket) -> float:
        at = self._packed_at.get(bucket.index)
        if at is None:
            owner = bucket.owner
            free = self._ended[owner][0] if len(self._ended[owner]) == self._depth else 0.0
            at = max(self._packer[owner], free) + _source_bytes(bucket) / self._links.cast
            self._packer[owner] = self._packed_at[bucket.index] = at
        return at

    def _carry(self, node: int, start: float, position: int, heap: list[tuple[float, int]]) -> float:
        queue = self._queues[node]
        transfer = queue[position]
        del queue[position]
        sink = self._senders + transfer.sinks[0]
        size = transfer.bucket.num_bytes
        end = start + size / self._rate(node, sink) + self._links.transfer_seconds
        self._sending[node] = self._receiving[sink] = end
        if node < self._senders:
            self._ended[node].append(end)
        self.transfers += 1
        if len(transfer.sinks) > 1:
            self._queues[sink].append(_Transfer(transfer.bucket, transfer.sinks[1:], end))
            heapq.heappush(heap, (max(end, self._sending[sink]), sink))
        return end + size / self._links.verify

    def _rate(self, node: int, sink: int) -> float:
        return self._links.inside if self._host(node) == self._host(sink) else self._links.network

    def _host(self, node: int) -> int:
        if self._links.one_host:
            return 0
        hosts = -(-self._senders // self._links.ranks_per_host)
        if node < self._senders:
            return node // self._links.ranks_per_host
        return hosts + (node - self._senders) // self._links.ranks_per_host
