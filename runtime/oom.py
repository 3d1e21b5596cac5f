"""Evidence that a process died for lack of memory: counters of the kernel, before and after.

OO-1: the counters are those of the control group that the process was in (version 1 or 2), of its parents as far as
      they are visible, and of the machine; the narrowest that moved is told.
OO-2: what can't be read counts as no evidence, never as an error.
"""

from __future__ import annotations

import contextlib
from pathlib import PurePosixPath

_GROUPS = PurePosixPath("/sys/fs/cgroup")


class OomWatch:
    """Remembers the counters at the start of a process."""

    def __init__(self, pid: int) -> None:
        self._sources = [*_group_sources(pid), ("/proc/vmstat", "this machine")]
        self._before = {path: _kills(path) for path, _ in self._sources}

    def evidence(self) -> str:
        """What the kernel has counted since; empty when nothing."""
        for path, place in self._sources:
            kills = _kills(path) - self._before[path]
            if kills > 0:
                return f"the kernel killed {kills} process(es) of {place} for lack of memory meanwhile{_limit(path)}"
        return ""


def _group_sources(pid: int) -> list[tuple[str, str]]:
    """(file, whose) from the control group of the process outwards."""
    found: list[tuple[str, str]] = []
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                root, name = _GROUPS, "memory.events"
            elif "memory" in controllers.split(","):
                root, name = _GROUPS / "memory", "memory.oom_control"
            else:
                continue
            own = PurePosixPath(path.lstrip("/"))
            for folder in (own, *own.parents):
                place = "its control group" if folder == own else f"the control group /{folder}"
                found.append((str(root / folder / name), place))
    return found


def _kills(path: str) -> int:
    """The `oom_kill` counter of a file of the kernel; 0 when it can't be read."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _limit(path: str) -> str:
    """The limit of a control group, as the end of a sentence."""
    folder = PurePosixPath(path).parent
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(folder / name) as file:
            limit = int(file.read())
            if limit < 2**50:
                return f" (limit {limit / 2**20:.0f} MiB)"
    return ""
