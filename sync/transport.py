"""The contract of a transport: how packed buckets get from trainer ranks to rollout ranks.

One object per rank and session: a `SenderTransport` on every trainer rank, a `ReceiverTransport` on every rollout rank.
The session makes the calls in this order; the side is in brackets, and so is the thread:

  1. `host()`              [trainer rank 0, worker thread]  make what the others meet at; return its address
  2. `open(address)`       [all ranks, worker threads]      join; return the proof that `host` put there: a real
     transfer
  then, for every version:
  3. `buffer(version, b)`  [owner of b, main thread]        memory to pack bucket b into
  4. `seal(version)`       [trainer ranks, main thread]     all buckets of this rank are packed
  5. `push(version)`       [trainer ranks, worker thread]   hand them over; may wait for the receivers
  6. `fetch(version)`      [rollout ranks, worker thread]   yield every bucket of this rank once, in plan order
  and at any time:
  6. `abort()`             [any rank, any thread]           wake 4 and 5, which then raise; never raises, may be
     repeated
  7. `close()`             [any rank, worker thread]        abort, and give back memory, sockets and files

Call 6 begins when call 4 has returned on all trainer ranks; 5 and 6 run at the same time.

TR-1: bytes that `fetch` yields are those that the owner packed for this version, or the digests tell: a transport needs
      no checksum of its own.
TR-2: memory that `fetch` yielded for v stays valid and unchanged while v+1 is packed and pushed, until this rank
      fetches.
TR-3: `push` and `fetch` end within `deadline_s`, with a TransportError that names the peer rank and a tensor of the
      bucket.
TR-4: after `abort`, or after a call that raised, the object is good for nothing but `close`: the session opens anew.
TR-5: nothing outlives the processes: a SIGKILL of any or all of them leaves no file, no memory, no socket.
TR-6: nothing listens beyond `interface`, which is loopback unless a user names another one.

To add one: subclass both, add it to `_TRANSPORTS` below; `tests/sync/test_transport_contract.py` runs over all of them.
`transports/shm.py` is the smallest and the one to copy from.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import msgspec

from runtime.errors import TuttiError
from sync.plan import Bucket

__all__ = [
    "Link",
    "ReceiverTransport",
    "SenderTransport",
    "SyncError",
    "TransportError",
    "TransportName",
    "receiver_transport",
    "sender_transport",
    "tensors_of",
]

TransportName = Literal["shm", "gloo"]

_TRANSPORTS: dict[str, str] = {"shm": "sync.transports.shm", "gloo": "sync.transports.gloo"}
"""Module of each transport; it defines `Sender(link)` and `Receiver(link)`."""


class SyncError(TuttiError, RuntimeError):
    """A version was not published, and every rollout rank keeps the one it had. The text names rank and tensor."""


class TransportError(SyncError):
    """Bytes could not be moved: a peer is gone, silent for longer than the deadline, or can't be reached."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport knows about its rank."""

    rank: int
    """Rank within its side: trainer ranks and rollout ranks both count from 0."""
    num_senders: int
    num_sinks: int
    buckets: tuple[Bucket, ...]
    """The buckets that this rank packs or reads, in plan order."""
    arena_bytes: int
    """Bytes of all buckets of the plan (`Plan.arena_bytes`)."""
    deadline_s: float
    """Upper limit of every wait for a peer, in seconds."""
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
    def buffer(self, version: int, bucket: Bucket) -> memoryview:
        """Writable memory of `bucket.num_bytes` bytes, aligned to plan.ALIGN. Never waits."""

    @abstractmethod
    def seal(self, version: int) -> None:
        """All buffers of this rank hold the version now. Never waits."""

    @abstractmethod
    def push(self, version: int) -> None:
        """Hand over what was packed into the buffers. Raises TransportError."""

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
    def fetch(self, version: int) -> Iterator[tuple[Bucket, memoryview]]:
        """Every bucket of this rank with its bytes, in plan order. Raises TransportError."""

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def sender_transport(name: TransportName, link: Link) -> SenderTransport:
    """The trainer's half of transport `name`."""
    made: SenderTransport = importlib.import_module(_TRANSPORTS[name]).Sender(link)
    return made


def receiver_transport(name: TransportName, link: Link) -> ReceiverTransport:
    """The rollout's half of transport `name`."""
    made: ReceiverTransport = importlib.import_module(_TRANSPORTS[name]).Receiver(link)
    return made


def tensors_of(bucket: Bucket) -> str:
    """The tensors of a bucket in a few words, for errors."""
    names = list(dict.fromkeys(s.name for s in bucket.segments))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
