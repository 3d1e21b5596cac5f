"""The run folder: what a run leaves behind for people and programs to read.

    runs/<name>/job.toml        the resolved settings            runs/<name>/metrics.jsonl   one flat object a step
    runs/<name>/trace.json      timeline for Perfetto            runs/<name>/samples.jsonl   a few samples a step

JO-1: a folder is never shared and never overwritten: a name that exists gets the next free suffix, and a folder that a
      living journal holds can't be opened again.
JO-2: a line of metrics is on its way to disk when `metrics` returns, whole: a killed run loses no finished step.
JO-3: steps go up: one line each. On resume, lines beyond the restored step are cut, and a torn last line with them.
JO-4: trace.json is valid JSON at every moment, also after a SIGKILL: each write replaces the closing bracket.
JO-5: spans that overlap on one track without nesting get lanes of their own: a timeline shows them side by side.
JO-6: memory is bounded: events and samples are written out when BUFFERED of them wait, and at each step.
JO-7: what the disk refuses (full, read-only, no permission) is a `RunFolderError` that says so; the files are as they
      were before the write, whole.
JO-8: a line that must wait (`hold`) lies in held.jsonl meanwhile: after a kill, a resume puts it where it belongs.

Assumed: one thread uses a journal. Times are epoch seconds, as `time.time` gives them on any process of the host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from runtime.errors import TuttiError

BUFFERED = 256
"""How many trace events or samples wait for a write at most."""

REMEMBERED = 256
"""How many finished spans of a lane are compared with a new one (JO-5)."""

HELD = "held.jsonl"

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks says."""

TRACE_TAIL = b"\n]\n"


class RunFolderError(TuttiError):
    """A run folder can't be made or written; the text says why and what to change."""


class RunFolderInUse(RunFolderError):
    """Another living process writes to this run folder."""


