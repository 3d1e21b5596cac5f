"""The exceptions of the runtime, and how an exception crosses from one process to another.

    TuttiError
    +-- ActorError                 an endpoint, constructor or background task of an actor raised
    |   +-- ProcessDied            the process of the actor is gone
    +-- DeadlineExceeded           (also TimeoutError) the deadline of a call or a task has passed
    +-- Stopped                    the mesh was stopped while the call was pending, or before it
    +-- MailboxFull                a call that must not wait found no room
    +-- Oversize                   (also ValueError) one message is larger than the limit
    +-- SelfCall                   (also RuntimeError) a serial actor would wait for itself
    +-- ShapeError                 (also ValueError) sizes, parts or coordinates that don't fit together
    |   +-- UnknownDimension       a mesh has no dimension of this name
    +-- OutOfRange                 (also IndexError) no such rank or index, or a slice that selects nothing
    +-- UnknownActor               (also LookupError) no living actors of this name, or several
    +-- ConnectionRefused          (also ConnectionError) a process did not answer at its address
    |   +-- PeerRefused            it answered, but one side did not prove that it knows the secret of the job
    +-- StartError                 a process could not be started
    +-- NotEnoughGpus              (also ValueError) processes asked for more GPUs than are free
    +-- RendezvousError            the ranks of torchrun did not find each other

ER-1: an exception raised in an endpoint reaches the caller as an instance of its own class *and* of `ActorError`, with
      its `args` and attributes; its class need not be constructible (`__init__` of Python classes isn't run again).
ER-2: what can't be rebuilt (class not importable here, attributes that don't pickle, an exception that would end the
      caller, such as SystemExit) arrives as a plain `ActorError` that keeps class name, text and traceback.
ER-3: the first line of `str(error)` names mesh, rank, host, endpoint, class and text of the user's exception.
"""

from __future__ import annotations

import signal as signals
import traceback
from types import TracebackType
from typing import Any

import msgspec

from runtime import codec


class TuttiError(Exception):
    """Base of all exceptions of this package. Catch it to tell our failures from those of user code."""


class ActorError(TuttiError):
    """An endpoint (or constructor, or background task) of an actor raised.

    The object is usually an instance of the user's class as well, so that `except ValueError` works.
    """

    mesh: str = ""
    """Name of the actor mesh, as given to `spawn`."""
    rank: int | None = None
    """Rank in the mesh that was spawned (a slice doesn't renumber it here)."""
    host: str = ""
    endpoint: str = ""
    exception_type: str = ""
    """Qualified name of the user's exception class."""
    text: str = ""
    """`str()` of the user's exception."""
    remote_traceback: str = ""
    _user_class: type[BaseException] | None = None

    @property
    def role(self) -> str:
        """The same as `mesh`."""
        return self.mesh

    def __str__(self) -> str:
        if not self.exception_type:
            return super().__str__()
        place = where(self.mesh, self.rank, self.host, self.endpoint)
        head = f"{place} raised {self.exception_type}: {self.text}".rstrip(": ")
        return f"{head}\n\nTraceback of {place}:\n{self.remote_traceback}" if self.remote_traceback else head

    def __reduce__(self) -> Any:
        user = self._user_class
        state = {k: v for k, v in self.__dict__.items() if k != "_user_class"}
        return _rebuild, (type(self) if user is None else user, self.args, state)


