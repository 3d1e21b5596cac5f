"""Main of a worker process.

    main thread  : sync endpoints, constructors, on_main_thread jobs, one after another
    loop thread  : sockets, async endpoints, heartbeats, cancel

WO-1: a long sync endpoint never stops the loop: heartbeats, cancel and async endpoints go on.
WO-2: the process dies with its parent: at the end of the control connection without a Stop, and by PR_SET_PDEATHSIG.
WO-3: Stop ends with exit code 0; the loss of the controller with 1, and takes along every process of the own session.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import functools
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from runtime import codec, memory
from runtime.abort import abort_collectives
from runtime.actor import CancelToken, Context, set_main_thread_runner
from runtime.agent import Agent
from runtime.cell import Cell
from runtime.codec import Payload
from runtime.directory import death_at
from runtime.interface import Interface
from runtime.logs import set_up_logging
from runtime.messages import ActorFailed, Heartbeat, Hello, Kill, ProcessSpec, Stop, Stopping
from runtime.node import Node
from runtime.posting import AGENT
from runtime.snapshot import snapshot
from runtime.waits import ProcessState
from runtime.wire import Connection

HEARTBEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class MainThread:
    """The queue of jobs of the main thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[[], Any], str, Callable[[Any], None] | None] | None]
        self.jobs = queue.SimpleQueue()
        self.running: tuple[str, float] | None = None
        """(label, time.monotonic() of its start) of the job that runs."""

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run jobs until None comes."""
        while (entry := self.jobs.get()) is not None:
            job, label, done = entry
            self.running = (label, time.monotonic())
            result = job()
            self.running = None
            if done is None:
                result()
            else:
                loop.call_soon_threadsafe(done, result)
            del entry, job, done, result  # hold no arguments while waiting


class Worker:
    """The loop side of a worker process."""

    def __init__(self, spec: ProcessSpec, main: MainThread, *, own_process: bool = True) -> None:
        """
        Args:
            own_process: nothing else runs here (`testing.py` is the exception).
        """
        self.spec = spec
        self.limit = spec.max_message_bytes
        self._main = main
        self._loop = asyncio.get_running_loop()
        self._cells: dict[str, Cell] = {}
        self._stop: asyncio.Future[float] = self._loop.create_future()
        codec.allow_pickle(spec.trust.pickle)
        self._node = Node(spec.address, spec.trust, spec.max_message_bytes, known=own_process)
        self._node.serve = self._serve
        self._node.on_caller_lost = self._on_caller_lost
        if spec.again:
            self._node.serving.hold()
        self._node.listen()
        self._node.controller = spec.controller
        self._node.hello = self._hello("peer")
        self._node.explain = functools.partial(death_at, self._node)
        self._control: Connection
        self._lag = 0.0
        self._node.main_thread_runner = self._on_main_thread
        if own_process:
            set_main_thread_runner(self._on_main_thread)

    async def run(self) -> None:
        """Serve until Stop."""
        place = Context(
            rank=self.spec.rank,
            size=self.spec.size,
            proc_name=self.spec.name,
            actor_name=self.spec.name,
            host=self.spec.host,
            node=self._node,
        )
        self._node.serving.add(AGENT, Cell(self, AGENT, Agent(self), Interface.of(Agent), place))
        self._control = control = self._node.dial(self.spec.controller, self._hello("worker"))
        beat = self._loop.create_task(self._heartbeat(), name="heartbeat")
        try:
            grace = await self._stop
            running = self._main.running
            control.send(Stopping(running[0] if running else ""))
            control.flush()
            await asyncio.gather(*[cell.stop(grace) for cell in self._cells.values()], return_exceptions=True)
        finally:
            beat.cancel()
        await control.drained()
        self._node.close()

    def _hello(self, kind: str) -> Hello:
        spec = self.spec
        return Hello(kind, spec.name, os.getpid(), spec.rank, self._node.address, spec.host, spec.id)

    # What cells and the agent need

    def run_on_main(self, job: Callable[[], Any], label: str, done: Callable[[Any], None] | None) -> None:
        self._main.jobs.put((job, label, done))

    def peer_failed(self, token: CancelToken) -> None:
        """Abort the process groups unless the endpoint ends by itself (R3)."""
        self._loop.call_later(self.spec.abort_after, self._abort_unless_finished, token)

    def _abort_unless_finished(self, token: CancelToken) -> None:
        told = [] if token.finished else abort_collectives()
        if told:
            spec = self.spec
            print(  # noqa: T201
                f"{spec.name} rank {spec.rank}: {' and '.join(told)} groups aborted, because another rank has failed "
                f"and this one did not end within {spec.abort_after:g} s",
                file=sys.stderr,
            )

    def report(self, failure: ActorFailed) -> None:
        self._control.send(failure)

    def add_cell(self, key: str, instance: Any, interface: Interface, place: Context) -> Cell:
        """Add an actor that is about to be constructed; called on the main thread."""

        async def add() -> Cell:
            cell = self._cells[key] = Cell(self, key, instance, interface, place)
            return cell

        return asyncio.run_coroutine_threadsafe(add(), self._loop).result()

    def serve_cell(self, key: str, cell: Cell) -> None:
        """The constructor of an actor has returned: it gets its calls; called on the main thread."""
        cell.constructed = True

        async def serve() -> None:
            self._node.serving.add(key, cell)

        asyncio.run_coroutine_threadsafe(serve(), self._loop).result()

    def drop_cell(self, key: str, cell: Cell) -> None:
        """Forget an actor whose constructor raised; called on the main thread."""
        self._forget(key)
        asyncio.run_coroutine_threadsafe(cell.tasks.close(), self._loop).result()

    async def remove_cell(self, key: str) -> None:
        """Stop one actor."""
        cell = self._forget(key)
        if cell is not None:
            await cell.stop(3.0)

    def all_made(self) -> None:
        """All actors of a process that was started again are there."""
        self._node.serving.all_made()

    def instance(self, key: str) -> Any:
        """The actor of a key, None when there is none."""
        cell = self._cells.get(key)
        return None if cell is None else cell.instance

    def keys(self) -> set[str]:
        """Of all its actors."""
        return set(self._cells)

    def _forget(self, key: str) -> Cell | None:
        self._node.serving.remove(key)
        return self._cells.pop(key, None)

    def state(self) -> ProcessState:
        """What this process does now."""
        self._node.moved -= 1  # being asked is no movement
        return snapshot(self._node, self.spec.name, self.spec.rank, self._lag, self._main.running)

    async def _on_main_thread(self, job: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        variables = contextvars.copy_context()

        def run() -> tuple[Any, BaseException | None]:
            if future.cancelled():
                return None, None
            try:
                return variables.run(job), None
            except BaseException as error:  # belongs to whoever awaits the job
                return None, error

        def done(result: tuple[Any, BaseException | None]) -> None:
            value, error = result
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        self.run_on_main(run, "on_main_thread", done)
        return await future

    # The wire

    def _serve(self, connection: Connection, message: Any, payload: Payload) -> None:
        if type(message) is Kill:
            print("killed: an endpoint did not stop when its caller had given up", file=sys.stderr, flush=True)  # noqa: T201
            self.end_at_once(signal.SIGKILL)
        if type(message) is Stop and connection is self._control and not self._stop.done():
            self._stop.set_result(message.grace)

    def _on_caller_lost(self, connection: Connection) -> None:
        if connection is self._control:
            if not self._stop.done():
                self.end_at_once()
            return

    def end_at_once(self, number: int | None = None) -> None:
        """End this process without a word, by a signal if one is given."""
        if number is not None:
            os.kill(os.getpid(), number)
        die()

    def vanish(self) -> None:
        """What is left to do here when `end_at_once` could not end all of it."""
        self._node.close()
        for cell in self._cells.values():
            cell.abandon()

    async def _heartbeat(self) -> None:
        while True:
            running = self._main.running
            label, seconds = (running[0], time.monotonic() - running[1]) if running else ("", 0.0)
            mailboxes = [cell.mailbox for cell in self._cells.values()]
            queued, nbytes = sum(m.messages for m in mailboxes), sum(m.nbytes for m in mailboxes)
            self._control.send(Heartbeat(label, seconds, self._lag, queued, nbytes, self._node.moved))
            memory.pool.trim()
            due = self._loop.time() + HEARTBEAT_SECONDS
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._lag = self._loop.time() - due


def die() -> NoReturn:
    """End at once, with everything that this process started (WO-3)."""
    if os.getpgrp() == os.getpid() and os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end_with_parent(number: int) -> None:
    """Ask the kernel for this signal at the death of the parent. Survives neither exec of set-user-id nor fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def die_with_parent(parent: int) -> None:
    """SIGKILL at the death of the parent (WO-2), also when it has died already."""
    end_with_parent(signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def set_process_name(name: str) -> None:
    """What ps and top show: 15 bytes at most."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def prepare(spec: ProcessSpec) -> None:
    """Make the process ready for user code: name, signals, environment, threads, random numbers, output."""
    set_process_name(f"{spec.name[:10]} {spec.rank}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    for name in spec.unset:
        os.environ.pop(name, None)
    os.environ.update(spec.env)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(spec.threads)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)  # threads that are started later inherit it
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(spec.threads)
    random.seed()
    numpy_random = sys.modules.get("numpy.random")  # imported later, it seeds itself
    if numpy_random is not None:
        numpy_random.seed()
    if spec.sys_path:
        sys.path[:] = spec.sys_path
    if spec.working_directory:
        os.chdir(spec.working_directory)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    set_up_logging(spec.log_level)
    sys.breakpointhook = functools.partial(_on_breakpoint, spec)
    # The loop thread gets the GIL sooner from a sync endpoint in pure Python.
    sys.setswitchinterval(0.001)


def _on_breakpoint(spec: ProcessSpec, *args: Any, **kwargs: Any) -> None:
    from runtime.breakpoints import stop_here  # pdb takes a while to import

    stop_here(spec, sys._getframe(1))


def run_loop(body: Callable[[], Any], main: MainThread) -> asyncio.AbstractEventLoop:
    """Start the loop thread on the coroutine function `body`; the main thread is told to end when it returns."""
    loop = new_event_loop()

    def target() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(body())
        except BaseException:  # a defect of ours: say so and let the process end, or it would hang
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)
        main.jobs.put(None)
        time.sleep(5)
        os._exit(0)  # the main thread is busy and can't be asked

    threading.Thread(target=target, name="tutti-loop", daemon=True).start()
    return loop


def warm_up() -> None:
    """For the fork server: make what every worker needs at its start once, before they are forked."""
    new_event_loop().close()
    for kind in Interface.of(Agent).endpoints.values():
        kind.prepare()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]


read_spec = msgspec.msgpack.Decoder(ProcessSpec).decode


def main(spec: ProcessSpec) -> NoReturn:
    """Run a worker in this process; never returns."""
    prepare(spec)
    jobs = MainThread()

    async def serve() -> None:
        await Worker(spec, jobs).run()

    loop = run_loop(serve, jobs)
    jobs.run(loop)
    leave(0)


def leave(code: int) -> NoReturn:
    """Exit without the clean-up of an interpreter that may have been forked."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fresh_main() -> NoReturn:
    """Entry of a fresh interpreter: the spec comes through an inherited file, whose descriptor is the argument."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        spec = read_spec(file.read())
    die_with_parent(spec.parent)
    main(spec)
