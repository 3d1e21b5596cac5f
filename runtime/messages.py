"""What processes say to each other. Arguments and results travel beside these records, as the payload of the frame.

Caller to callee: `Call`, `Cancel`, `Kill`, `More`, `Want`.
Callee to caller: `Reply`, `Fault`, `Item`, `Credit`, `Grant`, `Gone`, `ActorFailed`, `Heartbeat`.
Worker to controller, once and first: `Hello`. Controller to worker: `Assign` (a rank of torchrun gets its place),
`Stop`. Both ways, between connections and not seen above them: `Returned`.
"""

from __future__ import annotations

import msgspec

from runtime.auth import Trust
from runtime.errors import PackedError


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all records on the wire. Nobody changes one after it was made."""


class Hello(Message):
    """The first message of whoever connects."""

    kind: str
    """`worker`, `joined` (a rank of torchrun) or `peer` (a worker that calls another one)."""
    name: str
    pid: int
    rank: int
    """Rank in the mesh of processes; rank of torchrun for `joined`."""
    address: str
    """Where the process itself listens."""
    host: str
    process: str = ""
    """`ProcessSpec.id` of a worker."""


class Assign(Message):
    """A joined rank becomes this process of a mesh. `spec` is an encoded `ProcessSpec`."""

    spec: bytes


class Call(Message):
    id: int
    actor: str
    endpoint: str
    rank: int
    """Rank of the receiver in the mesh the caller used; a slice renumbers it."""
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Shape of that mesh."""
    chain: tuple[str, ...]
    """Serial actors that wait, directly or through others, for the result."""
    reply: bool
    """False for a broadcast: no result, and an error goes to supervision."""
    window: int
    """For a stream: how many values may be on the way; otherwise 0."""


class Cancel(Message):
    """Nobody waits for this call any more."""

    id: int
    actor: str
    peer_failed: bool = False
    """Because another rank of the same call has failed: this one may wait for it in a collective."""


class Kill(Message):
    """End this process: an endpoint in it did not stop when it was told to."""


class Reply(Message):
    """The payload is the result; at the end of a stream there is none. `credit` as in `Credit`."""

    id: int
    credit: int


class Fault(Message):
    id: int
    error: PackedError
    credit: int


class Item(Message):
    """The payload is the next value of a stream."""

    id: int


class More(Message):
    """These values of a stream have been taken: as many more may be sent."""

    id: int
    actor: str
    items: int
    nbytes: int


class Gone(Message):
    """What was sent without a wish for an answer found no actor or port of this name."""

    actor: str


class Credit(Message):
    """So many bytes have left the mailbox of the actor: the sender may send as many again."""

    actor: str
    nbytes: int


class Want(Message):
    """The sender asks for more room in a mailbox than is its own, or gives back what it was lent (negative `total`)."""

    actor: str
    first: int
    """Bytes that the first waiting message lacks."""
    total: int
    """Bytes that all waiting messages lack."""
    at_once: bool
    """Grant 0 rather than let it wait."""


class Grant(Message):
    """Answer to Want."""

    actor: str
    nbytes: int


class ActorFailed(Message):
    """An error that no caller waits for: a broadcast (`fatal` False) or a background task (`fatal` True)."""

    actor: str
    endpoint: str
    error: PackedError
    fatal: bool


class Heartbeat(Message):
    """The loop of the process runs. `running` is the endpoint on its main thread, empty when idle."""

    running: str
    seconds: float
    """How long that endpoint has run."""
    lag: float
    """Seconds by which this heartbeat is late: how late the loop runs what is due."""
    queued: int
    queued_bytes: int
    """In the mailboxes of its actors."""
    moved: int
    """Messages that have come in so far, from whomever."""


class Stop(Message):
    """Cancel what runs, run `__cleanup__` for at most `grace` seconds, exit with 0."""

    grace: float


class Stopping(Message):
    """Answer to Stop. `busy` names the endpoint that still holds the main thread; signals will follow."""

    busy: str


class Returned(Message):
    """The values over these shared blocks are gone: their sender may use them again."""

    leases: list[int]


AnyMessage = (
    Hello
    | Assign
    | Call
    | Cancel
    | Kill
    | More
    | Want
    | Reply
    | Fault
    | Item
    | Credit
    | Grant
    | Gone
    | ActorFailed
    | Heartbeat
    | Stop
    | Stopping
    | Returned
)


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know to begin."""

    id: str
    """Unique in the job: tells a restarted process from the one before."""
    name: str
    rank: int
    size: int
    """Number of processes of its mesh."""
    controller: str
    """Address of the controller."""
    address: str
    """Address at which this process shall listen; it publishes the port that it got."""
    host: str
    trust: Trust
    env: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    """Variables that it must not inherit."""
    threads: int = 1
    cores: tuple[int, ...] = ()
    """That it is bound to; empty for all."""
    abort_after: float = 0.0
    """Seconds after which the process groups of a rank are aborted whose peer has failed in the same call."""
    run_directory: str = ""
    log_level: str = "warning"
    sys_path: list[str] = []
    working_directory: str = ""
    max_message_bytes: int = 0
    again: bool = False
    """Its actors will be made as those of a process that has died; then the agent is told."""
    parent: int = 0
    """Process id of the parent at the start: if it has changed, the parent died meanwhile."""
