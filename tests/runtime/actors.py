"""Actors and records that the tests of the runtime share. Importable by workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from runtime import (
    Actor,
    ActorMesh,
    Failure,
    blocking,
    context,
    current_rank,
    current_size,
    endpoint,
    on_main_thread,
    spawn_procs,
)


class Scored(msgspec.Struct, frozen=True, tag=True):
    value: float


class Unscored(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Answer(msgspec.Struct, kw_only=True):
    """As the records of a pipeline: arrays, literals, a tagged union, free-form data."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish: Literal["stop", "length"]
    verdicts: list[Scored | Unscored] = []
    entry: dict[str, Any] = {}
    mask: np.ndarray | None = None


def is_main_thread() -> bool:
    """Whether this is the main thread of the process, or of what `local_host` makes of one."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or thread.name.startswith("main thread of")


@dataclass
class Plain:
    """Not known to msgspec's strict side: a dataclass with a numpy field."""

    name: str
    values: np.ndarray


class OddError(Exception):
    """Can't be rebuilt by calling the class with its args."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class Greeter(Actor):
    def __init__(self, word: str = "hi") -> None:
        if word == "fail":
            raise ValueError("no such word")
        self.word = word
        self.seen: list[int] = []

    @endpoint
    def hello(self, name: str) -> str:
        return f"{self.word} {name} from {current_rank()} of {current_size()}"

    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def nbytes(self, array: np.ndarray) -> int:
        return int(array.nbytes)

    @endpoint
    def unsendable(self):
        return threading.Lock()

    @endpoint
    def typed(self, answer: Answer) -> Answer:
        return answer

    @endpoint
    def verdict(self, value: Scored | Unscored) -> Scored | Unscored:
        return value

    @endpoint
    def numbers(self, x: int, /, y: float = 0.5, *rest: int, flag: bool = False, **more: Any) -> tuple[Any, ...]:
        return x, y, rest, flag, more

    @endpoint
    def note(self, number: int) -> None:
        self.seen.append(number)

    @endpoint
    def noted(self) -> list[int]:
        return self.seen

    @endpoint
    def place(self) -> dict[str, Any]:
        c = context()
        return {
            "rank": c.rank,
            "size": c.size,
            "proc": c.proc_name,
            "actor": c.actor_name,
            "current_rank": current_rank(),
            "current_size": current_size(),
            "pid": os.getpid(),
            "main_thread": threading.current_thread() is threading.main_thread(),
        }

    @endpoint
    async def async_place(self) -> dict[str, Any]:
        return {
            "main_thread": threading.current_thread() is threading.main_thread(),
            "through": await on_main_thread(lambda: threading.current_thread() is threading.main_thread()),
        }

    @endpoint
    def fail(self, kind: str = "ValueError") -> None:
        if kind == "odd":
            raise OddError(7, "seven")
        if kind == "unpicklable":
            error = RuntimeError("holds a lock")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
        if kind == "local":

            class LocalError(KeyError):
                pass

            raise LocalError("here only")
        if kind == "exit":
            sys.exit(3)
        if kind == "os":
            raise FileNotFoundError(2, "No such file or directory", "/nowhere")
        raise ValueError("bad word")

    @endpoint
    def fail_on(self, rank: int, others: float) -> None:
        if current_rank() == rank:
            raise ValueError(f"rank {rank} fails")
        end = time.monotonic() + others
        while time.monotonic() < end and not context().cancelled:
            time.sleep(0.01)

    @endpoint
    def die(self, how: str) -> None:
        print("last words", file=sys.stderr)
        if how == "exit":
            os._exit(7)
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def say(self, out: str, err: str = "") -> None:
        print(out, flush=True)
        if err:
            print(err, file=sys.stderr, flush=True)

    @endpoint
    def busy(self, seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if context().cancelled:
                self.seen.append(-1)
                return "cancelled"
            time.sleep(0.005)
        return "done"

    @endpoint
    def deaf(self, seconds: float) -> None:
        time.sleep(seconds)


class Gates(Actor):
    """Async endpoints that wait for each other, and a trace of what happened to them."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.running = 0
        self.most = 0
        self.trace: list[str] = []

    @endpoint(concurrency=8)
    async def wait(self) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.trace.append("cancelled")
            raise
        finally:
            self.running -= 1
        return self.most

    @endpoint
    async def serial_wait(self) -> str:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.trace.append("serial cancelled")
            raise
        return "through"

    @endpoint(concurrency=2)
    async def open(self) -> None:
        self.gate.set()

    @endpoint(concurrency=2)
    async def count(self) -> int:
        return self.running

    @endpoint(concurrency=2)
    async def traced(self) -> list[str]:
        return self.trace

    @endpoint(concurrency=2)
    async def background(self, fail: bool) -> None:
        self.tasks.start(self._work(fail), name="work")

    async def _work(self, fail: bool) -> None:
        await asyncio.sleep(0)
        if fail:
            raise LookupError("background work failed")
        await asyncio.Event().wait()

    @endpoint(concurrency=2)
    async def raise_now(self) -> None:
        raise LookupError("nobody waits for me")


