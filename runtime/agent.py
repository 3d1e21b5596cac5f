"""The actor that every worker has from the start: it makes and removes the others, and runs functions on the main
thread.

AG-1: what a large actor's constructor leaves is left out of garbage collections, which would walk over the million
      objects of a model and its packages again and again, half a second a time. Removing it ends that, for it alone:
      what other large actors hold stays out.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from runtime import codec
from runtime.abort import abort_collectives
from runtime.actor import Actor, Context, context, endpoint, set_context
from runtime.blame import blame
from runtime.errors import PackedError, unpack_error
from runtime.interface import Interface, unpack_interface
from runtime.supervise import Failure
from runtime.waits import ProcessState

if TYPE_CHECKING:
    from runtime.worker import Worker


MANY_OBJECTS = 100_000
"""A collection walks over so many in about 70 ms."""


class Agent(Actor):
    """Lives in a worker under the key `AGENT`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._large: set[str] = set()
        """Keys of the actors that are reason to leave objects out of collections."""
        self._left_out: set[str] = set()
        """Keys of all that were there when it was done last."""

    @endpoint
    def make(self, key: str, name: str, rank: int, size: int, made: bytes) -> None:
        """Construct an actor; `made` is what `pack_actor` made. Raises what its constructor
        raises."""
        cls, interface, args, kwargs = unpack_actor(made)
        own = context()
        place = Context(
            rank=rank,
            size=size,
            proc_name=own.proc_name,
            actor_name=name,
            host=own.host,
            endpoint="__init__",
            node=own.node,
            actor_key=key,
        )
        set_context(place)
        # The actor may start tasks while it is constructed, so it joins the worker first, empty.
        instance: Any = cls.__new__(cls)
        cell = self._worker.add_cell(key, instance, interface, place)
        try:
            instance.__init__(*args, **kwargs)
        except BaseException:
            self._worker.drop_cell(key, cell)
            raise
        self._worker.serve_cell(key, cell)
        if len(gc.get_objects()) > MANY_OBJECTS:  # AG-1
            self._large.add(key)
            gc.collect()
            self._leave_out()

    @endpoint
    async def all_made(self) -> None:
        """Told to a process that was started again, once it has its actors."""
        self._worker.all_made()

    @endpoint
    def init_process_group(self, backend: str, store: str, rank: int, size: int, timeout: float) -> None:
        """As the function."""
        init_process_group(backend, store, rank, size, timeout)

    @endpoint(concurrency=4)
    async def abort(self) -> list[str]:
        """Free what waits in a collective; served while the main thread is busy. Returns the back ends told."""
        return abort_collectives()

    @endpoint(concurrency=64)
    async def supervise(
        self, key: str, mesh: str, error: PackedError, name: str, rank: int | None, host: str, endpoint: str
    ) -> bool:
        """What the `__supervise__` of an actor says to a failure of a mesh that it owns."""
        hook = getattr(self._worker.instance(key), "__supervise__", None)
        if hook is None:
            return False
        answer = hook(Failure(mesh, unpack_error(error, name, rank, host, endpoint)))
        return bool(await answer if inspect.isawaitable(answer) else answer)

    @endpoint
    async def remove(self, key: str) -> None:
        """Stop an actor."""
        await self._worker.remove_cell(key)
        self._large.discard(key)
        if key in self._left_out:
            self._left_out.clear()
            gc.unfreeze()
            gc.collect()
            if self._large:
                self._leave_out()

    def _leave_out(self) -> None:
        gc.freeze()
        self._left_out = self._worker.keys()

    @endpoint(concurrency=4)
    async def state(self) -> ProcessState:
        """What this process does now."""
        return self._worker.state()

    @endpoint
    def run(self, function: Callable[..., Any], args: Any) -> Any:
        """Run a function on the main thread."""
        return function(*args)


def pack_actor(actor: type[Actor], interface: Interface, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """What `make` wants.

    Raises:
        TypeError: an argument can't be sent, or the class can't be imported elsewhere and pickle isn't allowed.
    """
    parts = (actor, interface.packed() if codec.pickle_is_allowed() else b"", args, kwargs)
    try:
        return codec.dumps(parts)
    except TypeError as error:
        path, _ = blame((args, kwargs), "", lambda child: codec.can_be_sent(codec.loosely(child)))
        if not path:
            raise
        path = re.sub(r"^\[1\]\['(\w+)'\]", r"argument \1", re.sub(r"^\[0\]\[(\d+)\]", r"argument number \1", path))
        raise TypeError(f"{actor.__qualname__}: {path} can't be sent: {error}") from error.__cause__


def unpack_actor(made: bytes) -> tuple[type[Actor], Interface, tuple[Any, ...], dict[str, Any]]:
    """The reverse. Without pickle the interface is read from the class once more."""
    cls, packed, args, kwargs = codec.loads(made)
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise TypeError(f"expected a subclass of Actor, got {cls!r}")
    return cls, unpack_interface(packed) if packed else Interface.of(cls), args, kwargs


def init_process_group(backend: str, store_path: str, rank: int, size: int, timeout: float) -> None:
    """Make the default torch.distributed group of this process (runs on its main thread).

    Raises:
        RuntimeError: torch.distributed is missing, or the ranks did not meet within `timeout` seconds.
    """
    import torch.distributed as dist

    if dist.is_initialized():  # aborted, or of other ranks before a restart
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(store_path, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


__all__ = ["Agent", "Interface", "init_process_group"]
