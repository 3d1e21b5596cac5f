"""New weights into service, and the proof that they are served: what a loop holds in place of a bare WeightSession.

    publish(v) -> way.publish(v) -> same weights? -> Commit
                        |
                        '-- a replica died on the way: wait until it is back, then once more

PU-1: after each publication every replica is asked for the logprobs of a few fixed sequences. How far they are from the
      trainer's, on average, must be within a threshold, as a share of how far the trainer's own lie apart (from their
      median, on average, and at least 1 nat). Rounding moves a logprob by some share of what a model computes: the
      share stays as it is while a policy gets sharper, whose unlikely tokens then differ by whole nats. A reload that
      leaves layers in the wrong layout, old or half loaded gives other numbers altogether: as far off as the trainer's
      lie apart, and farther.
      Below that threshold, a replica whose own answers stand still while the trainer's move clearly has kept its old
      weights: `WeightsDiffer` as well. Both are measured since a proof at which they last moved, so that small steps
      add up, and neither depends on how far the two are apart: also an engine that rounds a lot is found.
PU-2: a replica that dies during a publication or a snapshot, or while it is asked for the proof, delays it and does not
      end the run, as long as it may be started anew.
PU-3: publications, the re-sending of weights to one replica, and snapshots for others never overlap. What is sent
      beside the loop waits for a step under way, however long that takes, and never goes under the number of before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from roles.engine import Behind, EngineFailed
from roles.types import TrainSample
from roles.vllm_transfer import VllmTransfer
from runtime.errors import ProcessDied, Stopped, TuttiError
from sync.session import WeightSession
from sync.transport import SyncError

if TYPE_CHECKING:
    from roles.rollout import Rollout, RolloutConfig
    from roles.trainer import Trainer, TrainerConfig
    from runtime import ActorMesh
    from sync.config import Commit, SyncConfig

T = TypeVar("T")

FLOAT32_THRESHOLD, LOW_THRESHOLD, QUANTISED_THRESHOLD = 1e-3, 0.2, 0.35
"""Mean |difference| that engine and trainer may have, as a share of PU-1: both in float32; one in 16 bits; an engine
that rounds the weights to 8 bits. Seen with equal weights: below 1e-5; below 0.04; 0.07 to 0.2. A language model of 30
layers in FP8 has 0.12, also with its logits tripled, which takes it from 0.36 to 1.06 nat. Faults of it: one layer
shuffled 0.4 to 0.5, left at zero 0.3; all shuffled, half of them not loaded, another head: above 4. Of models with
random weights: experts in the wrong layout 0.5, other weights 0.8."""

MOVED = 0.25
"""Of what is allowed: how far the trainer's logprobs must have moved for a replica to be blamed for standing still."""

CLEARLY = 3.0
"""How many times less than the trainer's its own must have moved then."""


def threshold_of(trainer: TrainerConfig, rollout: RolloutConfig) -> float:
    """What two sides of these types may differ by (PU-1)."""
    if rollout.vllm.quantization:
        return QUANTISED_THRESHOLD
    return FLOAT32_THRESHOLD if trainer.dtype == rollout.dtype == "float32" else LOW_THRESHOLD


def spread_of(logprobs: np.ndarray) -> float:
    """How far they lie apart, in nat: what differences are measured in (PU-1)."""
    return max(1.0, _mean_distance(logprobs, np.median(logprobs)))


class WeightsDiffer(TuttiError):
    """A replica does not serve the weights that it was sent."""


class SameWeights:
    """Asks both sides for the logprobs of fixed tokens.

    Args:
        sequences: token ids, at least two each.
        threshold: of the mean |difference|, as a share of PU-1.
    """

    def __init__(
        self, trainer: Trainer, rollout: Rollout, sequences: Sequence[Sequence[int]], threshold: float
    ) -> None:
        if not sequences or any(len(ids) < 2 for ids in sequences):
            raise ValueError("same weights: expected sequences of at least two tokens; give prompts of the job")
        self._trainer = trainer
        self._rollout = rollout
        self._sequences = [list(ids) for ids in sequences]
        self._threshold = threshold
        self._before: dict[int, _Answers] = {}
        """By rank: where both sides were when they last moved."""
        self._samples = [
            TrainSample(
                token_ids=np.array(ids, np.int32),
                prompt_length=1,
                rollout_logprobs=np.zeros(len(ids) - 1, np.float32),
                advantages=np.zeros(len(ids) - 1, np.float32),
            )
            for ids in sequences
        ]

    async def check(self, version: int, left_out: Collection[int] = ()) -> None:
        """Raise WeightsDiffer when a replica answers otherwise than the trainer (PU-1).

        Args:
            left_out: ranks that this version has not reached.
        """
        expected, answers = await asyncio.gather(
            self._trainer.logprobs(self._samples), self._rollout.score(self._sequences, left_out)
        )
        now = np.concatenate(expected).astype(np.float64)
        for rank, scores in answers.items():
            said = np.concatenate(scores).astype(np.float64)
            self._check_near(rank, version, said, now)
            self._check_follows(rank, _Answers(version, now, said))

    def _check_near(self, rank: int, version: int, said: np.ndarray, now: np.ndarray) -> None:
        gap, allowed = _mean_distance(said, now), self._threshold * spread_of(now)
        if not np.isfinite(gap) or gap > allowed:
            raise WeightsDiffer(
                f"version {version}: rollout rank {rank} gives {len(now)} fixed tokens logprobs that are {gap:.3g} nat "
                f"from the trainer's on average (most {np.abs(said - now).max():.3g}), allowed are {allowed:.3g} "
                f"({self._threshold:g} of how far the trainer's lie apart): its engine does not compute with the "
                "weights that it was sent. Look at how it reloads them (layouts of experts, tied heads, quantised "
                "copies), or at models that differ"
            )

    def _check_follows(self, rank: int, answers: _Answers) -> None:
        before = self._before.setdefault(rank, answers)
        moved = _mean_distance(answers.expected, before.expected)
        followed = _mean_distance(answers.said, before.said)
        if moved <= MOVED * self._threshold * spread_of(answers.expected):
            return  # too little to tell: the next proof looks at this step as well
        if CLEARLY * followed < moved:
            raise WeightsDiffer(
                f"version {answers.version}: the weights moved the logprobs of {len(answers.said)} fixed tokens by "
                f"{moved:.2g} nat on average since version {before.version}, but rollout rank {rank} still answers "
                f"with the old ones (its own moved by {followed:.2g}): its engine does not use what it receives. Look "
                "at how it takes new weights, such as caches, adapters or quantised copies"
            )
        self._before[rank] = answers


