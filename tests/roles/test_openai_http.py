"""OA-1, OA-3 to OA-5 and OH-1: what the endpoint for agents refuses, and who goes away or does not come."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest

from roles import openai_http
from roles.engine import EngineFailed
from roles.openai_http import MAX_BODY
from roles.rollout import Rollout, RolloutConfig
from runtime import DeadlineExceeded, Stopped, this_host
from tests.roles.openai_help import ENDLESS, FUNCTION, TOOLS, client_of, serving, user
from tests.roles.test_environment import Script
from tests.roles.tiny import END
from tests.waiting import until

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 0.5}, "presence_penalty: engines don't sample by it"),
    ({"stop": ["w1", ""]}, "sampling.stop: expected at most 16 strings, none of them empty"),
    ({"stop": [1]}, "Expected `str`, got `int`"),
    ({"logprobs": True, "top_logprobs": 21}, "sampling.top_logprobs: expected 0 to 20, got 21"),
    ({"top_logprobs": 3}, "set logprobs to true"),
    ({"stop_token_ids": [61]}, "expected stop tokens in 0..60"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": "x"}, "seed: expected an integer"),
    ({"n": 0.5}, "n: expected 1 to 64"),
    ({"n": 0}, "n: expected 1 to 64, got 0"),
    ({"max_completion_tokens": 0}, "max_tokens: expected at least 1"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is known"),
    ({"temperature": "hot"}, "Expected `float`, got `str`"),
    ({"max_tokens": 100_000}, "within max_len = 64"),
    ({"n": 2}, "a session records one answer a request"),
    ({"seed": True}, "seed: expected an integer"),
    ({"stop": ["w1"] * 17}, "at most 16 strings"),
    ({"stop": {"a": 1}}, "got `object`"),
    ({"logprobs": 2}, "logprobs: expected true or false"),
    ({"tools": [1]}, "tools: expected a list of objects"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice: engines can't force calls"),
    ({"tools": TOOLS, "tool_choice": TOOLS[0]}, "tool_choice: engines can't force calls"),
    ({"functions": [FUNCTION]}, "functions: engines don't"),
    ({"stream_options": "usage", "stream": True}, "stream_options: expected an object"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "only text is known"),
    ({"messages": [{"role": "user", "content": 5}]}, "expected text"),
    ({"messages": [{"role": "user", "content": None}]}, "expected text"),
    ({"messages": [{"role": "user", "content": "w1 " * 80}]}, "within max_len = 64"),
    ({"messages": "w1"}, "messages: expected a list"),
]

REFUSED_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "at least one token"),
    ({"prompt": []}, "prompt: expected a text"),
    ({"prompt": None}, "prompt: expected a text"),
    ({"prompt": {"text": "w1"}}, "prompt: expected a text"),
    ({"prompt": [[]]}, "prompt: expected a text"),
    ({"prompt": [-1]}, "expected prompt tokens in 0..60"),
    ({"prompt": [61]}, "expected prompt tokens in 0..60"),
    ({"prompt": ["w1"] * 65}, "at most 64 prompts times n, got 65"),
    ({"prompt": ["w1"] * 9, "n": 8}, "at most 64 prompts times n, got 9 . 8"),
    ({"logprobs": "x"}, "logprobs: expected an integer"),
    ({"logprobs": 21}, "expected 0 to 20"),
    ({"echo": True}, "echo: engines don't"),
    ({"best_of": 3}, "best_of: engines don't"),
]


async def test_nothing_is_read_without_the_key_oa1(tokenizer: Any) -> None:
    async with serving(Script(tokenizer), tokenizer) as server, client_of(server, key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="bearer token"):
            await client.chat.completions.create(model="policy", messages=[user("w1")])
        async with httpx.AsyncClient() as bare:
            assert (await bare.get(f"{server.url()}/models")).status_code == 401


async def test_what_can_not_be_answered_rightly_is_refused_with_a_reason_oa3(policy: str, tokenizer: Any) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_len=64), policy)
        async with serving(rollout, tokenizer) as server, client_of(server, "s") as client:
            request: Any = {"model": "policy", "messages": [user("w1")], "max_tokens": 4}
            for body, text in REFUSED:
                with pytest.raises(openai.BadRequestError, match=text):
                    await client.post("/chat/completions", body={**request, **body}, cast_to=object)
            await client.chat.completions.create(**request)
            assert len(server.close_session("s")) == 1
        async with serving(rollout, tokenizer) as server, client_of(server) as client:
            for body, text in REFUSED_TEXT:
                with pytest.raises(openai.BadRequestError, match=text):
                    await client.post("/completions", body={"prompt": "w1", "max_tokens": 4, **body}, cast_to=object)
        assert rollout.outstanding == (0,)


async def test_bodies_that_are_too_large_or_no_json_are_refused_oa5(tokenizer: Any) -> None:
    async with serving(Script(tokenizer), tokenizer) as server, httpx.AsyncClient() as bare:
        headers = {"Authorization": f"Bearer {server.key}"}
        url = f"{server.url()}/chat/completions"
        for content in (b"{", b"[]", b"\xff", b"[" * 200_000):
            assert (await bare.post(url, content=content, headers=headers)).status_code == 400
        text = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]})
        assert (await bare.post(url, content=text, headers=headers)).status_code == 400
        assert (await bare.get(url, headers=headers)).status_code == 405
        large = await bare.post(url, content=b" " * (MAX_BODY + 1), headers=headers)
        assert large.status_code == 413
        missing = await bare.get(server.url().replace("/v1", "/sessions/x/v1/models"), headers=headers)
        assert missing.status_code == 404


async def test_a_rollout_that_can_not_answer_is_told_as_such_and_agents_may_ask_again_rd4(tokenizer: Any) -> None:
    class Lost(Script):
        faults = [Stopped("it has been stopped"), EngineFailed("it has failed"), DeadlineExceeded("it took too long")]

        async def complete(self, *args: Any, **more: Any) -> Any:
            if self.faults:
                raise self.faults.pop(0)
            return await super().complete(*args, **more)

    async with serving(Lost(tokenizer, "w5"), tokenizer) as server, client_of(server, "s") as client:
        for words in ("stopped", "failed", "too long"):
            with pytest.raises(openai.InternalServerError, match=words) as caught:
                await client.chat.completions.create(model="policy", messages=[user("w1")])
            assert caught.value.status_code == 503
        await client.chat.completions.create(model="policy", messages=[user("w1")])
        (trajectory,) = server.close_session("s")
        assert trajectory.completion.token_ids.tolist() == [5, END]
        assert server.num_forks == 0


async def test_of_an_answer_that_fails_nothing_is_recorded_rd4(tokenizer: Any) -> None:
    """The client has heard of no prompt, also not of the one that was answered before another failed."""
    first = asyncio.Event()

    class Half(Script):
        fault = True

        async def complete(self, token_ids: Any, *args: Any, **more: Any) -> Any:
            if self.fault and token_ids == (3,):
                await first.wait()
                raise EngineFailed("it has failed")
            said = await super().complete(token_ids, *args, **more)
            asyncio.get_running_loop().call_later(0.05, first.set)
            return said

    script = Half(tokenizer, "w5", "w6", "w7")
    async with serving(script, tokenizer) as server, client_of(server, "s") as client:
        with pytest.raises(openai.InternalServerError, match="it has failed"):
            await client.completions.create(model="policy", prompt=[[1, 2], [3]])
        assert server._homes["s"].record.trajectories() == []
        script.fault = False
        await client.completions.create(model="policy", prompt=[[1, 2], [3]])
        said = [(one.prompt_ids, one.completion.token_ids.tolist()) for one in server.close_session("s")]
        assert said == [((1, 2), [6, END]), ((3,), [7, END])]


@pytest.mark.parametrize("connection", ["new", "open already"])
async def test_who_goes_away_and_asks_again_at_once_goes_on_with_the_same_tokens_rd4(
    tokenizer: Any, connection: str
) -> None:
    """The next request may come before the one that was given up has let go."""

    class Waits(Script):
        waits = False

        async def complete(self, *args: Any, **more: Any) -> Any:
            if len(self.read) == 1 and not self.waits:
                self.waits = True
                try:
                    await asyncio.Event().wait()
                finally:  # as a replica that is told to stop
                    await asyncio.sleep(0.05)
            return await super().complete(*args, **more)

    script = Waits(tokenizer, "w5", "w6")
    async with serving(script, tokenizer) as server, client_of(server, "s") as client, client_of(server, "s") as other:
        first = await client.chat.completions.create(model="policy", messages=[user("w1")])
        messages = [user("w1"), first.choices[0].message.model_dump(), user("w2")]
        if connection == "open already":
            await other.models.list()
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))
        await until(lambda: script.waits, during=[asking])
        asking.cancel()
        await asyncio.wait([asking])
        await other.chat.completions.create(model="policy", messages=messages)
        (trajectory,) = server.close_session("s")
        assert server.num_forks == 0
    assert trajectory.completion.mask is not None
    assert trajectory.completion.token_ids[trajectory.completion.mask].tolist() == [5, END, 6, END]


async def test_a_body_that_does_not_come_is_not_waited_for_oh1(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_http, "BODY_SECONDS", 0.05)
    async with serving(Script(tokenizer), tokenizer) as server:
        host, port = server.url().removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_goes_away_stops_its_work_oa4(policy: str, tokenizer: Any) -> None:
    async with this_host() as host:
        rollout = await Rollout.start(host, RolloutConfig(max_running=4), policy)
        async with serving(rollout, tokenizer, sampling=ENDLESS) as server:
            async with client_of(server, "s") as client:
                call = asyncio.create_task(client.chat.completions.create(model="policy", messages=[user("w1")]))
                await until(rollout.stats, lambda stats: stats[0].running, during=[call])
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            await until(rollout.stats, lambda stats: stats[0].running == 0)
            assert server.close_session("s") == []


async def test_it_listens_on_loopback_only(tokenizer: Any) -> None:
    async with serving(Script(tokenizer), tokenizer) as server:
        port = int(server.url().rsplit(":", 1)[1].split("/")[0])
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", port))  # free: the server has 127.0.0.1 alone
