"""Files of a run that are good at every moment: JSON lines, each of them whole.

Their promises are those of runtime/journal.py: JO-3 (lines beyond a restored step are cut) and JO-7 (what the disk
refuses is told, and the file stays as it was).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import TuttiError

BUFFERED = 256
"""How many trace events or samples wait for a write at most (JO-6)."""


class RunFolderError(TuttiError):
    """A run folder can't be made or written; the text says why and what to change."""


class Lines:
    """A file of JSON lines, appended in whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, lines: bytes) -> None:
        size = os.fstat(self.fd).st_size
        with writing(self.path):
            try:
                write_all(self.fd, lines)
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    data = path.read_bytes()
    return [msgspec.json.decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what the disk refuses (JO-7)."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{path} can't be written: {error.strerror}; give the run another run_dir, or make room there"
        ) from error


def write_all(fd: int, data: bytes, offset: int | None = None) -> None:
    while data:
        written = os.write(fd, data) if offset is None else os.pwrite(fd, data, offset)
        data = data[written:]
        offset = None if offset is None else offset + written


def write_whole(path: Path, text: str) -> None:
    """A new file, with all of the text or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """numpy and torch scalars and arrays, and paths, as JSON knows them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a journal holds numbers and text, not {type(value).__name__}")