class Journal:
    """Writes one run folder. Made by `create` or `resume`; also a context manager that closes it.

    Args of both:
        samples_per_step: how many samples of one step are kept; the others are passed over.
    """

    def __init__(self, folder: Path, *, samples_per_step: int = 8) -> None:
        self.folder = folder
        self.samples_per_step = samples_per_step
        self._metrics = _Lines(folder / "metrics.jsonl")
        try:
            fcntl.flock(self._metrics.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._metrics.close()
            raise RunFolderInUse(
                f"{folder} is written by a run that is still alive; stop it first, or give this run another name"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:  # some shared file systems have none: then nobody is kept out
                raise
        self._held: _Lines | None = None
        self._samples = _Lines(folder / "samples.jsonl")
        self._trace = _Trace(folder / "trace.json")
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self._sample_lines: list[bytes] = []
        self._samples_of: tuple[int, int] = (-1, 0)
        self._last_step: int | None = None
        self._elapsed_before = 0.0
        self._started = time.monotonic()
        self._closed = False

    @classmethod
    def create(cls, root: str | Path, name: str, *, samples_per_step: int = 8) -> Self:
        """Make `root/name`, or `root/name-2`, `-3`, ... when it exists (JO-1).

        Raises:
            ValueError: the name is empty or holds a path separator.
            RunFolderError: the folder can't be made.
        """
        if not name or name in (".", "..") or "/" in name:
            raise ValueError(f"run name {name!r}: expected a plain folder name, without '/'")
        root = Path(root)
        with _writing(root):
            root.mkdir(parents=True, exist_ok=True)
        suffix = 1
        while True:
            folder = root / (name if suffix == 1 else f"{name}-{suffix}")
            if not folder.exists():
                with _writing(folder), contextlib.suppress(FileExistsError):  # another run may be quicker
                    folder.mkdir()
                    break
            suffix += 1
        return cls(folder, samples_per_step=samples_per_step)

    @classmethod
    def resume(cls, folder: str | Path, step: int, *, samples_per_step: int = 8) -> Self:
        """Go on in an existing folder after `step`, the step that was restored (JO-3).

        Raises:
            FileNotFoundError: there is no such folder.
            RunFolderInUse: a living process writes to it.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such run folder to resume")
        journal = cls(folder, samples_per_step=samples_per_step)
        kept = journal._metrics.cut_after(step)
        journal._samples.cut_after(step)
        kept += journal._take_held(after=kept[-1]["step"] if kept else -1, until=step)
        if kept:
            journal._last_step = kept[-1]["step"]
            journal._elapsed_before = kept[-1]["elapsed"]
        return journal

    # --- the four files -----------------------------------------------------------------------------------------------

    def write_job(self, text: str) -> Path:
        """Keep the resolved settings as job.toml. A resumed run that runs by other settings than before adds
        job.2.toml, and so on (JO-1); `latest_job` finds the last."""
        number, path = 1, latest_job(self.folder)
        if path is not None:
            if tomllib.loads(path.read_text(encoding="utf-8")) == tomllib.loads(text):  # whatever the comments say
                return path
            number = _job_number(path) + 1
        path = self.folder / ("job.toml" if number == 1 else f"job.{number}.toml")
        with _writing(path):
            path.write_text(text, encoding="utf-8")
        return path

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the line of a step: `step`, `time` (epoch), `elapsed` (seconds the run has run, pauses between a stop
        and a resume not counted), then `values`: plain numbers and text. Numbers that aren't finite become null.

        Raises:
            ValueError: the step has its line already, or a later one has.
            TypeError: a value is a table or list.
        """
        self._check_open()
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} after those of step {self._last_step}: steps go up, one line each"
            )
        for key, value in values.items():
            if isinstance(value, (Mapping, list, tuple)):
                raise TypeError(f"metric {key!r} is a {type(value).__name__}; a line of metrics is flat")
        row = self._row(step, values)
        self._metrics.write(_encode(row) + b"\n")
        self._last_step = step
        self.flush()
        for follower in self._followers:
            follower(row)

    def hold(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the line of a step that waits for something; `metrics` writes it, or after a kill the next resume."""
        self._check_open()
        if self._held is None:
            self._held = _Lines(self.folder / HELD)
        self._held.write(_encode(self._row(step, values)) + b"\n")

    def release(self) -> None:
        """Nothing waits any more: all that was held has its line."""
        if self._held is not None:
            self._held.close()
            self._held = None
            (self.folder / HELD).unlink(missing_ok=True)

    def _take_held(self, *, after: int, until: int) -> list[dict[str, Any]]:
        rows = [row for row in _read_lines(self.folder / HELD) if after < row["step"] <= until]
        for row in rows:
            self._metrics.write(_encode(row) + b"\n")
        (self.folder / HELD).unlink(missing_ok=True)
        return rows

    def _row(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        elapsed = self._elapsed_before + time.monotonic() - self._started
        return {"step": step, "time": round(time.time(), 3), "elapsed": round(elapsed, 3), **values}

    def follow(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """Call `follower` with each line of metrics from now on, once it is written. It must not wait."""
        self._followers.append(follower)

    def samples(self, step: int, rows: Iterable[Any]) -> None:
        """Keep the first `samples_per_step` samples of a step; a row is a mapping or a Struct."""
        self._check_open()
        if self._samples_of[0] != step:
            self._samples_of = (step, 0)
        for row in rows:
            if self._samples_of[1] >= self.samples_per_step:
                break
            self._samples_of = (step, self._samples_of[1] + 1)
            fields = row if isinstance(row, Mapping) else msgspec.structs.asdict(row)
            self._sample_lines.append(_encode({"step": step, **fields}) + b"\n")
        if len(self._sample_lines) >= BUFFERED:
            self._flush_samples()

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """The time that the block takes, as a bar on `track` ("trainer 0": thread 0 of process trainer)."""
        start = time.time()
        try:
            yield
        except BaseException as error:
            args = {**args, "error": type(error).__name__}
            raise
        finally:
            self.add_span(track, name, start, time.time(), **args)

    def add_span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """A bar from `start` to `end` (epoch seconds), measured elsewhere, such as on a rank."""
        self._check_open()
        self._trace.span(track, name, start, end, args)

    def instant(self, track: str, name: str, **args: Any) -> None:
        """A moment on a track: a commit, a death, a checkpoint."""
        self._check_open()
        self._trace.instant(track, name, time.time(), args)

    def counter(self, name: str, value: float) -> None:
        """A number over time, drawn as a curve above the tracks: the length of a queue, the age of samples."""
        self._check_open()
        self._trace.counter(name, time.time(), value)

    def flush(self) -> None:
        """Hand everything that waits to the operating system."""
        self._flush_samples()
        self._trace.flush()

    def close(self) -> None:
        """Flush and let go of the folder. Closing twice is fine; writing afterwards raises."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        finally:
            self._samples.close()
            self._trace.close()
            if self._held is not None:
                self._held.close()
            self._metrics.close()  # the lock goes with it, so it is the last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # What ended the run counts: a full disk, the usual reason, would be told a second time.
        with contextlib.suppress(RunFolderError) if kind else contextlib.nullcontext():
            self.close()

    def _flush_samples(self) -> None:
        if self._sample_lines:
            self._samples.write(b"".join(self._sample_lines))
            self._sample_lines.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the journal of {self.folder} is closed")


# --- files that are good at every moment ------------------------------------------------------------------------------


class _Lines:
    """A file of JSON lines, appended in whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _writing(path):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, lines: bytes) -> None:
        size = os.fstat(self.fd).st_size
        with _writing(self.path):
            try:
                _write_all(self.fd, lines)
            except OSError:
                os.ftruncate(self.fd, size)  # JO-7
                raise

    def cut_after(self, step: int) -> list[dict[str, Any]]:
        """Drop the lines of later steps, and what follows the last whole line; give the rows that stay."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        rows = [(line, msgspec.json.decode(line)) for line in whole]
        kept = [(line, row) for line, row in rows if row["step"] <= step]
        # Lines are in the order of steps, so that what stays is a beginning of the file: shortening it is all.
        os.ftruncate(self.fd, sum(len(line) for line, _ in kept))
        return [row for _, row in kept]

    def close(self) -> None:
        os.close(self.fd)


class _Trace:
    """Chrome trace events in the JSON array format."""

    def __init__(self, path: Path) -> None:
        self.waiting: list[bytes] = []
        self.processes: dict[str, int] = {}
        self.lanes: dict[str, list[_Lane]] = {}
        self.threads = 0
        self.path = path
        if path.exists() and not self.take_over(path):
            path.rename(path.with_suffix(".damaged.json"))
        with _writing(path):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.end = os.fstat(self.fd).st_size - len(TRACE_TAIL)
        """Where the closing bracket stands, and the next event goes."""
        self.empty = self.end <= 1
        if self.empty:
            self.end = 1
            with _writing(path):
                _write_all(self.fd, b"[" + TRACE_TAIL, 0)

    def take_over(self, path: Path) -> bool:
        """Go on with the tracks of an earlier part of the run; False when the file does not end as we end it."""
        with path.open("rb") as file:
            line = b""
            for line in file:
                if b'"thread_name"' in line:
                    event = msgspec.json.decode(line.rstrip(b",\n"))
                    track = re.sub(r" \(\d+\)$", "", event["args"]["name"])
                    self.processes[_role(track)] = event["pid"]
                    self.lanes.setdefault(track, []).append(_Lane(event["pid"], event["tid"]))
                    self.threads = max(self.threads, event["tid"])
        return line == b"]\n"

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
        self.waiting.append(_encode(event))
        if len(self.waiting) >= BUFFERED:
            self.flush()

    def flush(self) -> None:
        """One write over the old closing bracket, with a new one at its end (JO-4)."""
        if not self.waiting:
            return
        body = (b"\n" if self.empty else b",\n") + b",\n".join(self.waiting)
        with _writing(self.path):
            try:
                _write_all(self.fd, body + TRACE_TAIL, self.end)
            except OSError:
                os.ftruncate(self.fd, self.end)
                _write_all(self.fd, TRACE_TAIL, self.end)  # JO-7: there was room for it before
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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Tell what the disk refuses (JO-7)."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{path} can't be written: {error.strerror}; give the run another run_dir, or make room there"
        ) from error


