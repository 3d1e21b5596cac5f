"""AU-1 to AU-5 of runtime/auth.py, WI-4 of wire.py: hostile peers against a running job, over Unix sockets, TCP and TLS
(R9)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import struct
import subprocess
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import PeerRefused, Tls, this_host
from runtime.auth import MIN_SECRET_BYTES, Handshake, Trust, prove, secret_from
from runtime.frames import PREFIX, FrameReader, head_of
from runtime.memory import SHARED_THRESHOLD
from runtime.messages import Call, Hello, ProcessSpec
from runtime.sockets import dial
from tests.runtime.actors import Greeter
from tests.waiting import until

SECRET = b"s" * 32


@pytest.fixture(params=["unix", "tcp"])
async def host(request):
    async with this_host(preload=[], listen=None if request.param == "unix" else "tcp://127.0.0.1:0") as host:
        yield host


def knock(host) -> socket.socket:
    """A blocking connection to the controller, not proven."""
    sock = dial(host.node.address)
    sock.settimeout(10)
    return sock


async def known(host) -> socket.socket:
    """A proven one, as a process of the job has it."""
    sock = knock(host)
    await asyncio.to_thread(prove, sock, (host.run_directory / "secret").read_bytes(), dialled=True)
    sock.settimeout(10)
    return sock


async def closed(sock: socket.socket) -> None:
    """Wait until the other side has closed the connection."""

    def read() -> None:
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass

    await asyncio.to_thread(read)
    sock.close()


async def refused(host, reason: str, count: int = 1) -> None:
    await until(lambda: host.node.refusals.count, lambda counts: counts[reason] >= count, pause=0.002)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


async def works(host) -> None:
    """The job is unharmed: a process that is started now can be called."""
    async with await host.spawn_procs(1, name="after") as procs:
        greeters = await procs.spawn("greeter", Greeter)
        assert await greeters.hello.call_one("x") == "hi x from 0 of 1"


# Proof


def test_a_handshake_proves_both_sides():
    first, second = Handshake(SECRET, dialled=True), Handshake(SECRET, dialled=False)
    answer = second.feed(first.start())
    assert not second.done
    last = first.feed(answer)
    assert first.done
    assert len(last) == second.needs
    assert second.feed(last) == b""
    assert second.done


@given(st.binary(min_size=16, max_size=40), st.booleans())
def test_nobody_with_another_secret_passes_and_neither_side_says_the_secret(secret, dialler_is_wrong):
    if secret == SECRET:
        return
    first = Handshake(secret if dialler_is_wrong else SECRET, dialled=True)
    second = Handshake(SECRET if dialler_is_wrong else secret, dialled=False)
    opening = first.start()
    answer = second.feed(opening)
    assert secret not in opening + answer
    with pytest.raises(PeerRefused, match="does not know the secret"):
        first.feed(answer)


@settings(max_examples=200)
@given(st.booleans(), st.lists(st.binary(min_size=104, max_size=104), min_size=1, max_size=3), st.booleans())
def test_any_bytes_in_place_of_a_handshake_are_refused_and_nothing_else(dialled, pieces, with_magic):
    handshake = Handshake(SECRET, dialled=dialled)
    handshake.start()
    with pytest.raises(PeerRefused):
        for number, piece in enumerate(pieces):
            magic = b"tutti\x00\x00\x01" if with_magic and number == 0 else b""
            handshake.feed((magic + piece)[: handshake.needs])
            assert not handshake.done
        raise PeerRefused("it said no more")


def test_a_side_can_not_be_answered_with_its_own_proof_au2():
    """Reflection: an attacker that opens a second connection to get the MAC that the first one asks for."""
    victim, oracle = Handshake(SECRET, dialled=False), Handshake(SECRET, dialled=False)
    opening = Handshake(b"x" * 32, dialled=True).start()
    challenge = victim.feed(opening)
    nonce = challenge[8:40]
    answer = oracle.feed(opening[:8] + nonce)
    with pytest.raises(PeerRefused):
        victim.feed(answer[40:])


async def test_unauthenticated_peer_is_dropped_counted_and_the_job_unharmed(host, caplog):
    wrong = knock(host)
    with pytest.raises(PeerRefused, match="does not know the secret"):
        await asyncio.to_thread(prove, wrong, b"x" * 32, dialled=True)
    wrong.close()
    liar = knock(host)
    liar.sendall(b"tutti\x00\x00\x01" + bytes(32))
    await asyncio.to_thread(liar.recv, 72)
    liar.sendall(bytes(32))
    await closed(liar)
    await refused(host, "unauthenticated")
    assert "dropped a peer (unauthenticated, number 1)" in caplog.text
    await works(host)


async def test_nothing_is_decoded_before_the_proof_au1(host):
    """A whole valid message in place of the proof: it is neither read as one nor answered."""
    sock = knock(host)
    record = msgspec.msgpack.encode(Hello("worker", "trainer", 1, 0, "unix:/x", "h", "0-0"))
    sock.sendall(head_of(record, None, None))
    await closed(sock)
    await refused(host, "unauthenticated")
    assert host.node.peers == {}


async def test_replayed_session_proves_nothing_au2(host):
    """All bytes that a real process sent, recorded and sent again."""
    secret = (host.run_directory / "secret").read_bytes()
    first = Handshake(secret, dialled=True)
    opening = first.start()
    sock = knock(host)
    sock.sendall(opening)
    proof = first.feed(await asyncio.to_thread(sock.recv, 72, socket.MSG_WAITALL))
    sock.sendall(proof)
    again = knock(host)
    again.sendall(opening + proof)
    await closed(again)
    await refused(host, "unauthenticated")
    sock.close()
    await works(host)


async def test_slow_loris_peer_has_one_deadline_in_all_au3():
    async with this_host(preload=[]) as host:
        host.node.trust = msgspec.structs.replace(host.node.trust, handshake_seconds=0.3)
        begin = time.monotonic()
        silent, slow = knock(host), knock(host)

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in b"tutti\x00\x00\x01" + bytes(30):
                    slow.sendall(bytes([byte]))
                    time.sleep(0.05)

        await asyncio.gather(asyncio.to_thread(drip), closed(silent))
        await closed(slow)
        await refused(host, "slow", 2)
        assert time.monotonic() - begin >= 0.3
        host.node.trust = msgspec.structs.replace(host.node.trust, handshake_seconds=5.0)
        await works(host)


async def test_a_busy_loop_is_not_taken_for_a_slow_peer_au3():
    """The controller computes for longer than the deadline while a process connects."""
    async with this_host(preload=[]) as host:
        host.node.trust = msgspec.structs.replace(host.node.trust, handshake_seconds=0.05)
        spawning = asyncio.create_task(host.spawn_procs(1))
        await until(lambda: host._ranks, during=[spawning], pause=0)
        for _ in range(3):
            await asyncio.sleep(0.05)
            time.sleep(0.7)  # noqa: ASYNC251
        procs = await spawning
        assert (await procs.run(os.getpid)).values() == procs.pids
        assert not host.node.refusals.count


async def test_a_crowd_of_strangers_can_not_use_up_descriptors(host, monkeypatch):
    monkeypatch.setattr("runtime.node.MAX_UNPROVEN", 20)
    crowd = [knock(host) for _ in range(30)]
    await refused(host, "crowd", 10)
    for sock in crowd:
        sock.close()
    await works(host)


async def test_the_secret_is_not_in_command_lines_environments_or_reprs_au5(monkeypatch):
    monkeypatch.setenv("TUTTI_SECRET", "0123456789abcdef-sesame")
    async with this_host(preload=[]) as host:
        for start in ("fork", "fresh"):
            procs = await host.spawn_procs(1, name=start, start=start)
            greeters = await procs.spawn("greeter", Greeter)
            assert await greeters.variable.call_one("TUTTI_SECRET") is None
            for pid in (procs.pids[0], host._fork_server.pid):
                for file in ("cmdline", "environ"):
                    assert b"sesame" not in read(f"/proc/{pid}/{file}")
            assert "sesame" not in repr(procs.ranks[0].spec)
        assert (host.run_directory / "secret").read_bytes() == b"0123456789abcdef-sesame"
        assert (host.run_directory / "secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_comes_from_a_file_or_the_environment_and_is_not_short(tmp_path):
    assert secret_from({}) is None
    assert secret_from({"TUTTI_SECRET": "x" * 16}) == b"x" * 16
    (tmp_path / "s").write_bytes(b"y" * 20 + b"\n")
    assert secret_from({"TUTTI_SECRET": "x" * 16, "TUTTI_SECRET_FILE": str(tmp_path / "s")}) == b"y" * 20
    with pytest.raises(ValueError, match=f"at least {MIN_SECRET_BYTES} bytes, got 3. Make one"):
        secret_from({"TUTTI_SECRET": "abc"})
    assert "yyy" not in repr(Trust(secret=b"yyy")) + repr(ProcessSpec)


# Frames of proven peers


BAD = {
    "garbage": b"\xff" * 64,
    "not msgpack": PREFIX.pack(4, 0, 0, 0) + b"\xc1\xc1\xc1\xc1",
    "head too long": PREFIX.pack(2**31, 0, 0, 0),
    "too many buffers": PREFIX.pack(0, 0, 2**30, 0),
    "unknown flags": PREFIX.pack(1, 0, 0, 6) + b"\x90",
    "block that did not come": PREFIX.pack(2, 0, 0, 1) + struct.pack("<Q", 1) + msgspec.msgpack.encode(["Stop", 1.0]),
    "wrong fields": PREFIX.pack(6, 0, 0, 0) + msgspec.msgpack.encode(["Stop"]),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_malformed_frame_drops_the_peer_and_only_it(host, bad, caplog):
    sock = await known(host)
    sock.sendall(bad)
    await closed(sock)
    assert host.node.refusals.count["malformed"] == 1
    assert caplog.text.count("dropped a peer (malformed, number 1)") == 1
    await works(host)


async def test_oversized_frame_drops_the_peer_before_memory_is_taken(caplog):
    async with this_host(preload=[], max_message_bytes=1_000_000) as host:
        sock = await known(host)
        record = msgspec.msgpack.encode(Hello("peer", "x", 1, 0, "unix:/x", "h"))
        sock.sendall(PREFIX.pack(len(record), 2**40, 0, 0) + record)
        await closed(sock)
        assert host.node.refusals.count["oversized"] == 1
        assert "limit 1000000" in caplog.text
        await works(host)


async def test_truncated_frame_ends_with_its_connection(host):
    record = msgspec.msgpack.encode(Hello("peer", "x", 1, 0, "unix:/x", "h"))
    whole = PREFIX.pack(len(record), 100, 0, 0) + record + bytes(100)
    for end in (3, PREFIX.size, PREFIX.size + 5, len(whole) - 1):
        sock = await known(host)
        sock.sendall(whole[:end])
        sock.shutdown(socket.SHUT_WR)
        await closed(sock)
    assert not host.node.refusals.count
    await works(host)


async def test_an_unknown_process_can_not_pose_as_a_worker(host):
    sock = await known(host)
    record = msgspec.msgpack.encode(Hello("worker", "trainer", 1, 0, "unix:/x", "h", "9-9"))
    sock.sendall(head_of(record, None, None))
    await closed(sock)
    assert host.node.peers == {}


@settings(max_examples=300)
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20))
def test_any_bytes_in_any_pieces_are_frames_or_a_value_error_fr4(pieces):
    got = []
    reader = FrameReader(lambda record, payload: got.append((record, payload)), lambda lease: None, 10_000)
    with contextlib.suppress(ValueError):
        for piece in pieces:
            feed(reader, piece)
    reader.close()


@settings(max_examples=200)
@given(st.data())
def test_a_frame_with_changed_bytes_is_a_frame_or_a_value_error_fr4(data):
    record = msgspec.msgpack.encode(Call(1, "agent", "run", 0, ("rank",), (1,), (), True, 0))
    whole = bytearray(PREFIX.pack(len(record), 50, 1, 0) + struct.pack("<Q", 30) + record + bytes(80)) * 2
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    got = []
    reader = FrameReader(lambda record, payload: got.append(payload.nbytes), lambda lease: None, 10_000)
    with contextlib.suppress(ValueError):
        feed(reader, bytes(whole))
    assert all(size <= 10_000 for size in got)
    reader.close()


def feed(reader: FrameReader, data: bytes) -> None:
    while data:
        target = reader.targets()[0]
        part = data[: len(target)]
        target[: len(part)] = part
        data = data[len(part) :]
        reader.received(len(part), ())


@pytest.mark.parametrize("listen", [None, "tcp://127.0.0.1:0"])
async def test_a_live_job_outlives_a_hail_of_frames(listen):
    """Hundreds of proven peers that send what hypothesis makes of real frames, while calls go on."""
    record = msgspec.msgpack.encode(Call(1, "agent", "run", 0, ("rank",), (1,), (), True, 0))
    real = PREFIX.pack(len(record), 50, 1, 0) + struct.pack("<Q", 30) + record + bytes(80)
    mutated = st.tuples(
        st.integers(0, len(real) - 1), st.binary(min_size=1, max_size=6), st.integers(0, len(real))
    ).map(lambda m: (real[: m[0]] + m[1] + real[m[0] + len(m[1]) :])[: m[2] or None])
    hail: list[bytes] = []

    @settings(max_examples=100, database=None)
    @given(st.one_of(mutated, st.binary(min_size=1, max_size=200)))
    def collect(example: bytes) -> None:
        hail.append(example)

    collect()
    async with this_host(preload=[], listen=listen) as host:
        procs = await host.spawn_procs(1, name="trainer")
        greeters = await procs.spawn("greeter", Greeter)
        targets = [host.node.address, procs.ranks[0].address]
        secret = (host.run_directory / "secret").read_bytes()

        def throw() -> None:
            for number, frame in enumerate(hail):
                sock = dial(targets[number % 2])
                prove(sock, secret, dialled=True)
                with contextlib.suppress(ConnectionError):
                    sock.sendall(frame)
                sock.close()

        throwing = asyncio.create_task(asyncio.to_thread(throw))
        while not throwing.done():
            assert await greeters.hello.call_one("x") == "hi x from 0 of 1"
        await throwing
        assert await greeters.hello.call_one("y") == "hi y from 0 of 1"


# TCP and TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A CA of this test, one certificate of it, and one of a stranger."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for ca, leaf in (("ca", "job"), ("other-ca", "stranger")):
        common = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={ca}")
        openssl("req", "-x509", *common, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-days", "2")
        openssl("req", *common[:-1], f"/CN={leaf}", "-keyout", f"{leaf}.key", "-out", f"{leaf}.csr")
        openssl(
            *("x509", "-req", "-in", f"{leaf}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial"),
            *("-out", f"{leaf}.pem", "-days", "2"),
        )
    return folder


async def test_tls_carries_the_job_and_refuses_plain_text_and_foreign_certificates(certificates):
    tls = Tls(str(certificates / "job.pem"), str(certificates / "job.key"), str(certificates / "ca.pem"))
    async with this_host(preload=[], listen="tcp://127.0.0.1:0", tls=tls) as host:
        procs = await host.spawn_procs(2, name="trainer")
        greeters = await procs.spawn("greeter", Greeter)
        array = np.arange(3 * SHARED_THRESHOLD)
        for value in await greeters.echo.call(array):
            assert np.array_equal(value, array)
        assert await asyncio.gather(*[greeters.slice(rank=0).echo.call_one(i) for i in range(200)]) == list(range(200))
        secret = (host.run_directory / "secret").read_bytes()
        plain = knock(host)
        with pytest.raises((PeerRefused, ConnectionError)):
            await asyncio.to_thread(prove, plain, secret, dialled=True)
        plain.close()
        foreign = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        foreign.check_hostname = False
        foreign.verify_mode = ssl.CERT_NONE
        foreign.load_cert_chain(certificates / "stranger.pem", certificates / "stranger.key")

        def visit() -> None:
            with foreign.wrap_socket(knock(host)) as sock:
                prove(sock, secret, dialled=True)

        with pytest.raises((PeerRefused, OSError)):
            await asyncio.to_thread(visit)
        await refused(host, "unauthenticated", 2)
        assert await greeters.hello.call("x")


def test_certificates_that_can_not_be_used_are_told_before_anything_starts(tmp_path):
    with pytest.raises(OSError, match=r"No such file"):
        this_host(listen="tcp://127.0.0.1:0", tls=Tls(str(tmp_path / "no.pem"), "no.key", "no.ca"))