class Death(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The exit record of a process."""

    exit_code: int | None = None
    """None when a signal ended it, or when nobody on this side can know (a child of torchrun)."""
    signal: int | None = None
    oom: str = ""
    """Evidence that memory ran out; empty when there is none."""
    stderr_tail: tuple[str, ...] = ()
    peak_memory: int = 0
    """Largest resident size in bytes, 0 when unknown."""

    def describe(self) -> str:
        """One clause, such as `killed by SIGKILL`."""
        if self.signal is not None:
            text = f"killed by {signal_name(self.signal)}"
        elif self.exit_code is not None:
            text = f"exited with code {self.exit_code}"
        else:
            text = "gone (its exit status is known to its own parent only)"
        if self.peak_memory:
            text += f", peak memory {self.peak_memory / 2**20:.0f} MiB"
        return f"{text}; {self.oom}" if self.oom else text


class ProcessDied(ActorError):
    """The process of an actor is gone: raised by every pending and later call to it."""

    def __init__(self, mesh: str, rank: int | None, host: str, endpoint: str, death: Death) -> None:
        super().__init__(mesh, rank, host, endpoint, death)
        self.mesh, self.rank, self.host, self.endpoint, self.death = mesh, rank, host, endpoint, death

    @property
    def signal(self) -> int | None:
        """Number of the signal that ended the process, None when it ended otherwise."""
        return self.death.signal

    @property
    def exit_code(self) -> int | None:
        """Exit code, None when a signal ended the process."""
        return self.death.exit_code

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        """The last lines that the process wrote to stderr."""
        return self.death.stderr_tail

    def __str__(self) -> str:
        head = f"{where(self.mesh, self.rank, self.host, self.endpoint)}: process {self.death.describe()}"
        if not self.stderr_tail:
            return head
        return "\n".join([head, "Last lines of its stderr:", *(f"  {line}" for line in self.stderr_tail)])

    def __reduce__(self) -> Any:
        return ProcessDied, (self.mesh, self.rank, self.host, self.endpoint, self.death)


class DeadlineExceeded(TuttiError, TimeoutError):
    """The deadline of a call or task has passed; what ran remotely was told to stop."""


class Stopped(TuttiError):
    """The mesh (or host) was stopped while the call was pending, or before it was made."""


class MailboxFull(TuttiError):
    """A call with `options(wait=False)` found the mailbox of an actor full."""


class Oversize(TuttiError, ValueError):
    """One message is larger than the limit. Nothing was sent; the connection stays good."""


class SelfCall(TuttiError, RuntimeError):
    """The call could never run: the actor that must serve it waits, directly or through others, for its result."""


class ShapeError(TuttiError, ValueError):
    """Sizes, parts or coordinates that don't fit together."""


class UnknownDimension(ShapeError):
    """A mesh has no dimension of this name."""


class OutOfRange(TuttiError, IndexError):
    """No such rank or index, or a slice that selects nothing."""


class UnknownActor(TuttiError, LookupError):
    """`lookup` found no living actors of this name, or several meshes of it."""


class ConnectionRefused(TuttiError, ConnectionError):
    """A process did not answer at its address."""


class PeerRefused(ConnectionRefused):
    """The other end of a connection did not prove that it knows the secret of this job, or did not believe this one."""


class StartError(TuttiError):
    """A process could not be started, or did not answer in time."""


class NotEnoughGpus(TuttiError, ValueError):
    """Processes asked for more GPUs than this host has, or than are free."""


class RendezvousError(TuttiError):
    """The ranks of torchrun did not find each other, or fewer joined than were asked for."""


def where(mesh: str, rank: int | None, host: str, endpoint: str) -> str:
    """`trainer rank 1 on host a, train_step`: how all messages name a place."""
    text = mesh if rank is None else f"{mesh} rank {rank}"
    if host:
        text += f" on {host}"
    return f"{text}, {endpoint}" if endpoint else text


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


class PackedError(msgspec.Struct, frozen=True, array_like=True):
    """An exception as it travels."""

    exception_type: str
    text: str
    traceback: str
    content: bytes = b""
    """(class, args, attributes) as `codec.dumps` writes them; empty when only the text travels (ER-2)."""


def pack_error(error: BaseException) -> PackedError:
    """Make an exception ready to travel. Never raises for an exception that can't be pickled (ER-2)."""
    cls: type[BaseException] = type(error)
    if isinstance(error, ActorError) and error._user_class is not None:
        cls = error._user_class
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    text = _safe_text(error)
    trace = "".join(traceback.format_exception(error.with_traceback(_user_frames(error.__traceback__))))
    packed = b""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        attributes = {k: v for k, v in error.__dict__.items() if k != "_user_class" and _travels(v)}
        # The file names of an OSError are in its fields, not in `args`; its own pickling puts them back.
        args = OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args
        args = tuple(a if _travels(a) else repr(a) for a in args)
        try:
            packed = codec.dumps((cls, args, attributes))
        except Exception:  # a class can refuse in any way it likes; the text still travels
            packed = b""
    return PackedError(name, text, trace, packed)


def unpack_error(packed: PackedError, mesh: str, rank: int | None, host: str, endpoint: str) -> ActorError:
    """Rebuild an exception at the caller (ER-1), or what is left of it (ER-2)."""
    error: ActorError | None = None
    if packed.content:
        try:
            error = _rebuild(*codec.loads(packed.content))
        except Exception:  # unpickling runs foreign code; whatever it raises, the user's error must not be lost
            error = None
    if error is None:
        error = ActorError(packed.text)
    # Through __dict__: the user's class may be a frozen dataclass, or have a __setattr__ of its own.
    error.__dict__.update(
        mesh=mesh,
        rank=rank,
        host=host,
        endpoint=endpoint,
        exception_type=packed.exception_type,
        text=packed.text,
        remote_traceback=packed.traceback,
    )
    return error


_derived: dict[type[BaseException], type[ActorError]] = {}


def _both(user: type[BaseException]) -> type[ActorError]:
    """The class that is `user` and `ActorError` at once."""
    cls = _derived.get(user)
    if cls is None:
        if issubclass(user, ProcessDied):
            # Keep str() and properties of its own: wrapped once more it is about the actor that made the call.
            bases: tuple[type, ...] = (_Relayed, user)
        elif issubclass(user, ActorError):
            bases = (user,)
        else:
            bases = (ActorError, user)
        body = {"_user_class": user, "__module__": user.__module__, "__qualname__": user.__qualname__}
        cls = _derived[user] = type(user.__name__, bases, body)
    return cls


class _Relayed(ActorError):
    """A ProcessDied that an actor met in a call of its own and passed on."""

    __str__ = ActorError.__str__
    __reduce__ = ActorError.__reduce__


def _rebuild(user: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> ActorError:
    if not issubclass(user, Exception):
        raise TypeError(f"{user.__qualname__} is no exception")
    cls = _both(user)
    error = cls.__new__(cls, *args)
    if not isinstance(error, OSError):
        error.args = args
    init: Any = user.__init__
    if type(init).__name__ == "wrapper_descriptor":
        # Classes written in C keep fields that only their __init__ sets (OSError.errno, UnicodeError.start).
        init(error, *args)
    error.__dict__.update(attributes)
    return error


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame outside of this package; the whole one when there is none."""
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "runtime":
        inner = inner.tb_next
    return inner or trace


def _safe_text(error: BaseException) -> str:
    if isinstance(error, ActorError) and error.exception_type:
        return error.text
    try:
        return str(error)
    except Exception as second:  # a __str__ of user code
        return f"<no text: __str__ raised {type(second).__name__}>"


def _travels(value: object) -> bool:
    if isinstance(value, str | int | float | bool | bytes | None):
        return True
    return codec.can_be_sent(codec.loosely(value))
