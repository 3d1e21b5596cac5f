"""CE-3 and CE-4 of runtime/cell.py where a call ends in two ways at once."""

from __future__ import annotations

import asyncio

import pytest

from runtime import ProcessDied
from runtime.testing import kill, local_host
from tests.runtime.lane_actors import Stuck, Tidy
from tests.waiting import until


async def test_later_calls_of_a_failed_actor_do_not_wait_for_what_still_runs_ce4(tmp_path):
    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    with pytest.raises(LookupError, match="background"):
        async with local_host() as host:
            stuck = await (await host.spawn_procs(1)).spawn("stuck", Stuck)
            holding = asyncio.ensure_future(stuck.hold.call_one(str(begun), str(may_end)))
            await until(begun.exists)
            await stuck.fail.call_one()
            with pytest.raises(LookupError):
                await holding
            try:
                with pytest.raises(LookupError):
                    await stuck.later.options(timeout=5).call_one()
            finally:
                may_end.touch()


async def test_a_caller_that_gives_up_and_then_dies_interrupts_no_tidying_up_ce3():
    async with local_host() as host:
        tidy = await (await host.spawn_procs(1, name="a")).spawn("tidy", Tidy)
        callers = await host.spawn_procs(1, name="b")
        caller = await callers.spawn("caller", Tidy)
        await caller.give_up_on.call_one(tidy)
        await until(tidy.traced.call_one, lambda trace: trace == ["tidies up"])
        kill(callers)
        with pytest.raises(ProcessDied):
            await callers.watch()
        await tidy.open.call_one()
        await until(tidy.traced.call_one, lambda trace: trace == ["tidies up", "has tidied up"], seconds=5)
