"""Whether a version is staged beside the weights in service or over them, and how large its pieces may be then.

RO-1: all rollout ranks of a session do alike: a fleet that could not go back as one would not be one.
RO-2: over the weights in service (a ring) no rank keeps more than two layers on their way, on either side. What W4
      promises is less there: an engine is stopped from the first byte to the commit, and a failure leaves it stopped,
      with parts of two versions, until a version has come whole. It never serves a mixture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sync.config import SyncConfig
from sync.coverage import sent_entries
from sync.layout import Layout
from sync.messages import Side
from sync.plan import ALIGN, layer_of
from sync.transport import SyncError

__all__ = ["SPARE", "host_piece_bytes", "in_place", "piece_bytes"]

SPARE = 1.05
"""A second copy takes so much more than its bytes: blocks of the allocator."""


def in_place(config: SyncConfig, names: Sequence[str], sides: Sequence[Side], layouts: Sequence[Layout]) -> str:
    """Why versions are to be written over the weights in service; empty where they are staged beside them.

    Args:
        names: of the rollout ranks, for errors.

    Raises:
        SyncError: a ring is asked for, and an engine can't hand out its live tensors.
    """
    unable = [name for name, side in zip(names, sides, strict=True) if not side.in_place]
    if config.shadow == "ring":
        if unable:
            raise SyncError(
                f'{unable[0]}: [sync] shadow = "ring", and its engine can\'t be written in place (it has no '
                f'`live_weights`); set shadow = "full"'
            )
        return "asked for"
    if config.shadow == "full" or config.differences or unable:
        return ""
    for name, side, layout in zip(names, sides, layouts, strict=True):
        need = int(SPARE * sum(entry.num_bytes for entry in sent_entries(layout)))
        if 0 <= side.room_bytes < need:
            return f"{name} has room for {side.room_bytes / 1e9:.1f} GB, a second copy takes {need / 1e9:.1f} GB"
    return ""


_HOST_PIECE, _SHORTEST = 4 << 20, 512 << 10


def host_piece_bytes(layouts: Sequence[Layout]) -> int:
    """Of a piece in host memory: an eighth of what a rank receives, so that one is stored while the next is packed."""
    most = max((sum(entry.num_bytes for entry in sent_entries(layout)) for layout in layouts), default=0)
    return max(_SHORTEST, min(_HOST_PIECE, most // 8 // ALIGN * ALIGN))


def piece_bytes(limit: int, slots: int, layouts: Sequence[Layout]) -> int:
    """Upper limit of a piece, so that `slots` of them are at most two layers (RO-2); never above `limit`."""
    layers: dict[str, int] = defaultdict(int)
    for layout in layouts:
        own: dict[str, int] = defaultdict(int)
        for entry in sent_entries(layout):
            own[layer_of(entry.name)] += entry.num_bytes
        for name, size in own.items():
            layers[name] = max(layers[name], size)
    numbered = [size for name, size in layers.items() if name.endswith(".")] or list(layers.values())
    most = 2 * max(numbered, default=limit) // slots // ALIGN * ALIGN
    return max(ALIGN, min(limit, most))
