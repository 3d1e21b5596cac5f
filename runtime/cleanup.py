"""The `__cleanup__` hook of an actor, run when it stops.

CL-1: it runs where a call would: a sync one on the main thread, an async one on the loop, in the context of the actor.
CL-2: an error in it is told on stderr, and keeps no other actor from tidying up.
CL-3: it does not run for an actor whose constructor has not returned, because it raised or its process is stopped
      meanwhile: half of what the hook would tidy up is not there.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

from runtime.actor import Context, set_context
from runtime.errors import PackedError

RunOnMain = Callable[[Callable[[], Any], str, Callable[[Any], None]], None]


async def clean_up(instance: Any, place: Context, failure: PackedError | None, run_on_main: RunOnMain) -> None:
    """Run the hook, if the actor has one. `failure`: what has ended the actor."""
    hook = getattr(instance, "__cleanup__", None)
    if hook is None:
        return
    error = None if failure is None else RuntimeError(f"{failure.exception_type}: {failure.text}")
    label = f"{place.actor_name}.__cleanup__"
    loop, variables = asyncio.get_running_loop(), contextvars.Context()
    variables.run(set_context, place)
    try:
        if inspect.iscoroutinefunction(hook):
            await loop.create_task(hook(error), name=label, context=variables)
            return
        done: asyncio.Future[Exception | None] = loop.create_future()
        job = functools.partial(variables.run, _raised_by, hook, error)
        run_on_main(job, label, lambda raised: None if done.done() else done.set_result(raised))
        if (raised := await done) is not None:
            raise raised
    except Exception:  # CL-2: nobody waits for this error
        print(f"{label} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)  # noqa: T201


def _raised_by(hook: Callable[[Any], object], error: Exception | None) -> Exception | None:
    try:
        hook(error)
    except Exception as raised:  # whatever user code raises belongs to `clean_up`
        return raised
    return None
