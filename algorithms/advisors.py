"""Models besides the policy that have a say in what it learns: a frozen reference, and a critic that learns with it.

RC-1: a reference is the start model; its logprobs are attached to every sample before anything uses them.
RC-2: a critic judges the samples before it learns from them, on the same batch, once a step (PPO, arXiv:1707.06347).
RC-3: with a critic a KL penalty in the reward is part of what the critic predicts; without one it is subtracted from
      the advantages (`samples.kl_in_reward`).
RC-4: both are trainers of their own (`roles.trainer`), with their own processes; a critic is saved with the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from algorithms.catalog import objective
from algorithms.samples import kl_in_reward, with_critic
from roles.objective import ObjectiveSpec
from roles.types import StepResult, TrainSample

if TYPE_CHECKING:
    from roles.trainer_config import TrainerConfig
    from runtime import HostMesh

__all__ = ["Advisors", "CriticConfig"]


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[grpo.critic]` table of a job: PPO with a learned baseline, a value for each token."""

    lr: Annotated[float, Meta(ge=0)] = 1e-5
    gamma: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Discount of a reward per token."""
    lam: Annotated[float, Meta(ge=0, le=1)] = 0.95
    """lambda of GAE (arXiv:1506.02438)."""
    value_clip: float | None = 0.2
    """How far a value may move in one step before its loss stops to fall; none: no bound."""


class Scores(Protocol):
    """What is needed of a `roles.trainer.Trainer` that is asked."""

    async def logprobs(self, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]: ...


class Learns(Scores, Protocol):
    """And of one that learns."""

    async def train_step(
        self, samples: Sequence[TrainSample], objective: ObjectiveSpec, temperature: float = 1.0
    ) -> StepResult: ...

    async def begin_save(self, path: str | Path) -> None: ...

    async def save_ended(self) -> bool: ...

    async def finish_save(self) -> None: ...

    async def load(self, path: str | Path) -> None: ...


class Advisors:
    """The models, and what is asked of them.

    Args:
        reference: None: no penalty for leaving it.
        critic: None: the baseline comes from the group or the batch.
        config: of the critic.
        kl_weight: of the penalty in the reward; 0: it is none, and a reference is for the objective alone.
    """

    def __init__(
        self,
        *,
        reference: Scores | None = None,
        critic: Learns | None = None,
        config: CriticConfig | None = None,
        kl_weight: float = 0.0,
    ) -> None:
        self.reference = reference
        self.critic = critic
        self._config = config or CriticConfig()
        self._kl_weight = kl_weight
        self._loss = objective("value", {"clip": self._config.value_clip})

    @classmethod
    async def start(
        cls,
        host: HostMesh,
        trainer: TrainerConfig,
        model_path: str,
        *,
        reference: bool,
        critic: CriticConfig | None,
        kl_weight: float = 0.0,
        gpus: Sequence[Sequence[int]] = (),
    ) -> Advisors:
        """Start those that are asked for, laid out as the trainer of the policy.

        Raises:
            ActorError: a model can't be loaded.
        """
        from roles.trainer import Trainer

        frozen = msgspec.structs.replace(trainer, frozen=True, lora_rank=0)
        values = msgspec.structs.replace(trainer, head="value", lora_rank=0, lr=critic.lr if critic else 0.0)
        starting = [
            Trainer.start(host, config, model_path, name=name, gpus=gpus) if wanted else _none()
            for name, config, wanted in (("reference", frozen, reference), ("critic", values, critic is not None))
        ]
        first, second = await asyncio.gather(*starting)
        return cls(reference=first, critic=second, config=critic, kl_weight=kl_weight)

    async def advise(self, samples: Sequence[TrainSample], temperature: float) -> None:
        """Attach what they say of the samples, in place: reference logprobs, values, returns and advantages."""
        if self.reference is not None:
            for sample, said in zip(samples, await self.reference.logprobs(samples, temperature), strict=True):
                sample.reference_logprobs = said
        if self.critic is not None:
            values = await self.critic.logprobs(samples, temperature)
            config = self._config
            with_critic(samples, values, gamma=config.gamma, lam=config.lam, kl_weight=self._kl_weight)
        elif self._kl_weight:
            kl_in_reward(samples, self._kl_weight)

    async def learn(self, samples: Sequence[TrainSample], temperature: float) -> None:
        """Let the critic learn from what `advise` has put into the samples."""
        if self.critic is not None:
            await self.critic.train_step(samples, self._loss, temperature)

    async def begin_save(self, folder: Path) -> None:
        """Into a checkpoint under way."""
        if self.critic is not None:
            await self.critic.begin_save(folder / "critic")

    async def save_ended(self) -> bool:
        """Whether `finish_save` would return at once."""
        return self.critic is None or await self.critic.save_ended()

    async def finish_save(self) -> None:
        """Wait for the save under way."""
        if self.critic is not None:
            await self.critic.finish_save()

    async def load(self, folder: Path) -> None:
        """Raises CheckpointError: the checkpoint has no critic."""
        if self.critic is not None:
            await self.critic.load(folder / "critic")


async def _none() -> None:
    return None
