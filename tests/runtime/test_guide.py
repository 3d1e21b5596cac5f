"""The code of docs/runtime.md and of the README is cut out of this file, so that it runs.

Regions between `--8<-- [start:name]` and `--8<-- [end:name]` appear there as they stand.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

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


def test_the_readme_shows_a_program_that_runs(tmp_path: Path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(readme.partition("```python\n")[2].partition("```")[0])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['hello bob, from rank 0', 'hello bob, from rank 1']\n"
