"""WT-1, WT-2 of runtime/waits.py and SN-1, SN-2 of runtime/snapshot.py."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import HostMesh, this_host
from runtime.waits import Report, find_circles
from tests.runtime.actors import Gates, Greeter, Knot
from tests.waiting import until

NODES = [("a", ""), ("b", ""), ("c", ""), ("c", "x"), ("d", "")]


@given(st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES))))
def test_a_circle_is_found_exactly_when_there_is_one(pairs):
    edges = {node: {target for source, target in pairs if source == node} for node in NODES}
    circles = find_circles(edges)
    for circle in circles:
        assert all(after in edges[node] for node, after in zip(circle, [*circle[1:], circle[0]], strict=True))
        assert len(set(circle)) == len(circle)
    reach = {node: set(edges[node]) for node in NODES}  # the slow, obvious way
    for _ in NODES:
        for node in NODES:
            reach[node] |= {further for target in reach[node] for further in reach[target]}
    assert bool(circles) == any(node in reach[node] for node in NODES)


async def report_with(host: HostMesh, *texts: str) -> Report:
    """Ask until these texts are in the report."""
    return await until(host.report, lambda report: all(text in str(report) for text in texts), pause=0.02)


async def test_two_actors_that_wait_for_each_other_are_named_as_a_deadlock():
    async with this_host(preload=[]) as host:
        left = await (await host.spawn_procs(1, name="left")).spawn("left", Knot)
        right = await (await host.spawn_procs(1, name="right")).spawn("right", Knot)
        calls = [
            asyncio.create_task(left.hold_and_ask.call_one(right)),
            asyncio.create_task(right.hold_and_ask.call_one(left)),
        ]
        queued = asyncio.create_task(left.answer.call_one())
        await report_with(host, "left rank 0 runs hold_and_ask", "right rank 0 runs hold_and_ask")
        await asyncio.gather(left.open.call_one(), right.open.call_one())
        report = await report_with(host, "left rank 0 has 2 waiting", "deadlock: ")
        assert report.deadlocks == [
            "left rank 0 (hold_and_ask) waits for right rank 0 (hold_and_ask) waits for left rank 0 (hold_and_ask)"
        ]
        text = str(report)
        assert text.startswith("deadlock: left rank 0")
        assert "left rank 0 waits for the answer of right rank 0, answer" in text
        for call in (*calls, queued):
            call.cancel()
        await until(host.report, lambda report: not report.deadlocks)


async def test_a_busy_main_thread_and_queue_heads_are_reported_and_no_deadlock_is_seen():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="trainer")
        greeter, other = await procs.spawn("greeter", Greeter), await procs.spawn("other", Greeter)
        calls = [asyncio.create_task(greeter.busy.call_one(60.0))]
        await asyncio.sleep(0.05)
        calls += [asyncio.create_task(greeter.hello.call_one("x")) for _ in range(5)]
        calls.append(asyncio.create_task(other.hello.call_one("x")))
        calls += [asyncio.create_task(greeter.echo.broadcast(np.zeros(2**22))) for _ in range(3)]
        await asyncio.sleep(0.1)
        report = await host.report()
        assert report.deadlocks == []
        text = str(report)
        assert "main thread: greeter.busy for 0." in text
        assert "greeter rank 0 runs busy for" in text
        assert "greeter rank 0 has 6 waiting" in text
        assert "hello (0." in text
        assert ", and 3 more" in text
        assert "other rank 0 waits for the main thread to run hello" in text
        assert "this process waits for the answer of greeter rank 0, busy" in text
        assert "this process waits for room in the mailbox of greeter rank 0, echo" in text
        for call in calls:
            call.cancel()


async def test_an_actor_that_waits_for_the_main_thread_of_one_that_waits_for_it_is_a_deadlock():
    async with this_host(preload=[]) as host:
        one, two = await host.spawn_procs(1, name="one"), await host.spawn_procs(1, name="two")
        a, c = await one.spawn("a", Knot), await one.spawn("c", Knot)
        b = await two.spawn("b", Knot)
        calls = [
            asyncio.create_task(b.ask_main.call_one(c)),  # will ask c, which needs the main thread of `one`
            asyncio.create_task(a.ask_from_main.call_one(b)),  # holds that until b answers
        ]
        await report_with(host, "a rank 0 waits for the answer of b rank 0", "b rank 0 runs ask_main")
        await b.open.call_one()
        report = await report_with(host, "deadlock: ")
        for call in calls:
            call.cancel()
        first = "a rank 0 (ask_from_main)"
        assert report.deadlocks == [
            f"{first} waits for b rank 0 (ask_main) waits for c rank 0 (on_main) waits for {first}"
        ]


async def test_a_process_whose_loop_is_blocked_is_in_the_report_with_its_last_heartbeat(monkeypatch):
    monkeypatch.setattr("runtime.snapshot.ASK_SECONDS", 0.3)
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, name="knots")
        knots = await procs.spawn("knot", Knot)
        await procs.run(int)
        blocked = asyncio.create_task(knots.slice(rank=1).block_the_loop.call_one(1.5))
        late = "knots 1: does not answer; its last heartbeat came"
        await until(host.report, lambda report: late in str(report), during=[blocked], pause=0)
        await blocked
        await until(procs.status, lambda rows: rows[1]["loop_lag"] >= 0.2, pause=0.05)


async def test_mailboxes_are_part_of_the_status():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1)
        greeter = await procs.spawn("greeter", Greeter)
        busy = asyncio.create_task(greeter.busy.call_one(60.0))
        await asyncio.sleep(0)  # it is sent first
        await greeter.echo.broadcast(np.zeros(2**10))
        rows = await until(procs.status, lambda rows: rows[0]["mailbox_messages"] == 1, pause=0.05)
        assert rows[0]["mailbox_bytes"] > 8192
        busy.cancel()


async def test_a_standstill_is_logged_once_and_again_later(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, logger="runtime")
    async with this_host(preload=[], standstill=0.4) as host:
        gates = await (await host.spawn_procs(1)).spawn("gates", Gates)
        caplog.clear()  # the start itself may have taken so long
        await asyncio.sleep(1.0)
        assert caplog.records == []  # nobody waits for anything
        waiting = asyncio.create_task(gates.serial_wait.call_one())
        await until(lambda: caplog.records, during=[waiting], pause=0.05)
        assert "nothing has moved for" in caplog.text
        assert "gates rank 0 runs serial_wait" in caplog.text
        await gates.open.call_one()
        assert await waiting == "through"
        caplog.clear()
