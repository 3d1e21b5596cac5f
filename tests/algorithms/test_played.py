"""PY-1 of algorithms/played.py: who answers has its episodes counted as the job counts verdicts (RW-5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from algorithms.played import played
from roles.environment import Reply
from roles.reward import RewardFailed
from roles.types import Group, Prompt, Sampling, Scored
from runtime import TaskGroup
from runtime.testing import local_host
from tests.algorithms.test_job import resolved
from tests.roles.test_environment import Script
from tests.roles.tiny import save_tiny_policy

HERE = "tests.algorithms.test_played"


class Moody:
    """Raises when the prompt's position is odd."""

    async def reset(self, prompt: Prompt) -> None:
        if prompt.position % 2:
            raise LookupError("no such world")

    async def step(self, text: str) -> Reply:
        return Reply(done=True, reward=1.0)

    async def close(self) -> None: ...


class NotAsked:
    """The job's reward: these episodes bring their own."""

    async def score(self, group: Group) -> Group:
        raise NotImplementedError


async def moody_agent(prompt: Prompt, address: Any) -> float:
    if prompt.position % 2:
        raise LookupError("no reward today")
    return 1.0


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ([f"environment.name={HERE}:Moody"], f"name '{HERE}:Moody'"),
        (["environment.name=agent", f"environment.options.function={HERE}:moody_agent"], "name 'agent'"),
    ],
)
async def test_episodes_without_a_reward_end_the_run_as_missing_verdicts_do_py1(
    tmp_path: Path, settings: list[str], what: str
) -> None:
    policy = save_tiny_policy(tmp_path)
    limits = ["reward.max_unscored=0.5", "reward.window=4"]
    job = resolved(*settings, *limits, f"model.path={policy}").job
    rollout: Any = Script(AutoTokenizer.from_pretrained(policy), *["w1"] * 2)
    async with local_host() as host, TaskGroup("test") as tasks:
        playing, judging = await played(job, rollout, NotAsked(), host, tasks)
        for position in (0, 1):  # 2 of 4: as many as may be
            prompt = Prompt(position=position, text="w1", token_ids=(1, 2), task="any", entry={})
            group: Any = await playing.group(prompt, 2, Sampling(max_tokens=4), 0)
            assert await judging.score(group) is group
        assert not any(isinstance(reward, Scored) for reward in group.rewards)
        with pytest.raises(RewardFailed) as failure:
            await judging.score(group)
        tasks.cancel()
    text = str(failure.value)
    assert f"[environment] {what}: 4 of the last 4 completions could not be scored, expected at most 50%" in text
    assert "raised LookupError: no " in text
    assert "Fix it, or raise [environment] seconds" in text
