"""The code of docs/runtime/trust.md and debugging.md is cut out of this file, so that it runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import Actor, Restart, Tls, endpoint, this_host
from runtime.debug import stopped_ranks
from runtime.sockets import parse_address
from tests.runtime.actors import Greeter
from tests.runtime.test_trust import certificates
from tests.waiting import until

__all__ = ["certificates"]  # a fixture

pytestmark = pytest.mark.usefixtures("nothing_is_imported_ahead")


async def test_trust():
    # --8<-- [start:trust]
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": 2}, name="trainer")
        print(dict(host.refused))  # {} or, after uninvited guests, {'unauthenticated': 2}
    # --8<-- [end:trust]
    assert procs.pids
    assert not host.refused


async def test_tcp():
    # --8<-- [start:tcp]
    async with this_host(listen="tcp://127.0.0.1:0") as host:
        procs = await host.spawn_procs({"rank": 2}, name="trainer")
    # --8<-- [end:tcp]
    assert all(parse_address(rank.address).port for rank in procs.ranks)


async def test_tls(certificates):
    folder = str(certificates)
    # --8<-- [start:tls]
    tls = Tls(cert=f"{folder}/job.pem", key=f"{folder}/job.key", ca=f"{folder}/ca.pem")
    async with this_host(listen="tcp://127.0.0.1:0", tls=tls) as host:
        greeters = await (await host.spawn_procs(1)).spawn("greeter", Greeter)
        print(await greeters.hello.call_one("world"))
    # --8<-- [end:tls]


# --8<-- [start:breakpoint]
class Trainer(Actor):
    @endpoint
    def step(self) -> float:
        loss = 0.25
        breakpoint()
        return loss


# --8<-- [end:breakpoint]


async def test_a_rank_at_a_breakpoint_is_asked_from_a_second_terminal():
    async with this_host(preload=[]) as host:
        trainer = await (await host.spawn_procs(1, name="trainer")).spawn("trainer", Trainer)
        step = asyncio.create_task(trainer.step.call_one())
        await until(lambda: stopped_ranks([host.run_directory]), during=[step], pause=0.02)

        def terminal(*words: str) -> str:
            command = [sys.executable, "-m", "runtime.debug", "--run-dir", str(host.run_directory), *words]
            folder = Path(__file__).parents[2]
            return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=40, check=True).stdout

        assert await asyncio.to_thread(terminal, "send", "trainer", "p loss") == "[trainer/0] 0.25\n"
        await asyncio.to_thread(terminal, "send", "trainer", "continue")
        assert await step == 0.25


async def test_log_levels():
    # --8<-- [start:log]
    async with this_host(log={"trainer": "info"}, log_dir=None) as host:
        await host.spawn_procs({"rank": 2}, name="trainer")
    # --8<-- [end:log]


async def test_abort():
    pytest.importorskip("torch")
    async with this_host() as host:
        # --8<-- [start:abort]
        trainer = await host.spawn_procs({"rank": 2}, name="trainer", restart=Restart(max_restarts=3))
        await trainer.init_process_group("gloo")
        killed = await trainer.abort(grace=10.0)  # ranks that had to be killed; a policy brings them back
        await trainer.init_process_group("gloo")  # the groups are of no use after an abort
        # --8<-- [end:abort]
        assert killed == []
