"""Calls that have arrived, and the lanes in which they wait and run (AC-2)."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from runtime.actor import CancelToken
from runtime.codec import Payload
from runtime.mailbox import OVERHEAD
from runtime.messages import Call
from runtime.streams import Outflow
from runtime.wire import Connection


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
        "since",
        "started",
        "task",
        "token",
    )

    def __init__(self, connection: Connection, call: Call, payload: Payload, lane: Lane) -> None:
        self.connection = connection
        self.call = call
        self.payload: Payload | None = payload
        self.cost = payload.nbytes + OVERHEAD
        self.lane = lane
        self.outflow: Outflow | None = None
        self.token = CancelToken()
        self.started = False
        self.executing = False
        """A sync endpoint that has the main thread."""
        self.since = time.monotonic()
        """Of its arrival, then of its start."""
        self.task: asyncio.Task[None] | None = None


class Lane:
    """Messages that run at most `limit` at once, first come, first served."""

    __slots__ = ("limit", "queue", "running")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.queue: deque[Incoming] = deque()
        self.running: set[Incoming] = set()
