"""Who may talk to a process: the secret of a job, and the proof that both ends of a connection know it.

    dialled                                   accepted
      | ---- magic, nonce a ------------------> |
      | <--- magic, nonce b, MAC("accepted") -- |      MAC(x) = HMAC-SHA256(secret, magic | x | a | b)
      | ---- MAC("dialled") ------------------> |

AU-1: nothing that a peer sends is decoded before it has proven that it knows the secret; the proof goes both ways, also
      over Unix sockets.
AU-2: each side's nonce is fresh for the connection, so recorded bytes prove nothing later; the two MACs differ, so a
      side can't be answered with its own.
AU-3: an unproven peer has `handshake_seconds` in all, however slowly it sends, and gets no more than the bytes of the
      handshake read.
AU-4: a refused peer is counted by reason and told in the log, the 1st, 2nd, 4th, 8th ... time of a reason; nothing else
      of the job notices.
AU-5: the secret travels to child processes through inherited files, never in a command line; it is kept out of the
      environment of children and out of every `repr`.

The handshake authenticates a connection; it doesn't encrypt. Between hosts whose network others can write to, add TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from runtime.errors import PeerRefused

if TYPE_CHECKING:
    import ssl

    from runtime.sockets import Address

SECRET_VARIABLE = "TUTTI_SECRET"
"""Environment variable with the secret of a job as text."""
SECRET_FILE_VARIABLE = "TUTTI_SECRET_FILE"
"""Environment variable with the path of a file that holds it."""
SECRET_FILE = "secret"
"""Name of the file in the run directory (mode 0600) by which other processes of the same user find it."""
MIN_SECRET_BYTES = 16

LOOPBACK = ("127.0.0.0/8", "::1/128")

Reason = Literal["unauthenticated", "slow", "malformed", "oversized", "crowd"]

_MAGIC = b"tutti\x00\x00\x01"
_NONCE_BYTES = 32
_MAC_BYTES = 32

_log = logging.getLogger(__name__)


class Tls(msgspec.Struct, frozen=True):
    """Certificates of this job for TCP: both ends show one signed by `ca`. Paths of PEM files, on every host."""

    cert: str
    key: str
    ca: str

    def context(self, *, server: bool) -> ssl.SSLContext:
        """
        Raises:
            OSError: a file can't be read.
            ssl.SSLError: a file isn't what it should be.
        """
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # hosts are reached by address; who they are, CA and secret tell
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.cert, self.key)
        context.load_verify_locations(self.ca)
        return context


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """What a job trusts."""

    secret: bytes
    tls: Tls | None = None
    """For TCP. None: authenticated, but readable by whoever can read the network."""
    bind: tuple[str, ...] = LOOPBACK
    """Networks to which its processes may bind TCP sockets."""
    pickle: bool = True
    """Whether proven peers may send pickles."""
    handshake_seconds: float = 15.0

    def __repr__(self) -> str:
        return f"<Trust tls={self.tls is not None} bind={self.bind} pickle={self.pickle}>"

    def check_listen(self, address: Address) -> None:
        """
        Raises:
            ValueError: a process of this job must not listen there, or it isn't an IP address.
            OSError: a certificate can't be used.
        """
        if address.scheme == "unix":
            return
        try:
            ip = ipaddress.ip_address(address.host)
        except ValueError:
            raise ValueError(
                f"listen address {address}: expected the IP address that others reach, such as tcp://127.0.0.1:0"
            ) from None
        if ip.is_unspecified:
            raise ValueError(
                f"listen address {address}: expected one address that others reach, not all of them. Write it out, "
                "such as tcp://10.0.0.5:0"
            )
        if not any(ip in ipaddress.ip_network(network) for network in self.bind):
            raise ValueError(
                f"listen address {address}: not within {', '.join(self.bind)}. To be reachable there, allow it: "
                f"this_host(bind=[{address.host!r}])"
            )
        if self.tls is not None:
            for server in (True, False):
                self.tls.context(server=server)


def secret_from(environment: Mapping[str, str]) -> bytes | None:
    """The secret that the user has set: the file of `TUTTI_SECRET_FILE`, or `TUTTI_SECRET`; None when neither is.

    Raises:
        ValueError: it is shorter than `MIN_SECRET_BYTES`.
        OSError: the file can't be read.
    """
    path = environment.get(SECRET_FILE_VARIABLE)
    if path:
        secret, source = Path(path).read_bytes().strip(), path
    elif SECRET_VARIABLE in environment:
        secret, source = environment[SECRET_VARIABLE].strip().encode(), SECRET_VARIABLE
    else:
        return None
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{source}: expected a secret of at least {MIN_SECRET_BYTES} bytes, got {len(secret)}. "
            "Make one: openssl rand -hex 32"
        )
    return secret


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def without_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """What child processes get of an environment (AU-5)."""
    return {k: v for k, v in environment.items() if k != SECRET_VARIABLE}


def write_secret(folder: Path, secret: bytes) -> None:
    """Leave the secret in a run directory, for this user only."""
    descriptor = os.open(folder / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)


class Handshake:
    """One side of the proof, without sockets: feed it exactly `needs` bytes at a time, send what it returns."""

    def __init__(self, secret: bytes, *, dialled: bool) -> None:
        self.needs = len(_MAGIC) + _NONCE_BYTES + (_MAC_BYTES if dialled else 0)
        self.done = False
        """The other side has proven itself."""
        self._secret = secret
        self._dialled = dialled
        self._own = secrets.token_bytes(_NONCE_BYTES)
        self._theirs = b""

    def start(self) -> bytes:
        """What this side sends first."""
        return _MAGIC + self._own if self._dialled else b""

    def feed(self, data: bytes) -> bytes:
        """Take `needs` bytes; returns the answer.

        Raises:
            PeerRefused: the other side does not know the secret, or doesn't speak this protocol.
        """
        if self._theirs:  # accepted: the last step
            self._check(data, "dialled")
            return b""
        magic, rest = data[: len(_MAGIC)], data[len(_MAGIC) :]
        if magic != _MAGIC:
            raise PeerRefused("it does not speak the protocol of this version")
        self._theirs, proof = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
        if self._dialled:
            self._check(proof, "accepted")
            return self._mac("dialled")
        self.needs = _MAC_BYTES
        return _MAGIC + self._own + self._mac("accepted")

    def _check(self, proof: bytes, side: str) -> None:
        if not hmac.compare_digest(proof, self._mac(side)):
            raise PeerRefused("it does not know the secret of this job")
        self.done = True

    def _mac(self, side: str) -> bytes:
        first, second = (self._own, self._theirs) if self._dialled else (self._theirs, self._own)
        return hmac.digest(self._secret, b"|".join((_MAGIC, side.encode(), first, second)), hashlib.sha256)


def prove(sock: socket.socket, secret: bytes, *, dialled: bool, seconds: float = 5.0) -> None:
    """The handshake over a blocking socket, for programs without an event loop.

    Raises:
        PeerRefused: the other side has not proven itself in time.
    """
    handshake = Handshake(secret, dialled=dialled)
    end = time.monotonic() + seconds
    try:
        sock.settimeout(seconds)
        sock.sendall(handshake.start())
        while not handshake.done:
            data = b""
            while len(data) < handshake.needs:
                sock.settimeout(max(0.001, end - time.monotonic()))
                part = sock.recv(handshake.needs - len(data))
                if not part:
                    raise PeerRefused("it closed the connection during the handshake: it has another secret")
                data += part
            sock.sendall(handshake.feed(data))
    except TimeoutError:
        raise PeerRefused(f"no proof within {seconds} s") from None
    sock.settimeout(None)


class Refusals:
    """Peers that this process has refused (AU-4)."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        """By reason."""

    def note(self, reason: Reason, who: str, detail: object) -> None:
        """Count one, and tell of it when its number is a power of two."""
        self.count[reason] += 1
        number = self.count[reason]
        if number & (number - 1) == 0:
            _log.warning("dropped a peer (%s, number %d): %s: %s", reason, number, who, detail)
