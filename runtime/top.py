"""What the processes of running jobs do, live, from another terminal of this host: `python -m runtime.top`.

TO-1: it asks the controllers, as a peer that proves the secret of each job, and the kernel; it changes nothing.
TO-2: a job that ends while it is looked at drops out of the view.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from runtime.auth import SECRET_FILE, Trust
from runtime.calls import ActorMesh
from runtime.debug import run_directories, stopped_ranks
from runtime.directory import DIRECTORY, Directory, ProcessStatus
from runtime.errors import TuttiError
from runtime.frames import MAX_MESSAGE_BYTES
from runtime.interface import Interface
from runtime.mesh import CONTROLLER
from runtime.messages import Hello
from runtime.node import Node
from runtime.posting import ActorRef
from runtime.shape import Shape
from runtime.sockets import unix_address

ASK_SECONDS = 5.0
WIDTHS = {"process": 14, "pid": 7, "cpu": 4, "memory": 9, "lag": 7}
"""Columns that every terminal has room for."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Job:
    """A running job, as seen from outside."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ConnectionRefused: its controller doesn't answer.
            FileNotFoundError: it has ended.
        """
        self.folder = folder
        address = unix_address(str(folder / CONTROLLER))
        trust = Trust(secret=(folder / SECRET_FILE).read_bytes())
        self._node = Node("", trust, MAX_MESSAGE_BYTES, known=False)
        self._node.hello = Hello("peer", "top", os.getpid(), 0, "", socket.gethostname())
        ref = ActorRef(address, DIRECTORY, DIRECTORY, 0, "")
        self._directory = ActorMesh(DIRECTORY, Shape({}), [ref], Interface.of(Directory), self._node)
        self._node.peer(address)

    async def status(self) -> list[ProcessStatus]:
        """Raises TuttiError when the controller is gone or does not answer in time."""
        rows: list[ProcessStatus] = await self._directory.status.options(timeout=ASK_SECONDS).call_one()
        return rows

    def close(self) -> None:
        self._node.close()


class View:
    """All jobs, as one table."""

    def __init__(self, only: Path | None) -> None:
        self._only = only
        self._jobs: dict[Path, Job] = {}
        self._cpu: dict[int, tuple[float, float]] = {}
        """By pid: seconds of CPU used, and when that was read."""

    async def table(self) -> Table:
        """What is there now."""
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("process", "pid", "cpu", "memory", "lag", "mailbox", "restarts", "main thread"):
            is_text = name in ("process", "main thread")
            # Where the terminal is narrow, what runs is cut before anything else.
            least = None if name == "main thread" else len(name)
            table.add_column(
                name, no_wrap=True, justify="left" if is_text else "right", min_width=WIDTHS.get(name, least)
            )
        for folder in [self._only] if self._only is not None else run_directories():
            rows = await self._ask(folder)
            if rows is None:
                continue
            table.add_section()
            table.add_row(f"[bold]{folder.name}[/bold]", *[""] * 7)
            stopped = {(s.mesh, s.rank): s for _, s in stopped_ranks([folder])}
            for row in rows:
                place = stopped.get((row.mesh, row.rank))
                table.add_row(*self._cells(row, "" if place is None else f"breakpoint, {place.function}"))
        return table

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()

    async def _ask(self, folder: Path) -> list[ProcessStatus] | None:
        """None for a job that has ended (TO-2)."""
        try:
            job = self._jobs.get(folder) or Job(folder)
            self._jobs[folder] = job
            return await job.status()
        except (TuttiError, FileNotFoundError):
            gone = self._jobs.pop(folder, None)
            if gone is not None:
                gone.close()
            return None

    def _cells(self, row: ProcessStatus, stopped: str) -> list[str]:
        name = f"{row.mesh}/{row.rank}"
        if not row.alive or row.pid is None:
            return [name, "-", "", "", "", "", str(row.restarts), "dead"]
        cpu, memory = self._used(row.pid)
        running = f"{row.running} {row.running_seconds:.0f} s" if row.running else "idle"
        return [
            name,
            str(row.pid),
            cpu,
            f"{memory / 2**20:.0f} MiB",
            f"{row.loop_lag * 1e3:.0f} ms",
            f"{row.mailbox_messages}: {row.mailbox_bytes / 2**20:.1f} MiB" if row.mailbox_messages else "-",
            str(row.restarts),
            stopped or running,
        ]

    def _used(self, pid: int) -> tuple[str, int]:
        """Share of a core since the last look, and resident bytes."""
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used, now = (int(fields[11]) + int(fields[12])) / _TICKS, asyncio.get_running_loop().time()
            before, then = self._cpu.get(pid, (used, now))
            self._cpu[pid] = (used, now)
            share = f"{(used - before) / (now - then):.0%}" if now > then else ""
            return share, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return "", 0


async def run(only: Path | None, interval: float, once: bool) -> None:
    """Show until interrupted, or once."""
    view, console = View(only), Console()
    try:
        if once:
            console.print(await view.table())
            return
        with Live(await view.table(), console=console, auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(interval)
                live.update(await view.table(), refresh=True)
    finally:
        view.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m runtime.top", description="What the processes of running jobs do.")
    parser.add_argument("--run-dir", type=Path, help="of one job; default: all jobs of this user on this host")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default 1)")
    parser.add_argument("--once", action="store_true", help="print once and leave")
    options = parser.parse_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(options.run_dir, options.interval, options.once))
    return 0


if __name__ == "__main__":
    sys.exit(main())
