"""Actors: plain classes whose methods marked `@endpoint` can be called from other processes.

AC-1: sync endpoints run on the main thread of the process (CUDA, collectives), one at a time over all actors of the
      process; async ones run on its event loop, which lives in another thread.
AC-2: the endpoints without `concurrency` form the serial lane of the actor: one at a time, in the order that each
      sender sent them. `@endpoint(concurrency=n)` (async only) is a lane of its own: up to n at once, started in the
      order sent, beside the serial lane. Nothing is promised between lanes, so a concurrent call may overtake a serial
      one. A generator endpoint occupies its lane until its stream has ended.
AC-3: mistakes in a class are a TypeError where the class is defined: an endpoint that is static, that
      hides an endpoint of a base class without being one, or whose name the mesh itself needs.
AC-4: without a process around it an actor is an ordinary object: construct it, call its methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar, overload

from runtime.tasks import TaskGroup

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_MARK = "__tutti_endpoint__"
SERIAL = 0
"""The concurrency of endpoints that share the serial lane of their actor."""

RESERVED = frozenset(
    {
        "slice",
        "flatten",
        "split",
        "rename",
        "stop",
        "name",
        "shape",
        "size",
        "sizes",
        "procs",
        "tasks",
        "refs",
        "interface",
        "is_alive",
    }
)
"""Names that the mesh of an actor needs for itself."""


@overload
def endpoint(function: F) -> F: ...
@overload
def endpoint(*, concurrency: int | None = None) -> Callable[[F], F]: ...
def endpoint(function: F | None = None, *, concurrency: int | None = None) -> F | Callable[[F], F]:
    """Mark a method as callable from other processes. The method itself stays as it is.

    Args:
        concurrency: gives the endpoint a lane of its own, in which so many calls may run at once, 1 included (AC-2).
            Needs `async def`. None: it shares the serial lane of the actor.

    Raises:
        TypeError: the method can't be an endpoint; the message says why and what to do.
    """

    def mark(method: F) -> F:
        _check_method(method, concurrency)
        setattr(method, _MARK, concurrency or SERIAL)
        return method

    return mark if function is None else mark(function)


def concurrency_of(function: object) -> int | None:
    """The concurrency of an endpoint, `SERIAL` for one of the serial lane, None for anything else."""
    mark = getattr(function, _MARK, None)
    return mark if isinstance(mark, int) else None


def runs_on_loop(method: Callable[..., Any]) -> bool:
    """Whether an endpoint is async (AC-1): a coroutine function or an async generator."""
    return inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)


def _check_method(method: Any, concurrency: int | None) -> None:
    name = getattr(method, "__qualname__", repr(method))
    if isinstance(method, staticmethod | classmethod | property):
        kind = type(method).__name__
        raise TypeError(f"endpoint {name}: expected a plain method, got a {kind}. Take self and drop @{kind}")
    if not inspect.isfunction(method):
        raise TypeError(f"endpoint {name}: expected a method, got {type(method).__name__}")
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency is True or concurrency < 1):
        raise TypeError(f"endpoint {name}: expected concurrency of at least 1, got {concurrency!r}")
    if concurrency is not None and not runs_on_loop(method):
        raise TypeError(
            f"endpoint {name}: concurrency={concurrency} needs 'async def'. Sync endpoints share the main thread and "
            "run one at a time; make it async and call on_main_thread() for the part that must run there"
        )
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise TypeError(f"endpoint {name}: expected self as the first parameter")


class Actor:
    """Base class. Optional hook: `async def __cleanup__(self, error)`, run when the actor stops (AC-4 otherwise)."""

    _actor_tasks: TaskGroup | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in dir(cls):
            if name.startswith("__"):
                continue
            owners = [base for base in cls.__mro__ if name in base.__dict__]
            marks = [concurrency_of(base.__dict__[name]) for base in owners]
            if any(mark is not None for mark in marks):
                _check_name(cls, name, marks, owners)

    @property
    def tasks(self) -> TaskGroup:
        """The task group that the actor owns. An error in it fails all pending and later calls of the actor."""
        if self._actor_tasks is None:  # made directly, without a process around it (AC-4)
            self._actor_tasks = TaskGroup(type(self).__name__, on_error=_say_error)
            self._actor_tasks.open()
        return self._actor_tasks


def _say_error(error: BaseException, task: str) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": f"{task} failed", "exception": error})


def _check_name(cls: type, name: str, marks: list[int | None], owners: list[type]) -> None:
    if marks[0] is None:
        owner = next(base for base, mark in zip(owners, marks, strict=True) if mark is not None)
        raise TypeError(
            f"{cls.__qualname__}.{name} hides the endpoint of {owner.__qualname__} but is none itself. "
            "Put @endpoint above it, or give it another name"
        )
    if name in RESERVED or name.startswith("_"):
        why = "starts with an underscore" if name.startswith("_") else "is what the mesh itself calls something"
        raise TypeError(f"endpoint {cls.__qualname__}.{name}: the name {why}. Give the endpoint another name")


def endpoints_of(cls: type) -> dict[str, Callable[..., Any]]:
    """The endpoints of a class, inherited ones too."""
    found = {}
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if concurrency_of(function) is not None:
            found[name] = function
    return found


class CancelToken:
    """Told by the caller that nobody waits any more. Sync endpoints look at it: `context().cancelled`."""

    __slots__ = ("_told", "cancelled", "finished")

    def __init__(self) -> None:
        self.cancelled = False
        self.finished = False
        """The call is over; tasks that it left behind no longer hold anything."""
        self._told: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Nobody waits any more. Called on the loop."""
        self.cancelled = True
        if self._told is not None:
            self._told()

    @contextlib.contextmanager
    def calling(self, function: Callable[[], object]) -> Iterator[None]:
        """Within the block, `function` is called (on the loop) at the cancel; at once if that was before."""
        self._told = function
        if self.cancelled:
            function()
        try:
            yield
        finally:
            self._told = None


