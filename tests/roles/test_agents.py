"""Promises of roles/agents.py: programs that are written against the `openai` client, trained by their base URL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI

from roles.agents import Address, Agent, AgentEpisodes, AgentsHere, serve
from roles.dialogue import Dialogue
from roles.openai_server import OpenAIServer
from roles.rollout import Rollout, RolloutConfig
from roles.types import Prompt, Sampling, Scored, Unscored
from runtime import TaskGroup, this_host
from tests.roles.test_environment import Script
from tests.roles.tiny import END, prompt_at, tiny_model
from tests.waiting import until

SAMPLING = Sampling(max_tokens=6, temperature=0.9)


@asynccontextmanager
async def episodes_of(
    agent: Agent, rollout: Any, tokenizer: Any, *, seconds: float = 30.0, max_len: int = 0
) -> AsyncIterator[AgentEpisodes]:
    async with TaskGroup("test") as tasks:
        server = OpenAIServer(rollout, Dialogue(tokenizer), max_len=max_len)
        await serve(server, tasks)
        yield AgentEpisodes(server, AgentsHere(agent, seconds))
        tasks.cancel()


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def chat(address: Address, messages: Sequence[Any], **more: Any) -> Any:
    async with AsyncOpenAI(base_url=address.url, api_key=address.key, max_retries=0) as client:
        return await client.chat.completions.create(model="gpt-9", messages=list(messages), **more)


async def talk(prompt: Prompt, address: Address) -> float:
    """Three turns, each of what the last one said."""
    messages = [user(prompt.text)]
    for _ in range(3):
        message = (await chat(address, messages)).choices[0].message
        messages += [message.model_dump(), user("w3")]
    return float(len(messages))


async def test_groups_of_agents_are_trained_on_what_they_sampled_ag1(policy: str, tokenizer: Any) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=8), policy)
        async with episodes_of(talk, rollout, tokenizer) as episodes:
            group = await episodes.group(prompt_at(3), 4, SAMPLING, seed=7)
            again = await episodes.group(prompt_at(3), 4, SAMPLING, seed=7)
            other = await episodes.group(prompt_at(3), 4, SAMPLING, seed=7, attempt=1)
            assert rollout._router._sessions == {}  # AG-4
            assert rollout.outstanding == (0, 0)
            assert episodes.num_forks == 0
    assert group.rewards == [Scored(7.0)] * 4
    assert group.prompt.token_ids == Dialogue(tokenizer).prompt([user(prompt_at(3).text)])
    rows = [c.token_ids.tolist() for c in group.completions]
    assert rows == [c.token_ids.tolist() for c in again.completions]  # a run can be repeated (OA-7)
    assert len({tuple(row) for row in [*rows, *(c.token_ids.tolist() for c in other.completions)]}) == 8
    for completion in group.completions:
        turns = _turns(completion)
        assert len(turns) == 3
        assert all(len(turn) <= SAMPLING.max_tokens for turn in turns)
        assert len({tuple(turn) for turn in turns}) > 1
        ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = tiny_model()(input_ids=ids, use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1] / 0.9
        expected = logits.log_softmax(-1).gather(1, ids[0, len(group.prompt.token_ids) :, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.logprobs[completion.mask], expected[completion.mask], atol=1e-4)


def _turns(completion: Any) -> list[list[int]]:
    """Sampled tokens, by turn."""
    cuts = np.flatnonzero(np.diff(completion.mask.astype(int))) + 1
    parts = np.split(completion.token_ids, cuts)
    return [part.tolist() for part in parts[::2]]


async def test_agents_do_not_notice_that_a_replica_is_killed_under_them_ag1(policy: str, tokenizer: Any) -> None:
    """Streams and whole answers go on elsewhere; what is recorded is what the agents were told, and exact."""
    told: dict[str, list[int]] = {}

    async def agent(prompt: Prompt, address: Address) -> float:
        messages, ids = [user(prompt.text)], told.setdefault(address.url, [])
        for turn in range(3):
            if turn % 2:
                choice = (await chat(address, messages)).choices[0]
                text, new = choice.message.content, choice.model_extra["token_ids"]
            else:
                text, new = await stream(address, messages)
            ids += new
            messages += [{"role": "assistant", "content": text}, user("w3")]
        return 1.0

    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=16, max_restarts=0), policy)
        assert rollout.procs is not None
        long = Sampling(max_tokens=400, ignore_eos=True)
        async with episodes_of(agent, rollout, tokenizer, seconds=60) as episodes:
            calm = await episodes.group(prompt_at(0), 4, long, seed=7)
            playing = asyncio.ensure_future(episodes.group(prompt_at(0), 4, long, seed=7))
            # the first turns are told, the second under way
            await until(lambda: len(told) == 8 and any(list(told.values())[4:]), during=[playing])
            os.kill(rollout.procs.pids[0], signal.SIGKILL)
            group = await playing
            assert rollout.serving == (1,)
            assert episodes.num_forks == 0
            assert rollout.outstanding == (0, 0)
    assert group.rewards == [Scored(1.0)] * 4
    for completion, same, ids in zip(group.completions, calm.completions, list(told.values())[4:], strict=True):
        assert completion.token_ids.tolist() == same.token_ids.tolist()
        assert completion.token_ids[completion.mask].tolist() == ids
        np.testing.assert_allclose(completion.logprobs, same.logprobs, atol=1e-4)


async def stream(address: Address, messages: Sequence[Any]) -> tuple[str, list[int]]:
    """Text and tokens of an answer, as they come."""
    text, ids = "", list[int]()
    async with AsyncOpenAI(base_url=address.url, api_key=address.key, max_retries=0) as client:
        events = await client.chat.completions.create(model="policy", messages=list(messages), stream=True)
        async for event in events:
            choice: Any = event.choices[0]
            text += choice.delta.content or ""
            ids += choice.model_extra.get("token_ids", [])
    return text, ids


async def test_an_agent_that_fails_or_hangs_is_unscored_and_the_others_are_not_ag3(tokenizer: Any) -> None:
    ended: list[str] = []

    async def agent(prompt: Prompt, address: Address) -> float:
        kind = ("fails", "hangs", "asks nothing", "refused", "wins")[int(address.url.split("/")[-2].split("-")[-1])]
        try:
            if kind != "asks nothing":
                await chat(address, [user("w1")])
            if kind == "fails":
                raise KeyError("w9")
            if kind == "refused":
                await chat(address, [user("w1")], presence_penalty=1)
            if kind in ("hangs", "asks nothing"):
                await asyncio.Event().wait()
        finally:
            ended.append(kind)
        return 1.0

    script = Script(tokenizer, *["w5"] * 4)
    async with episodes_of(agent, script, tokenizer, seconds=2.0) as episodes:
        group = await episodes.group(prompt_at(0), 5, SAMPLING, seed=0)
    fails, hangs, nothing, refused, wins = group.rewards
    assert fails == Unscored("the agent raised KeyError: 'w9'")
    assert hangs == nothing == Unscored("the agent asked for nothing for 2 s")
    assert isinstance(refused, Unscored)
    assert "presence_penalty" in refused.reason
    assert wins == Scored(1.0)
    assert sorted(ended) == ["asks nothing", "fails", "hangs", "refused", "wins"]
    assert [len(c.token_ids) for c in group.completions] == [2, 2, 0, 2, 2]


async def test_an_agent_that_cancels_its_own_work_or_cannot_be_cancelled_ends_no_run_ag3(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("roles.agents.END_SECONDS", 0.05)
    over = asyncio.Event()

    async def agent(prompt: Prompt, address: Address) -> float:
        if address.url.split("/")[-2].endswith("-0"):
            inner = asyncio.ensure_future(asyncio.sleep(60))
            inner.cancel()
            await inner
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()
        return 1.0

    async with episodes_of(agent, Script(tokenizer), tokenizer, seconds=0.2) as episodes:
        group = await episodes.group(prompt_at(0), 2, SAMPLING, seed=0)
        over.set()
        await asyncio.sleep(0)
    assert group.rewards == [
        Unscored("the agent raised CancelledError"),
        Unscored("the agent asked for nothing for 0.2 s"),
    ]
    assert "an agent of prompt 0 goes on after it was cancelled" in caplog.text


async def test_an_agent_that_returns_no_number_is_unscored_ag3(tokenizer: Any) -> None:
    async def agent(prompt: Prompt, address: Address) -> float:
        return float("inf")

    async with episodes_of(agent, Script(tokenizer), tokenizer) as episodes:
        (reward,) = (await episodes.group(prompt_at(0), 1, SAMPLING, seed=0)).rewards
    assert reward == Unscored("the agent raised ValueError: a reward of inf, expected a finite number")


@pytest.mark.parametrize("own", [{"temperature": 0}, {"top_p": 0.9}, {"extra_body": {"top_k": 5}}])
async def test_a_distribution_of_its_own_is_refused_an_agent_ag5(tokenizer: Any, own: dict[str, Any]) -> None:
    async def agent(prompt: Prompt, address: Address) -> float:
        await chat(address, [user("w1")], temperature=SAMPLING.temperature)  # no other one
        await chat(address, [user("w1")], **own)
        return 1.0

    async with episodes_of(agent, Script(tokenizer, "w5"), tokenizer) as episodes:
        (reward,) = (await episodes.group(prompt_at(0), 1, SAMPLING, seed=0)).rewards
    assert isinstance(reward, Unscored)
    assert "what this session samples is trained under" in reward.reason


async def test_time_of_the_policy_is_not_that_of_the_agent_ag3(tokenizer: Any) -> None:
    class Slow(Script):
        async def complete(self, *args: Any, **more: Any) -> Any:
            await asyncio.sleep(2.5)
            return await super().complete(*args, **more)

    async def agent(prompt: Prompt, address: Address) -> float:
        await chat(address, [user("w1")])
        return 1.0

    async with episodes_of(agent, Slow(tokenizer, "w5"), tokenizer, seconds=2.0) as episodes:
        assert (await episodes.group(prompt_at(0), 1, SAMPLING, seed=0)).rewards == [Scored(1.0)]


async def test_a_group_that_is_cancelled_ends_its_agents_and_addresses_ag4(tokenizer: Any) -> None:
    gone = asyncio.Event()
    addresses: list[Address] = []

    async def agent(prompt: Prompt, address: Address) -> float:
        addresses.append(address)
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return 0.0

    async with episodes_of(agent, Script(tokenizer), tokenizer) as episodes:
        playing = asyncio.ensure_future(episodes.group(prompt_at(0), 1, SAMPLING, seed=0))
        await until(lambda: addresses, during=[playing])
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert gone.is_set()
        with pytest.raises(openai.NotFoundError, match="there is no session"):
            await chat(addresses[0], [user("w1")])


async def test_the_thread_of_the_latest_turn_is_trained_after_what_all_share_ag2(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(prompt: Prompt, address: Address) -> float:
        number = int(address.url.split("/")[-2].split("-")[-1])
        first = (await chat(address, [user("w1 w2")])).choices[0].message.model_dump()
        if number == 0:
            await chat(address, [user("w1 w2"), first, user("w4")])
        else:  # it forgets what it asked first
            await chat(address, [user("w1 w3")])
        return 1.0

    script = Script(tokenizer, "w5", "w5", "w6", "w6")
    async with episodes_of(agent, script, tokenizer) as episodes:
        group = await episodes.group(prompt_at(0), 2, SAMPLING, seed=0)
        assert episodes.num_forks == 1
        assert "what it left is not trained" in caplog.text
    spelled = Dialogue(tokenizer)
    whole, other = spelled.prompt([user("w1 w2")]), spelled.prompt([user("w1 w3")])
    shared = group.prompt.token_ids
    assert shared == whole[: len(shared)] == other[: len(shared)]
    assert whole[len(shared)] != other[len(shared)]
    kept, left = group.completions
    assert (*shared, *kept.token_ids.tolist()[: len(whole) - len(shared)]) == whole
    assert (*shared, *left.token_ids.tolist()) == (*other, 6, END)
    assert kept.mask is not None
    assert left.mask is not None
    assert kept.token_ids[kept.mask].tolist() == [5, END, 6, END]
    assert left.token_ids[left.mask].tolist() == [6, END]
    assert min(left.versions.tolist()) > 0  # what was read has the version of its turn: it makes no sample older


async def test_an_agent_learns_that_its_messages_have_become_too_long(tokenizer: Any) -> None:
    said: list[Any] = []

    async def agent(prompt: Prompt, address: Address) -> float:
        messages = [user("w1 " * 23)]
        try:
            for _ in range(9):
                answer = await chat(address, messages)
                said.append(answer.choices[0].finish_reason)
                messages += [answer.choices[0].message.model_dump(), user("w2 " * 5)]
        except openai.BadRequestError as error:
            said.extend([error.code, "maximum context length" in str(error)])
        return 1.0

    script = Script(tokenizer, *["w5 " * 12] * 9)
    async with episodes_of(agent, script, tokenizer, max_len=64) as episodes:
        group = await episodes.group(prompt_at(0), 1, Sampling(max_tokens=12), seed=0)
    assert said == ["length", "length", "context_length_exceeded", True]
    assert script.budgets == [12, 64 - len(script.read[1])]
    assert 0 < script.budgets[1] < 12
    assert len(group.prompt.token_ids) + len(group.completions[0].token_ids) == 64
    assert [len(turn) for turn in _turns(group.completions[0])] == script.budgets


async def test_agents_that_begin_with_nothing_in_common_are_unscored_ag2(tokenizer: Any) -> None:
    async def agent(prompt: Prompt, address: Address) -> float:
        async with AsyncOpenAI(base_url=address.url, api_key=address.key, max_retries=0) as client:
            number = int(address.url.split("/")[-2].split("-")[-1])
            await client.completions.create(model="policy", prompt=[number + 1, 7])
        return 1.0

    async with episodes_of(agent, Script(tokenizer, "w5", "w5"), tokenizer) as episodes:
        group = await episodes.group(prompt_at(0), 2, SAMPLING, seed=0)
    assert [type(reward) for reward in group.rewards] == [Unscored, Unscored]
    assert group.prompt.token_ids == prompt_at(0).token_ids
