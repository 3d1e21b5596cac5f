"""The HTTP side of the endpoint: bodies that come in, answers that go out, clients that go away. No model, no tokens.

OH-1: a body is read up to a size and within a time.
OH-2: an answer has its head with its first byte: what fails before has a status of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request

from roles.openai_wire import Refused

MAX_BODY = 8 << 20

BODY_SECONDS = 60.0
"""Within which a body must come; a client that dawdles holds memory."""


class Answer:
    """What goes back to the client: one body, or events as they come. Nothing is sent before the first (OA-6)."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._events = False
        self._head: dict[str, Any] = {}
        self._kind = ""

    def of(self, prefix: str, kind: str, model: str) -> Answer:
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

    async def error(self, text: str, status: int, code: str | None = None) -> None:
        kind = {401: "authentication_error", 503: "server_error"}.get(status, "invalid_request_error")
        body = {"error": {"message": text, "type": kind, "param": None, "code": code}}
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


class App:
    """One route. An object, since starlette takes functions for something else."""

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class Quiet(uvicorn.Server):
    """Signals belong to the job, not to a server inside of it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def gone(request: Request) -> None:
    """Raises ClientDisconnect when the client goes away; the body has been read (OA-4)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def body_of(request: Request) -> dict[str, Any]:
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                received += part
                if len(received) > MAX_BODY:
                    raise Refused(f"the body has more than {MAX_BODY} bytes", 413)
    except TimeoutError:
        raise Refused(f"the body has not come within {BODY_SECONDS:g} s", 408) from None
    try:
        body = msgspec.json.decode(
            received
        )  # stricter than Python's: no halves of characters, which no tokenizer takes
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body: expected an object")
    return body
