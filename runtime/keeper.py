"""Keeps the processes of a host: starts them, explains their end, restarts and stops them.

    launch -> ready ------------------------> stopping -> ended
                 \\-> died -> owner decides -> pause -> launch -> actors rebuilt -> ready

KE-1: a dead process is explained (signal or exit code, memory evidence, last lines) before its pending calls fail, and
      within `EXPLAIN_SECONDS`.
KE-2: `stop` lets async work and `__cleanup__` end within `grace` seconds; a process whose main thread is busy gets
      SIGTERM, then SIGKILL. After it no process, socket or file of the mesh is left.
KE-3: the owner of the mesh hears of a death first. What it handles is not restarted, unless by itself, then or later;
      otherwise the policy of the mesh decides, and what that gives up goes up (SU-1).
KE-4: a restarted process has the name, rank, environment and actors (same class, same arguments) of the one before.
      Calls that were pending raise `ProcessDied`; calls made meanwhile wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.calls import ActorMesh, agent_interface
from runtime.errors import ActorError, Death, ProcessDied, StartError, Stopped
from runtime.logs import Capture
from runtime.messages import ActorFailed, ProcessSpec, Stop
from runtime.node import Node, actor_error
from runtime.oom import OomWatch
from runtime.peer import Peer, Revival
from runtime.posting import AGENT, ActorRef
from runtime.process import Process, Start, death_of
from runtime.restart import History, Restart
from runtime.shape import Shape
from runtime.supervise import Failure, Supervisor
from runtime.tasks import TaskGroup

START_SECONDS = 120.0
"""How long a process may take until it answers; imports of large libraries on a busy machine are the slow part."""
EXPLAIN_SECONDS = 0.4
"""How long the end of a connection waits for an exit status; a process that still lives then is killed."""
BUSY_SECONDS = 0.25
"""Between Stop, SIGTERM and SIGKILL for a process whose main thread is busy."""

_log = logging.getLogger(__name__)


class Made(msgspec.Struct, frozen=True):
    """An actor as it was made: arguments of the agent's `make`."""

    key: str
    name: str
    rank: int
    size: int
    made: bytes


class Rank:
    """One place in a mesh, as the controller knows it, and the process that has it now."""

    def __init__(self, spec: ProcessSpec, policy: Restart | None = None) -> None:
        self.id = spec.id
        self.history = None if policy is None else History(policy)
        self.actors: dict[str, Made] = {}
        """What a restart makes again, in this order; kept only with a policy."""
        self.address = spec.address
        """Where the first process listened, with the port it got: what handles hold."""
        self.gpus: tuple[int, ...] = ()
        """That nobody else may have; see `devices.GpuPool`."""
        self.death: Death | None = None
        """The last one."""
        self.num_starts = 0
        self.unwanted = asyncio.Event()
        """Somebody has asked for its end."""
        self.revival: Revival | None = None
        """Between a death and the rebuilt actors, or the decision against it."""
        self.undecided = False
        """The owner is being asked about a death."""
        self.renew(spec)

    def renew(self, spec: ProcessSpec) -> None:
        """Get ready for another process."""
        self.spec = spec
        self.num_starts += 1
        self.capture: Capture | None = None
        self.process: Process | None = None
        self.peer: Peer | None = None
        self.ready: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self.busy = asyncio.Event()
        self.ended = asyncio.Event()
        """The end of the process is known and explained."""
        self.death_seen = False
        """A call has raised it."""

    @property
    def stopping(self) -> bool:
        return self.unwanted.is_set()

    @property
    def reviving(self) -> bool:
        """Whether it is being started again."""
        return self.revival is not None

    async def revived(self) -> None:
        """Wait until nothing is being restarted here."""
        while self.revival is not None:
            await asyncio.shield(self.revival.over)

    def end_revival(self) -> None:
        """Its actors are there again, or won't be."""
        revival, self.revival = self.revival, None
        assert revival is not None
        revival.end()


