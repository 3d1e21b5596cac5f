"""The rollout as an OpenAI-compatible HTTP endpoint: any agent written against the `openai` client can be trained.

    async with OpenAIServer(rollout, dialogue, model="policy").serving() as server:
        client = AsyncOpenAI(base_url=server.url("episode-7"), api_key=server.key)
        ...                                       # the agent, unchanged
        trajectories = server.close_session("episode-7")

    POST {url}/chat/completions   messages, tools, logprobs, stream, n
    POST {url}/completions        text or token ids, logprobs, stream
    GET  {url}/models

OA-1: every request bears the token, compared in constant time; without it nothing of the request is read.
OA-2: what was sampled under a session's address is recorded with exact tokens, logprobs and versions (recorded.py).
      The address without a session records nothing.
OA-3: a parameter that would change the distribution, and that engines don't sample by, is refused, never ignored: the
      recorded logprobs would be wrong.
OA-4: a client that goes away stops its work on the replica. Streams begin when the turn has ended: engines deal in
      whole completions.
OA-5: it listens on the loopback interface unless told otherwise; bodies above MAX_BODY bytes are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from roles.dialogue import Dialogue
from roles.environment import Completes
from roles.recorded import Session, Trajectory
from roles.seeds import completion_seed
from roles.types import Completion, Sampling
from runtime import ActorError, TaskGroup

MAX_BODY = 8 << 20
MAX_CHOICES = 64

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "stop": [],
    "response_format": {"type": "text"},
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "min_p": 0,
    "repetition_penalty": 1,
}
"""Parameters that are refused unless they have this value (OA-3)."""


class _Refused(Exception):
    """The client's fault, told in the form of the API."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class OpenAIServer:
    """See the module.

    Args:
        rollout: who samples.
        dialogue: how messages are spelled.
        model: the name that clients see.
        key: the bearer token; empty: a new one.
        sampling: what requests leave out.
        seed: of requests that bring none.
    """

    def __init__(
        self,
        rollout: Completes,
        dialogue: Dialogue,
        *,
        model: str = "policy",
        key: str = "",
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        self.key = key or secrets.token_urlsafe(32)
        self.num_forks = 0
        """Over all sessions that were closed."""
        self._rollout = rollout
        self._dialogue = dialogue
        self._model = model
        self._sampling = sampling or Sampling(max_tokens=1024)
        self._seed = seed
        self._count = 0
        self._sessions: dict[str, Session] = {}
        self._address = ""
        routes = []
        for prefix in ("/v1", "/sessions/{session}/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route(f"{prefix}/completions", self._guarded(self._text), methods=["POST"]),
                Route(f"{prefix}/models", self._guarded(self._models), methods=["GET"]),
            ]
        self.app = Starlette(routes=routes)

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[OpenAIServer]:
        """Listen; `port` 0 takes a free one."""
        with socket.create_server((host, port)) as listener:
            self._address = f"http://{host}:{listener.getsockname()[1]}"
            config = uvicorn.Config(self.app, log_level="error", access_log=False, lifespan="off", ws="none")
            server = _Quiet(config)
            async with TaskGroup("http") as tasks:
                tasks.start(server.serve(sockets=[listener]), name="server")
                try:
                    yield self
                finally:
                    server.should_exit = server.force_exit = True

    def url(self, session: str = "") -> str:
        """The base URL for a client; with a session, everything sampled under it is recorded from now on."""
        if not session:
            return f"{self._address}/v1"
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", session):
            raise ValueError(f"session {session!r}: expected 1 to 128 letters, digits, '_', '.' or '-'")
        self._sessions.setdefault(session, Session(self._dialogue))
        return f"{self._address}/sessions/{session}/v1"

    def close_session(self, session: str) -> list[Trajectory]:
        """What was recorded; the address is gone afterwards. Raises KeyError for an unknown session."""
        record = self._sessions.pop(session)
        self._rollout.forget(session)
        self.num_forks += record.num_forks
        return record.trajectories()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _guarded(self, handler: Any) -> Any:
        async def handle(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
                return _error("give the server's key as bearer token", 401)
            try:
                name = request.path_params.get("session", "")
                if name and name not in self._sessions:
                    raise _Refused(f"there is no session {name!r}", 404)
                body = await _body(request) if request.method == "POST" else {}
                async with TaskGroup("request") as tasks:
                    tasks.forever(_gone(request), name="client")
                    answer: asyncio.Task[Response] = tasks.start(handler(body, name), name="answer")
                return answer.result()
            except _Refused as refused:
                return _error(str(refused), refused.status)
            except ActorError as error:
                # What an engine can never run is the client's fault, all else ours.
                return _error(str(error).partition("\n")[0], 400 if isinstance(error, ValueError) else 503)
            except ValueError as error:
                return _error(str(error), 400)
            except ClientDisconnect:
                return Response(status_code=499)

        return handle

    async def _models(self, _body: Mapping[str, Any], _session: str) -> Response:
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "tutti"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _chat(self, body: Mapping[str, Any], name: str) -> Response:
        messages = _messages(body)
        tools = body.get("tools") or None
        sampling, seeds = self._wanted(body)
        session = self._sessions.get(name) or Session(self._dialogue)
        if len(seeds) > 1 and name:
            raise _Refused("n: a session records one answer a request; ask n times, or without a session")
        choices, usage = [], [0, 0]
        for index, seed in enumerate(seeds):
            thread = session.continued(messages, tools)
            turn = await self._complete(session, thread, sampling, seed, name)
            text = self._dialogue.text(turn.token_ids.tolist())
            message, reason = _message(text, turn, tools)
            session.answered(thread, turn, message)
            choice = {"index": index, "message": message, "finish_reason": reason}
            if body.get("logprobs"):
                choice["logprobs"] = {"content": self._logprobs(turn)}
            choices.append(choice | _exact(turn))
            usage[0] += len(thread.transcript) - len(turn.token_ids)
            usage[1] += len(turn.token_ids)
        return self._answer(body, "chat.completion", choices, usage)

    async def _text(self, body: Mapping[str, Any], name: str) -> Response:
        sampling, seeds = self._wanted(body)
        session = self._sessions.get(name) or Session(self._dialogue)
        choices: list[dict[str, Any]] = []
        usage = [0, 0]
        for ids in self._prompts(body.get("prompt")):
            for seed in seeds:
                thread = session.continued_ids(ids)
                turn = await self._complete(session, thread, sampling, seed, name)
                session.answered(thread, turn, None)
                tokens = turn.token_ids.tolist()
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "text": self._dialogue.text(tokens),
                    "finish_reason": _reason(turn),
                    "logprobs": None,
                }
                if body.get("logprobs") is not None:
                    choice["logprobs"] = {
                        "tokens": [self._dialogue.token(token) for token in tokens],
                        "token_logprobs": turn.logprobs.tolist(),
                        "top_logprobs": None,
                        "text_offset": [],
                    }
                choices.append(choice | _exact(turn))
                usage[0] += len(ids)
                usage[1] += len(tokens)
        return self._answer(body, "text_completion", choices, usage)

    async def _complete(self, session: Session, thread: Any, sampling: Sampling, seed: int, name: str) -> Completion:
        try:
            return await self._rollout.complete(thread.transcript.ids, sampling, seed, session=name or None)
        except BaseException:  # cancelled with its client, or refused: nothing was said
            session.failed(thread)
            raise

    def _wanted(self, body: Mapping[str, Any]) -> tuple[Sampling, list[int]]:
        """How to sample, and one seed for each choice."""
        for key, neutral in _NEUTRAL.items():
            if body.get(key, neutral) not in (neutral, None):
                raise _Refused(f"{key}: engines don't sample by it, so recorded logprobs would be wrong; leave it out")
        count = body.get("n") or 1
        if not isinstance(count, int) or not 1 <= count <= MAX_CHOICES:
            raise _Refused(f"n: expected 1 to {MAX_CHOICES}, got {count!r}")
        if body.get("top_logprobs") or (body.get("logprobs") not in (None, True, False, 0, 1)):
            raise _Refused("top_logprobs: only the sampled token's logprob is known; set it to 0")
        names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
        changes = {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit is not None:
            changes["max_tokens"] = limit
        try:
            sampling = msgspec.convert(msgspec.structs.asdict(self._sampling) | changes, Sampling)
        except msgspec.ValidationError as error:
            raise _Refused(str(error)) from None
        self._count += 1
        seed, own = body.get("seed"), completion_seed(self._seed, self._count, 0)
        return sampling, [completion_seed(own if seed is None else int(seed), 0, index) for index in range(count)]

    def _prompts(self, prompt: Any) -> list[Sequence[int]]:
        """Token ids of what `prompt` may be: a text, tokens, or a list of either."""
        if isinstance(prompt, str):
            return [self._dialogue.encode(prompt)]
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) and one for one in prompt):
            return [ids for one in prompt for ids in self._prompts(one)]
        raise _Refused("prompt: expected a text, a list of token ids, or a list of those")

    def _logprobs(self, turn: Completion) -> list[dict[str, Any]]:
        spelled = [self._dialogue.token(token) for token in turn.token_ids.tolist()]
        return [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(spelled, turn.logprobs.tolist(), strict=True)
        ]

    def _answer(
        self, body: Mapping[str, Any], kind: str, choices: list[dict[str, Any]], usage: Sequence[int]
    ) -> Response:
        answer = {
            "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "usage": {
                "prompt_tokens": usage[0],
                "completion_tokens": usage[1],
                "total_tokens": usage[0] + usage[1],
            },
        }
        if not body.get("stream"):
            return JSONResponse(answer)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(_events(answer, with_usage), media_type="text/event-stream")


