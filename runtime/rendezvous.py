"""The ranks of torchrun on one host as processes of a controller.

    rank 0     : the controller. It publishes its address in torchrun's store and fills slot 0 with a worker of its own
    rank 1..n-1: `join_main()`: read the address, connect, wait for a place in a mesh, become that worker

RE-1: `spawn_procs` of `torchrun_host()` takes the next free slots in rank order, and raises when too few are left.
RE-2: a joined rank exits with 0 when the controller stops it, placed or not, and with another code when the controller
      dies.
RE-3: one restart of torchrun never meets the ranks of another: run id and restart count are part of the key.

Assumed: all ranks run on this host (relays between hosts come later).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from runtime.auth import SECRET_FILE, Trust, secret_from
from runtime.codec import Payload
from runtime.errors import ConnectionRefused, RendezvousError
from runtime.keeper import START_SECONDS, Rank
from runtime.mesh import HostMesh
from runtime.messages import Assign, Hello, ProcessSpec, Stop
from runtime.process import Start, watch_foreign
from runtime.settings import HostSettings
from runtime.sockets import dial, parse_address
from runtime.wire import Connection

STORE_SECONDS = 300.0
"""How long a rank waits for the store and for the address of the controller."""


def in_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ and "WORLD_SIZE" in os.environ


def torchrun_host(**settings: Any) -> HostMesh:
    """The host of a torchrun job, for rank 0. Settings as of `this_host`.

    Raises:
        RendezvousError: not started by torchrun, not its rank 0, or ranks on several hosts.
    """
    _check_torchrun("torchrun_host")
    if os.environ["RANK"] != "0":
        raise RendezvousError(
            f"torchrun_host: rank 0 is the controller, this is rank {os.environ['RANK']}. Call join_main() here"
        )
    return TorchrunHost(HostSettings(**{"processes": int(os.environ["WORLD_SIZE"]), **settings}))


class TorchrunHost(HostMesh):
    """This machine with the ranks of torchrun as its processes: `spawn_procs` takes them in order. With `fork` and
    `fresh` it starts helper processes beside them, such as workers that judge answers."""

    def __init__(self, settings: HostSettings) -> None:
        super().__init__(settings)
        self._num_slots = int(os.environ["WORLD_SIZE"])
        self._joined: dict[int, asyncio.Future[tuple[Connection, Hello]]] = {}
        self._placed: set[int] = set()
        """Slots that have become a process, 0 first."""
        self._num_taken = 0
        """Slots that meshes have been promised."""
        self._store: Any = None

    async def __aenter__(self) -> HostMesh:
        await super().__aenter__()
        loop = asyncio.get_running_loop()
        self._joined = {slot: loop.create_future() for slot in range(1, self._num_slots)}
        try:
            self._store = await asyncio.to_thread(_store)
            await asyncio.to_thread(self._store.set, _key(), self.node.address)
        except BaseException:
            await self.stop()
            raise
        return self

    def _reserve(self, name: str, size: int, start: Start) -> None:
        """RE-1. Raises RendezvousError when fewer ranks are free than the mesh needs."""
        if start != "auto":
            return
        free = self._num_slots - self._num_taken
        if size > free:
            raise RendezvousError(
                f"spawn_procs({name!r}): needs {size} processes, but of the {self._num_slots} ranks of torchrun {free} "
                f"are free. Start with --nproc-per-node {self._num_slots - free + size}, or ask for fewer"
            )
        self._num_taken += size

    async def _launch(self, rank: Rank, start: Start) -> None:
        if start != "auto" or rank.num_starts > 1:
            await super()._launch(rank, start)
            return
        slot = len(self._placed)
        self._placed.add(slot)
        if slot == 0:
            await super()._launch(rank, start)
            return
        try:
            async with asyncio.timeout(START_SECONDS):
                connection, hello = await asyncio.shield(self._joined[slot])
        except TimeoutError:
            rank.ended.set()
            raise RendezvousError(
                f"{rank.spec.name} rank {rank.spec.rank}: rank {slot} of torchrun did not join within {START_SECONDS} "
                "s. Every rank but 0 must call join_main()"
            ) from None
        rank.process = watch_foreign(hello.pid)
        connection.send(Assign(msgspec.msgpack.encode(rank.spec)))
        connection.flush()

    def _serve(self, connection: Connection, message: Any, payload: Payload) -> None:
        if isinstance(message, Hello) and message.kind == "joined":
            future = self._joined.get(message.rank)
            if future is None or future.done():
                connection.close()
            else:
                future.set_result((connection, message))
            return
        super()._serve(connection, message, payload)

    async def stop(self) -> None:
        """Stop everything; ranks that were never placed end too, also those that come only now (RE-2)."""
        if self._store is not None:
            await asyncio.to_thread(self._store.set, _ended_key(), "1")
        for slot, future in self._joined.items():
            if slot not in self._placed and future.done():
                connection, _ = future.result()
                connection.send(Stop(0.0))
                await connection.drained()
        await super().stop()


async def join() -> NoReturn:
    """As `join_main`, from a coroutine: its event loop is not used any more, the process becomes a worker."""
    join_main()


def join_main() -> NoReturn:
    """Give this rank of torchrun to the controller; exits when the controller says so (RE-2). Call it on the main
    thread.

    Raises:
        RendezvousError: not a rank of torchrun, or the controller did not appear.
    """
    from runtime import worker

    _check_torchrun("join_main")
    rank = int(os.environ["RANK"])
    try:
        store = _store()
        store.wait([_key()], timedelta(seconds=STORE_SECONDS))
        address = store.get(_key()).decode()
        sock = dial(address)
        trust = Trust(secret=_secret_for(address))
    except (ConnectionRefused, FileNotFoundError) as error:
        worker.leave(_after_the_controller(rank, store, str(error)))
    except RuntimeError as error:  # what torch's store raises
        raise RendezvousError(
            f"rank {rank}: no controller within {STORE_SECONDS} s. Does rank 0 use torchrun_host()?"
        ) from error
    try:
        spec = _in_new_loop(sock, trust, Hello("joined", "", os.getpid(), rank, "", socket.gethostname()))
    except ConnectionResetError as error:
        worker.leave(_after_the_controller(rank, store, str(error)))
    if spec is None:
        worker.leave(0)
    worker.main(spec)


def _in_new_loop(sock: socket.socket, trust: Trust, hello: Hello) -> ProcessSpec | None:
    """Wait for a place: the spec of the worker to become, or None for 'stop'.

    Raises:
        ConnectionResetError: the controller is gone.
    """
    loop = asyncio.new_event_loop()
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)  # `join` calls from a loop that will not go on
    try:
        return loop.run_until_complete(_wait_for_place(sock, trust, hello))
    finally:
        loop.close()
        asyncio._set_running_loop(running)


async def _wait_for_place(sock: socket.socket, trust: Trust, hello: Hello) -> ProcessSpec | None:
    place: asyncio.Future[ProcessSpec | None] = asyncio.get_running_loop().create_future()

    def on_message(connection: Connection, message: Any, payload: Payload) -> None:
        if isinstance(message, Assign) and not place.done():
            place.set_result(msgspec.msgpack.decode(message.spec, type=ProcessSpec))
        elif isinstance(message, Stop) and not place.done():
            place.set_result(None)

    def on_lost(connection: Connection) -> None:
        if not place.done():
            place.set_exception(ConnectionResetError(connection.reason or "it gave this rank no place"))

    connection = Connection(sock, trust, on_message, on_lost, dialled=True)
    connection.send(hello)
    try:
        return await place
    finally:
        connection.close()


def _secret_for(address: str) -> bytes:
    """The secret of the job: from the environment, or from the run directory that the address lies in.

    Raises:
        FileNotFoundError: the controller has ended, and its directory with it.
        RendezvousError: the controller listens on TCP, so that only the environment can tell.
    """
    secret = secret_from(os.environ)
    if secret is not None:
        return secret
    wanted = parse_address(address)
    if wanted.scheme != "unix":
        raise RendezvousError(f"controller at {address}: set TUTTI_SECRET_FILE or TUTTI_SECRET for all ranks")
    return (Path(wanted.path).parent / SECRET_FILE).read_bytes()


def _after_the_controller(rank: int, store: Any, text: str) -> int:
    """The exit code of a rank that lost the controller, or came too late: 0 if it has ended well (RE-2)."""
    try:
        if store.check([_ended_key()]):
            return 0
    except RuntimeError:  # the store went with the controller, which told nobody
        pass
    print(f"rank {rank}: the controller (rank 0) died: {text}", file=sys.stderr)  # noqa: T201
    return 1


def _check_torchrun(caller: str) -> None:
    if not in_torchrun():
        raise RendezvousError(
            f"{caller}: this process was not started by torchrun. Use this_host(), or start it with torchrun"
        )
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]:
        raise RendezvousError(
            f"{caller}: torchrun runs {os.environ['WORLD_SIZE']} ranks, {os.environ['LOCAL_WORLD_SIZE']} of them here; "
            "expected all on one host. Use --nnodes 1"
        )


def _store() -> Any:
    """torchrun's store. Rank 0 serves it itself when the agent of torchrun doesn't."""
    from torch.distributed import TCPStore

    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0" and not by_agent,
        timeout=timedelta(seconds=STORE_SECONDS),
        wait_for_workers=False,
    )


def _key() -> str:
    run, restart = os.environ["TORCHELASTIC_RUN_ID"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"tutti/{run}/{restart}/controller"


def _ended_key() -> str:
    return f"{_key()}/ended"
