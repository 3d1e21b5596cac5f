"""The contract of a transport: how packed buckets get from trainer ranks to rollout ranks.

One object per rank and session: a `SenderTransport` on every trainer rank, a `ReceiverTransport` on every rollout rank.
The session makes the calls in this order; the side is in brackets, and so is the thread:

  1. `host()`               [trainer rank 0, worker thread] make what the others meet at; return its address
  2. `open(address)`        [all ranks, worker threads]     join, register memory once; return the proof that `host` put
                                                            there: a real transfer
  then, for every version, the two sides at the same time:
  3. `buffer(version, b)`   [owner of b, main thread]       memory to pack bucket b into; may wait for rollout ranks
  4. `put(version, b)`      [owner of b, main thread]       bucket b is packed: hand it over, and tell its sinks
  5. `drain(version)`       [trainer ranks, worker thread]  wait until all that was put has been taken
  6. `fetch(version)`       [rollout ranks, worker thread]  yield every bucket of this rank once, in plan order; what is
                                                            yielded may be overwritten when the next one is asked for
     A bucket may be put with fewer bytes than the plan says; both sides are told then (`resized`).
  and at any time:
  7. `abort()`              [any rank, any thread]          wake 3, 5 and 6, which then raise; never raises, may be
                                                            repeated
  8. `close()`              [any rank, worker thread]       abort, and give back memory, sockets and files

A trainer rank has `link.slots` buckets in flight at most; with as many as it has buckets, calls 3 never wait and the
trainer may train on while rollout ranks still read.

TR-1: bytes that `fetch` yields are those that the owner packed for this version, or the digests tell: a transport needs
      no checksum of its own.
TR-2: a buffer is not given out again before every sink of the bucket in it has taken it.
TR-3: `buffer`, `drain` and `fetch` end within `deadline_s`, with a TransportError that names the peer rank and tensors
      of the bucket; `fetch` gives LATER_S more, so that the trainer, who knows which rollout rank is late, is first.
TR-4: after `abort`, or after a call that raised, the object is good for nothing but `close`: the session opens anew.
TR-5: nothing outlives the processes: a SIGKILL of any or all of them leaves no file, no memory, no socket.
TR-6: nothing listens beyond `interface`, which is loopback unless a user names another one.
TR-7: memory is registered and connections are made in `open`, never while a version moves: memory and time stay flat.

To add one: subclass both, add it to `TRANSPORTS` below; `tests/sync/test_transport_contract.py` runs over all of them.
`transports/shm.py` is the smallest and the one to copy from.
"""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from runtime.errors import TuttiError
from sync.plan import Bucket

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LATER_S",
    "TRANSPORTS",
    "Link",
    "Reach",
    "ReceiverTransport",
    "SenderTransport",
    "SyncError",
    "TransportError",
    "TransportName",
    "receiver_transport",
    "resized",
    "sender_transport",
    "tensors_of",
    "wait_until",
]

TransportName = Literal["shm", "gloo", "nccl", "ipc", "nixl"]


LATER_S = 1.0
"""Seconds that rollout ranks wait longer than trainer ranks (TR-3)."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport needs, to be a candidate, and what it asks of a session."""

    module: str
    """It defines `Sender(link)` and `Receiver(link)`."""
    device: Literal["cpu", "cuda"]
    """Where its buffers lie: it is tried where weights lie there on both sides."""
    one_host: bool
    drains: bool
    """Whether `drain` has anything to wait for."""
    spread: bool = False
    """An owner sends to each sink by itself, so that replicas are better served by several holders (PL-3)."""


TRANSPORTS: dict[TransportName, Reach] = {
    "ipc": Reach(module="sync.transports.ipc", device="cuda", one_host=True, drains=False),
    "nccl": Reach(module="sync.transports.nccl", device="cuda", one_host=False, drains=True),
    "shm": Reach(module="sync.transports.shm", device="cpu", one_host=True, drains=False),
    "gloo": Reach(module="sync.transports.gloo", device="cpu", one_host=False, drains=True),
    "nixl": Reach(module="sync.transports.nixl", device="cpu", one_host=False, drains=False, spread=True),
}
"""All transports, in the order in which `auto` tries those that may fit; `nixl` is used when it is asked for."""