class _Quiet(uvicorn.Server):
    """Signals belong to the job, not to a server inside of it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def _exact(turn: Completion) -> dict[str, Any]:
    """Beyond the API: what was sampled, and by which version."""
    return {"token_ids": turn.token_ids.tolist(), "versions": turn.versions.tolist()}


def _reason(turn: Completion) -> str:
    return "length" if turn.finish_reason == "length" else "stop"


def _message(text: str, turn: Completion, tools: Any) -> tuple[dict[str, Any], str]:
    """The assistant's message; where tools were given, calls that can be read are taken out of the text."""
    calls = []
    for number, found in enumerate(_CALL.findall(text) if tools else []):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
            calls.append({"id": f"call_{len(turn.token_ids)}_{number}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}, _reason(turn)
    return {"role": "assistant", "content": _CALL.sub("", text).strip() or None, "tool_calls": calls}, "tool_calls"


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _Refused("messages: expected a list with at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Refused(f"messages[{place}]: expected an object with role and content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            raise _Refused(f"messages[{place}].content: only text is known")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise _Refused(f"messages[{place}].content: expected text")
    return messages


async def _gone(request: Request) -> None:
    """Raises ClientDisconnect when the client goes away; the body has been read (OA-4)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def _body(request: Request) -> dict[str, Any]:
    received = bytearray()
    async for part in request.stream():
        received += part
        if len(received) > MAX_BODY:
            raise _Refused(f"the body has more than {MAX_BODY} bytes", 413)
    try:
        body = json.loads(received)
    except ValueError as error:
        raise _Refused(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise _Refused("the body: expected an object")
    return body


def _error(text: str, status: int) -> JSONResponse:
    kind = {401: "authentication_error", 503: "server_error"}.get(status, "invalid_request_error")
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": None}}, status_code=status)


def _events(answer: dict[str, Any], with_usage: bool) -> Any:
    """The answer as server-sent events: role, content, end."""
    chat = answer["object"] == "chat.completion"
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    for choice in answer["choices"]:
        index, extra = choice["index"], {key: choice[key] for key in ("token_ids", "versions")}
        if not chat:
            yield event(
                [{"index": index, "text": choice["text"], "logprobs": choice["logprobs"], "finish_reason": None}]
            )
            yield event(
                [{"index": index, "text": "", "logprobs": None, "finish_reason": choice["finish_reason"]} | extra]
            )
            continue
        message = choice["message"]
        calls = [call | {"index": place} for place, call in enumerate(message.get("tool_calls", []))]
        delta = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
        logprobs = choice.get("logprobs")
        yield event([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}])
        yield event([{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]} | extra])
    if with_usage:
        yield event([], usage=answer["usage"])
    yield "data: [DONE]\n\n"
