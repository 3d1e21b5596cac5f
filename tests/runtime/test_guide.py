"""The code of docs/runtime/ and of the README is cut out of this file, so that it runs.

Regions between `--8<-- [start:name]` and `--8<-- [end:name]` appear there as they stand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

# --8<-- [start:greeter]
from runtime import Actor, current_rank, endpoint, this_host


class Greeter(Actor):
    def __init__(self, word: str) -> None:
        self.word = word

    @endpoint
    def hello(self, name: str) -> str:
        return f"{self.word} {name}, from rank {current_rank()}"


async def greet() -> list[str]:
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 2}, name="greeters")
        greeters = await procs.spawn("greeter", Greeter, "hello")
        return list((await greeters.hello.call("bob")).values())


# --8<-- [end:greeter]

from runtime import (  # noqa: E402 - the first example shows only what it needs
    ActorMesh,
    Channel,
    DeadlineExceeded,
    Port,
    ProcessDied,
    Restart,
    TaskGroup,
    UnknownDimension,
    blocking,
    context,
    lookup,
)
from runtime.testing import delayed, kill, local_host  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_is_imported_ahead")

ROOT = Path(__file__).resolve().parents[2]


async def test_an_actor_in_ten_lines():
    assert await greet() == ["hello bob, from rank 0", "hello bob, from rank 1"]


# --8<-- [start:worker]
class Worker(Actor):
    @endpoint
    def square(self, values: np.ndarray) -> np.ndarray:  # the main thread; arrays travel without a copy in Python
        return values**2

    @endpoint(concurrency=64)
    async def wait(self, seconds: float) -> int:  # the event loop; up to 64 at once
        await asyncio.sleep(seconds)
        return current_rank()

    @endpoint
    def fail(self, key: str) -> None:
        raise KeyError(key)


# --8<-- [end:worker]


async def test_the_ways_to_call_a_mesh():
    # --8<-- [start:adverbs]
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 2}, name="workers")
        workers = await procs.spawn("worker", Worker)

        everyone = await workers.wait.call(0.0)  # ValueMesh: one value a rank
        one = await workers.slice(rank=1).wait.call_one(0.0)  # a slice is a mesh of its own
        any_rank = await workers.wait.choose(0.0)  # the rank with the least to do
        arrived = [value async for _, value in workers.wait.stream(0.0)]  # as they come
        parts = await workers.square.scatter([(np.arange(2),), (np.arange(3),)])  # one tuple of arguments a rank
    # --8<-- [end:adverbs]
    assert list(everyone.values()) == [0, 1]
    assert one == 0  # its only rank
    assert any_rank in (0, 1)
    assert sorted(arrived) == [0, 1]
    assert [len(part) for part in parts.values()] == [2, 3]


async def test_calls_are_under_way_when_they_are_made():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs({"rank": 1}, name="workers")
        workers = await procs.spawn("worker", Worker)
        # --8<-- [start:under_way]
        first = workers.square.call_one(np.arange(3))  # sent
        many = [workers.square.call_one(np.arange(n)) for n in range(1000)]
        await asyncio.gather(*[call.as_asyncio() for call in many])
        await first
        # --8<-- [end:under_way]
        assert [len(await call) for call in many] == list(range(1000))


async def test_a_deadline_stops_the_remote_endpoint():
    # --8<-- [start:deadline]
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 1}, name="workers")
        workers = await procs.spawn("worker", Worker)
        with pytest.raises(TimeoutError):
            await workers.wait.options(timeout=0.1).call(3600.0)  # the endpoint is cancelled too
    # --8<-- [end:deadline]


async def test_an_error_is_the_users_class_and_tells_where():
    # --8<-- [start:error]
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 2}, name="workers")
        workers = await procs.spawn("worker", Worker)
        try:
            await workers.slice(rank=1).fail.call("colour")
        except KeyError as error:  # the user's class, and an ActorError
            told = str(error)
    # --8<-- [end:error]
    assert "worker" in told
    assert "KeyError" in told
    assert "colour" in told


async def test_the_death_of_a_rank_is_told_with_its_signal():
    # --8<-- [start:death]
    from runtime import ProcessDied

    class Victim(Actor):
        @endpoint
        def pid(self) -> int:
            return os.getpid()

        @endpoint(concurrency=1)
        async def wait(self) -> None:
            await asyncio.sleep(3600)

    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 1}, name="victims")
        victims = await procs.spawn("victim", Victim)
        pending = asyncio.ensure_future(victims.wait.call())
        os.kill(await victims.pid.call_one(), signal.SIGKILL)
        with pytest.raises(ProcessDied) as caught:
            await pending
    # --8<-- [end:death]
    assert caught.value.signal == signal.SIGKILL


async def test_a_mesh_has_named_dimensions():
    # --8<-- [start:mesh]
    async with this_host() as host:
        procs = await host.spawn_procs({"replica": 2, "tp": 2}, name="rollout")
        workers = await procs.spawn("worker", Worker)

        values = await workers.wait.call(0.0)
        corner = values.item(replica=1, tp=0)  # by coordinates; also values[2], values.items()
        column = workers.slice(tp=1)  # {replica: 2}: a mesh of its own, with ranks from 0
        flat = workers.flatten("rank").split("rank", pair=-1, member=2).rename(pair="host")
        with pytest.raises(UnknownDimension):
            workers.slice(dp=0)
        # --8<-- [end:mesh]
        assert corner == 2
        assert (await column.wait.call(0.0)).values() == [0, 1]
        assert flat.sizes == {"host": 2, "member": 2}


# --8<-- [start:lanes]
class Account(Actor):
    def __init__(self) -> None:
        self.balance = 0

    @endpoint
    async def deposit(self, amount: int) -> int:  # one at a time, in the order sent
        before = self.balance
        await asyncio.sleep(0)
        self.balance = before + amount  # nobody came between
        return self.balance

    @endpoint(concurrency=8)
    async def look(self) -> int:  # up to 8 at once, beside the others
        return self.balance

    @endpoint
    def report(self, audit: ActorMesh) -> Any:  # sync, and yet it may wait for other actors
        return blocking(audit.look.call_one())


# --8<-- [end:lanes]


async def test_a_serial_endpoint_is_never_interrupted_by_another():
    async with this_host() as host:
        procs = await host.spawn_procs(2)
        accounts = await procs.spawn("account", Account)
        one, other = accounts.slice(rank=0), accounts.slice(rank=1)
        await asyncio.gather(*[one.deposit.call_one(1) for _ in range(50)])
        assert await one.look.call_one() == 50
        assert await other.report.call_one(one) == 50


# --8<-- [start:generator]
class Engine(Actor):
    @endpoint(concurrency=16)
    async def generate(self, prompt: str, count: int) -> AsyncIterator[str]:
        try:
            for number in range(count):
                yield f"{prompt}{number}"
        finally:
            self.closed = True  # also when the caller has left, or is dead


# --8<-- [end:generator]


async def test_a_generator_endpoint_streams():
    async with this_host() as host:
        procs = await host.spawn_procs({"replica": 2}, name="rollout")
        engines = await procs.spawn("engine", Engine)
        # --8<-- [start:stream]
        async for token in engines.generate.stream_choose("a", 1000):  # of the least busy rank
            if token == "a3":
                break  # the generator is closed where it runs

        async with engines.slice(replica=0).generate.options(window=8).stream_one("b", 3) as tokens:
            first = await anext(tokens)  # it runs at most 8 values ahead of us

        seen = [(point["replica"], token) async for point, token in engines.generate.stream("c", 2)]
        # --8<-- [end:stream]
        assert first == "b0"
        assert sorted(seen) == [(0, "c0"), (0, "c1"), (1, "c0"), (1, "c1")]


# --8<-- [start:ports]
class Trainer(Actor):
    @endpoint
    def train(self, steps: int, progress: Port[float]) -> str:
        for step in range(steps):
            blocking(progress.send(1.0 / (step + 1)))  # waits while the port is full
        blocking(progress.close())
        return "done"


async def follow() -> list[float]:
    async with this_host() as host:
        procs = await host.spawn_procs(1, name="trainer")
        await procs.spawn("trainer", Trainer)

        trainer = await lookup("trainer")  # by name, from here or from inside any actor
        port, receiver = Channel.open(float)
        async with TaskGroup("job") as tasks:
            tasks.start(trainer.train.call_one(3, port), name="train")
            losses = [loss async for loss in receiver]
        return losses


# --8<-- [end:ports]


async def test_a_port_carries_progress_out_of_an_endpoint():
    assert await follow() == [1.0, 1 / 2, 1 / 3]


# --8<-- [start:records]
class Sample(msgspec.Struct):
    prompt: str
    token_ids: np.ndarray  # travels beside the message, without a copy in Python
    score: float | None = None


class Scorer(Actor):
    @endpoint
    def score(self, sample: Sample, weights: dict[str, float]) -> Sample:
        sample.score = weights["length"] * len(sample.token_ids)
        return sample


# --8<-- [end:records]


async def test_records_arrive_as_what_they_are_and_mistakes_stay_at_home():
    async with this_host() as host:
        scorer = await (await host.spawn_procs(1)).spawn("scorer", Scorer)
        sample = Sample("2 + 2 =", np.arange(5))
        scored = await scorer.score.call_one(sample, {"length": 0.5})
        assert type(scored) is Sample
        assert scored.score == 2.5
        # --8<-- [start:mistakes]
        with pytest.raises(TypeError, match=r"scorer.score: wrong argument: Expected `float`, got `str` - at `weights"):
            await scorer.score.call_one(sample, {"length": "much"})  # nothing was sent
        with pytest.raises(TypeError, match=r"argument 'sample' can't be sent: sample\.token_ids is a lock"):
            await scorer.score.call_one(Sample("x", threading.Lock()), {})  # type: ignore[arg-type]
        # --8<-- [end:mistakes]


async def test_a_sync_endpoint_looks_whether_anybody_still_waits():
    # --8<-- [start:cooperate]
    class Long(Actor):
        @endpoint
        def compute(self) -> None:
            while True:
                context().check_cancelled()  # or: if context().cancelled: return
                time.sleep(0.01)

    async with this_host() as host:
        procs = await host.spawn_procs(1, restart=Restart())
        long = await procs.spawn("long", Long)
        with pytest.raises(DeadlineExceeded):
            await long.compute.options(timeout=0.1, kill_after=5.0).call_one()
    # --8<-- [end:cooperate]


async def test_a_dead_process_comes_back_with_its_actors():
    # --8<-- [start:restart]
    async with this_host() as host:
        procs = await host.spawn_procs(1, name="rollout", restart=Restart(max_restarts=3, window=60.0))
        workers = await procs.spawn("worker", Worker)
        kill(procs)
        with contextlib.suppress(ProcessDied):  # what was pending at its death fails
            await workers.wait.call_one(0.0)
        await workers.wait.call_one(0.0)  # what is called now waits until it is there again
    # --8<-- [end:restart]


async def test_a_report_says_who_waits_for_whom():
    async with this_host() as host:
        workers = await (await host.spawn_procs(1, name="workers")).spawn("worker", Worker)
        waiting = asyncio.ensure_future(workers.wait.call_one(3600.0))
        await asyncio.sleep(0.1)
        # --8<-- [start:report]
        report = await host.report()
        print(report)
        assert not report.deadlocks  # sentences such as "a rank 0 (ask) waits for b rank 0 (ask) waits for ..."
        # --8<-- [end:report]
        assert "worker rank 0 runs wait for" in str(report)
        waiting.cancel()


# --8<-- [start:testing]
async def test_my_actors_without_processes():
    async with local_host() as host:
        procs = await host.spawn_procs(2, name="workers")
        workers = await procs.spawn("worker", Worker)
        with delayed(procs, 0.2), pytest.raises(TimeoutError):
            await workers.wait.options(timeout=0.05).call(0.0)
        kill(procs.slice(rank=1))
        with pytest.raises(ProcessDied):
            await workers.wait.call(0.0)
        assert await workers.slice(rank=0).wait.call_one(0.0) == 0


# --8<-- [end:testing]


def test_the_readme_shows_a_program_that_runs(tmp_path: Path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(readme.partition("```python\n")[2].partition("```")[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['hello bob, from rank 0', 'hello bob, from rank 1']\n"