class SyncError(TuttiError, RuntimeError):
    """A version was not published, and every rollout rank keeps the one it had. The text names rank and tensor."""


class TransportError(SyncError):
    """Bytes could not be moved: a peer is gone, silent for longer than the deadline, or can't be reached."""

    late: tuple[int, ...] = ()
    """Rollout ranks that it waited for; empty where that is not known."""

    @classmethod
    def of_late(cls, text: str, sinks: tuple[int, ...]) -> TransportError:
        """The error of a trainer rank whose bucket was not taken by these."""
        error = cls(text)
        error.late = sinks
        return error


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport knows about its rank."""

    rank: int
    """Rank within its side: trainer ranks and rollout ranks both count from 0."""
    num_senders: int
    num_sinks: int
    buckets: tuple[Bucket, ...]
    """The buckets that this rank packs or reads, in plan order."""
    slots: int
    """Buckets that a trainer rank may have in flight."""
    slot_bytes: int
    """Bytes of the largest bucket of the plan, a multiple of plan.ALIGN."""
    deadline_s: float
    """Upper limit of every wait for a peer, in seconds."""
    device: str = "cpu"
    """Where weights lie on this rank, such as `cuda:1`; each rank fills in its own."""
    interface: str = "lo"
    """Network interface to listen on and to connect from; `lo` reaches this host only (TR-6)."""


class SenderTransport(ABC):
    """The trainer's half. See the contract above."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @abstractmethod
    def host(self) -> str:
        """Make the meeting point (rank 0 only) and return its address, a text that fits in a message."""

    @abstractmethod
    def open(self, address: str) -> bytes:
        """Join the others; return the proof read through the transport. Raises TransportError."""

    @abstractmethod
    def buffer(self, version: int, bucket: Bucket) -> Tensor:
        """Writable uint8 memory of `bucket.num_bytes` bytes, aligned to plan.ALIGN. Raises TransportError."""

    @abstractmethod
    def put(self, version: int, bucket: Bucket) -> None:
        """Its buffer holds the bucket now: hand it over. Never waits for a peer."""

    @abstractmethod
    def drain(self, version: int) -> None:
        """Wait until all buckets have been taken. Raises TransportError."""

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class ReceiverTransport(ABC):
    """The rollout's half. See the contract above."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @abstractmethod
    def open(self, address: str) -> bytes:
        """Join the others; return the proof read through the transport. Raises TransportError."""

    @abstractmethod
    def fetch(self, version: int, sizes: Mapping[int, int] | None = None) -> Iterator[tuple[Bucket, Tensor]]:
        """Every bucket of this rank with its bytes (uint8), in plan order. Raises TransportError.

        Args:
            sizes: bucket index -> bytes, of those that the owner puts with fewer bytes than the plan says.
        """

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def sender_transport(name: TransportName, link: Link) -> SenderTransport:
    """The trainer's half of transport `name`."""
    made: SenderTransport = importlib.import_module(TRANSPORTS[name].module).Sender(link)
    return made


def receiver_transport(name: TransportName, link: Link) -> ReceiverTransport:
    """The rollout's half of transport `name`."""
    made: ReceiverTransport = importlib.import_module(TRANSPORTS[name].module).Receiver(link)
    return made


def resized(bucket: Bucket, sizes: Mapping[int, int] | None) -> Bucket:
    """The bucket as it travels: with the bytes that it is said to have, or those of the plan."""
    size = sizes.get(bucket.index) if sizes else None
    return bucket if size is None else msgspec.structs.replace(bucket, num_bytes=size)


def tensors_of(bucket: Bucket) -> str:
    """The tensors of a bucket in a few words, for errors."""
    names = list(dict.fromkeys(s.name for s in bucket.segments))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def wait_until(is_so: Callable[[], bool], deadline_s: float) -> bool:
    """Poll what another process changes: at once, then every 20 us, in the end every ms. False at the deadline."""
    if is_so():
        return True
    ends = time.monotonic() + deadline_s
    pause = 20e-6
    while not is_so():
        if time.monotonic() > ends:
            return False
        time.sleep(pause)
        pause = min(pause * 1.2, 1e-3)
    return True
