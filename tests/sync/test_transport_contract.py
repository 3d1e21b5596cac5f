"""TR-1 to TR-7 for every transport, between real processes: 2 trainer ranks, 2 rollout ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from runtime import ActorMesh, HostMesh
from sync.transport import TransportError
from tests.conftest import open_files
from tests.sync.ranks import TransportReceiver, TransportSender, byte_of, toy_plan

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRANSPORTS = ["shm", "gloo", *(["nixl"] if find_spec("nixl") else [])]
"""NIXL is an extra: it takes part where it is installed."""


class Fleet(NamedTuple):
    senders: list[ActorMesh]
    receivers: list[ActorMesh]


@contextlib.asynccontextmanager
async def fleet(host: HostMesh, name: str, deadline_s: float = 20.0, slots: int = 2) -> AsyncIterator[Fleet]:
    """Four processes with one half each, joined."""
    procs = await host.spawn_procs({"rank": 4}, name="ranks")
    try:
        senders = [
            await procs.slice(rank=rank).spawn(f"sender{rank}", TransportSender, name, deadline_s, slots, rank)
            for rank in (0, 1)
        ]
        receivers = [
            await procs.slice(rank=2 + rank).spawn(f"receiver{rank}", TransportReceiver, name, deadline_s, slots, rank)
            for rank in (0, 1)
        ]
        address = await senders[0].host.call_one()
        proofs = await asyncio.gather(*(half.open.call_one(address) for half in [*senders, *receivers]))
        assert len(set(proofs)) == 1
        assert len(proofs[0]) >= 16
        yield Fleet(senders, receivers)
    finally:
        await procs.stop()


async def transfer(ranks: Fleet, version: int, seconds_each: float = 0.0) -> list[dict[int, bytes]]:
    """Both sides at once; what each rollout rank saw."""
    *_, first, second = await asyncio.gather(
        *(sender.send.call_one(version) for sender in ranks.senders),
        *(receiver.fetch.call_one(version, seconds_each) for receiver in ranks.receivers),
    )
    return [first, second]


def expected(version: int, rank: int) -> dict[int, bytes]:
    return {b.index: bytes([byte_of(version, b.index)]) * b.num_bytes for b in toy_plan().received_by(rank)}


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_every_rank_gets_every_bucket_once_in_order_version_after_version(host, name):
    async with fleet(host, name) as ranks:
        for version in (3, 4, 5, 6):
            for rank, seen in enumerate(await transfer(ranks, version)):
                assert list(seen.items()) == list(expected(version, rank).items())


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("slots", [1, 3])
async def test_slow_reader_never_sees_a_buffer_that_was_packed_again(host, name, slots):
    """TR-2"""
    async with fleet(host, name, slots=slots) as ranks:
        for version in (8, 9):
            for rank, seen in enumerate(await transfer(ranks, version, seconds_each=0.02)):
                assert seen == expected(version, rank)


async def test_trainer_with_a_slot_for_each_bucket_goes_on_before_anybody_reads(host):
    """Only memory that both sides map can be read after its owner went on."""
    async with fleet(host, "shm", slots=99) as ranks:
        await asyncio.gather(*(sender.send.call_one(1) for sender in ranks.senders))
        for rank, receiver in enumerate(ranks.receivers):
            assert await receiver.fetch.call_one(1) == expected(1, rank)


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_version_that_one_trainer_rank_never_packed_is_an_error_that_names_it_and_a_tensor(host, name):
    """TR-3"""
    async with fleet(host, name, deadline_s=1.0) as ranks:
        send = asyncio.gather(ranks.senders[0].send.call_one(1), return_exceptions=True)
        with pytest.raises(TransportError, match=r"rollout rank 0: .*model\.") as caught:
            await ranks.receivers[0].fetch.call_one(1)
        assert "trainer rank" in str(caught.value)
        await send


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_rollout_rank_that_never_reads_is_an_error_at_the_trainer_that_names_a_tensor(host, name):
    """TR-3"""
    async with fleet(host, name, deadline_s=1.0, slots=1) as ranks:
        reading = asyncio.gather(ranks.receivers[0].fetch.call_one(1), return_exceptions=True)
        results = await asyncio.gather(*(s.send.call_one(1) for s in ranks.senders), return_exceptions=True)
        errors = [r for r in results if r is not None]
        assert errors
        for error in errors:
            assert isinstance(error, TransportError)
            assert "model." in str(error)
        await reading


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_abort_ends_a_transfer_that_waits_and_close_frees_the_rank(host, name):
    """TR-4"""
    async with fleet(host, name, slots=1) as ranks:
        sends = [asyncio.ensure_future(sender.send.call_one(1)) for sender in ranks.senders]
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(half.abort.call_one() for half in [*ranks.senders, *ranks.receivers]))
        for result in await asyncio.gather(*sends, return_exceptions=True):
            assert result is None or isinstance(result, TransportError)
        assert asyncio.get_running_loop().time() - began < 15  # not the deadline of 20 s
        for half in [*ranks.senders, *ranks.receivers]:
            await half.abort.call_one()
            await half.close.call_one()
            await half.close.call_one()
        with pytest.raises(TransportError, match="open the session again"):
            await ranks.receivers[0].fetch.call_one(2)


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_address_that_leads_nowhere_is_a_transport_error(host, name):
    procs = await host.spawn_procs({"rank": 1}, name="ranks")
    receiver = await procs.spawn("receiver", TransportReceiver, name, 1.0, 2, 0)
    address = "/proc/1/fd/999" if name == "shm" else "127.0.0.1:9"
    with pytest.raises(TransportError, match=address):
        await receiver.open.call_one(address)
    await procs.stop()


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_default_process_group_is_never_touched(host, name):
    async with fleet(host, name) as ranks:
        await transfer(ranks, 1)
        assert not await ranks.senders[0].default_group_is_there.call_one()


async def test_gloo_listens_on_loopback_only(host):
    """TR-6"""
    async with fleet(host, "gloo") as ranks:
        await transfer(ranks, 1)
        pids = [await half.pid.call_one() for half in [*ranks.senders, *ranks.receivers]]
        assert {address.split(":")[0] for address in listening(pids)} == {"0100007F"}


def listening(pids: Sequence[int]) -> set[str]:
    """Local addresses in hexadecimal at which these processes listen by TCP."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    theirs = {link for pid in pids for link in open_files(pid)}
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in theirs}


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_arena_has_no_name_that_could_outlive_the_ranks(host, name):
    """TR-5; that no process, socket, shared memory or thread is left is checked by the fixtures of the suite"""
    async with fleet(host, name) as ranks:
        await transfer(ranks, 1)
        pids = [await half.pid.call_one() for half in [*ranks.senders, *ranks.receivers]]
        arenas = [link for pid in pids for link in open_files(pid) if "tutti-weights" in link]
        assert all("memfd:" in link and "(deleted)" in link for link in arenas)
        assert bool(arenas) == (name == "shm")
