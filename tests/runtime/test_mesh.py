"""HO-1 to HO-3 of runtime/mesh.py, PR-1 to PR-3 of process.py, WO-1 to WO-3 of worker.py, LO-1 to LO-4 of logs.py and
SU-1 to SU-3 of supervise.py: real processes, real kills."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time

import pytest

from runtime import (
    Actor,
    ActorError,
    ActorMesh,
    Failure,
    ProcessDied,
    Restart,
    StartError,
    Stopped,
    TaskGroup,
    context,
    endpoint,
    this_host,
)
from runtime.process import starts_fresh
from tests.runtime.actors import Gates, Greeter, Tidy
from tests.waiting import until


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
async def host():
    async with this_host(preload=[]) as host:
        yield host


@pytest.mark.parametrize("start", ["fork", "fresh"])
async def test_processes_have_their_place_environment_and_threads(start):
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(
            {"replica": 2, "tp": 1}, name="rollout", env=lambda rank: {"MY_RANK": str(rank)}, threads=3, start=start
        )
        greeters = await procs.spawn("greeter", Greeter)
        assert (await greeters.variable.call("MY_RANK")).values() == ["0", "1"]
        assert (await greeters.variable.call("OMP_NUM_THREADS")).values() == ["3", "3"]
        assert [dict(point) for point, _ in (await greeters.place.call()).items()] == [
            {"replica": 0, "tp": 0},
            {"replica": 1, "tp": 0},
        ]
        assert [place["pid"] for place in await greeters.place.call()] == procs.pids
        assert all(os.getsid(pid) == pid for pid in procs.pids)
        assert (await greeters.slice(replica=1).hello.call_one("x")) == "hi x from 0 of 1"


def test_device_visibility_asks_for_a_fresh_process():
    assert starts_fresh({"CUDA_VISIBLE_DEVICES": "0"})
    assert starts_fresh({"HIP_VISIBLE_DEVICES": "0"})
    assert not starts_fresh({"MY_RANK": "0"})


async def test_environment_set_after_the_start_of_the_host_reaches_forks(host, monkeypatch):
    monkeypatch.setenv("SET_LATER", "yes")
    greeters = await (await host.spawn_procs(1)).spawn("greeter", Greeter)
    assert await greeters.variable.call_one("SET_LATER") == "yes"


async def test_forks_have_the_environment_of_now_also_pool_sizes_and_what_was_removed(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("REMOVED_LATER", "yes")
    async with this_host(preload=[]) as host:
        monkeypatch.delenv("REMOVED_LATER")
        greeters = await (await host.spawn_procs(1)).spawn("greeter", Greeter)
        assert await greeters.variable.call_one("OPENBLAS_NUM_THREADS") == "1"
        assert await greeters.variable.call_one("REMOVED_LATER") is None


async def test_random_numbers_of_forks_differ(host):
    procs = await host.spawn_procs(2)
    first, second = (await procs.run(_random_number)).values()
    assert first != second


def _random_number() -> float:
    return random.random()


async def test_an_error_in_a_constructor_raises_in_spawn_and_the_process_stays_usable(host):
    procs = await host.spawn_procs(2, name="trainer")
    with pytest.raises(ValueError, match="no such word") as caught:
        await procs.spawn("greeter", Greeter, "fail")
    assert isinstance(caught.value, ActorError)
    assert caught.value.endpoint == "__init__"
    greeters = await procs.spawn("greeter", Greeter)
    assert len(await greeters.hello.call("x")) == 2


async def test_actors_that_were_made_beside_a_constructor_that_raised_are_cleaned_up(host, tmp_path):
    procs = await host.spawn_procs(2, name="trainer")
    with pytest.raises(ValueError, match="not on rank 1"):
        await procs.spawn("half", Half, str(tmp_path / "cleaned"))
    await until((tmp_path / "cleaned").exists)
    assert await procs.spawn("half", Tidy, str(tmp_path / "again"))


class Half(Actor):
    def __init__(self, path: str) -> None:
        self.path = path
        if context().rank == 1:
            raise ValueError("not on rank 1")

    def __cleanup__(self, error: BaseException | None) -> None:
        open(self.path, "w").close()


async def test_the_limit_of_open_files_is_made_for_many_processes(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        async with this_host(preload=[]) as host:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 65536)
            procs = await host.spawn_procs(1)
            (theirs,) = (await procs.run(resource.getrlimit, resource.RLIMIT_NOFILE)).values()
            assert theirs[0] >= min(before[1], 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_wrong_use_is_refused_at_once(host):
    procs = await host.spawn_procs(1, name="a")
    with pytest.raises(ValueError, match="a mesh named 'a' is running"):
        await host.spawn_procs(1, name="a")
    with pytest.raises(TypeError, match="expected a subclass of Actor, got"):
        await procs.spawn("x", str)
    with pytest.raises(TypeError, match="Write str"):
        await host.spawn_procs(1, name="b", env={"X": 1})
    await procs.stop()
    await host.spawn_procs(1, name="a")


@pytest.mark.parametrize("start", ["fork", "fresh"])
@pytest.mark.parametrize(
    ("how", "number", "code"), [("kill", signal.SIGKILL, None), ("segv", signal.SIGSEGV, None), ("exit", None, 7)]
)
async def test_death_is_reported_with_signal_or_code_and_last_lines(start, how, number, code):
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2, name="trainer", start=start)
        greeters = await procs.spawn("greeter", Greeter)
        pending = asyncio.create_task(greeters.slice(rank=1).deaf.call_one(60.0)) if how == "kill" else None
        with pytest.raises(ProcessDied) as caught:
            if pending:
                await asyncio.sleep(0.1)
                begin = time.monotonic()
                os.kill(procs.pids[1], signal.SIGKILL)
                await pending
            else:
                begin = time.monotonic()
                await greeters.slice(rank=1).die.call_one(how)
        assert time.monotonic() - begin < 2.0  # a loaded machine; half a second is what the benchmark shows
        error = caught.value
        assert (error.mesh, error.rank, error.signal, error.exit_code) == ("greeter", 1, number, code)
        if how != "kill":
            assert "last words" in error.stderr_tail
        # Later calls to it fail at once, and the other rank goes on.
        with pytest.raises(ProcessDied):
            await greeters.hello.call("x")
        assert await greeters.slice(rank=0).hello.call_one("x") == "hi x from 0 of 1"
        assert (await greeters.place.choose())["rank"] == 0


@pytest.mark.parametrize("restart", [None, Restart(backoff=0.0)], ids=["gone for good", "restarted"])
async def test_an_actor_that_called_a_dead_process_is_told_how_it_died_too(restart):
    async with this_host(preload=[], sink=lambda line: None) as host:
        procs = await host.spawn_procs(1, name="a", restart=restart)
        greeters = await procs.spawn("greeter", Greeter)
        await greeters.say.call_one("", "last words")
        asker = await (await host.spawn_procs(1, name="b")).spawn("asker", Asker)
        asking = asyncio.create_task(asker.ask.call_one(greeters))
        await until(procs.status, lambda rows: rows[0]["running"] == "greeter.deaf", during=[asking], pause=0.05)
        os.kill(procs.pids[0], signal.SIGKILL)
        with pytest.raises(ProcessDied, match="killed by SIGKILL") as caught:
            await asking
        assert (caught.value.signal, caught.value.stderr_tail) == (signal.SIGKILL, ("last words",))
        if restart is None:
            with pytest.raises(ProcessDied):
                await host.watch()


class Asker(Actor):
    @endpoint
    async def ask(self, mesh: ActorMesh) -> None:
        await mesh.deaf.call_one(60.0)


async def test_a_kill_that_is_not_ours_mentions_memory(host):
    procs = await host.spawn_procs(1)
    greeters = await procs.spawn("greeter", Greeter)
    with pytest.raises(ProcessDied, match="not sent by this job: an operator, or the kernel for lack of memory"):
        await greeters.die.call_one("kill")


async def test_a_process_that_can_not_start_says_why(tmp_path):
    async with this_host(preload=[]) as host:
        with pytest.raises(ProcessDied, match=r"broken rank 0 on .*, start: process exited with code 1"):
            await host.spawn_procs(1, name="broken", env={"PYTHONHOME": str(tmp_path)})
        assert await host.spawn_procs(1, name="fine")


async def test_a_killed_fork_server_is_an_error_and_not_a_hang():
    with pytest.raises((StartError, ProcessDied)):
        async with this_host(preload=[]) as host:
            await host.spawn_procs(1, name="a")
            os.kill(host._fork_server.pid, signal.SIGKILL)
            await until(host._fork_server._popen.poll, lambda code: code is not None)
            await host.spawn_procs(1, name="b")


async def test_watch_raises_the_death_of_any_rank(host):
    procs = await host.spawn_procs(2, name="rollout")
    with pytest.raises(ProcessDied, match="rollout rank 1"):
        async with TaskGroup("job") as tasks:
            tasks.forever(procs.watch(), name="watch")
            await asyncio.sleep(0)
            os.kill(procs.pids[1], signal.SIGKILL)
            await asyncio.Event().wait()


async def test_an_owner_that_handles_a_failure_keeps_it_from_the_job():
    told: list[Failure] = []

    class Keeper:
        async def __supervise__(self, failure: Failure) -> bool:
            told.append(failure)
            return True

    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, name="rollout", owner=Keeper())
        os.kill(procs.pids[0], signal.SIGKILL)
        await until(lambda: told)
    assert told[0].mesh == "rollout"
    assert isinstance(told[0].error, ProcessDied)


async def test_a_failure_that_nobody_handled_is_raised_on_leaving():
    with pytest.raises(ProcessDied, match="rollout rank 0"):
        async with this_host(preload=[]) as host:
            procs = await host.spawn_procs(1, name="rollout")
            os.kill(procs.pids[0], signal.SIGKILL)
            await until(procs.status, lambda rows: not rows[0]["alive"])


async def test_an_error_in_a_broadcast_endpoint_goes_to_supervision_and_the_actor_lives():
    with pytest.raises(LookupError, match="nobody waits for me") as caught:
        async with this_host(preload=[]) as host:
            gates = await (await host.spawn_procs(1)).spawn("gates", Gates)
            await gates.raise_now.broadcast()
            assert await gates.count.call_one() == 0
            await host.watch()
    assert isinstance(caught.value, ActorError)
    assert (caught.value.mesh, caught.value.endpoint) == ("gates", "raise_now")


async def test_a_failed_background_task_fails_running_and_later_calls():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1)
        gates = await procs.spawn("gates", Gates)
        waiting = asyncio.create_task(gates.wait.call_one())
        await asyncio.sleep(0.05)
        await gates.background.call_one(True)
        with pytest.raises(LookupError, match="background work failed"):
            await waiting
        with pytest.raises(LookupError, match="background work failed"):
            await gates.count.call_one()
        with pytest.raises(LookupError, match="background work failed"):
            await procs.watch()


async def test_heartbeats_go_on_under_a_long_sync_endpoint(host):
    procs = await host.spawn_procs(1)
    greeters = await procs.spawn("greeter", Greeter)
    deaf = asyncio.create_task(greeters.deaf.call_one(60.0))
    rows = await until(procs.status, lambda rows: rows[0]["running"] == "greeter.deaf", during=[deaf], pause=0.05)
    assert rows[0]["running_seconds"] > 0
    waiting = [asyncio.create_task(greeters.hello.call_one("x")) for _ in range(3)]
    rows = await until(procs.status, lambda rows: rows[0]["mailbox_messages"] == 3, pause=0.05)
    assert rows[0]["loop_lag"] < 1.0  # a busy main thread is not a late loop
    await procs.stop()
    for call in (deaf, *waiting):
        with pytest.raises(Stopped):
            await call


async def test_stop_runs_clean_up_and_later_calls_say_so(host, tmp_path):
    procs = await host.spawn_procs(2)
    tidy = await procs.spawn("tidy", Tidy, str(tmp_path / "clean"))
    pids = procs.pids
    await procs.stop()
    assert (tmp_path / "clean").read_text() == "None"
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(Stopped, match="tidy rank 0, nothing: the mesh was stopped"):
        await tidy.nothing.call()
    await procs.stop()


async def test_stop_ends_a_busy_process_and_what_it_started(host):
    procs = await host.spawn_procs(1)
    greeters = await procs.spawn("greeter", Greeter)
    child = (await procs.run(os.spawnlp, os.P_NOWAIT, "sleep", "sleep", "100"))[0]
    assert alive(child)
    busy = asyncio.create_task(greeters.deaf.call_one(100.0))
    await asyncio.sleep(0.1)
    await procs.stop()
    assert not any(alive(pid) for pid in procs.pids)
    await until(lambda: not alive(child))
    with pytest.raises(Stopped):
        await busy


async def test_nothing_is_left_after_the_host(tmp_path):
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2)
        pids = [*procs.pids, host._fork_server.pid]
        folder = host.run_directory
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    assert not any(alive(pid) for pid in pids)


async def test_lines_come_once_with_prefix_whole_and_to_files(tmp_path):
    lines: list[str] = []
    async with this_host(log_dir=tmp_path / "logs", sink=lines.append, preload=[]) as host:
        procs = await host.spawn_procs(2, name="trainer")
        greeters = await procs.spawn("greeter", Greeter)
        await greeters.slice(rank=1).say.call_one("x" * 60_000, "to stderr")
        await greeters.slice(rank=0).say.call_one("a\nb")
        await procs.run(os.write, 1, b"no newline at the end")
    assert sorted(line for line in lines if "newline" not in line) == sorted(
        ["[trainer 1] " + "x" * 60_000, "[trainer 1] to stderr", "[trainer 0] a", "[trainer 0] b"]
    )
    assert sum("no newline at the end" in line for line in lines) == 2
    assert (tmp_path / "logs" / "trainer-0.log").read_text() == "a\nb\nno newline at the end\n"
    assert os.path.getsize(tmp_path / "logs" / "trainer-1.log") > 60_000  # noqa: ASYNC240


async def test_torch_groups_of_two_meshes_are_separate():
    pytest.importorskip("torch")
    async with this_host() as host:
        trainer, rollout = await host.spawn_procs(2, name="trainer"), await host.spawn_procs(1, name="rollout")
        await asyncio.gather(trainer.init_process_group("gloo"), rollout.init_process_group("gloo"))
        assert (await trainer.run(_sum_of_ones)).values() == [2.0, 2.0]
        assert (await rollout.run(_sum_of_ones)).values() == [1.0]


def _sum_of_ones() -> float:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)
