"""What the session and the ports of ranks say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from sync.layout import Box, Layout, LayoutError
from sync.transport import Link, SyncError, TransportName

__all__ = [
    "Applied",
    "BaseMissing",
    "Largest",
    "LayoutMoved",
    "Manifest",
    "OpenSpec",
    "Opened",
    "PortClosed",
    "Side",
    "Staged",
]


class LayoutMoved(LayoutError, SyncError):
    """A rank's layout is not the one that the plan was made for; the session plans anew."""


class PortClosed(SyncError):
    """A rank's port is not open, though the session had opened it: its process is new. The session opens it again."""


class BaseMissing(SyncError):
    """A rank does not hold the version that differences were made against; the session sends whole buckets."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says about itself."""

    digest: str
    layout: Layout | None
    """None when the caller knows a layout of this digest already."""
    host: str
    """Host name and boot: equal on two ranks only if they run under one kernel."""
    device: Literal["cpu", "cuda"]
    """Where its weights lie; ROCm says cuda too."""
    parts: int = 1
    """Rollout: processes that its weights lie in; this is what one of them says, and each is asked."""
    in_place: bool = False
    """Rollout: the engine can hand out its live tensors to be written over."""
    room_bytes: int = -1
    """Rollout: memory that a second copy of the weights may take, with what it has for it already; -1: not known."""
    incarnation: str
    """Another one after a restart: a port of an earlier process is never taken for open."""


class OpenSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to open its half of a transfer."""

    transport: TransportName
    plan_key: str
    layout_digest: str
    """Digest of the layout that the plan assumes for this rank (PO-4)."""
    link: Link
    in_place: bool = False
    """Stage over the weights in service (PO-7)."""
    address: str = ""
    """What `sync_host` returned; empty for the call of `sync_host` itself."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `sync_open`. That a transport can't be reached is an answer, not an error: "auto" tries another."""

    plan_key: str
    proof: bytes = b""
    """Read through the transport; equal on all ranks when they really share it."""
    refused: str = ""
    """Why the transport can't be used by this rank; empty when it can."""


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """Largest values by block of one weight: what trainer ranks agree on where blocks reach over ranks (PL-8)."""

    name: str
    blocks: Box
    values: bytes
    """float32, in the shape of `blocks`."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer rank has packed: the digests of the segments of each bucket."""

    version: int
    digests: dict[int, tuple[int, ...]]
    """Bucket index -> one 64-bit digest per segment."""
    seconds: float
    """Time to cast, pack, hash and hand over."""


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout rank holds in shadow memory."""

    version: int
    digests: dict[int, tuple[int, ...]]
    """Bucket index -> one 64-bit digest per segment, of the bytes as they lie in its memory."""
    seconds: float


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `sync_commit`."""

    version: int
    pause_seconds: float
    """Wall time of `apply_weights`: the wait for a step boundary and the swap."""
