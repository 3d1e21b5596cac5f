"""BP-1 to BP-4 of runtime/breakpoints.py: real processes at a `breakpoint()`, and a real second program that comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import Actor, HostMesh, PeerRefused, current_rank, endpoint, this_host
from runtime.auth import prove
from runtime.debug import stopped_ranks
from tests.waiting import until


class Puzzled(Actor):
    def __init__(self) -> None:
        self.answer = 41

    @endpoint
    def think(self) -> int:
        rank = current_rank()
        breakpoint()
        return self.answer + rank

    @endpoint
    async def think_async(self) -> int:
        breakpoint()
        return self.answer

    @endpoint
    async def ping(self) -> str:
        return "here"


@pytest.fixture
async def host(tmp_path):
    async with this_host(preload=[], sink=lambda line: None, log_dir=tmp_path) as host:
        yield host


async def stopped(host: HostMesh, count: int) -> None:
    await until(lambda: stopped_ranks([host.run_directory]), lambda ranks: len(ranks) >= count, pause=0.02)


async def second_terminal(host: HostMesh, *words: str, typed: str = "") -> tuple[int, str]:
    """`python -m runtime.debug` as a program of its own."""

    def run() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "runtime.debug", "--run-dir", str(host.run_directory), *words],
            cwd=Path(__file__).parents[2],
            input=typed,
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return await asyncio.to_thread(run)


async def test_a_second_terminal_lists_asks_and_lets_go_on(host, tmp_path):
    procs = await host.spawn_procs(2, name="trainer")
    puzzled = await procs.spawn("puzzled", Puzzled)
    call = asyncio.create_task(puzzled.think.call())
    await stopped(host, 2)
    code, listed = await second_terminal(host)
    assert code == 0
    assert f"trainer/0 stopped at {__file__}:" in listed
    assert "in Puzzled.think   pid" in listed
    code, said = await second_terminal(host, "send", "trainer", "p self.answer, rank")
    assert said.splitlines() == ["[trainer/0] (41, 0)", "[trainer/1] (41, 1)"]
    code, said = await second_terminal(host, "attach", "trainer/1", typed="self.answer = 99\np self.answer\ncontinue\n")
    assert code == 0
    assert "return self.answer + rank" in said
    assert "(Pdb) 99" in said
    assert said.rstrip().endswith("trainer/1 goes on")
    assert not call.done()
    code, said = await second_terminal(host, "send", "all", "continue")
    assert said.splitlines() == ["[trainer/0] goes on"]
    assert (await call).values() == [41, 100]
    assert not list(host.run_directory.glob("*.debug")) + list(host.run_directory.glob("*.stopped"))
    assert "; python -m runtime.debug attach trainer/1" in (tmp_path / "trainer-1.log").read_text()


async def test_who_leaves_leaves_the_rank_stopped_and_the_next_sees_where_bp3(host):
    puzzled = await (await host.spawn_procs(1, name="trainer")).spawn("puzzled", Puzzled)
    call = asyncio.create_task(puzzled.think.call_one())
    await stopped(host, 1)
    _, said = await second_terminal(host, "attach", typed="p 6 * 7\n")
    assert said.rstrip().endswith("trainer/0 stays stopped")
    assert "42" in said
    _, said = await second_terminal(host, "attach", typed="next\ncontinue\n")
    before, _, after = said.partition("(Pdb)")
    assert "-> return self.answer + rank" in before
    assert "42" in before  # what the one before was told
    assert "--Return--" in after
    assert await call == 41


async def test_a_stopped_rank_is_not_taken_for_dead_bp2(host):
    procs = await host.spawn_procs(1, name="trainer")
    puzzled = await procs.spawn("puzzled", Puzzled)
    other = await procs.spawn("other", Puzzled)
    call = asyncio.create_task(puzzled.think.call_one())
    await stopped(host, 1)
    assert await other.ping.call_one() == "here"  # its loop goes on
    await asyncio.sleep(1.5)  # heartbeats go on
    assert procs.status()[0]["alive"]
    assert procs.status()[0]["heartbeat_age"] < 2.0
    await second_terminal(host, "send", "all", "c")
    assert await call == 41
    blocked = asyncio.create_task(puzzled.think_async.call_one())
    await stopped(host, 1)
    await asyncio.sleep(1.5)  # this one has no heartbeats, and lives
    assert procs.status()[0]["alive"]
    await second_terminal(host, "send", "trainer/0", "c")
    assert await blocked == 41


async def test_nobody_without_the_secret_gets_to_the_debugger_bp1(host):
    puzzled = await (await host.spawn_procs(1, name="trainer")).spawn("puzzled", Puzzled)
    call = asyncio.create_task(puzzled.think.call_one())
    await stopped(host, 1)
    ((_, place),) = stopped_ranks([host.run_directory])
    assert os.stat(place.address).st_mode & 0o077 == 0
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(place.address)
    with contextlib.closing(stranger), pytest.raises(PeerRefused):
        await asyncio.to_thread(prove, stranger, b"x" * 32, dialled=True)
    _, said = await second_terminal(host, "attach", typed="continue\n")
    assert said.rstrip().endswith("goes on")
    assert await call == 41


async def test_a_stopped_rank_can_be_stopped_for_good(host):
    procs = await host.spawn_procs(1, name="trainer")
    puzzled = await procs.spawn("puzzled", Puzzled)
    call = asyncio.create_task(puzzled.think.call_one())
    await stopped(host, 1)
    await procs.stop(grace=0.2)
    assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], Exception)
    assert stopped_ranks([host.run_directory]) == []


async def test_wrong_targets_are_named(host):
    code, said = await second_terminal(host)
    assert (code, said.strip()) == (0, "no rank is stopped")
    code, said = await second_terminal(host, "attach", "trainer/7")
    assert code == 1
    assert "trainer/7: no such stopped rank" in said
