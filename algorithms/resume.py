"""Checkpoints of a whole run: what the page saves between two steps, and how a run goes on from there.

RS-1: a checkpoint holds the trainer (weights, optimizer, schedule, RNG, version), the admission book, the groups that
      were finished and wait for training, and the position of the prompt stream, all of one moment between two steps.
RS-2: only complete checkpoints are seen (`roles.checkpoint`); an interrupted write leaves the one before.
RS-3: a resumed run trains the saved groups as they are, and issues what was in flight again, in its old place and with
      its old seeds. Those groups are sampled anew from the restored weights, where the uninterrupted run would have
      gone on with tokens of older weights: the same prompts in the same order, not the same tokens.
RS-4: with `exact`, the page lets everything in flight finish before it saves. Then nothing is sampled anew, and with an
      engine whose times repeat the resumed run is the uninterrupted one bit for bit. With staleness 0 that holds
      always: what is in flight between two steps is sampled from the very weights that are saved.
RS-5: `begin` returns when everything of its moment is in memory of its own or on disk; the folder appears in `settle`
      or `finish`, when the ranks have written theirs. One checkpoint is under way at a time; the next waits for it. A
      run that fails meanwhile still waits for it, `RESCUE` seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from algorithms.admission import Admission, AdmissionState
from algorithms.advisors import Advisors
from algorithms.groups import pack_groups, unpack_groups
from roles import checkpoint
from roles.types import Prompt
from runtime.errors import TuttiError

__all__ = ["Checkpoints", "RunState"]

RESCUE = 120.0
"""Seconds that a failed run waits for the checkpoint under way: ranks may be stuck."""

GROUPS = "groups.msgpack"
"""The finished groups, in the order of the book."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's part of a checkpoint."""

    step: int
    """Steps done; the next one is this."""
    admission: AdmissionState
    prompts: dict[str, Any]


class Saves(Protocol):
    """What is needed of `roles.trainer.Trainer`."""

    async def begin_save(self, path: str | Path) -> None: ...

    async def save_ended(self) -> bool: ...

    async def finish_save(self) -> None: ...

    async def load(self, path: str | Path) -> None: ...


class Stream(Protocol):
    """What is needed of `roles.prompts.PromptSource`."""

    def at(self, position: int) -> Prompt: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(kw_only=True)
class Checkpoints:
    """Where a run saves, how often, and what it saves."""

    run: Path
    every: int
    keep: int
    trainer: Saves
    admission: Admission
    prompts: Stream
    background: bool = True
    """Whether training goes on while ranks write (RS-5)."""
    exact: bool = False
    """RS-4."""
    advisors: Advisors | None = None
    _under_way: contextlib.ExitStack | None = field(default=None, init=False)
    """Closing it makes the folder appear."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return self.every > 0 and step % self.every == 0

    async def save(self, step: int) -> Path:
        """Write the checkpoint of `step` and wait for it."""
        await self.begin(step)
        await self.finish()
        return checkpoint.step_folder(self.run, step)

    async def begin(self, step: int) -> None:
        """Start to write the checkpoint of `step` unless it is there. Between two steps, slots released (RS-1)."""
        await self.finish()
        path = checkpoint.step_folder(self.run, step)
        if checkpoint.is_complete(path):
            return
        with _disk(path), contextlib.ExitStack() as stack:
            if path.exists():  # what was left of it by a copy or a disk that lost files; the run went on from before it
                shutil.rmtree(path)
            writing = stack.enter_context(checkpoint.folder(path))
            await self.trainer.begin_save(writing / "trainer")
            if self.advisors is not None:
                await self.advisors.begin_save(writing)
            state = RunState(step=step, admission=self.admission.state(), prompts=self.prompts.state())
            checkpoint.write_state(writing, state)
            (writing / GROUPS).write_bytes(pack_groups(self.admission.buffered()))
            self._under_way = stack.pop_all()
        if not self.background:
            await self.finish()

    async def settle(self) -> None:
        """Let the checkpoint under way appear if all of it is written; else it goes on being written."""
        if self._under_way is None or not await self.trainer.save_ended():
            return
        if self.advisors is None or await self.advisors.save_ended():
            await self.finish()

    async def finish(self) -> None:
        """Wait for the checkpoint under way, if any. Raises what went wrong with it: then it never appears (RS-2)."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        with _disk(self.run / "checkpoints"):
            with under_way:
                await self.trainer.finish_save()
                if self.advisors is not None:
                    await self.advisors.finish_save()
            checkpoint.prune(self.run, self.keep)

    async def rescue(self) -> None:
        """After a failure: let the checkpoint under way appear if the ranks can still write it."""
        with contextlib.suppress(TuttiError, OSError):
            async with asyncio.timeout(RESCUE):
                await self.finish()

    async def restore(self, path: Path) -> int:
        """Bring trainer, book and prompt stream to where `path` was saved; returns the steps done.

        Raises:
            CheckpointError: it is incomplete, of another format, or of a prompt stream with other settings.
        """
        state: RunState = checkpoint.read_state(path, RunState)
        await self.trainer.load(path / "trainer")
        if self.advisors is not None:
            await self.advisors.load(path)
        try:
            self.prompts.restore(state.prompts)
        except ValueError as error:
            raise checkpoint.CheckpointError(str(error)) from error
        try:
            groups = unpack_groups((path / GROUPS).read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise checkpoint.CheckpointError(f"checkpoint {path / GROUPS}: {error}; resume from another one") from error
        self.admission.restore(state.admission, self.prompts.at, groups, steps=state.step)
        return state.step


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Tell what the disk refuses the controller; ranks tell it themselves."""
    try:
        yield
    except TuttiError:
        raise
    except OSError as error:
        raise checkpoint.CheckpointError(
            f"checkpoint {path} can't be written: {error.strerror or error}; make room, or choose another run_dir"
        ) from error