class Keeper:
    """Starts, watches, restarts and stops ranks. `launch` starts a process; who connects is told by `connected`."""

    def __init__(
        self, node: Node, run_directory: Path, launch: Callable[[Rank, Start], Awaitable[None]], tasks: TaskGroup
    ) -> None:
        self._node = node
        self._run_directory = run_directory
        self._launch = launch
        self._tasks = tasks

    async def start(self, rank: Rank, supervisor: Supervisor, how: Start) -> None:
        """Start a process and wait until it answers.

        Raises:
            StartError: it could not be started or did not answer in time.
            ProcessDied: it ended before it answered.
        """
        spec = rank.spec
        await self._launch(rank, how)
        assert rank.process is not None
        watch = OomWatch(rank.process.pid)
        self._tasks.start(self._observe(rank, supervisor, how, watch), name=f"observe {spec.name} {spec.rank}")
        ended = asyncio.ensure_future(rank.ended.wait())
        try:
            async with asyncio.timeout(START_SECONDS):
                await first_of(rank.ready, ended)
        except TimeoutError:
            raise StartError(
                f"{spec.name} rank {spec.rank}: did not answer within {START_SECONDS} s of its start"
            ) from None
        finally:
            ended.cancel()
        if not rank.ready.done():
            raise ProcessDied(spec.name, spec.rank, spec.host, "start", rank.death or Death())

    def connected(self, rank: Rank, peer: Peer, supervisor: Supervisor, where: Callable[[str], ActorRef]) -> None:
        """The process of a rank has said hello."""
        rank.peer = peer
        peer.on_lost = rank.lost.set
        peer.on_kill = lambda: rank.process.kill(signal.SIGKILL) if rank.process is not None else None
        peer.on_stopping = lambda busy: rank.busy.set() if busy else None
        name = rank.spec.name

        def seen() -> None:
            rank.death_seen = True
            supervisor.seen(rank.death)

        peer.on_death_seen = seen

        def failed(message: ActorFailed) -> None:
            error = actor_error(message.error, where(message.actor), message.endpoint)
            self._tasks.start(supervisor.report(Failure(name, error)), name="report")

        peer.on_actor_failed = failed
        if not rank.ready.done():
            rank.ready.set_result(peer)

    # The end of a process

    async def _observe(self, rank: Rank, supervisor: Supervisor, how: Start, watch: OomWatch) -> None:
        """Wait for the end of a process and explain it (KE-1)."""
        try:
            await self._wait_for_the_end(rank, supervisor, how, watch)
        except asyncio.CancelledError:
            # All tasks of the loop are being cancelled: nobody will explain this death, and nobody shall wait for it.
            if rank.process is not None:
                rank.process.kill(signal.SIGKILL)
            raise
        finally:
            rank.ended.set()

    async def _wait_for_the_end(self, rank: Rank, supervisor: Supervisor, how: Start, watch: OomWatch) -> None:
        process = rank.process
        assert process is not None
        lost = asyncio.ensure_future(rank.lost.wait())
        await first_of(process.exited, lost)
        lost.cancel()
        if not process.exited.done() and not rank.stopping:
            await asyncio.wait([process.exited], timeout=EXPLAIN_SECONDS)
            process.kill(signal.SIGKILL)  # it has closed its connection but lives: it can't be used any more
        record = await process.exited
        rank.death = death = death_of(record, process.signals, watch, await _last_lines(rank))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._run_directory / rank.id)
        peer = rank.peer
        if rank.stopping:
            if peer is not None:
                peer.stop()
        elif peer is not None:
            self._died(rank, peer, death, supervisor, how)

    def _died(self, rank: Rank, peer: Peer, death: Death, supervisor: Supervisor, how: Start) -> None:
        """Fail what waits for a dead process, and see to it that the owner, and the policy, hear of it."""
        if rank.reviving:
            peer.died(death)
            return  # whoever revives it learns of it
        again = rank.history is not None
        if again:
            rank.revival = Revival(peer)
        peer.died(death)
        failure = Failure(rank.spec.name, ProcessDied(rank.spec.name, rank.spec.rank, rank.spec.host, "", death))
        if again:
            self._tasks.start(
                self._decide(rank, failure, supervisor, how), name=f"restart {rank.spec.name} {rank.spec.rank}"
            )
        else:
            self._tasks.start(supervisor.report(failure, handled=rank.death_seen), name="report")

    async def _decide(self, rank: Rank, failure: Failure, supervisor: Supervisor, how: Start) -> None:
        """KE-3."""
        try:
            rank.undecided = True
            try:
                handled = await supervisor.ask(failure)
            finally:
                rank.undecided = False
            if handled or rank.stopping or not rank.ended.is_set():  # the owner may have started it again
                return
            error = await self._revive(rank, supervisor, how, failure.error)
            if error is not None and not rank.stopping:
                await supervisor.report(Failure(rank.spec.name, error), asked=True)
        finally:
            rank.end_revival()

    async def _revive(self, rank: Rank, supervisor: Supervisor, how: Start, error: ActorError) -> ActorError | None:
        """Start it until it lives, as the policy allows. Returns the error that ended the attempts."""
        history, loop = rank.history, asyncio.get_running_loop()
        assert history is not None
        while (pause := history.next_pause(loop.time())) is not None:
            _log.warning(
                "%s; restart %d of %d in %.1f s",
                str(error).partition("\n")[0],
                history.num_recent,
                history.policy.max_restarts,
                pause,
            )
            unwanted = asyncio.ensure_future(rank.unwanted.wait())
            await first_of(unwanted, timeout=pause)
            unwanted.cancel()
            if rank.stopping:
                return None
            try:
                await self._restart(rank, supervisor, how)
                return None
            except (Stopped, StartError, ActorError) as failed:
                if rank.unwanted.is_set():  # the work of whoever stops the mesh meanwhile
                    return None
                if isinstance(failed, Stopped):
                    raise
                if isinstance(failed, ActorError):
                    error = failed
                else:
                    error.add_note(f"Then its restart failed: {failed}")
        error.add_note(
            f"Not restarted any more: {history.num_recent} restarts within {history.policy.window:g} s, the limit is "
            f"{history.policy.max_restarts}"
        )
        return error

    async def restart(self, rank: Rank, supervisor: Supervisor, how: Start) -> None:
        """Start the process of a dead rank again and rebuild its actors (KE-4). Raises as `start`, and ActorError for a
        constructor; then it is stopped again. Nothing when somebody else does so already."""
        if rank.undecided:
            rank.undecided = False
            await self._restart(rank, supervisor, how)
            return
        if rank.reviving:
            return
        rank.revival = Revival(self._node.peers[rank.address])
        try:
            await self._restart(rank, supervisor, how)
        finally:
            rank.end_revival()

    async def _restart(self, rank: Rank, supervisor: Supervisor, how: Start) -> None:
        rank.renew(msgspec.structs.replace(rank.spec, id=f"{rank.id}.{rank.num_starts}", again=True))
        try:
            await self.start(rank, supervisor, how)
            await self._rebuild(rank)
            if rank.ended.is_set():  # `_died` has left it to us
                raise ProcessDied(rank.spec.name, rank.spec.rank, rank.spec.host, "start", rank.death or Death())
        except BaseException:
            if rank.process is not None:
                rank.process.kill(signal.SIGKILL)
                await rank.ended.wait()
            raise

    async def _rebuild(self, rank: Rank) -> None:
        ref = ActorRef(rank.address, AGENT, rank.spec.name, rank.spec.rank, rank.spec.host)
        agent = ActorMesh(rank.spec.name, Shape({"rank": 1}), [ref], agent_interface(), self._node)
        for made in list(rank.actors.values()):
            if made.key in rank.actors:  # it may have been stopped meanwhile
                await agent.make.call_one(*msgspec.structs.astuple(made))
        await agent.all_made.call_one()

    # Stopping

    async def stop(self, ranks: Sequence[Rank], grace: float) -> None:
        """Stop processes (KE-2)."""
        results = await asyncio.gather(*[self._stop(rank, grace) for rank in ranks], return_exceptions=True)
        for rank in ranks:
            self._node.forget(rank.address)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _stop(self, rank: Rank, grace: float) -> None:
        rank.unwanted.set()
        if rank.ended.is_set():
            if rank.peer is not None:
                rank.peer.stop()
            return
        process = rank.process
        if process is None:  # not started yet; whoever starts it will see that it is no longer wanted
            rank.ended.set()
            return
        if rank.peer is None or rank.peer.connection.closed:
            process.kill(signal.SIGKILL)
        else:
            rank.peer.connection.send(Stop(grace))
            busy = asyncio.ensure_future(rank.busy.wait())
            await first_of(busy, process.exited, timeout=grace + 1)
            busy.cancel()
            for number in (signal.SIGTERM, signal.SIGKILL):
                if not process.exited.done():
                    await asyncio.wait([process.exited], timeout=BUSY_SECONDS)
                    process.kill(number)
        await rank.ended.wait()


async def _last_lines(rank: Rank) -> tuple[str, ...]:
    if rank.capture is None:
        return ()
    # What it started may still hold the pipes: wait only for what lies in them.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await rank.capture.ended.wait()
    rank.capture.close()
    return tuple(rank.capture.tail)


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of them is done, for at most `timeout` seconds."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
