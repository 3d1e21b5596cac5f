"""The actor that every worker has from the start: it makes and removes the others, and runs functions on the main
thread."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from runtime.actor import Actor, Context, context, endpoint, set_context
from runtime.interface import Interface

if TYPE_CHECKING:
    from runtime.worker import Worker


class Agent(Actor):
    """Lives in a worker under the key `AGENT`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @endpoint
    def make(self, key: str, name: str, rank: int, size: int, made: bytes) -> None:
        """Construct an actor; `made` is the pickle of (class, interface, args, kwargs). Raises what its constructor
        raises."""
        cls, interface, args, kwargs = pickle.loads(made)
        own = context()
        place = Context(
            rank=rank, size=size, proc_name=own.proc_name, actor_name=name, host=own.host, endpoint="__init__"
        )
        set_context(place)
        # The actor may start tasks while it is constructed, so it joins the worker first, empty.
        instance = cls.__new__(cls)
        cell = self._worker.add_cell(key, instance, interface, place)
        try:
            instance.__init__(*args, **kwargs)
        except BaseException:
            self._worker.drop_cell(key, cell)
            raise

    @endpoint
    async def remove(self, key: str) -> None:
        """Stop an actor."""
        await self._worker.remove_cell(key)

    @endpoint
    def run(self, function: Callable[..., Any], args: Any) -> Any:
        """Run a function on the main thread."""
        return function(*args)


def init_process_group(backend: str, store_path: str, rank: int, size: int, timeout: float) -> None:
    """Make the default torch.distributed group of this process (runs on its main thread).

    Raises:
        RuntimeError: torch.distributed is missing, or the ranks did not meet within `timeout` seconds.
    """
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(store_path, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


__all__ = ["Agent", "Interface", "init_process_group"]
