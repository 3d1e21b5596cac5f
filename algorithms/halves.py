"""One side of a run alone: generation without training, or training on groups that a run has kept.

For finding out which side is slow, stuck or wrong: `[debug] train = false` starts no trainer, `[debug] groups = "RUN"`
starts no engine and no reward worker. Page, admission and buffer are the real ones.

HA-1: `keep_groups` writes the groups of each step in the order in which they are trained, one file a step, into the run
      folder.
HA-2: training on kept groups trains exactly these, in their order: the same tokens, logprobs, rewards and versions.
HA-3: without training the weights stay those of the model folder. The number of their version moves on all the same, as
      the pipeline needs it to, and is what sampled tokens carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from algorithms.groups import pack_groups, unpack_groups
from algorithms.metrics import MAXIMA, SUMS
from roles.objective import ObjectiveSpec
from roles.types import Dropped, Group, Prompt, Sampling, StepResult, TrainSample
from runtime.errors import TuttiError
from sync.session import Commit

__all__ = [
    "DebugConfig",
    "FixedWeights",
    "KeptGroups",
    "KeptPrompts",
    "AlreadyScored",
    "Unsent",
    "Untrained",
    "keep",
    "kept_files",
    "read_kept",
]

FOLDER = "groups"


class DebugConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[debug]` table of a job: one side of it alone."""

    keep_groups: bool = False
    """Write the groups that are trained into `groups/` of the run folder, a file a step."""
    train: bool = True
    """false: generate and score, but start no trainer; the weights stay those of the model."""
    groups: str = ""
    """A run folder with kept groups: train on these, and start neither engine nor reward workers. Relative to the
    current folder."""

    def __post_init__(self) -> None:
        if self.groups and (self.keep_groups or not self.train):
            raise ValueError(
                "[debug] groups trains on what a run has kept: it goes with neither train = false nor keep_groups"
            )


# --- groups on disk ---------------------------------------------------------------------------------------------------


def keep(run: Path, step: int, groups: Sequence[Group]) -> None:
    """Write the groups of a step (HA-1). Those of later steps are of a run that was resumed before them."""
    (run / FOLDER).mkdir(exist_ok=True)
    for file in (run / FOLDER).glob("*.msgpack"):
        if int(file.stem) > step:
            file.unlink()
    (run / FOLDER / f"{step:06d}.msgpack").write_bytes(pack_groups(groups))


def kept_files(run: Path) -> list[Path]:
    """The files of a run's kept groups, by step.

    Raises:
        ValueError: there are none.
    """
    files = sorted((run / FOLDER).glob("*.msgpack"))
    if not files:
        raise ValueError(f"[debug] groups: {run} has no kept groups; make some with debug.keep_groups=true")
    return files


def read_kept(run: Path) -> list[Group]:
    """All groups that a run has kept, in the order in which it trained them. Raises as `kept_files`."""
    return [group for file in kept_files(run) for group in unpack_groups(file.read_bytes())]


class Unsent:
    """Stands where `sync.session.WeightSession` stands: there is nobody to send weights to."""

    def __init__(self) -> None:
        self.version = 0

    async def publish(self, version: int) -> Commit:
        self.version = version
        return Commit(
            version=version,
            bytes=0,
            wire_bytes=0,
            seconds=0.0,
            pack_seconds=0.0,
            stage_seconds=0.0,
            pause_seconds=0.0,
            transport="shm",
        )


# --- training alone ---------------------------------------------------------------------------------------------------


class KeptPrompts:
    """Stands where `roles.prompts.PromptSource` stands: the prompts of kept groups."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._prompts = [group.prompt for group in groups]
        self._by_position = {prompt.position: prompt for prompt in self._prompts}
        self._next = 0

    def take(self) -> Prompt:
        if self._next == len(self._prompts):
            raise TuttiError(f"[debug] groups: all {self._next} kept groups are used; lower steps")
        self._next += 1
        return self._prompts[self._next - 1]

    def at(self, position: int) -> Prompt:
        return self._by_position[position]

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def close(self) -> None: ...


class KeptGroups:
    """Stands where `roles.rollout.Rollout` stands (HA-2)."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._groups = {group.prompt.position: group for group in groups}

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped:
        return self._groups[prompt.position]


class AlreadyScored:
    """Stands where `roles.reward.RewardPool` stands: groups come with their rewards."""

    async def score(self, group: Group) -> Group:
        return group


# --- generation alone -------------------------------------------------------------------------------------------------


class Untrained:
    """Stands where `roles.trainer.Trainer` stands (HA-3)."""

    version = 0

    async def train_step(
        self, samples: Sequence[TrainSample], objective: ObjectiveSpec, temperature: float = 1.0
    ) -> StepResult:
        self.version += 1
        return StepResult(
            version=self.version,
            sums=dict.fromkeys(SUMS, 0.0),
            maxima=dict.fromkeys(MAXIMA, 0.0),
            grad_norm=0.0,
            learning_rate=0.0,
            seconds=0.0,
        )

    async def begin_save(self, path: str | Path) -> None: ...

    async def save_ended(self) -> bool:
        return True

    async def finish_save(self) -> None: ...

    async def load(self, path: str | Path) -> None:
        raise TuttiError("[debug] train = false: a run without training has no checkpoint to go on from")


class _Groups(Protocol):
    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped: ...


class FixedWeights(Unsent):
    """Stands where rollout and weight session stand: the same weights under rising numbers (HA-3)."""

    def __init__(self, rollout: _Groups) -> None:
        super().__init__()
        self._rollout = rollout

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped:
        version = self.version
        group = await self._rollout.group(prompt, n, sampling, seed, attempt=attempt)
        if isinstance(group, Group):
            for completion in group.completions:
                completion.versions = np.full_like(completion.versions, version)
        return group