class _Answers(NamedTuple):
    """Logprobs of the fixed tokens: the trainer's, and those of one replica."""

    version: int
    expected: np.ndarray
    said: np.ndarray


def _mean_distance(a: np.ndarray, b: np.ndarray | np.floating) -> float:
    return float(np.abs(a - b).mean())


class Delivery(Protocol):
    """How a version gets into replicas: a WeightSession, or a `roles.vllm_transfer.VllmTransfer`."""

    async def open(self) -> None:
        """Let both sides meet. Raises LayoutError where they don't fit, SyncError where they don't reach each other."""
        ...

    async def publish(self, version: int) -> Commit:
        """Bring the trainer's weights, as they are now, into service. Raises SyncError when it has not come to all that
        must have it: then no replica serves parts of two versions, and those that can't go on refuse to."""
        ...

    async def close(self) -> None:
        """Let both sides go; `publish` opens it again."""
        ...

    def over(self, receivers: ActorMesh) -> Delivery:
        """The same way to other rollout ranks. One of the two is open at a time."""
        ...


def delivery(trainer: Trainer, rollout: Rollout, config: SyncConfig) -> Delivery:
    """The way that the job chose (`rollout.vllm.weight_transfer`)."""
    way = rollout.config.vllm.weight_transfer
    if rollout.config.engine == "torch" or way == "sync":
        return WeightSession(trainer.mesh, rollout.mesh, config)
    return VllmTransfer(trainer.mesh, rollout.mesh, way, config)


class Publisher:
    """Takes the place of a WeightSession on an algorithm's page.

    Args:
        way: to all rollout ranks.
        same: the proof; None: none.
        every: publications between two proofs.
    """

    def __init__(
        self,
        way: Delivery,
        trainer: Trainer,
        rollout: Rollout,
        same: SameWeights | None = None,
        every: int = 1,
    ) -> None:
        self._way = way
        self._trainer = trainer
        self._rollout = rollout
        self._same = same
        self._every = every
        self._lock = asyncio.Lock()

    async def publish(self, version: int) -> Commit:
        """As `WeightSession.publish`, with PU-1 and PU-2."""
        return await _outlasting(self._rollout, lambda: self._publish(version))

    async def resend(self, rank: int, others: Rollout | None = None) -> None:
        """Bring the trainer's weights to one rank of the fleet, or of other replicas."""
        await self._send((others or self._rollout).mesh.slice(rank=rank))

    async def snapshot(self, others: Rollout, same: SameWeights | None = None) -> None:
        """Bring the trainer's weights to replicas that don't belong to the fleet and keep them until the next snapshot,
        whatever is published meanwhile. PU-2.

        Args:
            same: the proof that they serve them; None: none.
        """
        await _outlasting(others, lambda: self._snapshot(others, same))

    async def _snapshot(self, others: Rollout, same: SameWeights | None) -> None:
        await self._send(others.mesh)
        others.published(self._trainer.version)
        if same is not None:
            await same.check(self._trainer.version)

    async def _send(self, receivers: ActorMesh) -> None:
        """By a way of their own, for which the fleet's is closed: the next publication opens it anew."""
        async with self._lock, self._trainer.moving:
            await self._way.close()
            alone = self._way.over(receivers)
            try:
                await alone.open()
                await alone.publish(self._trainer.version)
            finally:
                await alone.close()

    async def _publish(self, version: int) -> Commit:
        async with self._lock:
            commit = await self._way.publish(version)
            self._rollout.published(version, commit.left_out)
            if self._same is not None and self._every and version % self._every == 0:
                await self._same.check(version, commit.left_out)
            return commit


async def _outlasting(replicas: Rollout, send: Callable[[], Awaitable[T]]) -> T:
    """Send until no replica is lost on the way (PU-2)."""
    for _ in range(replicas.config.max_restarts):
        starts = replicas.starts
        try:
            return await send()
        except (SyncError, ProcessDied, Stopped, EngineFailed, Behind):
            # One that is back already, with weights of the version in service, has only lost its port.
            if not await replicas.troubled() and replicas.starts == starts:
                raise  # the trainer's end, or another fault
            await replicas.all_serve()
    return await send()
