"""Checkpoints of a whole run: what the page saves between two steps, and how a run goes on from there.

RS-1: a checkpoint holds the trainer (weights, optimizer, schedule, RNG, version), the admission book (prompts that were
      issued and not trained) and the position of the prompt stream, all of one moment between two steps (A5).
RS-2: only complete checkpoints are seen (`roles.checkpoint`); an interrupted write leaves the one before.
RS-3: a resumed run issues first what was outstanding, in the same order and with the same seeds, then goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from algorithms.admission import Admission, AdmissionState
from roles import checkpoint
from roles.prompts import PromptSource
from roles.trainer import Trainer

__all__ = ["Checkpoints", "RunState"]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's part of a checkpoint."""

    step: int
    """Steps done; the next one is this."""
    admission: AdmissionState
    prompts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where a run saves, how often, and what it saves."""

    run: Path
    every: int
    keep: int
    trainer: Trainer
    admission: Admission
    prompts: PromptSource

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps."""
        return self.every > 0 and step % self.every == 0

    async def save(self, step: int) -> Path:
        """Write the checkpoint of `step` unless it is there; call it between two steps, slots released (RS-1)."""
        path = checkpoint.step_folder(self.run, step)
        if checkpoint.is_complete(path):
            return path
        with checkpoint.folder(path) as writing:
            await self.trainer.save(writing / "trainer")
            state = RunState(step=step, admission=self.admission.state(), prompts=self.prompts.state())
            checkpoint.write_state(writing, state)
        checkpoint.prune(self.run, self.keep)
        return path

    async def restore(self, path: Path) -> int:
        """Bring trainer, book and prompt stream to where `path` was saved; returns the steps done.

        Raises:
            CheckpointError: it is incomplete or of another format.
            ValueError: the prompt stream has other settings than the one that was saved.
        """
        state: RunState = checkpoint.read_state(path, RunState)
        await self.trainer.load(path / "trainer")
        self.prompts.restore(state.prompts)
        self.admission.restore(state.admission, self.prompts.at)
        return state.step
