"""Promises of roles/openai_server.py and recorded.py: the real `openai` client against a real server. The policy is the
small engine where tokens matter, and a scripted one (`Script`) where a model would have to know what to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import numpy as np
import openai
import pytest
import torch

from roles.dialogue import Dialogue
from roles.openai_server import OpenAIServer
from roles.openai_wire import calls_in
from roles.rollout import Rollout, RolloutConfig
from roles.types import Piece
from runtime import this_host
from tests.roles.openai_help import ENDLESS, TOOLS, client_of, serving, user
from tests.roles.test_environment import Script
from tests.roles.tiny import END, tiny_model
from tests.waiting import until


async def test_an_agent_of_two_turns_is_recorded_with_exact_tokens_logprobs_and_versions_oa2(
    policy: str, tokenizer: Any
) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(ranks=2, max_running=8), policy)
        async with serving(rollout, tokenizer) as server, client_of(server, "episode-1") as client:
            messages = [user("w1 w2")]
            for reply in ("w3", "w4"):
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, max_tokens=6, logprobs=True, temperature=0.9, seed=5
                )
                message = answer.choices[0].message
                assert answer.choices[0].logprobs is not None
                assert answer.choices[0].logprobs.content is not None
                assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens  # type: ignore[union-attr]
                messages += [message.model_dump(), user(reply)]
            (trajectory,) = server.close_session("episode-1")
            assert server.num_forks == 0
            assert rollout._router._sessions == {}
    completion = trajectory.completion
    assert completion.mask is not None
    assert completion.versions.tolist() == [0] * len(completion.token_ids)
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    ids = torch.tensor([[*trajectory.prompt_ids, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = tiny_model()(input_ids=ids, use_cache=False).logits[0, len(trajectory.prompt_ids) - 1 : -1] / 0.9
    expected = logits.log_softmax(-1).gather(1, ids[0, len(trajectory.prompt_ids) :, None])[:, 0].numpy()
    np.testing.assert_allclose(completion.logprobs[completion.mask], expected[completion.mask], atol=1e-4)


async def test_sampled_tokens_are_never_spelled_again_and_a_changed_history_forks_rd1_rd2(tokenizer: Any) -> None:
    script = Script(tokenizer, "w5 w6", "w7", "w8")
    async with serving(script, tokenizer) as server, client_of(server, "s") as client:
        first = await client.chat.completions.create(model="policy", messages=[user("w1")])
        said = first.choices[0].message.content
        assert said == "w5 w6"
        assistant: Any = {"role": "assistant", "content": said}
        await client.chat.completions.create(model="policy", messages=[user("w1"), assistant, user("w2")])
        changed: Any = {"role": "assistant", "content": "w9"}
        await client.chat.completions.create(model="policy", messages=[user("w1"), changed, user("w2")])
        kept, forked = server.close_session("s")
        assert server.num_forks == 1
    assert script.read[1] == (*script.read[0], 5, 6, END, *Dialogue(tokenizer).reply([user("w2")], [5, 6, END]))
    assert kept.completion.mask is not None
    assert kept.completion.token_ids[kept.completion.mask].tolist() == [5, 6, END, 7, END]
    assert forked.completion.token_ids.tolist() == [8, END]
    assert forked.completion.mask is None


async def test_tool_calls_reach_the_agent_and_its_results_the_policy(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    script = Script(tokenizer, "w5", "w3")
    dialogue = Dialogue(tokenizer)
    texts = iter([f"w5 {call}", "w3"])
    dialogue.text = lambda ids: next(texts)  # type: ignore[method-assign]  # WORDS can't spell JSON
    async with OpenAIServer(script, dialogue).serving() as server, client_of(server, "s") as client:
        first = await client.chat.completions.create(model="policy", messages=[user("w1")], tools=TOOLS)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "w5"
        assert choice.message.tool_calls is not None
        (made,) = choice.message.tool_calls
        assert made.type == "function"
        assert (made.function.name, made.function.arguments) == ("add", '{"a": 1}')
        result: Any = {"role": "tool", "tool_call_id": made.id, "content": "w2"}
        second = await client.chat.completions.create(
            model="policy", messages=[user("w1"), cast(Any, choice.message.model_dump()), result], tools=TOOLS
        )
        assert second.choices[0].message.content == "w3"
        assert server._homes["s"].record.num_forks == 0
        assert len(script.read) == 2
        assert script.read[1][: len(script.read[0])] == script.read[0]


async def test_streams_completions_and_several_choices(policy: str, tokenizer: Any) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=8), policy)
        async with serving(rollout, tokenizer) as server, client_of(server) as client:
            request: Any = {"model": "policy", "messages": [user("w1")], "max_tokens": 8, "seed": 1, "n": 3}
            plain = await client.chat.completions.create(**request, logprobs=True)
            assert len({choice.message.content for choice in plain.choices}) > 1
            stream = await client.chat.completions.create(
                **request, logprobs=True, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            for choice in plain.choices:
                mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
                assert "".join(c.delta.content or "" for c in mine) == choice.message.content
                assert [c.delta.role for c in mine if c.delta.role] == ["assistant"]
                assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
                assert choice.logprobs is not None
                told = [entry for c in mine if c.logprobs for entry in c.logprobs.content or []]
                whole = choice.logprobs.content or []
                assert [entry.token for entry in told] == [entry.token for entry in whole]
                # The same tokens in another batch: the last digit may differ.
                assert [entry.logprob for entry in told] == pytest.approx([entry.logprob for entry in whole], abs=1e-5)
                extras = [cast(Any, c.model_extra) for c in mine]
                assert [t for e in extras for t in e.get("token_ids", [])] == choice.model_extra["token_ids"]
                # A chunk for each token that gives text, then the reason.
                assert len(mine) == sum(not entry.token.startswith("<") for entry in told) + 1
            assert chunks[-1].usage == plain.usage
            completion = await client.completions.create(
                model="policy", prompt=[1, 2, 3], max_tokens=5, logprobs=2, seed=3
            )
            exact: Any = completion.choices[0].model_extra
            logprobs = completion.choices[0].logprobs
            assert logprobs is not None
            assert len(exact["token_ids"]) == len(logprobs.token_logprobs or []) == len(logprobs.top_logprobs or [])
            streamed = await client.completions.create(
                model="policy", prompt=[1, 2, 3], max_tokens=5, seed=3, stream=True
            )
            assert "".join([c.choices[0].text async for c in streamed]) == completion.choices[0].text
            assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_stream_gives_tokens_while_later_ones_are_sampled_oa4(policy: str, tokenizer: Any) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=4), policy)
        async with serving(rollout, tokenizer, sampling=ENDLESS) as server, client_of(server) as client:
            stream = await client.chat.completions.create(model="policy", messages=[user("w1")], stream=True)
            first = [await anext(stream) for _ in range(5)]
            assert [len(cast(Any, chunk.choices[0].model_extra)["token_ids"]) for chunk in first] == [1] * 5
            assert (await rollout.stats())[0].running == 1
            await stream.close()
            await until(rollout.stats, lambda stats: stats[0].running == 0)


async def test_stop_strings_end_an_answer_before_them_and_the_tokens_stay_exact(policy: str, tokenizer: Any) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=8), policy)
        async with serving(rollout, tokenizer) as server, client_of(server, "s") as client:
            request: Any = {"model": "policy", "messages": [user("w1")], "max_tokens": 30, "seed": 4}
            whole = (await client.chat.completions.create(**request)).choices[0]
            text, tokens = whole.message.content or "", cast(Any, whole.model_extra)["token_ids"]
            place = text.index(" ", 12) - 1  # begins in one word and ends in the next
            stop = text[place : place + 4]
            for stream in (False, True):
                answer: Any = await client.chat.completions.create(**request, stop=[stop, "w99"], stream=stream)
                if stream:
                    chunks = [chunk.choices[0] async for chunk in answer]
                    said, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
                    ids = [token for c in chunks for token in c.model_extra.get("token_ids", [])]
                else:
                    (choice,) = answer.choices
                    said, reason, ids = choice.message.content, choice.finish_reason, choice.model_extra["token_ids"]
                assert (said, reason) == (text[: text.index(stop)], "stop")
                assert ids == tokens[: len(ids)]
                assert stop in tokenizer.decode(ids)
                assert stop not in tokenizer.decode(ids[:-1])
            assert [len(t.completion.token_ids) for t in server.close_session("s")] == [len(tokens), len(ids), len(ids)]


async def test_the_likeliest_tokens_are_told_beside_the_sampled_one(policy: str, tokenizer: Any) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=8), policy)
        async with serving(rollout, tokenizer) as server, client_of(server) as client:
            for temperature in (0.0, 0.9):
                answer = await client.chat.completions.create(
                    model="policy", messages=[user("w1")], max_tokens=6, logprobs=True, top_logprobs=3,
                    temperature=temperature, seed=2,
                )  # fmt: skip
                entries = answer.choices[0].logprobs.content or []  # type: ignore[union-attr]
                for entry in entries:
                    values = [other.logprob for other in entry.top_logprobs]
                    assert len(values) == 3
                    assert values == sorted(values, reverse=True)
                    named = {other.token: other.logprob for other in entry.top_logprobs}
                    assert named.get(entry.token, entry.logprob) == pytest.approx(entry.logprob, abs=1e-5)
                    if temperature == 0:  # what the model made of the token, not that greedy decoding is certain of it
                        assert entry.logprob == values[0] < 0
            greedy = await client.chat.completions.create(
                model="policy", messages=[user("w1")], max_tokens=2, logprobs=True, temperature=0
            )
            assert [e.top_logprobs for e in greedy.choices[0].logprobs.content or []] == [[], []]  # type: ignore


async def test_calls_of_tools_in_a_stream_are_no_text_of_it(tokenizer: Any) -> None:
    spelled = {5: "Let me see.", 6: " <tool", 7: '_call>{"name": "add", "arg', 8: 'uments": {"a": 1}}</tool_call>'}
    dialogue = Dialogue(tokenizer)
    dialogue.text = lambda ids: "".join(spelled.get(i, "") for i in ids)  # type: ignore[method-assign]
    script = Script(tokenizer, "w5 w6 w7 w8", "w5 w6")
    async with OpenAIServer(script, dialogue).serving() as server, client_of(server, "s") as client:
        request: Any = {"model": "policy", "messages": [user("w1")], "tools": TOOLS, "stream": True}
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**request)]
        assert "".join(c.delta.content or "" for c in chunks) == "Let me see."
        assert chunks[-1].finish_reason == "tool_calls"
        (call,) = chunks[-1].delta.tool_calls or []
        assert call.function is not None
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        # A client that puts the chunks together and sends them back goes on with the same tokens.
        assistant: Any = {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": call.id, "type": "function", "function": call.function.model_dump()}],
        }
        request["messages"] = [user("w1"), assistant, {"role": "tool", "tool_call_id": call.id, "content": "w2"}]
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**request)]
        assert "".join(c.delta.content or "" for c in chunks) == "Let me see. <tool"  # what was no call is text
        (trajectory,) = server.close_session("s")
        assert server.num_forks == 0
        assert trajectory.completion.token_ids[:5].tolist() == [5, 6, 7, 8, END]


async def test_who_asks_again_after_a_failure_goes_on_with_the_same_tokens_rd4_oa6(tokenizer: Any) -> None:
    class Failing(Script):
        fail_after = -1

        async def stream(self, *args: Any, **more: Any) -> AsyncGenerator[Piece, None]:
            number = 0
            async for piece in super().stream(*args, **more):
                if number == self.fail_after:
                    raise ValueError("the engine is gone")
                yield piece
                number += 1

    script = Failing(tokenizer, "w5 w6", "w7", "w7", "w7")
    async with serving(script, tokenizer) as server, client_of(server, "s") as client:
        first = await client.chat.completions.create(model="policy", messages=[user("w1")])
        assistant: Any = {"role": "assistant", "content": first.choices[0].message.content}
        request: Any = {"model": "policy", "messages": [user("w1"), assistant, user("w2")], "stream": True}
        script.fail_after = 0
        with pytest.raises(openai.BadRequestError, match="the engine is gone"):  # before the first event: a status
            await client.chat.completions.create(**request)
        script.fail_after = 1
        with pytest.raises(openai.APIError, match="the engine is gone"):  # later: the last event
            async for _ in await client.chat.completions.create(**request):
                pass
        script.fail_after = -1
        async for _ in await client.chat.completions.create(**request):
            pass
        (trajectory,) = server.close_session("s")
        assert server.num_forks == 0
        assert script.read[1] == script.read[2] == script.read[3]
    assert trajectory.completion.mask is not None
    assert trajectory.completion.token_ids[trajectory.completion.mask].tolist() == [5, 6, END, 7, END]


async def test_agents_need_not_be_changed_oa8(tokenizer: Any) -> None:
    async with serving(Script(tokenizer, *["w5"] * 3), tokenizer) as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model="gpt-9", messages=[user("w1")], extra_body={"metadata": {"a": "b"}, "what": 1}, user="me", store=False
        )
        assert answer.model == "policy"
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9', only 'policy'"):
            await client.models.retrieve("gpt-9")


class Seeds(Script):
    """Remembers what its answers are drawn by."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, *["w5"] * 99)
        self.seeds: list[int] = []

    async def complete(self, token_ids: Any, sampling: Any, seed: int, **more: Any) -> Any:
        self.seeds.append(seed)
        return await super().complete(token_ids, sampling, seed, **more)


