"""Promises of roles/environment.py, transcript.py, dialogue.py and tools.py. The policy is the small engine
where tokens matter, and a scripted one (`Script`) where a model would have to know how to play."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from roles.dialogue import Dialogue
from roles.environment import EpisodeLimits, Episodes, Reply
from roles.gym_environment import GymEnvironment
from roles.pieces import as_piece, cut
from roles.rollout import Rollout, RolloutConfig
from roles.routing import Member
from roles.tools import ToolEnvironment, calculator, describe, python
from roles.transcript import Transcript
from roles.types import Completion, Group, Piece, Prompt, Sampling, Scored, Unscored
from runtime import this_host
from tests.roles.tiny import CHAT, END, prompt_at, save_tiny_policy, tiny_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tokenizer(policy: str) -> Any:
    return AutoTokenizer.from_pretrained(policy)


class Script:
    """Not a model: says given texts, one after another. Remembers what it read."""

    def __init__(self, tokenizer: Any, *turns: str) -> None:
        self.turns = list(turns)
        self.read: list[tuple[int, ...]] = []
        self.budgets: list[int] = []
        self.forgotten: list[Any] = []
        self._tokenizer = tokenizer

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling, seed: int, *, session: Any = None
    ) -> Completion:
        self.read.append(tuple(token_ids))
        self.budgets.append(sampling.max_tokens)
        ids = np.array([*self._tokenizer.encode(self.turns.pop(0)), END], np.int32)[: sampling.max_tokens]
        n = len(ids)
        return Completion(
            token_ids=ids,
            logprobs=np.full(n, -1.0, np.float32),
            versions=np.full(n, len(self.read), np.int32),
            finish_reason="stop" if ids[-1] == END else "length",
        )

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, seed: int, *, session: Any = None
    ) -> AsyncGenerator[Piece, None]:
        """Token by token."""
        whole = await self.complete(token_ids, sampling, seed, session=session)
        for place in range(len(whole.token_ids)):
            yield cut(as_piece(whole), place + 1, place)
        yield Piece(
            token_ids=whole.token_ids[:0], logprobs=whole.logprobs[:0], versions=whole.versions[:0], completion=whole
        )

    def forget(self, session: Any) -> None:
        self.forgotten.append(session)


class Counting:
    """An environment that says `w1`, then `w2` ... and ends after some turns."""

    closed = 0

    def __init__(self, turns: int = 3, fault: str = "") -> None:
        self.turns, self.said, self.fault = turns, 0, fault

    async def reset(self, prompt: Prompt) -> Any:
        if self.fault == "reset":
            raise RuntimeError("no such world")
        return {"begins with nothing": [], "begins wrongly": [{"role": "user"}]}.get(self.fault)

    async def step(self, text: str) -> Any:
        if self.fault == "answers nothing":
            return None
        if self.fault == "bad reward":
            return Reply("w1", reward="much")  # type: ignore[arg-type]
        if self.fault == "no number":
            return Reply(done=True, reward=float("nan"))
        if self.fault == "step":
            raise KeyError("w9")
        if self.fault == "hang":
            await asyncio.Event().wait()
        self.said += 1
        if self.said == self.turns:
            return Reply(done=True, reward=0.5)
        return Reply(f"w{self.said}", reward=0.25)

    async def close(self) -> None:
        type(self).closed += 1
        if self.fault == "close":
            raise OSError("it is stuck")


async def test_an_episode_of_a_real_policy_is_one_append_only_row_with_exact_logprobs_ep1(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=16), policy)
        dialogue = Dialogue(AutoTokenizer.from_pretrained(policy))
        episodes = Episodes(rollout, Counting, dialogue)
        group = await episodes.group(prompt_at(0), 4, Sampling(max_tokens=6), seed=3)
        assert isinstance(group, Group)
        assert rollout.outstanding == (0, 0)
        assert rollout._router._sessions == {}
        again = await episodes.group(prompt_at(0), 4, Sampling(max_tokens=6), seed=3)
        assert isinstance(again, Group)
    model = tiny_model()
    for completion, twin in zip(group.completions, again.completions, strict=True):
        assert completion.token_ids.tolist() == twin.token_ids.tolist()  # RH-2 holds for episodes
        assert completion.mask is not None
        observed = completion.token_ids[~completion.mask].tolist()
        assert observed == [1, 2]
        ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(group.prompt.token_ids) :, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.logprobs[completion.mask], expected[completion.mask], atol=1e-4)
        assert not completion.logprobs[~completion.mask].any()
    assert group.rewards == [Scored(1.0)] * 4
    assert (await episodes.score(group)) is group


async def test_many_sessions_stay_on_their_replicas_and_leave_nothing_behind_ep4(policy: str) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=64), policy)
        episodes = Episodes(rollout, Counting, Dialogue(AutoTokenizer.from_pretrained(policy)))
        homes: dict[Any, set[int]] = {}
        place = rollout._router.place

        def noted(tokens: int, session: Any = None) -> int:
            rank = place(tokens, session)
            homes.setdefault(session, set()).add(rank)
            return rank

        rollout._router.place = noted  # type: ignore[method-assign]
        sampling = Sampling(max_tokens=3, ignore_eos=True)
        played = await asyncio.gather(*[episodes.play(prompt_at(i), sampling, i) for i in range(100)])
        assert [episode.turns for episode in played] == [3] * 100
        assert len(homes) == 100
        assert all(len(ranks) == 1 for ranks in homes.values())
        assert set.union(*homes.values()) == {0, 1}
        await episodes.group(prompt_at(5), 6, sampling, 3)
        together = [ranks for session, ranks in homes.items() if isinstance(session, Member)]
        assert len(together) == 6
        assert len(set.union(*together)) == 1
        assert rollout._router._sessions == {}
        assert rollout.outstanding == (0, 0)
        for stats in await rollout.stats():
            assert (stats.running, stats.waiting) == (0, 0)


async def test_turns_read_everything_that_stands_before_them(tokenizer: Any) -> None:
    script = Script(tokenizer, "w5 w6", "w7", "w8")
    episode = await Episodes(script, Counting, Dialogue(tokenizer)).play(prompt_at(0), Sampling(), seed=1)
    begin = prompt_at(0).token_ids
    assert script.read == [begin, (*begin, 5, 6, END, 1), (*begin, 5, 6, END, 1, 7, END, 2)]
    assert episode.completion.token_ids.tolist() == [5, 6, END, 1, 7, END, 2, 8, END]
    assert episode.completion.mask is not None
    assert episode.completion.mask.astype(int).tolist() == [1, 1, 1, 0, 1, 1, 0, 1, 1]
    assert episode.completion.versions.tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert (episode.reward, episode.turns, episode.ended) == (Scored(1.0), 3, "done")
    assert script.forgotten == [1]


@pytest.mark.parametrize(
    ("limits", "ended", "tokens"),
    [
        ({"turns": 2}, "turns", [5, 6, END, 1, 7, END]),
        ({"tokens": 9}, "tokens", [5, 6, END, 1, 7]),  # the second turn is cut by what is left
        ({"tokens": 8}, "tokens", [5, 6, END]),  # a reply that leaves no room for a turn is left out
    ],
)
async def test_budgets_end_an_episode_and_replies_are_never_cut_ep2(
    tokenizer: Any, limits: dict, ended: str, tokens: list[int]
) -> None:
    script = Script(tokenizer, "w5 w6", "w7", "w8")
    episodes = Episodes(script, Counting, Dialogue(tokenizer), EpisodeLimits(**limits))
    episode = await episodes.play(prompt_at(0), Sampling(), seed=1)
    assert episode.ended == ended
    assert episode.completion.token_ids.tolist() == tokens
    used = [len(read) + budget for read, budget in zip(script.read, script.budgets, strict=True)]
    assert max(used) <= limits.get("tokens", 4096)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("reset", "reset of the environment raised RuntimeError: no such world"),
        ("step", "step of the environment raised KeyError: 'w9'"),
        ("hang", "step of the environment took too long"),
        ("begins with nothing", "reset of the environment raised ValueError: it has no messages"),
        ("begins wrongly", "reset of the environment raised KeyError: 'content'"),
        (
            "answers nothing",
            "step of the environment raised AttributeError: 'NoneType' object has no attribute 'reward'",
        ),
        ("bad reward", "step of the environment raised ValueError: could not convert string to float: 'much'"),
        ("no number", "step of the environment raised ValueError: a reward of nan"),
        ("close", "close of the environment raised OSError: it is stuck"),
    ],
)
async def test_a_faulty_environment_makes_an_unscored_episode_and_is_closed_ep3_ep5(
    tokenizer: Any, fault: str, reason: str
) -> None:
    Counting.closed = 0
    script = Script(tokenizer, "w5", "w5", "w5")
    episodes = Episodes(script, lambda: Counting(fault=fault), Dialogue(tokenizer), EpisodeLimits(seconds=0.2))
    episode = await episodes.play(prompt_at(0), Sampling(), seed=1)
    assert isinstance(episode.reward, Unscored)
    assert episode.reward.reason.startswith(reason)
    assert episode.ended == "error"
    assert Counting.closed == 1


async def test_one_faulty_environment_of_a_group_is_no_matter_of_the_others_ep3(tokenizer: Any) -> None:
    """Also where messages take the place of the prompt, which the faulty one has none of."""

    class Sometimes(Counting):
        made = 0

        def __init__(self) -> None:
            super().__init__(turns=1)
            type(self).made += 1
            self.number = type(self).made
            if self.number == 1:
                raise OSError("no room")

        async def reset(self, prompt: Prompt) -> Any:
            if self.number == 2:
                raise OSError("no map")
            return [{"role": "user", "content": "w1 w2"}]

    episodes = Episodes(Script(tokenizer, "w5"), Sometimes, Dialogue(tokenizer))
    group = await episodes.group(prompt_at(0), 3, Sampling(), seed=1)
    assert group.rewards == [
        Unscored("making of the environment raised OSError: no room"),
        Unscored("reset of the environment raised OSError: no map"),
        Scored(0.5),
    ]
    assert group.prompt.token_ids == (1, 2)
    assert [len(completion.token_ids) for completion in group.completions] == [0, 0, 2]


@pytest.mark.parametrize("tokens", [4, 4096])
async def test_what_the_policy_can_not_read_is_unscored_and_ends_no_run_ep3(tokenizer: Any, tokens: int) -> None:
    class Full(Script):
        async def complete(self, *args: Any, **more: Any) -> Completion:
            raise ValueError("expected prompt and completion within max_len = 4")

    episodes = Episodes(Full(tokenizer), Counting, Dialogue(tokenizer), EpisodeLimits(tokens=tokens))
    (reward,) = (await episodes.group(prompt_at(0), 1, Sampling(), seed=1)).rewards
    words = "it begins with 4 tokens of 4" if tokens == 4 else "the policy can't answer: expected prompt and completion"
    assert isinstance(reward, Unscored)
    assert reward.reason.startswith(words)


async def test_a_chat_template_spells_the_whole_dialogue_as_the_turns_do_dg2(policy: str) -> None:
    chat = AutoTokenizer.from_pretrained(policy)
    chat.chat_template = CHAT
    dialogue = Dialogue(chat)
    turns = [{"role": "user", "content": "w1 w2"}]
    ids = list(dialogue.prompt(turns))
    for said, reply in (("w3", "w4"), ("w5 w6", "w7")):
        turn = [*chat.encode(said), END]  # the policy ends its turn itself
        ids += [*turn, *dialogue.reply([{"role": "user", "content": reply}], turn)]
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
        assert tuple(ids) == dialogue.prompt(turns)


def test_a_template_that_drops_earlier_turns_is_refused_dg2(policy: str) -> None:
    chat = AutoTokenizer.from_pretrained(policy)
    chat.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="leaves out earlier turns of the assistant"):
        Dialogue(chat)


def test_a_transcript_keeps_the_routes_of_the_turn_that_sampled_ts3() -> None:
    def turn(read: int, count: int, value: int) -> Completion:
        return Completion(
            token_ids=np.full(count, value, np.int32),
            logprobs=np.zeros(count, np.float32),
            versions=np.full(count, value, np.int32),
            finish_reason="stop",
            routes=np.full((read + count - 1, 1, 2), value, np.uint8),
        )

    transcript = Transcript([9, 9, 9])
    transcript.sample(turn(3, 2, 1))
    transcript.observe([8, 8])
    transcript.sample(turn(7, 3, 2))
    transcript.observe([8])
    completion = transcript.completion()
    assert completion.token_ids.tolist() == [1, 1, 8, 8, 2, 2, 2]
    assert completion.routes is not None
    assert completion.routes[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 2]  # prompt + completion - 1


async def add(a: float, b: float = 1.0) -> str:
    """The sum."""
    return str(a + b)


async def broken(text: str) -> str:
    """Never works."""
    raise RuntimeError(f"no {text}")


async def judge(prompt: Prompt, text: str) -> float:
    return float("w3" in text)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("add", '{"a": 1, "b": 2}'), "<tool_response>3.0</tool_response>"),
        (call("add", '{"a": 1}') + call("add", '{"a": 5}'), "<tool_response>2.0</tool_response>\n<tool_response>6.0"),
        (call("add", '{"b": 1}'), "error: TypeError: missing a required argument: 'a'"),
        (call("add", '{"a": "x"}'), "error: ValidationError: Expected `float`, got `str`"),
        (call("nothing", "{}"), "error: not a call of one of ['add', 'broken']"),
        ("<tool_call>{</tool_call>", "error: not a call of one of"),
        (call("broken", '{"text": "luck"}'), "error: RuntimeError: no luck"),
    ],
)
async def test_tools_answer_the_policy_and_never_fail_the_run_tl1_tl2(text: str, answer: str) -> None:
    environment = ToolEnvironment([add, broken], judge)
    await environment.reset(prompt_at(0))
    reply = await environment.step(text)
    assert answer in reply.text
    assert not reply.done


async def test_a_turn_without_a_call_is_the_answer() -> None:
    environment = ToolEnvironment([add], judge)
    await environment.reset(prompt_at(0))
    assert await environment.step("it is w3") == Reply(done=True, reward=1.0)


def test_tools_are_described_by_their_signature() -> None:
    assert describe(add)["function"] == {
        "name": "add",
        "description": "The sum.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a"],
        },
    }

    def plain(a: int) -> str:
        return ""

    with pytest.raises(ValueError, match="expected an async function"):
        describe(plain)  # type: ignore[arg-type]


@pytest.mark.parametrize(("expression", "value"), [("2 * (3 + 4)", "14"), ("7 // 2 - -1", "4"), ("1 / 4", "0.25")])
async def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert await calculator(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "9 ** 9 ** 9", "x", "1" * 300])
async def test_the_calculator_knows_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        await calculator(expression)


async def test_code_runs_in_the_sandbox_and_its_output_is_cut() -> None:
    assert await python("print(sum(range(10)))") == "45"
    assert "ZeroDivisionError" in await python("1 / 0")
    assert "PermissionError" in await python("import socket; socket.socket()")
    assert len(await python("while True: print('x' * 1000)")) == 10_000


async def test_gym_episodes_give_several_tries_worth_less_and_less() -> None:
    prompt = Prompt(
        position=0,
        text="",
        token_ids=(1,),
        task="chain_sum",
        entry={"question": "2 + 2 =", "answer": "4", "metadata": {}},
    )
    environment = GymEnvironment(tries=2, discount=0.5)
    await environment.reset(prompt)
    assert not (await environment.step("5")).done
    assert await environment.step("4") == Reply(done=True, reward=0.5)
    environment = GymEnvironment(tries=1)
    await environment.reset(prompt)
    assert await environment.step("5") == Reply(done=True, reward=0.0)
