"""Where weights lie, and the streams and current devices that follow from it. torch is imported where there is a
GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["free_bytes", "on_device", "side_stream"]


def free_bytes(device: str) -> int:
    """Memory of a GPU that this process may still take, what torch keeps unused included; -1 on the host."""
    if not device.startswith("cuda"):
        return -1
    import torch

    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


@contextlib.contextmanager
def on_device(device: str) -> Iterator[None]:
    """On a GPU: make it the current one of this thread."""
    if not device.startswith("cuda"):
        yield
        return
    import torch

    with torch.cuda.device(torch.device(device)):
        yield


@contextlib.contextmanager
def side_stream(device: str, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """On a GPU: a stream beside those that decode; awaited in the end.

    What is written there may be read, on whatever stream, by the copies of the swap before. It begins after them: after
    the event that stands for them, or, where there is none, when all streams have done what they were told.
    """
    if not device.startswith("cuda"):
        yield
        return
    import torch

    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream()
    stream = _STREAMS[device]
    if after is None:
        torch.cuda.synchronize(device)
    else:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


_STREAMS: dict[str, torch.cuda.Stream] = {}
"""One per device of this process: a new stream for each version would reserve memory of its own each time."""