async def test_no_two_turns_draw_the_same_numbers_and_a_run_can_be_repeated_oa7(tokenizer: Any) -> None:
    async def seeds_of(*requests: tuple[str, dict[str, Any]]) -> list[int]:
        script = Seeds(tokenizer)
        async with serving(script, tokenizer, seed=3) as server:
            for session, more in requests:
                async with client_of(server, session) as client:
                    await client.chat.completions.create(**{"model": "policy", "messages": [user("w1")], **more})
        return script.seeds

    plan: list[tuple[str, dict[str, Any]]] = [("", {}), ("", {}), ("a", {}), ("a", {}), ("b", {}), ("", {"n": 3})]
    drawn = await seeds_of(*plan)
    assert len(set(drawn)) == 8
    # A session's numbers do not depend on what others ask meanwhile.
    (first, second), (other,) = drawn[2:4], drawn[4:5]
    assert await seeds_of(("b", {}), ("a", {}), ("", {}), ("a", {})) == [other, first, drawn[0], second]
    # Who says a seed gets the same again, but not for a longer dialogue.
    same = await seeds_of(("", {"seed": 5}), ("a", {"seed": 5}), ("", {"seed": 5, "messages": [user("w1 w2")]}))
    assert same[0] == same[1] != same[2]


async def test_equal_prompts_of_one_request_draw_numbers_of_their_own_oa7(tokenizer: Any) -> None:
    script = Seeds(tokenizer)
    async with serving(script, tokenizer) as server, client_of(server) as client:
        await client.completions.create(model="policy", prompt=["w1", "w1", "w2"], n=2)
        assert len(set(script.seeds)) == 6
        await client.completions.create(model="policy", prompt=["w1", "w1"], seed=5)
        assert script.seeds[6] == script.seeds[7]


