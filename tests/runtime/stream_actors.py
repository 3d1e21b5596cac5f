"""Actors that give or take values one by one: streams, channels and ports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

from runtime import (
    Actor,
    ActorMesh,
    Channel,
    Port,
    blocking,
    context,
    current_rank,
    endpoint,
    lookup,
)
from tests.runtime.actors import Answer, OddError, is_main_thread


class Teller(Actor):
    """Generators, and a trace of what happened to them."""

    def __init__(self) -> None:
        self.made = 0
        self.trace: list[str] = []
        self.may_fail = asyncio.Event()

    @endpoint(concurrency=2)
    async def count(self, end: int, fail: bool = False) -> AsyncIterator[int]:
        try:
            for number in range(end):
                self.made = number + 1
                yield number
            if fail:
                raise LookupError("no more numbers")
        finally:
            self.trace.append("count closed")

    @endpoint
    async def count_or_fail(self, rank: int) -> AsyncIterator[int]:
        """Without end; the given rank fails after five values, once it may."""
        async for number in self.count(5 if current_rank() == rank else 10**6, fail=True):
            yield number
            if current_rank() == rank and number == 4:
                await self.may_fail.wait()

    @endpoint(concurrency=1)
    async def let_fail(self) -> None:
        self.may_fail.set()

    @endpoint
    def count_on_main(self, end: int, fail: bool = False) -> Iterator[int]:
        assert is_main_thread()
        assert context().endpoint == "count_on_main"
        try:
            for number in range(end):
                self.made = number + 1
                yield number
            if fail:
                raise LookupError("no more numbers")
        finally:
            self.trace.append("count_on_main closed")

    @endpoint
    async def wait_between(self) -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.trace.append("cancelled in the generator")
            raise

    @endpoint(concurrency=2)
    async def answers(self, sizes: list[int]) -> AsyncIterator[Answer]:
        for size in sizes:
            yield Answer(token_ids=np.arange(size), logprobs=np.zeros(size), finish="stop")

    @endpoint(concurrency=2)
    async def slow_from(self, rank: int) -> AsyncIterator[int]:
        yield current_rank()
        if current_rank() == rank:
            await asyncio.Event().wait()
        yield current_rank()

    @endpoint(concurrency=2)
    async def look(self) -> tuple[int, list[str]]:
        return self.made, self.trace

    @endpoint
    def on_main(self) -> str:
        return "served"

    @endpoint
    async def retell(self, mesh: ActorMesh, end: int) -> AsyncIterator[int]:
        async for number in mesh.count.stream_one(end):
            yield number * 10


class Sender(Actor):
    """Sends through ports, and asks for actors by name."""

    @endpoint
    async def send(self, port: Port[Any], values: list[Any]) -> None:
        for value in values:
            await port.send(value)

    @endpoint
    def send_from_main(self, port: Port[Any], values: list[Any]) -> None:
        assert is_main_thread()
        for value in values:
            blocking(port.send(value))

    @endpoint
    async def fail_into(self, port: Port[Any]) -> None:
        await port.send(1)
        await port.exception(OddError(7, "seven"))

    @endpoint
    async def close(self, port: Port[Any]) -> None:
        await port.send(1)
        await port.close()
        await port.close()

    @endpoint(concurrency=2)
    async def give(self, count: int) -> Port[int]:
        """Opens a channel here and sums what comes."""
        port, self.receiver = Channel.open(int, name="numbers")
        self.tasks.start(self._sum(count), name="sum")
        return port

    async def _sum(self, count: int) -> None:
        self.total = 0
        async with self.receiver as values:
            for _ in range(count):
                self.total += await values.recv()

    @endpoint(concurrency=2)
    async def summed(self) -> int:
        return self.total

    @endpoint
    async def greet_by_name(self, name: str, who: str) -> list[str]:
        return (await (await lookup(name)).hello.call(who)).values()

    @endpoint
    def ask_blocking(self, mesh: ActorMesh, name: str) -> Any:
        return blocking(mesh.hello.call_one(name))

    @endpoint
    def wait_blocking(self, mesh: ActorMesh) -> Any:
        return blocking(mesh.serial_wait.call_one())

    @endpoint
    async def block_on_the_loop(self, mesh: ActorMesh) -> Any:
        return blocking(mesh.hello.call_one("x"))

    @endpoint
    def check(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            context().check_cancelled()
            time.sleep(0.005)
