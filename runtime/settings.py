"""What can be set on a host; `this_host(...)` takes each by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from runtime import auth
from runtime.auth import LOOPBACK, Tls, Trust
from runtime.frames import MAX_MESSAGE_BYTES
from runtime.logs import Sink, check_levels
from runtime.sockets import parse_address
from runtime.supervise import Owner


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a host.

    Raises:
        ValueError: the listen address isn't allowed, the secret is too short, or a log level doesn't exist.
        OSError: the secret or a certificate can't be read.
    """

    log_dir: str | Path | None = None
    """Folder for one log file a rank; None keeps none."""
    log: Mapping[str, str] = {}
    """Level of `logging` by name of a mesh of processes, such as `{"trainer": "info"}`. Default: warning."""
    sink: Sink | None = None
    """Gets each line that a worker prints, with its prefix. Default: stderr."""
    preload: list[str] | None = None
    """Modules that the fork server imports once, in the background. Default: those of numpy, torch and transformers
    that this process has imported."""
    processes: int | None = None
    """How many will run here in all, for the defaults of their threads and cores. Default: those that run."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Limit of one message; a larger one raises Oversize at the sender."""
    owner: Owner | None = None
    """Has a `__supervise__` that is told of failures which the owners of meshes did not handle."""
    listen: str | None = None
    """`tcp://ADDRESS:0` lets processes talk over TCP, which also reaches other hosts. Default: Unix sockets."""
    bind: Sequence[str] = LOOPBACK
    """Networks to which they may bind TCP sockets; nothing beyond this machine unless it stands here."""
    tls: Tls | None = None
    """Certificates for TCP."""
    pickle: bool = True
    """Whether values without a type that msgspec knows may cross, as pickles. They run code on arrival."""
    abort_after: float = 5.0
    """Seconds after the failure of one rank of a call until the torch.distributed groups of those ranks are aborted
    which still run it: they may wait for the failed one."""
    standstill: float | None = 300.0
    """Seconds without any message after which `report()` is logged, if calls are pending. None: never."""

    def __post_init__(self) -> None:
        check_levels(self.log)

    def trust(self) -> Trust:
        """With the secret of `TUTTI_SECRET_FILE` or `TUTTI_SECRET`, or a fresh one. Raises as the class."""
        secret = auth.secret_from(os.environ) or auth.new_secret()
        trust = Trust(secret=secret, tls=self.tls, bind=tuple(self.bind), pickle=self.pickle)
        if self.listen is not None:
            trust.check_listen(parse_address(self.listen))
        return trust

    def log_level(self, name: str) -> str:
        """Of a mesh; `reward` stands for `reward.0`, `reward.1` and so on."""
        levels = check_levels(self.log)
        return levels.get(name) or levels.get(name.partition(".")[0]) or "warning"
