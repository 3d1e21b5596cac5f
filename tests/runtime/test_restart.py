"""RS-1, RS-2 of runtime/restart.py and KE-1 to KE-4 of keeper.py: processes that die and come back (R5)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import (
    Actor,
    ActorError,
    ActorMesh,
    ConnectionRefused,
    Failure,
    MailboxFull,
    ProcessDied,
    Restart,
    Stopped,
    UnknownActor,
    context,
    endpoint,
    lookup,
    this_host,
)
from runtime.keeper import Keeper, Rank
from runtime.process import Process
from runtime.restart import History
from runtime.testing import kill, local_host
from tests.runtime.actors import Caller, Greeter
from tests.runtime.stream_actors import Sender
from tests.waiting import until

SOON = Restart(max_restarts=3, backoff=0.01)


class LeavesItDead:
    """An owner that handles every failure, by nothing."""

    def __supervise__(self, failure: Failure) -> bool:
        return True


class Fragile(Actor):
    """Its constructor fails as long as a file is there."""

    def __init__(self, path: str) -> None:
        self.calls = 0
        if os.path.exists(path):
            raise ValueError("not yet")

    @endpoint
    def count(self) -> int:
        self.calls += 1
        return self.calls


async def test_a_process_that_leads_no_group_yet_is_killed_all_the_same():
    """As one is for a moment after its fork: whoever stops it then must not wait for it for ever (KE-2)."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    Process(child.pid).kill(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL


class SlowAgain(Actor):
    """Its second constructor takes long, and says that it has begun."""

    def __init__(self, first: str, second: str) -> None:
        if os.path.exists(first):
            open(second, "w").close()
            time.sleep(60)
        open(first, "w").close()


