"""A reward model as a role: a sequence classifier on ranks of its own, scoring whole groups in one batch.

RM-1: the score of a completion is the first logit of the classifier over prompt and completion; what is not finite is
      `Unscored`, never 0.
RM-2: a group has `timeout_s` seconds; beyond, its completions are `Unscored` and the ranks stay.
RM-3: too many without a verdict stop the run, as with every reward (RW-5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from roles.reward import RewardPool
from roles.reward_config import RewardConfig, RewardModelConfig
from roles.tally import Tally
from roles.types import Group, Reward, Scored, Unscored
from runtime import Actor, DeadlineExceeded, endpoint

if TYPE_CHECKING:
    from runtime import ActorMesh, HostMesh


class RewardModelRank(Actor):
    """The classifier on one process."""

    def __init__(self, config: RewardModelConfig) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        self._config = config
        self._device = torch.device(device)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(config.path, local_files_only=True)
        model: Any = AutoModelForSequenceClassification.from_pretrained(config.path, local_files_only=True)
        self._model = model.to(self._device, getattr(torch, config.dtype)).eval()

    @endpoint
    def score(self, question: str, texts: list[str]) -> list[float]:
        """The first logit for each text, in their order; may be NaN."""
        import torch

        scores: list[float] = []
        for start in range(0, len(texts), self._config.batch):
            part = [question + text for text in texts[start : start + self._config.batch]]
            inputs = self._tokenizer(part, return_tensors="pt", padding=True, truncation=True)
            wanted = {name: inputs[name].to(self._device) for name in ("input_ids", "attention_mask")}
            with torch.inference_mode():
                logits = self._model(**wanted).logits[:, 0].float()
            scores += (logits.sigmoid() if self._config.sigmoid else logits).tolist()
        return scores


class RewardModel:
    """The controller's handle; stands where a `RewardPool` stands."""

    def __init__(self, ranks: Sequence[ActorMesh], config: RewardModelConfig, tally: Tally) -> None:
        self._ranks = list(ranks)
        self._config = config
        self._tally = tally
        self._load = [0] * len(self._ranks)

    @classmethod
    async def start(
        cls, host: HostMesh, config: RewardModelConfig, *, max_unscored: float = 0.5, window: int = 256
    ) -> RewardModel:
        """Processes with the model loaded.

        Raises:
            ActorError: the model can't be loaded; it is an OSError or ValueError too.
        """
        procs = await host.spawn_procs({"rank": config.ranks}, name="reward_model")
        mesh = await procs.spawn("reward_model", RewardModelRank, config)
        cure = "Look at the model, or raise [reward.model] timeout_s if it is only slow"
        tally = Tally(f"[reward.model] {config.path}", cure, max_unscored=max_unscored, window=window)
        return cls([mesh.slice(rank=rank) for rank in range(config.ranks)], config, tally)

    async def score(self, group: Group) -> Group:
        """The group with one reward for each completion.

        Raises:
            RewardFailed: too many of the last completions could not be judged.
            runtime.ActorError: a rank failed or died.
        """
        texts = [completion.text for completion in group.completions]
        rank = min(range(len(self._ranks)), key=self._load.__getitem__)
        self._load[rank] += len(texts)
        try:
            call = self._ranks[rank].score.options(timeout=self._config.timeout_s)
            values: list[float] = await call.call_one(group.prompt.text, texts)
            rewards: list[Reward] = [
                Scored(value) if math.isfinite(value) else Unscored(f"not finite: the model said {value}")
                for value in values
            ]
        except DeadlineExceeded:
            rewards = [Unscored(f"time limit: no verdict after {self._config.timeout_s:g} s")] * len(texts)
        finally:
            self._load[rank] -= len(texts)
        scored = msgspec.structs.replace(group, rewards=rewards)
        self._tally.count(scored)
        return scored


async def start_reward(host: HostMesh, config: RewardConfig) -> RewardPool | RewardModel:
    """What the `[reward]` table of a job asks for, ready to score."""
    if config.model is None:
        return await RewardPool.start(host, config)
    return await RewardModel.start(host, config.model, max_unscored=config.max_unscored, window=config.window)
