"""Who waits for whom: the state of all processes at one moment, and the circles in it.

    lane of an actor  --runs-->  endpoint  --waits for-->  lane of another actor, or the main thread

WT-1: a lane is a node. It points to another lane when what it runs waits there: for an answer, or for room in the
      mailbox. A lane whose sync endpoint waits for the main thread points to the lane that holds the main thread.
WT-2: a circle through lanes that can't start anything more is a deadlock, and is named. Every call in it waits for the
      next one, so that none can ever end.

Everything but the collecting is pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

SERIAL = ""
"""Name of the lane of all endpoints without `concurrency`."""
HEADS = 3
"""Waiting messages of a lane that are shown."""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A call that runs in a lane, or waits in its queue."""

    endpoint: str
    seconds: float
    """Since it began to run, or since it arrived."""
    needs_main_thread: bool = False
    """It is sync and has not begun: the main thread does something else."""
    has_main_thread: bool = False


class LaneState(msgspec.Struct, frozen=True, array_like=True):
    name: str
    """SERIAL, or the endpoint that the lane is for."""
    limit: int
    running: list[Work]
    queued: int
    heads: list[Work]

    @property
    def full(self) -> bool:
        """Nothing more can start."""
        return len(self.running) >= self.limit


class ActorState(msgspec.Struct, frozen=True, array_like=True):
    key: str
    name: str
    rank: int
    nbytes: int
    """Of its mailbox."""
    lanes: list[LaneState]
    """Those with something in them."""


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """A call that waits for its answer, or to be sent."""

    caller: str
    """Key of the actor that made it; empty outside of actors."""
    caller_lane: str
    key: str
    mesh: str
    rank: int
    endpoint: str
    lane: str
    seconds: float
    before: str = "the answer of"
    """What it waits for, of that actor."""


class ProcessState(msgspec.Struct, frozen=True, array_like=True):
    name: str
    rank: int
    pid: int
    lag: float
    """Seconds by which the event loop was late, the last time it was measured."""
    main_thread: str
    """The endpoint that it runs, empty when idle."""
    main_thread_seconds: float
    actors: list[ActorState]
    """Those that have something to do."""
    waits: list[Wait]
    silent: str = ""
    """Why the process could not be asked; then nothing else is known."""


class Report(msgspec.Struct, frozen=True):
    """What `report()` returns. As text it is what a person wants to read."""

    processes: list[ProcessState]

    @property
    def deadlocks(self) -> list[str]:
        """The circles (WT-2), one sentence each."""
        names = {lane: text for lane, text, _ in self._lanes()}
        return [_sentence([names[lane] for lane in circle]) for circle in find_circles(self._edges())]

    def __str__(self) -> str:
        lines = [f"deadlock: {sentence}" for sentence in self.deadlocks]
        for process in self.processes:
            lines += _describe(process)
        return "\n".join(lines) or "nothing runs and nothing waits"

    def _lanes(self) -> Iterator[tuple[tuple[str, str], str, LaneState]]:
        for process in self.processes:
            for actor in process.actors:
                for lane in actor.lanes:
                    what = ", ".join(work.endpoint for work in lane.running)
                    yield (actor.key, lane.name), f"{actor.name} rank {actor.rank} ({what})", lane

    def _edges(self) -> dict[tuple[str, str], set[tuple[str, str]]]:
        """WT-1, between lanes that are full."""
        full = {node for node, _, lane in self._lanes() if lane.full}
        edges: dict[tuple[str, str], set[tuple[str, str]]] = {node: set() for node in full}
        for process in self.processes:
            for wait in process.waits:
                source, target = (wait.caller, wait.caller_lane), (wait.key, wait.lane)
                if source in full and target in full:
                    edges[source].add(target)
            lanes = [((actor.key, lane.name), lane) for actor in process.actors for lane in actor.lanes]
            holders = [node for node, lane in lanes if any(work.has_main_thread for work in lane.running)]
            for node, lane in lanes:
                if node in full and any(work.needs_main_thread for work in lane.running):
                    edges[node].update(holder for holder in holders if holder in full and holder != node)
        return edges


def find_circles(edges: dict[tuple[str, str], set[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
    """Circles of a graph that share no node, each from its smallest node on."""
    circles: list[list[tuple[str, str]]] = []
    done: set[tuple[str, str]] = set()
    for start in sorted(edges):
        path: list[tuple[str, str]] = []
        todo = [(start, 0)]
        while todo:
            node, depth = todo.pop()
            del path[depth:]
            if node in path:
                circle = path[path.index(node) :]
                first = circle.index(min(circle))
                circles.append(circle[first:] + circle[:first])
                done.update(circle)
                break
            if node in done:
                continue
            path.append(node)
            following = sorted(edges.get(node, ()), reverse=True)
            if not following:
                done.add(node)
            todo += [(target, depth + 1) for target in following]
    return circles


def _sentence(names: list[str]) -> str:
    return " waits for ".join([*names, names[0]])


def _describe(process: ProcessState) -> list[str]:
    if process.silent:
        return [f"{process.name} {process.rank}: {process.silent}"]
    head = f"{process.name} {process.rank} (pid {process.pid})"
    lines = []
    if process.main_thread:
        lines.append(f"  main thread: {process.main_thread} for {process.main_thread_seconds:.1f} s")
    names = {actor.key: f"{actor.name} rank {actor.rank}" for actor in process.actors}
    for actor in process.actors:
        for lane in actor.lanes:
            lines += _describe_lane(names[actor.key], actor, lane)
    for wait in process.waits:
        who = names.get(wait.caller, "this process")
        lines.append(
            f"  {who} waits for {wait.before} {wait.mesh} rank {wait.rank}, {wait.endpoint}, for {wait.seconds:.1f} s"
        )
    if not lines:
        return []
    late = f", its event loop was {process.lag:.1f} s late" if process.lag > 0.5 else ""
    return [f"{head}{late}:", *lines]


def _describe_lane(name: str, actor: ActorState, lane: LaneState) -> list[str]:
    lines = []
    for work in lane.running:
        state = "waits for the main thread to run" if work.needs_main_thread else "runs"
        lines.append(f"  {name} {state} {work.endpoint} for {work.seconds:.1f} s")
    if lane.queued:
        heads = ", ".join(f"{work.endpoint} ({work.seconds:.1f} s)" for work in lane.heads)
        more = f", and {lane.queued - len(lane.heads)} more" if lane.queued > len(lane.heads) else ""
        lines.append(f"  {name} has {lane.queued} waiting ({actor.nbytes} bytes): {heads}{more}")
    return lines