class Context:
    """Where the code that asks is running."""

    __slots__ = (
        "_chain",
        "actor_key",
        "actor_name",
        "endpoint",
        "host",
        "message_rank",
        "message_size",
        "node",
        "proc_name",
        "rank",
        "size",
        "token",
    )

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        proc_name: str,
        actor_name: str,
        host: str,
        endpoint: str = "",
        message_rank: int | None = None,
        message_size: int | None = None,
        chain: tuple[str, ...] = (),
        token: CancelToken | None = None,
        node: Any = None,
        actor_key: str = "",
    ) -> None:
        self.actor_key = actor_key
        """What the runtime calls the actor; unique in the job, empty outside of actors."""
        self.rank = rank
        """Rank of the actor in the mesh that was spawned; a slice doesn't change it."""
        self.size = size
        """Size of that mesh."""
        self.proc_name = proc_name
        """Name given to `spawn_procs`; `controller` outside of actors."""
        self.actor_name = actor_name
        """Name given to `spawn`; `controller` outside of actors."""
        self.host = host
        self.endpoint = endpoint
        self.message_rank = rank if message_rank is None else message_rank
        """Rank in the mesh that the caller used: what `current_rank()` returns."""
        self.message_size = size if message_size is None else message_size
        self._chain = chain
        self.token = token or CancelToken()
        self.node = node
        """The `peer.Node` of the process; None outside of actors."""

    def of_call(
        self, actor_key: str, endpoint: str, rank: int, size: int, chain: tuple[str, ...], token: CancelToken
    ) -> Context:
        """The context of a call to the actor that has this one. `rank` and `size`: in the mesh of the caller."""
        of_call = Context.__new__(Context)  # one for each call, so without the detour over keywords
        of_call.actor_key = actor_key
        of_call.rank = self.rank
        of_call.size = self.size
        of_call.proc_name = self.proc_name
        of_call.actor_name = self.actor_name
        of_call.host = self.host
        of_call.endpoint = endpoint
        of_call.message_rank = rank
        of_call.message_size = size
        of_call._chain = chain
        of_call.token = token
        of_call.node = self.node
        return of_call

    def check_cancelled(self) -> None:
        """
        Raises:
            asyncio.CancelledError: the caller has given up. Let it pass: nobody waits for a result.
        """
        if self.token.cancelled:
            raise asyncio.CancelledError("the caller has given up")

    @property
    def cancelled(self) -> bool:
        """True once the caller has given up (cancel or deadline). A long sync endpoint should look and return, or call
        `check_cancelled`."""
        return self.token.cancelled

    @property
    def chain(self) -> tuple[str, ...]:
        """Serial actors that wait for what runs here; a call to one of them could never run."""
        return () if self.token.finished else self._chain


_outside = Context(rank=0, size=1, proc_name="controller", actor_name="controller", host=socket.gethostname())
_context: contextvars.ContextVar[Context] = contextvars.ContextVar("tutti_context", default=_outside)


def context() -> Context:
    """The context of the running endpoint or constructor; outside of actors one of rank 0 and size 1."""
    return _context.get()


def set_context(value: Context) -> None:
    """For the worker: enter a context (in a fresh `contextvars.Context`)."""
    _context.set(value)


def current_rank() -> int:
    """Rank of this actor in the mesh that the caller used: after `mesh.slice(rank=2)` it is 0."""
    return _context.get().message_rank


def current_size() -> int:
    """Size of the mesh that the caller used."""
    return _context.get().message_size


MainThreadRunner = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
_runner: MainThreadRunner | None = None


def set_main_thread_runner(runner: MainThreadRunner | None) -> None:
    """For the worker: how `on_main_thread` gets there from code that runs outside of its actors."""
    global _runner
    _runner = runner


async def on_main_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a sync function on the main thread of the process, between sync endpoints, in the order asked.

    Where there is no worker (an actor made directly in a test) it runs at once, in the thread of the loop.
    Cancelling the waiting task lets a function that has begun run to its end; its result is dropped, and
    `context().cancelled` is true inside.
    """
    runner = getattr(context().node, "main_thread_runner", None) or _runner
    if runner is None:
        result = function(*args)
        await asyncio.sleep(0)
        return result
    return await runner(lambda: function(*args))  # type: ignore[no-any-return]


def importable(cls: type) -> bool:
    """Whether another process can import the class by its name."""
    module = sys.modules.get(cls.__module__)
    return module is not None and cls.__module__ != "__main__" and getattr(module, cls.__name__, None) is cls
