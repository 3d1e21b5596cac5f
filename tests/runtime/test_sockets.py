"""SO-1 to SO-3 and SO-5 of runtime/sockets.py: where processes listen, and what they do when they can't."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket

import numpy as np
import pytest

from runtime import Stopped, this_host
from runtime.auth import Trust
from runtime.memory import SHARED_THRESHOLD
from runtime.node import current_node
from runtime.sockets import Listener, parse_address
from tests.runtime.actors import Greeter
from tests.waiting import until


async def test_processes_talk_over_tcp_and_to_each_other():
    from tests.runtime.actors import Caller

    async with this_host(preload=[], listen="tcp://127.0.0.1:0") as host:
        assert not list(host.run_directory.glob("*-*"))
        procs = await host.spawn_procs(2, name="a")
        greeters = await procs.spawn("greeter", Greeter)
        assert all(parse_address(ref.address).scheme == "tcp" for ref in greeters.refs)
        assert len({parse_address(ref.address).port for ref in greeters.refs} - {0}) == 2
        array = np.arange(2 * SHARED_THRESHOLD)
        for value in await greeters.echo.call(array):
            assert np.array_equal(value, array)
            value[:] = 0  # writable
        caller = await (await host.spawn_procs(1, name="b")).spawn("caller", Caller)
        assert await caller.ask.call_one(greeters, "x") == ["hi x from 0 of 2", "hi x from 1 of 2"]
        assert listening(os.getpid()) == {parse_address(host.node.address).port}


async def test_a_process_without_descriptors_takes_connections_once_it_has_some_so5(tmp_path, caplog):
    came: list[socket.socket] = []
    listener = Listener(f"unix:{tmp_path}/here", Trust(secret=b"s" * 32), came.append)
    client = socket.socket(socket.AF_UNIX)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(client.fileno())  # the lowest that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        client.connect(f"{tmp_path}/here")
        await until(lambda: caplog.records, pause=0)
        for _ in range(50):  # turns in which it isn't asked again
            await asyncio.sleep(0)
        assert [r.getMessage().split(": ")[1] for r in caplog.records] == ["another process can't connect"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await until(lambda: came)
    listener.close()
    for sock in (client, *came):
        sock.close()


async def test_nothing_listens_on_tcp_unless_told_to():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1)
        assert listening(os.getpid()) == set()
        assert listening(procs.pids[0]) == set()


def listening(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    links = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/net/{table}") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


@pytest.mark.parametrize(
    ("listen", "text"),
    [
        ("tcp://10.1.2.3:0", r"not within 127.0.0.0/8, ::1/128. To be reachable there, allow it: this_host\(bind="),
        ("tcp://0.0.0.0:0", "not all of them"),
        ("tcp://localhost:0", "expected the IP address that others reach"),
        ("tcp://127.0.0.1", "expected unix:/path or tcp://host:port"),
    ],
)
def test_listen_addresses_that_are_not_allowed_are_refused_at_once_so2(listen, text):
    with pytest.raises(ValueError, match=text):
        this_host(listen=listen)


async def test_an_address_of_another_machine_is_named_when_it_can_not_be_bound():
    with pytest.raises(OSError, match=r"cannot listen at tcp://192.0.2.1:0/tutti-.*: Cannot assign"):
        async with this_host(preload=[], listen="tcp://192.0.2.1:0", bind=["192.0.2.0/24"]):
            pass
    with pytest.raises(Stopped, match="no host is running"):
        current_node()
