"""Collecting what `waits.py` describes: from this process, from all processes of a job, and when nothing moves.

SN-1: a process that does not answer in time is part of the report, with its last heartbeat.
SN-2: a standstill is reported when calls are pending and no process has received a message for the set time; again
      after twice that, and so on. Endpoints may compute for hours: the report says which, and accuses nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from runtime.calls import ActorMesh, agent_interface
from runtime.cell import Cell
from runtime.errors import TuttiError
from runtime.messages import ProcessSpec
from runtime.node import Node
from runtime.peer import Peer
from runtime.posting import AGENT, ActorRef, Pending, Posting
from runtime.shape import Shape
from runtime.waits import SERIAL, ActorState, LaneState, ProcessState, Report, Wait

log = logging.getLogger("runtime")

ASK_SECONDS = 2.0
"""How long a process may take to say what it does."""
STATE = "state"
"""The endpoint of the agent that answers; it is no part of the answer."""


class Ranked(Protocol):
    """A process as its host knows it."""

    spec: ProcessSpec
    address: str
    peer: Peer | None


def snapshot(node: Node, name: str, rank: int, lag: float, main_thread: tuple[str, float] | None) -> ProcessState:
    """This process, now. `main_thread`: what runs there and since when (`time.monotonic`)."""
    now = time.monotonic()
    label, since = main_thread or ("", now)
    cells = [served for served in list(node.serving.by_key.values()) if isinstance(served, Cell)]
    return ProcessState(name, rank, os.getpid(), lag, label, now - since, list(_busy(cells)), list(_waits(node, now)))


async def collect(node: Node, ranks: Sequence[Ranked]) -> Report:
    """All processes of a job: the controller and its ranks (SN-1)."""

    async def state_of(rank: Ranked) -> ProcessState:
        spec = rank.spec
        agent = ActorRef(rank.address, AGENT, spec.name, spec.rank, spec.host)
        mesh = ActorMesh(spec.name, Shape({}), [agent], agent_interface(), node)
        try:
            state: ProcessState = await mesh.state.options(timeout=ASK_SECONDS).call_one()
            return state
        except TuttiError:
            return ProcessState(spec.name, spec.rank, 0, 0.0, "", 0.0, [], [], _last_sign(rank.peer))

    own = snapshot(node, "controller", 0, 0.0, None)
    states = await asyncio.gather(*[state_of(rank) for rank in ranks])
    node.moved -= sum(not state.silent for state in states)  # asking is no movement
    return Report([own, *states])


def has_pending(node: Node) -> bool:
    """Whether a call of this process waits for something."""
    return bool(node.waiting_for_room) or any(True for _ in _open_calls(node))


async def watch_standstill(
    seconds: float, node: Node, peers: Callable[[], Iterable[Peer]], report: Callable[[], Awaitable[Report]]
) -> None:
    """Log a report when nothing has moved for so long (SN-2); never returns."""
    last: object = None
    since = time.monotonic()
    limit = seconds
    while True:
        await asyncio.sleep(min(5.0, seconds / 4))
        now = (node.moved, sorted((peer.address, peer.beat.moved) for peer in peers() if peer.beat is not None))
        if now != last or not has_pending(node):
            last, since, limit = now, time.monotonic(), seconds
        elif time.monotonic() - since >= limit:
            log.warning("nothing has moved for %.0f s:\n%s", time.monotonic() - since, await report())
            limit *= 2


def _busy(cells: Sequence[Cell]) -> Iterable[ActorState]:
    for cell in cells:
        state = cell.state()
        lanes: list[LaneState] = [lane for lane in state.lanes if lane.name != STATE]
        if lanes:
            yield ActorState(state.key, state.name, state.rank, state.nbytes, lanes)


def _open_calls(node: Node) -> Iterable[Pending]:
    for peer in list(node.peers.values()):
        for call in list(peer.pending.values()):
            if not call.future.done() and call.endpoint.name != STATE:
                yield call


def _waits(node: Node, now: float) -> Iterable[Wait]:
    for call in _open_calls(node):
        yield _wait(call.ref, call, now, "the answer of")
    for ref, posting in node.waiting_for_room:
        peer = node.peers.get(ref.address)
        away = peer is not None and peer.comes_back(ref)
        yield _wait(ref, posting, now, "the restart of" if away else "room in the mailbox of")


def _wait(ref: ActorRef, call: Pending | Posting, now: float, before: str) -> Wait:
    endpoint, caller = call.endpoint, call.caller
    return Wait(
        caller.actor_key,
        SERIAL if caller.actor_key in caller.chain else caller.endpoint,
        ref.key,
        ref.mesh,
        ref.rank,
        endpoint.name,
        SERIAL if endpoint.serial else endpoint.name,
        now - call.since,
        before,
    )


def _last_sign(peer: Peer | None) -> str:
    if peer is None or peer.beat is None:
        return "does not answer"
    beat = peer.beat
    age = asyncio.get_running_loop().time() - peer.beat_at
    ran = f", when it ran {beat.running} for {beat.seconds:.1f} s" if beat.running else ""
    return f"does not answer; its last heartbeat came {age:.1f} s ago{ran}"
