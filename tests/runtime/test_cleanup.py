"""CL-1 to CL-3 of runtime/cleanup.py, and KE-2 for processes that tidy up."""

from __future__ import annotations

import asyncio

import pytest

from runtime import Stopped, this_host
from tests.runtime.lane_actors import FailsToTidyUp, FailsToTidyUpOnTheLoop, NeverMade, TidiesUpSlowly
from tests.waiting import until


async def test_a_main_thread_that_has_answered_is_not_taken_for_busy_ke2(tmp_path):
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(8, name="tidy")
        tidy = await procs.spawn("tidy", TidiesUpSlowly, str(tmp_path))
        await tidy.nothing.call()
        await procs.stop()
    assert len(list(tmp_path.iterdir())) == 8


async def test_an_error_of_a_clean_up_is_told_and_stops_no_other_cl2():
    lines: list[str] = []
    async with this_host(preload=[], sink=lines.append) as host:
        procs = await host.spawn_procs(1, name="tidy")
        for actor in (FailsToTidyUp, FailsToTidyUpOnTheLoop):
            await procs.spawn(actor.__name__, actor)
        await procs.stop()
        assert procs.ranks[0].death is not None
        assert procs.ranks[0].death.exit_code == 0
    told = "\n".join(lines)
    assert "FailsToTidyUp.__cleanup__ failed:" in told
    assert "ValueError: could not tidy up on the main thread" in told
    assert "ValueError: could not tidy up on the loop" in told


@pytest.mark.parametrize("fails", [True, False], ids=["raises", "is stopped meanwhile"])
async def test_what_was_never_made_is_not_tidied_up_cl3(fails, tmp_path):
    lines: list[str] = []
    async with this_host(preload=[], sink=lines.append) as host:
        procs = await host.spawn_procs(1, name="tidy")
        making = asyncio.ensure_future(procs.spawn("never", NeverMade, fails, str(tmp_path / "begun")))
        if not fails:
            await until((tmp_path / "begun").exists, during=[making])
            await procs.stop()
        with pytest.raises(LookupError if fails else Stopped):
            await making
    assert not lines
