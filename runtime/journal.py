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
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from runtime.run_files import BUFFERED, Lines, RunFolderError, encode, read_lines, write_whole, writing
from runtime.timeline import Trace

HELD = "held.jsonl"

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks says."""


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
        self._metrics = Lines(folder / "metrics.jsonl")
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
        self._held: Lines | None = None
        self._samples = Lines(folder / "samples.jsonl")
        self._trace = Trace(folder / "trace.json")
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self._untold: list[dict[str, Any]] = []
        """Rows that a killed run had held: nobody who followed it has seen them."""
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
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
        suffix = 1
        while True:
            folder = root / (name if suffix == 1 else f"{name}-{suffix}")
            if not folder.exists():
                with writing(folder), contextlib.suppress(FileExistsError):  # another run may be quicker
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
        journal._untold = journal._take_held(after=kept[-1]["step"] if kept else -1, until=step)
        kept += journal._untold
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
        with writing(path):
            write_whole(path, text)
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
        self._metrics.write(encode(row) + b"\n")
        self._last_step = step
        self.flush()
        for follower in self._followers:
            follower(row)

    def hold(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the line of a step that waits for something; `metrics` writes it, or after a kill the next resume."""
        self._check_open()
        if self._held is None:
            self._held = Lines(self.folder / HELD)
        self._held.write(encode(self._row(step, values)) + b"\n")

    def release(self) -> None:
        """Nothing waits any more: all that was held has its line."""
        if self._held is not None:
            self._held.close()
            self._held = None
            (self.folder / HELD).unlink(missing_ok=True)

    def _take_held(self, *, after: int, until: int) -> list[dict[str, Any]]:
        rows = [row for row in read_lines(self.folder / HELD) if after < row["step"] <= until]
        for row in rows:
            self._metrics.write(encode(row) + b"\n")
        (self.folder / HELD).unlink(missing_ok=True)
        return rows

    def _row(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        elapsed = self._elapsed_before + time.monotonic() - self._started
        return {"step": step, "time": round(time.time(), 3), "elapsed": round(elapsed, 3), **values}

    def follow(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """Call `follower` with each line of metrics from now on, once it is written, and first with those that waited
        when the run was killed (JO-8). It must not wait."""
        self._followers.append(follower)
        for row in self._untold:
            follower(row)

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
            self._sample_lines.append(encode({"step": step, **fields}) + b"\n")
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


# --- reading ----------------------------------------------------------------------------------------------------------


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, oldest first; a torn last line is left out, a missing file has no rows."""
    return read_lines(Path(folder) / "metrics.jsonl")


def read_samples(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of samples.jsonl, likewise."""
    return read_lines(Path(folder) / "samples.jsonl")


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
    for folder in Path(root).iterdir() if Path(root).is_dir() else ():
        match = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", folder.name)
        if match and folder.is_dir():
            found.append((int(match[1] or 1), folder))
    return [folder for _, folder in sorted(found)]