def _write_all(fd: int, data: bytes, offset: int | None = None) -> None:
    while data:
        written = os.write(fd, data) if offset is None else os.pwrite(fd, data, offset)
        data = data[written:]
        offset = None if offset is None else offset + written


def _role(track: str) -> str:
    """`trainer 0`, `trainer[0]` and `trainer-0` are threads of the process `trainer`."""
    return re.sub(r"[\s\[:#-]*\d+\]?$", "", track) or track


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """numpy and torch scalars and arrays, and paths, as JSON knows them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a journal holds numbers and text, not {type(value).__name__}")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, oldest first; a torn last line is left out, a missing file has no rows."""
    return _read_lines(Path(folder) / "metrics.jsonl")


def read_samples(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of samples.jsonl, likewise."""
    return _read_lines(Path(folder) / "samples.jsonl")


def read_trace(folder: str | Path) -> list[dict[str, Any]]:
    """The events of trace.json."""
    events: list[dict[str, Any]] = msgspec.json.decode((Path(folder) / "trace.json").read_bytes())
    return events


def latest_job(folder: str | Path) -> Path | None:
    """The settings that a run ran by the last time it was started; None when it never was."""
    return max((path for path in Path(folder).glob("job*.toml") if _job_number(path)), key=_job_number, default=None)


def _job_number(path: Path) -> int:
    match = re.fullmatch(r"job(?:\.(\d+))?\.toml", path.name)
    return int(match[1] or 1) if match else 0


def latest_run(root: str | Path, name: str) -> Path | None:
    """The newest folder that `create(root, name)` made."""
    return next(reversed(runs_of(root, name)), None)


def runs_of(root: str | Path, name: str) -> list[Path]:
    """The folders that `create(root, name)` made, oldest first: in the order of their suffixes."""
    found: list[tuple[int, Path]] = []
    for folder in Path(root).glob(f"{name}*"):
        match = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", folder.name)
        if match and folder.is_dir():
            found.append((int(match[1] or 1), folder))
    return [folder for _, folder in sorted(found)]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    data = path.read_bytes()
    return [msgspec.json.decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
