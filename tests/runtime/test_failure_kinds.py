"""What users of other runtimes ran into, with processes, death, leftovers and sizes: each kind once, under its number
in our list of failures. Kinds 26, 33, 35 and 45 are in the tests of restarts, devices and aborts, 21 in those of
trust."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from runtime import Oversize, ProcessDied, this_host
from tests.runtime.actors import Greeter

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def controller(plan: str, before: Callable[[], None] | None = None) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """A controller in a program of its own: the process, its run directory, and the pids of what it started."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        if before is not None:
            before()

    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.controllers", plan],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )
    assert process.stdout is not None
    folder, *pids = process.stdout.readline().split()
    return process, Path(folder), [int(pid) for pid in pids]


async def test_kind_1_no_child_is_left_after_stop():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2)
        await procs.spawn("greeter", Greeter)
        (child, _) = (await procs.run(os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "100")).values()
        pids = [*procs.pids, child]
        await procs.stop()
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not [pid for pid in pids if alive(pid)]


def test_kind_2_one_interrupt_closes_all_roles_in_order():
    process, folder, pids = controller("fork")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT  # what a shell shows as 130
    assert not [pid for pid in pids if alive(pid)]
    assert not folder.exists()
    assert stderr.count("Traceback") <= 2  # KeyboardInterrupt, and the cancellation that it came from


async def test_kind_3_a_controller_lives_on_after_stop():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1)
        greeters = await procs.spawn("greeter", Greeter)
        await greeters.hello.call_one("x")
        await procs.stop()
        await asyncio.sleep(1.5)  # longer than a heartbeat: nothing may come back for the stopped process
        async with await host.spawn_procs(1) as again:
            assert await again.spawn("greeter", Greeter)


def test_kind_5_an_exit_from_outside_of_all_tasks_leaves_no_process():
    process, folder, pids = controller("torn")
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert not [pid for pid in pids if alive(pid)]
    assert not folder.exists()


def test_kind_5_an_error_of_the_user_is_the_only_traceback():
    process, folder, pids = controller("raising")
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert stderr.count("Traceback") == 1
    assert stderr.rstrip().endswith("LookupError: no such data set")
    assert not [pid for pid in pids if alive(pid)]
    assert not folder.exists()


@pytest.mark.parametrize("megabytes", [128, pytest.param(1024, marks=pytest.mark.slow)])
async def test_kind_6_size_is_not_taken_for_death(megabytes):
    async with this_host(preload=[]) as host:
        greeters = await (await host.spawn_procs(4)).spawn("greeter", Greeter)
        array = np.ones(megabytes << 17)
        for _ in range(2 if megabytes < 1024 else 25):
            assert (await greeters.nbytes.call(array)).values() == [array.nbytes] * 4


async def test_kind_7_oversize_is_an_error_at_the_caller_and_the_connection_stays_good():
    async with this_host(preload=[], max_message_bytes=1_000_000) as host:
        greeters = await (await host.spawn_procs(1)).spawn("greeter", Greeter)
        other = asyncio.create_task(greeters.deaf.call_one(0.3))
        with pytest.raises(Oversize, match=r"message of 8000\d\d\d bytes: the limit is 1000000"):
            await greeters.echo.call_one(np.ones(1_000_000))
        await other
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"


async def test_kind_7_an_oversize_result_is_an_error_of_its_call():
    async with this_host(preload=[], max_message_bytes=1_000_000) as host:
        procs = await host.spawn_procs(1)
        with pytest.raises(ValueError, match="the limit is 1000000"):
            await procs.run(np.ones, 1_000_000)
        assert (await procs.run(os.getpid)).values() == procs.pids


async def test_kind_14_a_killed_rank_is_told_during_the_call_with_rank_signal_and_last_lines():
    async with this_host(preload=[], sink=lambda line: None) as host:
        procs = await host.spawn_procs(2, name="trainer")
        greeters = await procs.spawn("greeter", Greeter)
        await greeters.slice(rank=1).say.call_one("to stdout", "about to be killed")
        call = asyncio.create_task(greeters.deaf.call(60.0))
        await asyncio.sleep(0.2)
        os.kill(procs.pids[1], signal.SIGKILL)
        with pytest.raises(ProcessDied) as caught:
            await asyncio.wait_for(call, 20)
        assert caught.value.rank == 1
        assert caught.value.signal == signal.SIGKILL
        assert caught.value.stderr_tail == ("about to be killed",)


async def test_kind_15_the_first_line_names_role_rank_host_endpoint_and_what_happened():
    async with this_host(preload=[]) as host:
        greeters = await (await host.spawn_procs(2)).spawn("rollout", Greeter)
        with pytest.raises(ValueError, match="bad word") as caught:
            await greeters.slice(rank=1).fail.call_one()
        first = str(caught.value).partition("\n")[0]
        assert first == f"rollout rank 1 on {host.name}, fail raised ValueError: bad word"


async def test_kind_19_two_jobs_run_at_once():
    async with (
        this_host(preload=[], listen="tcp://127.0.0.1:0") as one,
        this_host(preload=[], listen="tcp://127.0.0.1:0") as two,
    ):
        first, second = [await (await h.spawn_procs(2)).spawn("greeter", Greeter) for h in (one, two)]
        assert len((await first.hello.call("x")).values() + (await second.hello.call("x")).values()) == 4


def test_kind_39_workers_of_a_dead_controller_are_gone_and_so_is_its_folder():
    process, folder, pids = controller("fork")
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while (any(alive(pid) for pid in pids) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if alive(pid)]
    assert not folder.exists()


async def test_kind_44_a_crash_is_told_with_signal_peak_memory_and_the_place_in_the_code():
    async with this_host(preload=[], sink=lambda line: None) as host:
        greeters = await (await host.spawn_procs(1, name="rollout")).spawn("greeter", Greeter)
        with pytest.raises(ProcessDied, match="killed by SIGSEGV, peak memory") as caught:
            await greeters.die.call_one("segv")
        assert any("Segmentation fault" in line for line in caught.value.stderr_tail)  # of faulthandler
        assert any(", in die" in line or "in die" in line for line in caught.value.stderr_tail)


def test_kind_44_death_for_lack_of_memory_is_told_with_the_limit():
    """A real control group with a real limit; the kernel kills the worker that takes too much."""
    with ExitStack() as stack:
        group = memory_group(400 * 2**20, stack)
        process, folder, pids = controller("greedy", lambda: join(group))
        _, stderr = process.communicate(timeout=50)
    assert process.returncode == 1
    assert "trainer rank 0 on" in stderr or "trainer rank 1 on" in stderr
    assert "killed by SIGKILL" in stderr
    assert "of its control group for lack of memory meanwhile (limit 400 MiB)" in stderr
    assert not [pid for pid in pids if alive(pid)]
    assert not folder.exists()


def join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def memory_group(limit: int, stack: ExitStack) -> Path:
    """A control group of our own; skips where we may not make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent, name = Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
            break
    else:
        parent, name = Path("/sys/fs/cgroup"), "memory.max"
    group = parent / f"tutti-test-{os.getpid()}"
    try:
        group.mkdir()
        stack.callback(group.rmdir)
        (group / name).write_text(str(limit))
        swap = group / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")
    except OSError as error:
        pytest.skip(f"no control group of our own can be made here: {error}")
    return group
