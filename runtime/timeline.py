"""The timeline of a run: Chrome trace events in the JSON array format, for Perfetto.

Its promises are those of runtime/journal.py: JO-4 (valid JSON at every moment), JO-5 (spans that overlap get lanes of
their own), JO-6 (bounded memory) and JO-7 (what the disk refuses).
"""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from runtime.run_files import BUFFERED, encode, write_all, writing

REMEMBERED = 256
"""How many finished spans of a lane are compared with a new one (JO-5)."""

TAIL = b"\n]\n"


class Trace:
    """Writes trace.json."""

    def __init__(self, path: Path) -> None:
        self.waiting: list[bytes] = []
        self.processes: dict[str, int] = {}
        self.lanes: dict[str, list[_Lane]] = {}
        self.threads = 0
        self.path = path
        if path.exists() and not self.take_over(path):
            path.rename(path.with_suffix(".damaged.json"))
        with writing(path):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.end = os.fstat(self.fd).st_size - len(TAIL)
        """Where the closing bracket stands, and the next event goes."""
        self.empty = self.end <= 1
        if self.empty:
            self.end = 1
            with writing(path):
                write_all(self.fd, b"[" + TAIL, 0)

    def take_over(self, path: Path) -> bool:
        """Go on with the tracks of an earlier part of the run; False when the file does not end as we end it."""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(TAIL)))
            if file.read() != TAIL:
                return False
            file.seek(0)
            for line in file:
                if b'"thread_name"' in line:
                    event = msgspec.json.decode(line.rstrip(b",\n"))
                    track = re.sub(r" \(\d+\)$", "", event["args"]["name"])
                    self.processes[_role(track)] = event["pid"]
                    self.lanes.setdefault(track, []).append(_Lane(event["pid"], event["tid"]))
                    self.threads = max(self.threads, event["tid"])
        return True

    def span(self, track: str, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        lanes = self.lanes.setdefault(track, [])
        lane = next((lane for lane in lanes if lane.has_room(start)), None)
        if lane is None:
            lane = self.new_lane(track)
        lane.taken.append((start, end))
        timing = {"ts": _micros(start), "dur": max(0, _micros(end) - _micros(start))}
        self.add({"ph": "X", "name": name, "pid": lane.pid, "tid": lane.tid, **timing, "args": args})

    def instant(self, track: str, name: str, at: float, args: dict[str, Any]) -> None:
        lanes = self.lanes.get(track) or [self.new_lane(track)]
        place = {"pid": lanes[0].pid, "tid": lanes[0].tid, "ts": _micros(at)}
        self.add({"ph": "i", "s": "t", "name": name, **place, "args": args})

    def counter(self, name: str, at: float, value: float) -> None:
        self.add({"ph": "C", "name": name, "pid": 0, "ts": _micros(at), "args": {"value": value}})

    def new_lane(self, track: str) -> _Lane:
        role = _role(track)
        if role not in self.processes:
            pid = self.processes[role] = len(self.processes) + 1
            self.add({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": role}})
            self.add({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        self.threads += 1
        lane = _Lane(self.processes[role], self.threads)
        lanes = self.lanes.setdefault(track, [])
        lanes.append(lane)
        title = track if len(lanes) == 1 else f"{track} ({len(lanes)})"
        self.add({"ph": "M", "name": "thread_name", "pid": lane.pid, "tid": lane.tid, "args": {"name": title}})
        return lane

    def add(self, event: dict[str, Any]) -> None:
        self.waiting.append(encode(event))
        if len(self.waiting) >= BUFFERED:
            self.flush()

    def flush(self) -> None:
        """One write over the old closing bracket, with a new one at its end (JO-4)."""
        if not self.waiting:
            return
        body = (b"\n" if self.empty else b",\n") + b",\n".join(self.waiting)
        with writing(self.path):
            try:
                write_all(self.fd, body + TAIL, self.end)
            except OSError:
                os.ftruncate(self.fd, self.end)
                write_all(self.fd, TAIL, self.end)  # JO-7: there was room for it before
                raise
        self.end += len(body)
        self.empty = False
        self.waiting.clear()

    def close(self) -> None:
        os.close(self.fd)


class _Lane:
    """A row of a track, on which bars follow or contain each other."""

    def __init__(self, pid: int, tid: int) -> None:
        self.pid, self.tid = pid, tid
        self.taken: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def has_room(self, start: float) -> bool:
        """Bars come in the order of their ends; so one that reaches past `start` must lie within the new one."""
        return all(begun >= start for begun, ended in self.taken if ended > start)


def _role(track: str) -> str:
    """`trainer 0`, `trainer[0]` and `trainer-0` are threads of the process `trainer`."""
    return re.sub(r"[\s\[:#-]*\d+\]?$", "", track) or track


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