async def test_a_mesh_stopped_while_a_process_comes_back_stops_without_an_error(tmp_path, caplog):
    second = tmp_path / "second"
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 1}, name="procs", restart=SOON)
        await procs.spawn("slow", SlowAgain, str(tmp_path / "first"), str(second))
        await killed(procs)
        await until(second.exists)
        await procs.stop(grace=0.1)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_process_that_stop_ends_before_it_answers_is_not_restarted_once_more(monkeypatch, caplog):
    """Its start is under way in the fork server when the mesh is stopped."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 1}, name="procs", restart=SOON)
        fork = host._fork_server.fork

        async def held(*arguments: Any) -> Process:
            asked.set()
            await go_on.wait()
            return await fork(*arguments)

        monkeypatch.setattr(host._fork_server, "fork", held)
        await killed(procs)
        await asked.wait()
        await procs.stop()
        go_on.set()
        (rank,) = procs.ranks
        await rank.revived()
        assert rank.process is not None
        await rank.process.exited
    assert [record.args[1] for record in caplog.records if "restart %d of" in str(record.msg)] == [1]


async def killed(procs, rank: int = 0) -> None:
    """Kill a process and wait until its death is known."""
    ended = procs.ranks[rank].ended
    os.kill(procs.pids[rank], signal.SIGKILL)
    await ended.wait()


@given(st.integers(1, 5), st.lists(st.floats(0, 100), max_size=30), st.floats(1, 200))
def test_never_more_than_max_restarts_in_a_window_rs1(limit, steps, window):
    history = History(Restart(max_restarts=limit, window=window))
    now, granted = 0.0, []
    for step in steps:
        now += step
        if history.next_pause(now) is not None:
            granted.append(now)
        else:
            assert sum(t > now - window for t in granted) == limit
    assert all(sum(t - window < other <= t for other in granted) <= limit for t in granted)


def test_pauses_double_up_to_their_limit_rs2():
    history = History(Restart(max_restarts=6, backoff=0.5, max_backoff=3.0, window=100.0))
    assert [history.next_pause(float(n)) for n in range(7)] == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0, None]
    assert history.next_pause(106.0) == 0.5  # all of them are out of the window


@pytest.mark.parametrize("wrong", [{"max_restarts": 0}, {"window": -1.0}, {"backoff": -0.1}])
def test_a_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"Restart\(.*expected"):
        Restart(**wrong)


@pytest.mark.parametrize("start", ["fork", "fresh"])
@pytest.mark.parametrize("listen", [None, "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
async def test_a_dead_process_comes_back_with_its_place_and_its_actors_ke4(start, listen):
    async with this_host(preload=[], listen=listen) as host:
        procs = await host.spawn_procs(2, name="trainer", start=start, env={"MINE": "yes"}, restart=SOON)
        greeters = await procs.spawn("greeter", Greeter, "hallo")
        second = await procs.slice(rank=1).spawn("second", Greeter, "ciao")
        pending = asyncio.create_task(greeters.slice(rank=1).deaf.call_one(60.0))
        await asyncio.sleep(0.1)
        before = procs.pids
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(ProcessDied, match="greeter rank 1"):
            await pending
        # Made while it is away: waits for it.
        assert (await greeters.hello.call("x")).values() == ["hallo x from 0 of 2", "hallo x from 1 of 2"]
        assert await second.hello.call_one("y") == "ciao y from 0 of 1"
        assert (await greeters.variable.call("MINE")).values() == ["yes", "yes"]
        assert procs.pids[0] == before[0]
        assert procs.pids[1] != before[1]
        assert [row["restarts"] for row in procs.status()] == [0, 1]
    # Nothing was unhandled, so leaving the host raised nothing.


async def test_handles_in_other_processes_reach_the_process_that_came_back():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="a", restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        caller = await (await host.spawn_procs(1, name="b")).spawn("caller", Caller)
        assert await caller.ask.call_one(greeters, "x") == ["hi x from 0 of 1"]
        await killed(procs)
        assert await greeters.hello.call_one("y") == "hi y from 0 of 1"
        assert await caller.ask.call_one(greeters, "z") == ["hi z from 0 of 1"]


class Slow(Actor):
    """Its constructor takes a while."""

    def __init__(self) -> None:
        time.sleep(0.5)


class Writer(Actor):
    """Calls from a process of its own."""

    @endpoint
    async def write(self, mesh: ActorMesh, number: int) -> list[int]:
        await mesh.note.broadcast(number)
        noted: list[int] = await mesh.noted.call_one()
        return noted


async def test_calls_of_other_processes_wait_for_actors_that_are_being_made_again_se3():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="a", restart=SOON)
        await procs.spawn("slow", Slow)
        greeters = await procs.spawn("greeter", Greeter)
        stopped = await procs.spawn("stopped", Greeter)
        await stopped.stop()
        writer = await (await host.spawn_procs(1, name="b")).spawn("writer", Writer)
        assert await writer.write.call_one(greeters, 1) == [1]
        await killed(procs)

        async def write() -> list[int] | None:
            try:
                noted: list[int] = await writer.write.call_one(greeters, 2)
                return noted
            except (ProcessDied, ConnectionRefused):  # nobody listens there yet
                return None

        assert await until(write) == [2]
        with pytest.raises(Stopped):
            await writer.write.call_one(stopped, 3)


class Gated(Actor):
    """Its constructor says that it has begun, and waits until it may end."""

    def __init__(self, begun: str, may_end: str, only: int | None = None) -> None:
        if only is None or only == context().rank:
            Path(begun).touch()
            while not os.path.exists(may_end):
                time.sleep(0.005)
        self.word = "made"

    @endpoint
    async def hello(self, name: str) -> str:
        return f"{self.word} {name}"


async def test_calls_of_other_processes_wait_for_the_end_of_a_constructor_se3(tmp_path):
    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="a", restart=SOON)
        may_end.touch()
        gated = await procs.spawn("gated", Gated, str(begun), str(may_end))
        caller = await (await host.spawn_procs(1, name="b")).spawn("caller", Caller)
        begun.unlink()
        may_end.unlink()
        await killed(procs)
        await until(begun.exists)
        asking = asyncio.create_task(caller.ask.call_one(gated, "x"))
        await asyncio.wait([asking], timeout=0.2)
        may_end.touch()
        assert await asking == ["made x"]


async def test_actors_of_a_process_that_dies_before_all_ranks_have_theirs_are_made_again(tmp_path):
    """KE-4 for a mesh that is being spawned."""
    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, restart=SOON)
        spawning = asyncio.create_task(procs.spawn("gated", Gated, str(begun), str(may_end), 1))
        await until(begun.exists)
        await procs.slice(rank=0).run(int)  # its actor is made: it runs one thing after another
        await killed(procs, 0)
        await procs.ranks[0].revived()
        may_end.touch()
        assert (await (await spawning).hello.call("x")).values() == ["made x", "made x"]


async def test_a_port_of_a_process_that_has_died_reaches_no_receiver_of_the_next_one():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, restart=SOON)
        sender = await procs.spawn("sender", Sender)
        old = await sender.give.call_one(1)
        await killed(procs)
        new = await sender.give.call_one(1)
        with contextlib.suppress(Stopped):
            for _ in range(2):  # CH-4
                await old.send(1)
        await new.send(5)
        assert await until(sender.summed.call_one) == 5


async def test_actors_that_another_process_has_stopped_do_not_come_back():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="a", restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        second = await procs.spawn("second", Greeter)
        caller = await (await host.spawn_procs(1, name="b")).spawn("caller", Caller)
        await caller.stop_it.call_one(greeters)
        assert list(procs.ranks[0].actors) == [second.refs[0].key]
        with pytest.raises(UnknownActor):  # NA-2
            await lookup("greeter")


async def test_a_process_that_dies_as_its_restart_ends_is_started_again(monkeypatch):
    rebuild = Keeper._rebuild

    async def dies_at_the_end(keeper: Keeper, rank: Rank) -> None:
        await rebuild(keeper, rank)
        if rank.num_starts == 2:
            assert rank.process is not None
            rank.process.kill(signal.SIGKILL)
            await rank.ended.wait()

    monkeypatch.setattr(Keeper, "_rebuild", dies_at_the_end)
    async with local_host() as host:
        procs = await host.spawn_procs(1, restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        kill(procs)
        await procs.ranks[0].ended.wait()
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"
        assert procs.status()[0]["restarts"] == 2


async def test_two_who_restart_a_mesh_at_once_start_one_process():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, owner=LeavesItDead(), restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs)
        await until(lambda: not procs.ranks[0].reviving)
        await asyncio.gather(procs.restart(), procs.restart())
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"
        assert procs.status()[0]["restarts"] == 1


async def test_slices_without_the_dead_rank_go_on_meanwhile():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, restart=Restart(backoff=1.0))
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs, 1)
        waiting = asyncio.create_task(greeters.slice(rank=1).hello.call_one("x"))
        assert await greeters.slice(rank=0).hello.call_one("x") == "hi x from 0 of 1"
        assert (await greeters.place.choose())["rank"] == 0
        assert not waiting.done()
        assert await waiting == "hi x from 0 of 1"


async def test_calls_made_while_a_process_is_away_arrive_in_the_order_made_pe3():
    """And nobody overtakes them who calls just when it is back, by whatever way."""
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, restart=Restart(backoff=0.2))
        one = await procs.spawn("greeter", Greeter)
        await killed(procs)
        calls: list[Awaitable[Any]] = []
        sent = 0
        while procs.ranks[0].reviving or sent < 1000:
            call = one.note.broadcast if sent % 3 == 1 else one.note.call_one
            calls.append(asyncio.ensure_future(call(sent)))
            await asyncio.sleep(0)  # a broadcast begins now
            sent += 1
            if sent == 300:
                calls.append(asyncio.ensure_future(one.echo.call_one(bytes(20 * 2**20))))  # copied in a thread
        await asyncio.gather(*calls)
        assert await one.noted.call_one() == list(range(sent))


async def test_who_will_not_wait_is_told_that_a_process_is_away():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, restart=Restart(backoff=0.2))
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs)
        with pytest.raises(MailboxFull, match="being started again"):
            await greeters.hello.options(wait=False).call_one("x")
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"


async def test_a_call_of_all_ranks_waits_for_the_dead_one_and_holds_up_nobody():
    """R5; PE-3."""
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, restart=Restart(backoff=0.5))
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs, 1)
        everyone = asyncio.create_task(greeters.hello.call("x"))
        assert await greeters.slice(rank=0).hello.call_one("x") == "hi x from 0 of 1"
        assert not everyone.done()
        assert "this process waits for the restart of greeter rank 1, hello" in str(await host.report())
        assert len(await everyone) == 2


async def test_calls_during_a_restart_by_hand_wait_for_the_actors():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, owner=LeavesItDead(), restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs)
        await until(lambda: not procs.ranks[0].reviving)
        restart = asyncio.create_task(procs.restart())
        await until(lambda: procs.ranks[0].reviving)
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"
        await restart


async def test_the_owner_decides_first_ke3():
    told: list[Failure] = []

    class Keeper:
        async def __supervise__(self, failure: Failure) -> bool:
            await asyncio.sleep(0.05)
            told.append(failure)
            return True

    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="rollout", owner=Keeper(), restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs)
        with pytest.raises(ProcessDied):  # the owner keeps it, so it isn't restarted
            await greeters.hello.call_one("x")
        assert [type(f.error) for f in told] == [ProcessDied]
        await procs.restart()  # until the owner says so
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"


@pytest.mark.parametrize("handles", [True, False])
async def test_an_owner_that_restarts_its_mesh_while_it_is_asked_has_it_back(handles):
    class Keeper:
        async def __supervise__(self, failure: Failure) -> bool:
            await procs.restart()
            return bool(handles)

    async with local_host() as host:
        procs = await host.spawn_procs(1, owner=Keeper(), restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        kill(procs)
        await procs.ranks[0].ended.wait()
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"
        await until(lambda: not procs.ranks[0].reviving)
        assert procs.status()[0]["restarts"] == 1


async def test_owner_that_does_not_handle_it_leaves_it_to_the_policy_ke3():
    told: list[Failure] = []

    class Onlooker:
        def __supervise__(self, failure: Failure) -> None:
            told.append(failure)

    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, owner=Onlooker(), restart=SOON)
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs)
        assert await greeters.hello.call_one("x")
    assert len(told) == 1


async def test_kind_26_a_rank_that_fails_nine_times_keeps_its_name_and_then_ends_the_job():
    with pytest.raises(ProcessDied, match="rollout rank 0") as caught:
        async with this_host(preload=[]) as host:
            procs = await host.spawn_procs(1, name="rollout", restart=Restart(max_restarts=8, backoff=0.0))
            greeters = await procs.spawn("greeter", Greeter)
            for _ in range(9):
                assert (await greeters.place.call_one())["proc"] == "rollout"
                await killed(procs)
            await procs.watch()
    assert any("8 restarts within 600 s, the limit is 8" in note for note in caught.value.__notes__)


async def test_a_constructor_that_fails_again_uses_up_the_policy(tmp_path):
    flag = tmp_path / "flag"
    with pytest.raises(ActorError, match="not yet"):
        async with this_host(preload=[]) as host:
            procs = await host.spawn_procs(1, restart=SOON)
            fragile = await procs.spawn("fragile", Fragile, str(flag))
            assert await fragile.count.call_one() == 1
            await killed(procs)
            assert await fragile.count.call_one() == 1  # a new one
            flag.touch()
            await killed(procs)
            with pytest.raises(ProcessDied):
                await fragile.count.call_one()
            assert procs.status()[0]["restarts"] == 3
            await procs.watch()


async def test_actors_that_were_stopped_do_not_come_back():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, restart=SOON)
        first = await procs.spawn("first", Greeter)
        second = await procs.spawn("second", Greeter)
        await first.stop()
        assert list(procs.ranks[0].actors) == [second.refs[0].key]
        await killed(procs)
        with pytest.raises(UnknownActor):  # NA-2
            await lookup("first")
        assert await second.hello.call_one("x")
        with pytest.raises(UnknownActor):
            await lookup("first")


async def test_stop_while_a_restart_is_awaited_leaves_nothing():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, restart=Restart(backoff=30.0))
        greeters = await procs.spawn("greeter", Greeter)
        await killed(procs)
        waiting = asyncio.create_task(greeters.hello.call_one("x"))
        await asyncio.sleep(0.05)
        await procs.stop()
        with pytest.raises(ProcessDied):
            await asyncio.wait_for(waiting, 10)
        assert not procs.ranks[0].reviving


async def test_without_a_policy_restart_says_what_to_write():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="a")
        with pytest.raises(ValueError, match=r"a: its actors aren't known. Spawn it with spawn_procs\(restart="):
            await procs.restart()


async def test_choose_passes_over_dead_ones_also_in_a_process_that_never_called_them():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, name="a")
        greeters = await procs.spawn("greeter", Greeter)
        caller = await (await host.spawn_procs(1, name="b")).spawn("caller", Caller)
        kill(procs.slice(rank=1))
        with pytest.raises(ProcessDied):
            await procs.watch()
        assert await caller.ask_any.call_one(greeters, 3) == [0, 0, 0]
