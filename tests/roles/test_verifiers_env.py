"""Promises of roles/verifiers_env.py: real environments of the package `verifiers`, played against our endpoint."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from roles.agents import AgentEpisodes, serve
from roles.dialogue import Dialogue
from roles.openai_server import OpenAIServer
from roles.questions import read_rows
from roles.rollout import Rollout, RolloutConfig
from roles.types import Prompt, Sampling, Scored, Unscored
from roles.verifiers_env import Verifiers, VerifiersOptions, main
from runtime import TaskGroup, this_host
from tests.roles.test_environment import Script
from tests.roles.tiny import END

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None,
        reason="verifiers is not installed: pip install 'tutti[verifiers]'",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(180),  # each process that is started loads the package: seconds on an idle machine
]
WORLD = "tests.roles.worlds"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """The rows of the environment, by way of a file for [data]."""
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    main([WORLD, str(file)])
    return [
        Prompt(position=place, text=row.text, token_ids=(1,), task=row.task, entry=row.entry)
        for place, row in enumerate(read_rows(str(file), "exact", "test"))
    ]


@asynccontextmanager
async def episodes_of(
    host: Any, rollout: Any, dialogue: Dialogue, *, seconds: float = 30.0, turns: int = 8, **arguments: Any
) -> AsyncIterator[AgentEpisodes]:
    players = await Verifiers.start(host, VerifiersOptions(id=WORLD, arguments=arguments), seconds=seconds, turns=turns)
    async with TaskGroup("test") as tasks:
        server = OpenAIServer(rollout, dialogue)
        await serve(server, tasks)
        yield AgentEpisodes(server, players)
        tasks.cancel()


SAMPLING = Sampling(max_tokens=8)


async def test_single_turns_are_recorded_and_judged_by_the_rubric_vf1(tokenizer: Any, prompts: list[Prompt]) -> None:
    script, dialogue = Script(tokenizer, "w5 w1", "w4", ""), Dialogue(tokenizer)
    async with this_host() as host, episodes_of(host, script, dialogue) as episodes:
        group = await episodes.group(prompts[2], 3, SAMPLING, seed=0)
    asked = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w2 w2"}]
    assert group.prompt.token_ids == dialogue.prompt(asked)
    by_tokens = {tuple(c.token_ids.tolist()): r for c, r in zip(group.completions, group.rewards, strict=True)}
    assert by_tokens == {
        (5, 1, END): Scored(1.0, {"says_the_answer": 1.0, "num_turns": 1.0}),
        (4, END): Scored(0.0, {"says_the_answer": 0.0, "num_turns": 1.0}),
        (END,): Scored(0.0, {"says_the_answer": 0.0, "num_turns": 1.0}),  # to be judged as any other
    }


async def test_several_turns_stay_one_row_and_the_group_is_judged_together_vf1(
    policy: str, tokenizer: Any, prompts: list[Prompt]
) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=8), policy)
        async with episodes_of(host, rollout, Dialogue(tokenizer), kind="turns", turns=2) as episodes:
            sampling = Sampling(max_tokens=8, ignore_eos=True)
            group = await episodes.group(prompts[0], 3, sampling, seed=4)
            again = await episodes.group(prompts[0], 3, sampling, seed=4)
            assert episodes.num_forks == 0
    assert [c.token_ids.tolist() for c in group.completions] == [c.token_ids.tolist() for c in again.completions]
    for completion in group.completions:
        assert completion.mask is not None
        assert completion.mask.sum() == 16  # two turns: the job's limit, below the environment's own
    parts = [reward.parts for reward in group.rewards if isinstance(reward, Scored)]
    assert [part["num_turns"] for part in parts] == [2.0] * 3
    assert max(part["longest"] for part in parts) == 1.0
    for reward in group.rewards:
        assert isinstance(reward, Scored)
        assert reward.value == reward.parts["says_the_answer"] + 0.5 * reward.parts["longest"]


async def test_tools_of_the_environment_reach_the_policy_and_its_calls_them_vf1(
    tokenizer: Any, prompts: list[Prompt]
) -> None:
    spelled = {8: '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', 5: "w5"}
    dialogue = Dialogue(tokenizer)
    dialogue.text = lambda ids: "".join(spelled.get(i, "") for i in ids)  # type: ignore[method-assign]
    told: list[Any] = []
    encode = dialogue.prompt
    dialogue.prompt = lambda messages, tools=None: (told.append(tools), encode(messages, tools))[1]  # type: ignore[method-assign, func-returns-value]
    replies: list[Any] = []
    reply = dialogue.reply
    dialogue.reply = lambda messages, turn=(): (replies.append(messages), reply(messages, turn))[1]  # type: ignore[method-assign, func-returns-value]
    script = Script(tokenizer, "w8", "w5")
    async with this_host() as host, episodes_of(host, script, dialogue, kind="tools") as episodes:
        group = await episodes.group(prompts[1], 1, SAMPLING, seed=0)
        assert episodes.num_forks == 0
    assert told[0][0]["function"]["name"] == "add"
    ((result,),) = replies
    assert (result["role"], result["content"]) == ("tool", "5")
    (reward,) = group.rewards
    assert isinstance(reward, Scored)
    assert reward.value == 1.0
    (completion,) = group.completions
    assert completion.mask is not None
    assert completion.token_ids[completion.mask].tolist() == [8, END, 5, END]


@pytest.mark.parametrize(("fault", "reason"), [("raises", "raised KeyError: 'w9'"), ("hangs", "took too long")])
async def test_an_environment_that_fails_makes_unscored_episodes_vf2(
    fault: str, reason: str, tokenizer: Any, prompts: list[Prompt]
) -> None:
    script = Script(tokenizer, "w5")
    async with (
        this_host() as host,
        episodes_of(host, script, Dialogue(tokenizer), kind="turns", fault=fault, seconds=3.0) as episodes,
    ):
        group = await episodes.group(prompts[0], 1, SAMPLING, seed=0)
    assert group.rewards == [Unscored(f"the environment {reason}")]
    assert group.completions[0].token_ids.tolist() == [5, END]


async def test_time_of_the_policy_is_not_that_of_the_environment_vf2(tokenizer: Any, prompts: list[Prompt]) -> None:
    class Slow(Script):
        async def complete(self, *args: Any, **more: Any) -> Any:
            await asyncio.sleep(4.0)
            return await super().complete(*args, **more)

    script = Slow(tokenizer, "w5")
    async with this_host() as host, episodes_of(host, script, Dialogue(tokenizer), seconds=3.0) as episodes:
        (reward,) = (await episodes.group(prompts[0], 1, SAMPLING, seed=0)).rewards
    assert isinstance(reward, Scored)


async def test_an_environment_that_blocks_is_ended_and_the_run_goes_on_vf3(
    tokenizer: Any, prompts: list[Prompt]
) -> None:
    script = Script(tokenizer, "w5", "w5")
    async with (
        this_host() as host,
        episodes_of(host, script, Dialogue(tokenizer), kind="turns", fault="blocks", seconds=2.0) as episodes,
    ):
        for _ in range(2):  # it is started anew
            (reward,) = (await episodes.group(prompts[0], 1, SAMPLING, seed=0)).rewards
            assert isinstance(reward, Unscored)
            assert reward.reason.startswith("the environment's process died: ")


def test_its_dataset_becomes_questions_of_a_job(tmp_path: Path, prompts: list[Prompt]) -> None:
    assert [prompt.text for prompt in prompts] == ["w0 w2", "w1 w2", "w2 w2", "w3 w2"]
    assert prompts[3].entry["row"]["info"] == {"number": 3}
    assert prompts[3].entry["row"]["example_id"] == 3
