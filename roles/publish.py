"""New weights into service, and the proof that they are served: what a loop holds in place of a bare WeightSession.

    publish(v) -> way.publish(v) -> same weights? -> Commit
                        |
                        '-- a replica died on the way: wait until it is back, then once more

PU-1: after each publication every replica is asked for the logprobs of a few fixed sequences; they must be the
      trainer's within a hard threshold. A reload that leaves a layer in the wrong layout, or an old one in place, shows
      at once.
      Below that threshold, a replica that is nearer to what the trainer said one proof before than to what it says now,
      where the step has moved the two clearly apart, has kept its old weights: `WeightsDiffer` as well. So an engine
      that does not follow is found after its first steps, also where the threshold has to be wide.
PU-2: a replica that dies during a publication or a snapshot, or while it is asked for the proof, delays it and does not
      end the run, as long as it may be started anew.
PU-3: publications, the re-sending of weights to one replica, and snapshots for others never overlap. What is sent
      beside the loop waits for a step under way, however long that takes, and never goes under the number of before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

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

FLOAT32_THRESHOLD, LOW_THRESHOLD = 1e-3, 0.2
"""Mean |difference| in nat that engine and trainer may have, both in float32 or not. Seen with equal weights: below
1e-5 and below 0.04 for random models, 0.07 for a trained one (its logits are larger, and a prompt has tokens that it
does not expect); with experts in the wrong layout: above 0.5, with other weights: above 0.8."""


QUANTISED_THRESHOLD = 0.3
"""Of an engine that rounds the weights to 8 bits; seen with random weights: 0.07."""


def threshold_of(trainer: TrainerConfig, rollout: RolloutConfig) -> float:
    """The mean |difference| in nat that two sides of these types may have."""
    if rollout.vllm.quantization:
        return QUANTISED_THRESHOLD
    return FLOAT32_THRESHOLD if trainer.dtype == rollout.dtype == "float32" else LOW_THRESHOLD


CLEARLY = 3.0
"""How many times nearer to the old logprobs than to the new ones a replica must be to be blamed for that alone."""


class WeightsDiffer(TuttiError):
    """A replica does not serve the weights that it was sent."""


class SameWeights:
    """Asks both sides for the logprobs of fixed tokens.

    Args:
        sequences: token ids, at least two each.
        threshold: of the mean |difference|, in nat.
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
        self._before: tuple[int, np.ndarray] | None = None
        """What the trainer said at the proof before, and its version."""
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
        before, self._before = self._before, (version, now)
        for rank, scores in answers.items():
            said = np.concatenate(scores).astype(np.float64)
            gap = np.abs(said - now)
            if before is not None and before[0] != version:
                self._check_moved(rank, version, *before, said, now)
            if not gap.mean() <= self._threshold:  # NaN too
                raise WeightsDiffer(
                    f"version {version}: rollout rank {rank} gives {len(gap)} fixed tokens logprobs that are "
                    f"{gap.mean():.3g} nat from the trainer's on average (most {gap.max():.3g}), allowed are "
                    f"{self._threshold:g}: its engine does not compute with the weights that it was sent. Look at how "
                    "it reloads them (layouts of experts, tied heads, quantised copies), or at models that differ"
                )

    def _check_moved(
        self, rank: int, version: int, old_version: int, old: np.ndarray, said: np.ndarray, now: np.ndarray
    ) -> None:
        moved, to_old, to_new = (float(np.abs(a - b).mean()) for a, b in ((now, old), (said, old), (said, now)))
        if to_new > CLEARLY * to_old and moved > to_old:
            raise WeightsDiffer(
                f"version {version}: the weights moved the logprobs of {len(now)} fixed tokens by {moved:.2g} nat on "
                f"average since version {old_version}, but rollout rank {rank} still answers with the old ones (it "
                f"differs from them by {to_old:.2g}, from the new ones by {to_new:.2g}): its engine does not use what "
                "it receives. Look at how it takes new weights, such as caches, adapters or quantised copies"
            )


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
