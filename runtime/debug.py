"""Come to ranks that have stopped at a `breakpoint()`, from another terminal of this host.

    python -m runtime.debug                        list them
    python -m runtime.debug attach trainer/1       talk to one; `continue` lets it go on, leaving (Ctrl+D) does not
    python -m runtime.debug send trainer 'p loss'  one command to each stopped rank of a mesh, or to `all`

Jobs are found by their run directories, which only their user can read; the secret in them opens the door.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from runtime.auth import SECRET_FILE, prove
from runtime.breakpoints import PROMPT, SUFFIX, StoppedAt
from runtime.errors import PeerRefused


class Visit:
    """A conversation with a stopped rank."""

    def __init__(self, folder: Path, stopped: StoppedAt) -> None:
        """
        Raises:
            PeerRefused: the rank belongs to another job.
            OSError: it has gone on meanwhile.
        """
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.connect(stopped.address)
            prove(self._sock, (folder / SECRET_FILE).read_bytes(), dialled=True, seconds=10.0)
        except BaseException:
            self._sock.close()
            raise

    def answer(self) -> tuple[str, bool]:
        """What it says up to its next prompt, and whether it still waits there."""
        said = b""
        while not said.endswith(PROMPT.encode()):
            part = self._sock.recv(65536)
            if not part:
                return said.decode(errors="replace"), False
            said += part
        return said.decode(errors="replace"), True

    def say(self, command: str) -> None:
        self._sock.sendall(command.encode() + b"\n")

    def close(self) -> None:
        self._sock.close()


def run_directories() -> list[Path]:
    """Of the jobs of this user on this host."""
    folders = {Path(tempfile.gettempdir()), Path("/tmp")}
    found = [path for folder in folders for path in folder.glob("tutti-*") if (path / SECRET_FILE).is_file()]
    return sorted(path for path in found if path.stat().st_uid == os.getuid())


def stopped_ranks(folders: Sequence[Path]) -> list[tuple[Path, StoppedAt]]:
    """All stopped ranks of these jobs."""
    found = []
    for folder in folders:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                stopped = msgspec.json.decode(path.read_bytes(), type=StoppedAt)
            except FileNotFoundError:  # it has gone on
                continue
            if os.path.exists(f"/proc/{stopped.pid}"):
                found.append((folder, stopped))
    return found


def matching(target: str, ranks: list[tuple[Path, StoppedAt]]) -> list[tuple[Path, StoppedAt]]:
    """Those that a name stands for: `all`, a mesh, or `mesh/rank`."""
    return [(f, s) for f, s in ranks if target in ("all", s.mesh, f"{s.mesh}/{s.rank}")]


def attach(folder: Path, stopped: StoppedAt) -> int:
    """Talk to one rank until it goes on, or until the end of the input."""
    visit = Visit(folder, stopped)
    try:
        while True:
            said, waits = visit.answer()
            print(said, end="", flush=True)
            if not waits:
                print(f"{stopped.mesh}/{stopped.rank} goes on")
                return 0
            line = sys.stdin.readline()
            if not line:
                print(f"\n{stopped.mesh}/{stopped.rank} stays stopped")
                return 0
            visit.say(line.rstrip("\n"))
    finally:
        visit.close()


def send(command: str, ranks: list[tuple[Path, StoppedAt]]) -> int:
    """One command to each; prints their answers."""
    for folder, stopped in ranks:
        visit = Visit(folder, stopped)
        try:
            visit.answer()
            visit.say(command)
            said, waits = visit.answer()
        finally:
            visit.close()
        text = said.removesuffix(PROMPT).rstrip() if waits else "goes on"
        print(f"[{stopped.mesh}/{stopped.rank}] {text}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 when no rank, or more than one to attach to, is meant."""
    parser = argparse.ArgumentParser(prog="python -m runtime.debug", description="Come to ranks at a breakpoint().")
    parser.add_argument("--run-dir", type=Path, help="of one job; default: all jobs of this user on this host")
    actions = parser.add_subparsers(dest="action")
    actions.add_parser("list", help="list stopped ranks (the default)")
    one = actions.add_parser("attach", help="talk to a stopped rank")
    one.add_argument("target", nargs="?", default="all", help="mesh or mesh/rank; may be left out when one is stopped")
    each = actions.add_parser("send", help="send a command of pdb to stopped ranks")
    each.add_argument("target", help="mesh, mesh/rank or all")
    each.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    ranks = stopped_ranks([options.run_dir] if options.run_dir else run_directories())
    if options.action in (None, "list"):
        print("\n".join(f"{s.describe()}   pid {s.pid}, {folder}" for folder, s in ranks) or "no rank is stopped")
        return 0
    chosen = matching(options.target, ranks)
    if not chosen or (options.action == "attach" and len(chosen) > 1):
        known = "\n".join(s.describe() for _, s in chosen or ranks) or "no rank is stopped"
        print(f"{options.target}: {'several ranks, say which' if chosen else 'no such stopped rank'}\n{known}")
        return 1
    try:
        return attach(*chosen[0]) if options.action == "attach" else send(" ".join(options.command), chosen)
    except (PeerRefused, ConnectionError, FileNotFoundError) as error:
        print(f"{options.target}: {error}; it may have gone on", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
