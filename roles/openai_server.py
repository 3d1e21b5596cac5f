"""The rollout as an OpenAI-compatible HTTP endpoint: any agent written against the `openai` client can be trained.

    async with OpenAIServer(rollout, dialogue, model="policy").serving() as server:
        client = AsyncOpenAI(base_url=server.url("episode-7"), api_key=server.key)
        ...                                       # the agent, unchanged
        trajectories = server.close_session("episode-7")

    POST {url}/chat/completions   messages, tools, stop, logprobs, top_logprobs, stream, n
    POST {url}/completions        text or token ids, stop, logprobs, stream, n
    GET  {url}/models

OA-1: every request bears the token, compared in constant time; without it nothing of the request is read.
OA-2: what was sampled under a session's address is recorded with exact tokens, logprobs and versions (recorded.py).
      The address without a session records nothing.
OA-3: what can't be answered rightly is refused, never answered otherwise (openai_wire.py, OW-1).
OA-4: a client that goes away stops its work on the replica. A stream gives each token when it was sampled.
OA-5: it listens on the loopback interface unless told otherwise; bodies above MAX_BODY bytes are refused.
OA-6: an error before the first event has its HTTP status; a later one is an event of the stream, and its last.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route

from roles.dialogue import Dialogue
from roles.environment import Completes
from roles.openai_wire import (
    Asked,
    ChatChoice,
    Choice,
    Refused,
    TextChoice,
    asked,
    messages_of,
    prompts_of,
)
from roles.recorded import Session, Thread, Trajectory
from roles.seeds import completion_seed
from roles.types import Completion, Piece, Sampling
from runtime import ActorError, TaskGroup

MAX_BODY = 8 << 20

Handler = Callable[[Mapping[str, Any], str, "_Answer"], Coroutine[Any, Any, None]]


class Streams(Completes, Protocol):
    """What is needed of `roles.rollout.Rollout`."""

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, seed: int, *, session: Any = None
    ) -> AsyncGenerator[Piece, None]: ...


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
        rollout: Streams,
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

    def _guarded(self, handler: Handler) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            request, answer = Request(scope, receive), _Answer(send)
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
                return await answer.error("give the server's key as bearer token", 401)
            try:
                name = request.path_params.get("session", "")
                if name and name not in self._sessions:
                    raise Refused(f"there is no session {name!r}", 404)
                body = await _body(request) if request.method == "POST" else {}
                async with TaskGroup("request") as tasks:
                    tasks.forever(_gone(request), name="client")
                    await tasks.start(handler(body, name, answer), name="answer")
            except Refused as refused:
                await answer.error(str(refused), refused.status)
            except ActorError as error:
                # What an engine can never run is the client's fault, all else ours.
                await answer.error(str(error).partition("\n")[0], 400 if isinstance(error, ValueError) else 503)
            except ValueError as error:
                await answer.error(str(error), 400)
            except ClientDisconnect:
                pass

        return _App(app)

    async def _models(self, _body: Mapping[str, Any], _session: str, answer: _Answer) -> None:
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "tutti"}
        await answer.whole({"object": "list", "data": [entry]})

    async def _chat(self, body: Mapping[str, Any], name: str, answer: _Answer) -> None:
        messages, tools = messages_of(body), body.get("tools") or None
        wanted = asked(body, self._sampling, chat=True)
        if wanted.count > 1 and name:
            raise Refused("n: a session records one answer a request; ask n times, or without a session")
        session = self._session(name)
        turns = [
            (ChatChoice(index, self._dialogue, wanted, tools=bool(tools)), session.continued(messages, tools))
            for index in range(wanted.count)
        ]
        await self._say(answer.of("chatcmpl", "chat.completion", self._model), name, session, turns, wanted)

    async def _text(self, body: Mapping[str, Any], name: str, answer: _Answer) -> None:
        wanted = asked(body, self._sampling, chat=False)
        prompts = prompts_of(body.get("prompt"), self._dialogue)
        session = self._session(name)
        turns = [
            (TextChoice(index, self._dialogue, wanted), session.continued_ids(prompts[index // wanted.count]))
            for index in range(len(prompts) * wanted.count)
        ]
        await self._say(answer.of("cmpl", "text_completion", self._model), name, session, turns, wanted)

    async def _say(
        self, answer: _Answer, name: str, session: Session, turns: Sequence[tuple[Choice, Thread]], wanted: Asked
    ) -> None:
        """All choices at once, each with a seed of its own, then the end of the answer."""
        self._count += 1
        seed = completion_seed(self._seed, self._count, 0) if wanted.seed is None else wanted.seed
        read = sum(len(thread.transcript) for _, thread in turns)
        try:
            async with TaskGroup("choices") as tasks:
                said = [
                    tasks.start(
                        self._turn(answer, name, session, turn, wanted, completion_seed(seed, 0, index % wanted.count)),
                        name=f"choice {index}",
                    )
                    for index, turn in enumerate(turns)
                ]
        except BaseException:  # cancelled with its client, or refused: nothing was said
            for _, thread in turns:
                session.failed(thread)
            raise
        sampled = sum(len(task.result().token_ids) for task in said)
        usage = {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
        if not wanted.stream:
            await answer.choices([choice.told() for choice, _ in turns], usage=usage)
        else:
            if wanted.usage:
                await answer.event([], usage=usage)
            await answer.end()

    async def _turn(
        self, answer: _Answer, name: str, session: Session, turn: tuple[Choice, Thread], wanted: Asked, seed: int
    ) -> Completion:
        choice, thread = turn
        ids, sampling, home = thread.transcript.ids, wanted.sampling, name or None
        if not wanted.stream:
            completion = await self._rollout.complete(ids, sampling, seed, session=home)
            choice.read(completion)
            session.answered(thread, completion, choice.message())
            return completion
        async with contextlib.aclosing(self._rollout.stream(ids, sampling, seed, session=home)) as pieces:
            async for piece in pieces:
                for chunk in choice.chunks(piece):
                    await answer.event([chunk])
                if piece.completion is not None:
                    completion = piece.completion
        last = choice.last_chunks(completion)
        session.answered(thread, completion, choice.message())
        for chunk in last:
            await answer.event([chunk])
        return completion

    def _session(self, name: str) -> Session:
        return self._sessions[name] if name else Session(self._dialogue)


class _Answer:
    """What goes back to the client: one body, or events as they come. Nothing is sent before the first (OA-6)."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._events = False
        self._head: dict[str, Any] = {}
        self._kind = ""

    def of(self, prefix: str, kind: str, model: str) -> _Answer:
        """Fill in what all answers to one kind of request begin with."""
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._kind = kind
        return self

    async def choices(self, choices: list[dict[str, Any]], **more: Any) -> None:
        await self.whole({**self._head, "object": self._kind, "choices": choices, **more})

    async def event(self, choices: list[dict[str, Any]], **more: Any) -> None:
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        await self._write(json.dumps({**self._head, "object": kind, "choices": choices, **more}))

    async def end(self) -> None:
        await self._write("[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, text: str, status: int) -> None:
        kind = {401: "authentication_error", 503: "server_error"}.get(status, "invalid_request_error")
        body = {"error": {"message": text, "type": kind, "param": None, "code": None}}
        if self._events:
            await self._write(json.dumps(body))
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await self.whole(body, status)

    async def whole(self, body: dict[str, Any], status: int = 200) -> None:
        encoded = json.dumps(body).encode()
        await self._begin(status, b"application/json", [(b"content-length", str(len(encoded)).encode())])
        await self._send({"type": "http.response.body", "body": encoded})

    async def _write(self, data: str) -> None:
        if not self._events:
            self._events = True
            await self._begin(200, b"text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")])
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    async def _begin(self, status: int, kind: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]}
        )


class _App:
    """One route. An object, since starlette takes functions for something else."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class _Quiet(uvicorn.Server):
    """Signals belong to the job, not to a server inside of it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


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
            raise Refused(f"the body has more than {MAX_BODY} bytes", 413)
    try:
        body = json.loads(received)
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body: expected an object")
    return body
