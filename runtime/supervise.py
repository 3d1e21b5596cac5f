"""Who learns of a failure that no call can report.

    actor or process fails -> owner of its mesh (`__supervise__`) -> owner of the host -> whoever watches -> root

SU-1: a failure goes up until somebody handles it: a `__supervise__` that returns true, a waiting `watch()`, or a call
      that raised it.
SU-2: what nobody handled is raised when the host is left (first failure, the others as notes), so that the job can't
      end well.
SU-3: an error raised by a `__supervise__` is a failure of its own, one level higher.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Protocol

import msgspec

from runtime.errors import ActorError, Death, ProcessDied


class Failure(msgspec.Struct, frozen=True):
    """What a `__supervise__` is told."""

    mesh: str
    """Name of the mesh of processes."""
    error: ActorError
    """A ProcessDied, or what a background task or a broadcast endpoint raised."""


class Owner(Protocol):
    """Anything with this hook can own a mesh."""

    def __supervise__(self, failure: Failure) -> Any:
        """True (or an awaitable of True): handled. Anything else sends the failure up."""


class _Entry:
    __slots__ = ("failure", "handled")

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        self.handled = False


class Supervisor:
    """Takes the failures of a mesh, or of a host (which has no parent)."""

    def __init__(self, owner: Owner | None = None, parent: Supervisor | None = None) -> None:
        self._owner = owner
        self._parent = parent
        self._entries: list[_Entry] = []
        self._undecided: list[_Entry] = []
        """The own owner is being asked."""
        self._watchers: set[asyncio.Future[None]] = set()

    async def report(self, failure: Failure, *, handled: bool = False, asked: bool = False) -> None:
        """Take note of a failure and offer it to the owners (SU-1).

        Args:
            handled: a call has raised it already.
            asked: the own owner knows of it and did not handle it.
        """
        entry = _Entry(failure)
        entry.handled = handled
        await self._take(entry, asked)

    async def ask(self, failure: Failure) -> bool:
        """Tell the own owner of a failure; whether it handles it."""
        if self._owner is None:
            return False
        try:
            answer = self._owner.__supervise__(failure)
            return bool(await answer if inspect.isawaitable(answer) else answer)
        except Exception as error:  # SU-3: the hook is user code
            failure.error.add_note(f"__supervise__ of its owner raised {type(error).__name__}: {error}")
            return False

    def seen(self, death: Death | None) -> None:
        """A call has raised this death: its caller knows."""
        for entry in (*self._entries, *self._undecided):
            error = entry.failure.error
            if isinstance(error, ProcessDied) and error.death is death:
                entry.handled = True

    async def watch(self) -> None:
        """Wait for the first failure that nobody has handled and raise it, also one that came before.

        Raises:
            ProcessDied, ActorError: what happened.
        """
        while (entry := next((e for e in self._entries if not e.handled), None)) is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.add(future)
            try:
                await future
            finally:
                self._watchers.discard(future)
        entry.handled = True
        raise entry.failure.error

    def unhandled(self) -> list[ActorError]:
        """Failures that nobody has handled (SU-2)."""
        return [entry.failure.error for entry in self._entries if not entry.handled]

    async def _take(self, entry: _Entry, asked: bool = False) -> None:
        if not entry.handled and not asked:
            self._undecided.append(entry)
            try:
                if await self.ask(entry.failure):
                    entry.handled = True  # or `seen` has said so meanwhile
            finally:
                self._undecided.remove(entry)
        if entry.handled:
            return  # it goes no further up (SU-1)
        self._entries = [*(one for one in self._entries if not one.handled), entry]  # a host may outlive many meshes
        for future in self._watchers:
            if not future.done():
                future.set_result(None)
        if self._parent is not None:
            await self._parent._take(entry)
