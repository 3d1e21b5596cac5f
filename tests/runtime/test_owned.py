"""OW-1 to OW-3 of runtime/owned.py: processes that an actor starts, with and without processes."""

from __future__ import annotations

import pytest

from runtime import HostMesh, ProcessDied, Stopped, lookup, spawn_procs, this_host
from runtime.testing import kill, local_host
from tests.runtime.actors import Team
from tests.waiting import until


@pytest.fixture(params=["local", "processes"])
async def host(request):
    make = local_host if request.param == "local" else this_host
    async with make(preload=[]) as host:
        yield host


async def stopped(mesh) -> None:
    """Wait until calls to a mesh say that it was stopped."""
    with pytest.raises(Stopped):
        await until(lambda: mesh.hello.call("x"), lambda answers: False)


async def test_an_actor_starts_processes_and_gives_their_actors_away(host: HostMesh):
    team = await (await host.spawn_procs(1, name="leader")).spawn("team", Team)
    assert await team.gather.call_one(2, "crew") == ["member x from 0 of 2", "member x from 1 of 2"]
    members = await team.handle.call_one()
    assert len(await members.hello.call("y")) == 2
    assert (await lookup("crew/member")).sizes == {"rank": 2}
    await team.dismiss.call_one()
    await stopped(members)
    assert await team.gather.call_one(1, "crew") == ["member x from 0 of 1"]  # the name is free again


async def test_they_end_when_their_owner_is_stopped(host: HostMesh):
    team = await (await host.spawn_procs(1, name="leader")).spawn("team", Team)
    await team.gather.call_one(1, "crew")
    members = await team.handle.call_one()
    await team.stop()
    await stopped(members)


async def test_they_end_with_the_process_of_their_owner(host: HostMesh):
    leaders = await host.spawn_procs(1, name="leader")
    team = await leaders.spawn("team", Team)
    await team.gather.call_one(1, "crew")
    members = await team.handle.call_one()
    kill(leaders)
    with pytest.raises(ProcessDied):
        await leaders.watch()
    await stopped(members)


async def test_their_failures_go_to_their_owner_first(host: HostMesh):
    team = await (await host.spawn_procs(1, name="leader")).spawn("team", Team, True)
    await team.gather.call_one(1, "crew")
    kill(host.procs_named("crew"))
    told = await until(team.heard.call_one)
    assert "crew rank 0" in told[0]
    assert "killed by SIGKILL" in told[0]


async def test_what_their_owner_does_not_handle_goes_up(host: HostMesh):
    team = await (await host.spawn_procs(1, name="leader")).spawn("team", Team, False)
    await team.gather.call_one(1, "crew")
    kill(host.procs_named("crew"))
    with pytest.raises(ProcessDied, match="crew rank 0"):
        await host.watch()
    assert len(await team.heard.call_one()) == 1


async def test_outside_of_actors_the_host_is_asked():
    with pytest.raises(RuntimeError, match=r"Use host\.spawn_procs\(\)"):
        await spawn_procs(1, name="x")
