"""`python -m benchmarks [name...] [--json-dir DIR] [--list]`: run benchmarks and print their tables."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from keyword import iskeyword
from pathlib import Path

import msgspec

from benchmarks.table import Row, to_markdown


def available() -> list[str]:
    """The benchmarks of this package: its modules with a `run`, found without importing any. A module whose name would
    be a keyword of Python has a line behind it (`async_` is benchmark async)."""
    folder = Path(__file__).parent
    modules = (path.stem for path in folder.glob("[!_]*.py") if "\ndef run() " in path.read_text(encoding="utf-8"))
    return sorted(name.rstrip("_") for name in modules)


def module_of(name: str) -> str:
    """The module of a benchmark."""
    return f"{name}_" if iskeyword(name) else name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, all of it by default. Returns the exit code: 2 for a name that does not exist."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks and print their tables.")
    parser.add_argument("names", nargs="*", metavar="name", help="which ones; all when left out")
    parser.add_argument("--json-dir", type=Path, help="also write NAME.json into this folder")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args(arguments)
    known = available()
    if options.list:
        print("\n".join(known))
        return 0
    for name in options.names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            print(f"benchmark {name!r} does not exist{hint} There are: {', '.join(known) or 'none'}", file=sys.stderr)
            return 2
    for name in options.names or known:
        module = importlib.import_module(f"benchmarks.{module_of(name)}")
        started = time.monotonic()
        rows: list[Row] = module.run()
        seconds = time.monotonic() - started
        print(f"\n## {module.TITLE}\n\n{to_markdown(rows)}\n\n{name}, {seconds:.0f} s, {machine()}", flush=True)
        if options.json_dir:
            options.json_dir.mkdir(parents=True, exist_ok=True)
            result = {
                "name": name,
                "title": module.TITLE,
                "date": datetime.now(UTC).date().isoformat(),
                "machine": machine(),
                "seconds": seconds,
                "rows": [row.as_dict() for row in rows],
            }
            text = msgspec.json.format(msgspec.json.encode(result), indent=2)
            (options.json_dir / f"{name}.json").write_bytes(text + b"\n")
    return 0


def machine() -> str:
    """Where this ran, as far as it matters to a number."""
    return f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
