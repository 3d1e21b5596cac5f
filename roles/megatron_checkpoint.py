"""Weights and optimizer of a megatron rank on disk, in the format of megatron's dist_checkpointing.

MC-1: what is written under one layout is read under any other: weights by their boxes, the optimizer gathered into the
      shapes of the weights.
MC-2: no process is started: what has to be written is written by this one, in a thread where the caller wants that.
MC-3: a write in the background reads copies in CPU memory; its last lines are collectives, for the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def state(chunks: Sequence[Any], optimizer: Any, updates: int, *, loading: bool) -> dict[str, Any]:
    """What goes to disk or is read from there; before the first update the optimizer has nothing to say.

    Args:
        optimizer: megatron's; None for a frozen model.
        updates: behind the optimizer's state, in memory or in the file.
    """
    found: dict[str, Any] = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    if optimizer is not None and updates:
        named = {"model": found["model0"]} if len(chunks) == 1 else dict(found)
        with _torch_adam_on_disk(optimizer, updates):
            found["optimizer"] = optimizer.sharded_state_dict(named, is_loading=loading, metadata=RESHARDABLE)
    return found


def write(found: dict[str, Any], target: Path) -> None:
    """Write into an existing folder, on all ranks together."""
    _stay_in_this_process()
    dist_checkpointing.save(found, str(target))


def begin_write(found: dict[str, Any], target: Path) -> tuple[Callable[[], None], list[Callable[[], None]]]:
    """Copy what is to be written into CPU memory; returns the work of writing it, and what is to be called on all ranks
    when that is done (MC-3)."""
    _stay_in_this_process()
    request = dist_checkpointing.save(found, str(target), async_sharded_save=True, async_strategy="mcore")
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()

    def work() -> None:
        if request.async_fn is not None:
            request.async_fn(*arguments, **request.async_fn_kwargs)

    return work, list(request.finalize_fns)


def read_into(folder: Path, expected: dict[str, Any], chunks: Sequence[Any], optimizer: Any, updates: int) -> None:
    """Load what `state(..., loading=True)` asks for."""
    loaded = dist_checkpointing.load(expected, str(folder))
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])
    if optimizer is None:
        return
    if updates:
        with _torch_adam_on_disk(optimizer, updates):
            optimizer.load_state_dict(loaded["optimizer"])
        return
    optimizer.reload_model_params()
    for inner in _inner_optimizers(optimizer):
        inner.state.clear()


def _stay_in_this_process() -> None:
    """megatron's own queue of results lives in a process that outlives this one (R10)."""
    filesystem_async._results_queue = queue.Queue()


def _inner_optimizers(optimizer: Any) -> list[Any]:
    """Torch's optimizers inside megatron's."""
    return [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]


@contextlib.contextmanager
def _torch_adam_on_disk(optimizer: Any, updates: int) -> Iterator[None]:
    """Two things that megatron's distributed optimizer takes for granted of Adam, and torch's has not (0.19):

    It reads the step from the state of a parameter, and fails where a rank has none: the optimizer of the experts on a
    stage of dense layers. And it expects every tensor of that state in the file, also the step, which is stored apart.
    """
    inner = _inner_optimizers(optimizer)

    def state_dict(one: Any) -> dict[str, Any]:
        plain: dict[str, Any] = type(one).state_dict(one)
        return plain if plain["state"] else {**plain, "state": {0: {"step": torch.tensor(float(updates))}}}

    def set_states(one: Any, param: Tensor, tensors: dict[str, Any]) -> None:
        type(one)._set_main_param_and_optimizer_states(one, param, {"step": None, **tensors})

    outer = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    for one in inner:
        one.state_dict = functools.partial(state_dict, one)
    for one in outer:
        one._set_main_param_and_optimizer_states = functools.partial(set_states, one)
    try:
        yield
    finally:
        for one in inner:
            del one.state_dict
        for one in outer:
            del one._set_main_param_and_optimizer_states