async def test_a_session_records_one_text_a_request_oa3(tokenizer: Any) -> None:
    async with serving(Script(tokenizer), tokenizer) as server, client_of(server, "s") as client:
        with pytest.raises(openai.BadRequestError, match="n: a session records one answer a request"):
            await client.completions.create(model="policy", prompt="w1", n=2)


async def test_tokens_of_a_prompt_are_counted_once_however_many_answers_it_gets(tokenizer: Any) -> None:
    async with serving(Script(tokenizer, *["w5"] * 3), tokenizer) as server, client_of(server) as client:
        answer = await client.chat.completions.create(model="policy", messages=[user("w1")], n=3)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(Dialogue(tokenizer).prompt([user("w1")]))
    assert answer.usage.completion_tokens == 6


async def test_calls_that_the_agent_does_not_want_stay_text(tokenizer: Any) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    dialogue = Dialogue(tokenizer)
    dialogue.text = lambda ids: call  # type: ignore[method-assign]
    async with OpenAIServer(Script(tokenizer, "w5"), dialogue).serving() as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[user("w1")], tools=TOOLS, tool_choice="none"
        )
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", call)


async def test_a_session_that_is_closed_under_a_request_lets_it_end(tokenizer: Any) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    class Waiting(Script):
        async def complete(self, *args: Any, **more: Any) -> Any:
            began.set()
            await go.wait()
            return await super().complete(*args, **more)

    async with serving(Waiting(tokenizer, "w5"), tokenizer) as server, client_of(server, "s") as client:
        call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[user("w1")]))
        await began.wait()
        assert server.close_session("s") == []
        go.set()
        assert (await call).choices[0].message.content == "w5"
        with pytest.raises(openai.NotFoundError, match="there is no session 's'"):
            await client.chat.completions.create(model="policy", messages=[user("w1")])


def test_a_call_that_nests_without_end_is_no_call() -> None:
    assert calls_in("<tool_call>" + "[" * 5000 + "</tool_call>") == []
