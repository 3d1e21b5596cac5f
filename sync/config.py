"""The settings of weight transfer, and what a publish returns."""

from __future__ import annotations

from typing import Literal

import msgspec

from sync.plan import ALIGN
from sync.transport import TransportName

__all__ = ["Commit", "SyncConfig"]


class SyncConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel from trainer ranks to rollout ranks."""

    transport: Literal["auto", "shm", "gloo", "nccl", "ipc", "nixl"] = "auto"
    """Host memory: `shm` on one host, `gloo` over sockets, `nixl` by UCX (RDMA where there is a card). GPU memory:
    `ipc` on one host by copy engines, beside decoding; `nccl` (RCCL) also between hosts. `auto`: the first of ipc,
    nccl, shm, gloo that fits where the weights lie and passes a trial on all ranks; the choice and its reason are
    logged."""
    bucket_bytes: int = 0
    """Upper limit of one transferred piece, in bytes; a multiple of 64. Larger tensors are split. 0: 128 MiB in GPU
    memory; in host memory an eighth of what a rank receives, 0.5 to 4 MiB."""
    slots: int = 4
    """Pieces that a trainer rank may have packed and not yet seen taken; it keeps `slots * bucket_bytes` bytes for
    them. With as many as it has pieces, the trainer goes on before any rollout rank has read."""
    deadline_s: float = 60.0
    """Upper limit of each phase of a transfer, in seconds: open, pack and transfer, apply."""
    quorum: int = 0
    """Rollout replicas that must take a version; the others may be late or gone and catch up with a later one. 0:
    all."""
    max_behind: int = 1
    """Versions that a replica which was left out may lag behind and still serve; beyond, it is told to stop."""
    differences: bool = False
    """Send what changed since the version in service, bucket by bucket where that is faster than sending all of it. For
    host memory and slow networks; costs each trainer rank two copies of what it sends."""
    shadow: Literal["auto", "full", "ring"] = "auto"
    """Where a version is staged. `full`: beside the weights in service, which serve until all is verified; takes memory
    for a second copy. `ring`: over the weights in service, with no more than two layers on their way; the engine is
    stopped meanwhile, and after a failure serves nothing until a version has come whole. `auto`: `ring` where a GPU has
    no room for a second copy and the engine can be written in place, else `full`; the choice is logged."""
    interface: str = "lo"
    """Network interface for gloo and nixl. `lo` serves ranks of one host; between hosts name the one that joins them
    (`eth0`)."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0 or self.bucket_bytes % ALIGN:
            raise ValueError(f"[sync] bucket_bytes = {self.bucket_bytes}: expected 0 or a positive multiple of {ALIGN}")
        if not self.deadline_s > 0:
            raise ValueError(f"[sync] deadline_s = {self.deadline_s}: expected a positive number of seconds")
        if self.shadow == "ring" and self.differences:
            raise ValueError(
                '[sync] shadow = "ring" with differences = true: differences are made against weights that a ring '
                "overwrites; choose one of the two"
            )
        for name, least in (("slots", 1), ("quorum", 0), ("max_behind", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"[sync] {name} = {value}: expected at least {least}")


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A version that the fleet serves, and what it took."""

    version: int
    bytes: int
    """Bytes of weights packed, in the dtypes of the rollout; each counted once however many ranks read it."""
    seconds: float
    """From the call of `publish` to the last rank that put it into service."""
    pack_seconds: float
    """Trainer: the slowest rank to cast, pack, hash and hand over. After it the trainer may go on."""
    stage_seconds: float
    """Rollout: the slowest rank to fetch and hash, while it decodes."""
    pause_seconds: float
    """Rollout: the slowest rank to put it into service: the wait for a step boundary and the swap."""
    transport: TransportName
    wire_bytes: int = 0
    """Bytes handed over: fewer than `bytes` where differences were sent."""
    left_out: tuple[int, ...] = ()
    """Rollout ranks that did not take it: late or gone."""
