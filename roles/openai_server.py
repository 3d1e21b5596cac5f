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
OA-7: the numbers of an answer come from the seed of its session and how many requests that had before, or from the seed
      of the request and how much it read: a run can be repeated, and no two turns draw the same.
OA-8: whatever model a client names, the policy answers, under its own name: agents need not be changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route

from roles.dialogue import Dialogue
from roles.engine import Behind, EngineFailed
from roles.environment import Completes
from roles.openai_http import Answer, App, Quiet, body_of, gone
from roles.openai_wire import (
    MAX_CHOICES,
    Asked,
    ChatChoice,
    Choice,
    Refused,
    TextChoice,
    asked,
    messages_of,
    prompts_of,
    tools_of,
    with_room,
)
from roles.questions import stable_hash
from roles.recorded import Session, Thread, Trajectory
from roles.routing import Member
from roles.seeds import completion_seed
from roles.types import Completion, Piece, Sampling
from runtime import TaskGroup, TuttiError

DISTRIBUTION = ("temperature", "top_p", "top_k")
"""What says how likely a token is."""

Handler = Callable[[Mapping[str, Any], "_Home", "Answer"], Coroutine[Any, Any, None]]


class Streams(Completes, Protocol):
    """What is needed of `roles.rollout.Rollout`."""

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, seed: int, *, session: Any = None
    ) -> AsyncGenerator[Piece, None]: ...


class _Home:
    """A session's address: what is recorded there, and what its requests leave out.

    Args:
        record: of its dialogues.
        sampling: of requests that leave it out.
        seed: of all its requests.
        place: what its replica is chosen by.
        near: what it shares with others that begin on the same one.
        fixed: requests draw from the distribution of `sampling`, or are refused.
    """

    def __init__(
        self,
        record: Session,
        sampling: Sampling,
        seed: int,
        place: Hashable | None = None,
        near: str = "",
        fixed: bool = False,
    ) -> None:
        self.fixed = fixed
        self.place = place
        self.near = near
        self.record = record
        self.sampling = sampling
        self._seed = seed
        self._count = 0
        self._busy = 0
        self._leaving: set[Request] = set()
        """Those whose clients have gone, until they have let go of their threads."""
        self._settled = asyncio.Event()
        self._since = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since its latest request was answered; 0 while there is one."""
        return 0.0 if self._busy else time.monotonic() - self._since

    def next_seed(self) -> int:
        """OA-7."""
        self._count += 1
        return completion_seed(self._seed, self._count, 0)

    @contextlib.contextmanager
    def busy(self, request: Request) -> Iterator[None]:
        """While a request is being answered."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._since = time.monotonic()
            self._leaving.discard(request)
            self._settled.set()

    async def gone(self, request: Request) -> None:
        """As the function, and noted for `settled`."""
        try:
            await gone(request)
        except ClientDisconnect:
            self._leaving.add(request)
            raise

    async def settled(self) -> None:
        """Wait until no thread is held by a request whose client has gone: who gave up and asks again finds the thread
        as it was (RD-4)."""
        while self._leaving:
            self._settled.clear()
            await self._settled.wait()


