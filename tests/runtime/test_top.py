"""TO-1 and TO-2 of runtime/top.py, from a real second process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import Restart, this_host
from runtime.top import View
from tests.runtime.actors import Greeter
from tests.waiting import until


@pytest.mark.parametrize("listen", [None, "tcp://127.0.0.1:0"], ids=["unix", "tcp"])
async def test_a_second_terminal_sees_processes_and_what_they_do_to1(listen):
    async with this_host(preload=[], listen=listen) as host:
        procs = await host.spawn_procs(2, name="trainer", restart=Restart(backoff=0.0))
        greeters = await procs.spawn("greeter", Greeter)
        deaf = asyncio.create_task(greeters.slice(rank=1).deaf.call_one(4.0))
        await until(host.status, lambda rows: rows[1]["running"] == "greeter.deaf", during=[deaf], pause=0.05)
        command = [sys.executable, "-m", "runtime.top", "--once", "--run-dir", str(host.run_directory)]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=40,
            check=True,
            env={**os.environ, "COLUMNS": "160"},
        )
        lines = done.stdout.splitlines()
        assert any(host.run_directory.name in line for line in lines)
        (first,), (second,) = ([line for line in lines if name in line] for name in ("trainer/0", "trainer/1"))
        assert str(procs.pids[0]) in first
        assert "idle" in first
        assert "greeter.deaf" in second
        await deaf


async def test_a_job_that_has_ended_drops_out_of_the_view_to2():
    async with this_host(preload=[]) as host:
        await host.spawn_procs(1, name="trainer")
        view = View(host.run_directory)
        assert (await view.table()).row_count == 2
    assert (await view.table()).row_count == 0
    view.close()
