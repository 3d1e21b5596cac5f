"""Calls that have arrived, and the lanes in which they wait and run (AC-2)."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from runtime.actor import CancelToken
from runtime.codec import Payload
from runtime.interface import EndpointType
from runtime.mailbox import OVERHEAD
from runtime.messages import Call
from runtime.streams import Outflow
from runtime.wire import Connection

QUICK_SECONDS = 100e-6
"""An endpoint whose last run took less is expected to be so quick again: an answer may wait for it (CE-7)."""


class Lane:
    """Messages that run at most `limit` at once, first come, first served."""

    __slots__ = ("draining", "limit", "queue", "running")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.queue: deque[Incoming] = deque()
        self.running: set[Incoming] = set()
        self.draining = False
        """The loop is about to start all that may run."""

    def continues_quickly(self) -> bool:
        """Whether another call waits and is expected to be over in no time."""
        return bool(self.queue) and self.queue[0].route.quick


class Route:
    """An endpoint of one actor: where its calls wait, and what is known of them."""

    __slots__ = ("chain", "kind", "label", "lane", "on_main", "quick")

    def __init__(self, kind: EndpointType, lane: Lane, label: str, chain: tuple[str, ...]) -> None:
        self.kind = kind
        self.lane = lane
        self.label = label
        """Actor and endpoint."""
        self.chain = chain
        """What waits for the calls that this endpoint makes: its actor, and the main thread of the process."""
        self.on_main = not kind.is_async and not kind.streams
        """A sync endpoint: it has the main thread from its start to its end."""
        self.quick = False
        """Its last run took less than `QUICK_SECONDS`."""


class Incoming:
    """A call that has arrived."""

    __slots__ = (
        "call",
        "connection",
        "cost",
        "executing",
        "lane",
        "outflow",
        "payload",
        "route",
        "since",
        "started",
        "task",
        "token",
    )

    def __init__(self, connection: Connection, call: Call, payload: Payload, route: Route) -> None:
        self.connection = connection
        self.call = call
        self.payload: Payload | None = payload
        self.cost = payload.nbytes + OVERHEAD
        self.route = route
        self.lane = route.lane
        self.outflow: Outflow | None = None
        self.token = CancelToken()
        self.started = False
        self.executing = False
        """A sync endpoint that has the main thread now."""
        self.since = time.monotonic()
        """Of its arrival, then of its start."""
        self.task: asyncio.Task[None] | None = None