class Knot(Actor):
    """Actors that get in each other's way."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    @endpoint
    async def hold_and_ask(self, mesh: ActorMesh) -> None:
        await self.gate.wait()
        await mesh.answer.call_one()

    @endpoint
    async def answer(self) -> None: ...

    @endpoint(concurrency=2)
    async def open(self) -> None:
        self.gate.set()

    @endpoint
    def ask_from_main(self, mesh: ActorMesh) -> None:
        blocking(mesh.answer.call_one())

    @endpoint
    async def ask_main(self, mesh: ActorMesh) -> None:
        await self.gate.wait()
        await mesh.on_main.call_one()

    @endpoint
    def on_main(self) -> None: ...

    @endpoint
    async def block_the_loop(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251


class Team(Actor):
    """Owns processes."""

    def __init__(self, handles: bool = True) -> None:
        self.handles = handles
        self.told: list[str] = []

    @endpoint
    async def gather(self, size: int, name: str) -> list[str]:
        self.procs = await spawn_procs(size, name=name)
        self.members = await self.procs.spawn("member", Greeter, "member")
        return (await self.members.hello.call("x")).values()

    @endpoint(concurrency=4)
    async def handle(self) -> ActorMesh:
        return self.members

    @endpoint(concurrency=4)
    async def heard(self) -> list[str]:
        return self.told

    @endpoint
    async def dismiss(self) -> None:
        await self.procs.stop()
        await self.procs.stop()

    async def __supervise__(self, failure: Failure) -> bool:
        self.told.append(str(failure.error).splitlines()[0])
        return self.handles


class Caller(Actor):
    """Calls other actors through a handle."""

    @endpoint
    async def ask(self, mesh: ActorMesh, name: str) -> list[str]:
        return (await mesh.hello.call(name)).values()

    @endpoint
    async def ask_any(self, mesh: ActorMesh, times: int) -> list[int]:
        """Which ranks answered."""
        return [(await mesh.place.choose())["rank"] for _ in range(times)]

    @endpoint
    async def stop_it(self, mesh: ActorMesh) -> None:
        await mesh.stop()

    @endpoint
    async def ask_again(self, mesh: ActorMesh) -> Any:
        return await mesh.echo_serial.call_one("x")

    @endpoint(concurrency=1)
    async def ask_once(self, mesh: ActorMesh) -> Any:
        return await mesh.ask_once.call_one(mesh)

    @endpoint(concurrency=1)
    async def ask_beside(self, mesh: ActorMesh) -> Any:
        return await mesh.echo_serial.call_one("x")

    @endpoint
    async def through(self, other: ActorMesh, me: ActorMesh) -> Any:
        return await other.ask_again.call_one(me)

    @endpoint
    async def echo_serial(self, value: str) -> str:
        return value

    @endpoint
    async def give_up_on(self, mesh: ActorMesh) -> None:
        with contextlib.suppress(TimeoutError):
            await mesh.deaf.options(timeout=0.1, kill_after=0.2).call_one(60.0)

    @endpoint
    async def fail_below(self, mesh: ActorMesh) -> None:
        await mesh.fail.call_one()


class Tidy(Actor):
    """Leaves a file behind when it is cleaned up."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def nothing(self) -> None: ...

    async def __cleanup__(self, error: BaseException | None) -> None:
        with open(self.path, "w") as file:
            file.write(repr(error))


class Knotted(Actor):
    """Holds itself, so that only the collector can free it."""

    alive = 0

    def __init__(self, size: int) -> None:
        self.itself = self
        self.parts: list[list[int]] = [[] for _ in range(size)]
        weakref.finalize(self, Knotted.ended)
        Knotted.alive += 1

    @staticmethod
    def ended() -> None:
        Knotted.alive -= 1

    @endpoint
    def counts(self) -> tuple[int, int]:
        """(objects that collections leave out, actors of this class in this process)."""
        return gc.get_freeze_count(), Knotted.alive