class OpenAIServer:
    """See the module.

    Args:
        rollout: who samples.
        dialogue: how messages are spelled.
        model: the name that clients see.
        key: the bearer token; empty: a new one.
        sampling: what requests leave out. Where they leave out `max_tokens`, an answer is shorter if there is no room.
        seed: of requests that bring none.
        max_len: most tokens of messages and answer together, `rollout.max_len`. 0: the engine knows, and an answer of
            `sampling.max_tokens` must fit.
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
        max_len: int = 0,
    ) -> None:
        self.key = key or secrets.token_urlsafe(32)
        self.num_forks = 0
        """Over all sessions that were closed."""
        self._rollout = rollout
        self._dialogue = dialogue
        self._model = model
        self._sampling = sampling or Sampling(max_tokens=1024)
        self._seed = seed
        self._max_len = max_len
        self._nowhere = _Home(Session(dialogue), self._sampling, seed)  # of requests without a session
        self._homes: dict[str, _Home] = {}
        self._address = ""
        routes = []
        for prefix in ("/v1", "/sessions/{session}/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route(f"{prefix}/completions", self._guarded(self._text), methods=["POST"]),
                Route(f"{prefix}/models", self._guarded(self._models), methods=["GET"]),
                Route(f"{prefix}/models/{{model}}", self._guarded(self._only_model), methods=["GET"]),
            ]
        self.app = Starlette(routes=routes)

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[OpenAIServer]:
        """Listen; `port` 0 takes a free one."""
        with socket.create_server((host, port)) as listener:
            self._address = f"http://{host}:{listener.getsockname()[1]}"
            config = uvicorn.Config(self.app, log_level="error", access_log=False, lifespan="off", ws="none")
            server = Quiet(config)
            async with TaskGroup("http") as tasks:
                tasks.start(server.serve(sockets=[listener]), name="server")
                try:
                    yield self
                finally:
                    server.should_exit = server.force_exit = True

    def url(
        self,
        session: str = "",
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        near: str = "",
        fixed: bool = False,
    ) -> str:
        """The base URL for a client; with a session, everything sampled under it is recorded from now on.

        Args:
            session: its name.
            sampling: what requests of a new session leave out. None: as everywhere.
            seed: of all requests of a new session. None: made of its name.
            near: new sessions of the same begin on the same replica. Empty: on the least busy one.
            fixed: requests of a new session that bring another temperature, top_p or top_k are refused.
        """
        if not session:
            return f"{self._address}/v1"
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", session):
            raise ValueError(f"session {session!r}: expected 1 to 128 letters, digits, '_', '.' or '-'")
        if session not in self._homes:
            own = completion_seed(self._seed, stable_hash(session), 0) if seed is None else seed
            place = Member(near, session) if near else session
            self._homes[session] = _Home(Session(self._dialogue), sampling or self._sampling, own, place, near, fixed)
        return f"{self._address}/sessions/{session}/v1"

    def idle(self, session: str) -> float:
        """For how many seconds a session has not asked for anything; 0 while it is answered."""
        return self._homes[session].idle

    def close_session(self, session: str) -> list[Trajectory]:
        """What was recorded, where the session ended last; the address is gone afterwards. Raises KeyError for an
        unknown session."""
        home = self._homes.pop(session)
        record = home.record
        self._rollout.forget(home.place)
        if near := home.near:
            self._rollout.forget(near)
        self.num_forks += record.num_forks
        return record.trajectories()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            request, answer = Request(scope, receive), Answer(send)
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
                return await answer.error("give the server's key as bearer token", 401)
            try:
                name = request.path_params.get("session", "")
                home = self._homes.get(name) if name else self._nowhere
                if home is None:
                    raise Refused(f"there is no session {name!r}", 404)
                body = await body_of(request) if request.method == "POST" else dict(request.path_params)
                with home.busy(request):
                    async with TaskGroup("request") as tasks:
                        tasks.forever(home.gone(request), name="client")
                        await tasks.start(handler(body, home, answer), name="answer")
            except Refused as refused:
                await answer.error(str(refused), refused.status, refused.code)
            except (TuttiError, EngineFailed, Behind) as error:
                # What an engine can never run is the client's fault, all else ours.
                await answer.error(str(error).partition("\n")[0], 400 if isinstance(error, ValueError) else 503)
            except ValueError as error:
                await answer.error(str(error), 400)
            except ClientDisconnect:
                pass

        return App(app)

    async def _models(self, _body: Mapping[str, Any], _home: _Home, answer: Answer) -> None:
        await answer.whole({"object": "list", "data": [self._entry()]})

    async def _only_model(self, path: Mapping[str, Any], _home: _Home, answer: Answer) -> None:
        if path["model"] != self._model:
            raise Refused(f"there is no model {path['model']!r}, only {self._model!r}", 404, "model_not_found")
        await answer.whole(self._entry())

    def _entry(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "tutti"}

    async def _chat(self, body: Mapping[str, Any], home: _Home, answer: Answer) -> None:
        messages, (tools, calls) = messages_of(body), tools_of(body)
        wanted = self._asked(body, home, chat=True)
        session = await self._record(home)
        turns = [
            (ChatChoice(index, self._dialogue, wanted, tools=calls), session.continued(messages, tools))
            for index in range(wanted.count)
        ]
        await self._say(answer.of("chatcmpl", "chat.completion", self._model), home, session, turns, wanted)

    async def _text(self, body: Mapping[str, Any], home: _Home, answer: Answer) -> None:
        wanted = self._asked(body, home, chat=False)
        prompts = prompts_of(body.get("prompt"), self._dialogue)
        if len(prompts) * wanted.count > MAX_CHOICES:
            raise Refused(
                f"prompt: expected at most {MAX_CHOICES} prompts times n, got {len(prompts)} * {wanted.count}"
            )
        session = await self._record(home)
        turns = [
            (TextChoice(index, self._dialogue, wanted), session.continued_ids(prompts[index // wanted.count]))
            for index in range(len(prompts) * wanted.count)
        ]
        await self._say(answer.of("cmpl", "text_completion", self._model), home, session, turns, wanted)

    async def _say(
        self, answer: Answer, home: _Home, session: Session, turns: Sequence[tuple[Choice, Thread]], wanted: Asked
    ) -> None:
        """All choices at once, each with a seed of its own, then the end of the answer. What is no stream is recorded
        when all of them are there: an answer of which one fails is never heard (RD-4)."""
        drawn = home.next_seed()
        read = sum(len(thread.transcript) for _, thread in turns[:: wanted.count])
        try:
            async with TaskGroup("choices") as tasks:
                said = []
                for index, turn in enumerate(turns):
                    if wanted.seed is None:
                        seed = completion_seed(drawn, 0, index)
                    else:
                        begin = completion_seed(wanted.seed, len(turn[1].transcript), 0)
                        seed = completion_seed(begin, 0, index % wanted.count)
                    said.append(
                        tasks.start(self._turn(answer, home, session, turn, wanted, seed), name=f"choice {index}")
                    )
            if not wanted.stream:
                for (choice, thread), task in zip(turns, said, strict=True):
                    session.answered(thread, task.result(), choice.message())
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
        self, answer: Answer, home: _Home, session: Session, turn: tuple[Choice, Thread], wanted: Asked, seed: int
    ) -> Completion:
        choice, thread = turn
        ids = thread.transcript.ids
        sampling = with_room(wanted, len(ids), self._max_len)
        if not wanted.stream:
            completion = await self._rollout.complete(ids, sampling, seed, session=home.place)
            choice.read(completion)
            return completion
        async with contextlib.aclosing(self._rollout.stream(ids, sampling, seed, session=home.place)) as pieces:
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

    def _asked(self, body: Mapping[str, Any], home: _Home, *, chat: bool) -> Asked:
        wanted = asked(body, home.sampling, chat=chat)
        if wanted.count > 1 and home is not self._nowhere:
            raise Refused("n: a session records one answer a request; ask n times, or without a session")
        for name in DISTRIBUTION if home.fixed else ():
            if (given := getattr(wanted.sampling, name)) != (ours := getattr(home.sampling, name)):
                raise Refused(f"{name}: what this session samples is trained under {ours}, got {given}; leave it out")
        return wanted

    async def _record(self, home: _Home) -> Session:
        """Where a request is recorded; without a session, nowhere that lasts."""
        if home is self._nowhere:
            return Session(self._dialogue)
        await home.settled()
        return home.record
