"""The store by which ranks of a network transport find each other: `gloo`, `nccl` and `nixl` host one.

ST-1: it is bound to the address of one interface and to a free port, which is known before anybody connects.
ST-2: it holds the proof that whoever opened it has reached this sender and no other.
"""

from __future__ import annotations

import fcntl
import secrets
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

from sync.transport import Link, TransportError

__all__ = ["PROOF", "host_store"]

PROOF = "proof"
"""Key of the proof (ST-2)."""


def host_store(link: Link) -> tuple[dist.TCPStore, str]:
    """A store of this process, and the address that the others open.

    Raises:
        TransportError: the interface has no IPv4 address.
    """
    address = address_of(link.interface)
    listener = socket.create_server((address, 0), backlog=128)
    port = int(listener.getsockname()[1])
    timeout = timedelta(seconds=link.deadline_s)
    store = dist.TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    store.set(PROOF, secrets.token_hex(16))
    return store, f"{address}:{port}"


def address_of(interface: str) -> str:
    """IPv4 address of a network interface of this host. Raises TransportError when it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise TransportError(
                f"network interface {interface!r} has no IPv4 address here ({error.strerror}); set [sync] "
                f"interface to one of {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
