"""Freeing a rank that waits in a collective for a peer that will not come (R3).

AB-1: `abort_collectives` makes what waits in a gloo or NCCL group of this process raise. It may be called from any
      thread, and does nothing where there is no group.
AB-2: groups are of no use afterwards: `ProcMesh.init_process_group` makes new ones.
AB-3: other sockets of the process stay as they are: those of gloo are told from them by the epoll set that gloo's own
      thread waits on, which holds nothing but one pipe, one listening socket and the connections to peers.

NCCL has a way to abort. gloo has none (`ProcessGroup.abort` returns and the rank waits on), but it gives up an
operation when a connection ends, so we end its connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

_FDS = "/proc/self/fd"


def abort_collectives() -> list[str]:
    """End what waits in torch.distributed groups of this process (AB-1). Returns the back ends that were told."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    told = []
    if "nccl" in _backends(dist):
        # Older torch lacks it; there the time limit of the group is what ends the wait.
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None:
            abort()
            told.append("nccl")
    connections = gloo_connections()
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # the other side may have gone meanwhile
            connection.shutdown(socket.SHUT_RDWR)
    if connections:
        told.append("gloo")
    return told


def gloo_connections() -> list[socket.socket]:
    """The connections of gloo to peers, as descriptors of their own (AB-3)."""
    found: list[socket.socket] = []
    for name in os.listdir(_FDS):
        if _target(name) == "anon_inode:[eventpoll]":
            found += _if_of_gloo(_watched(name))
    return found


def _if_of_gloo(descriptors: list[str]) -> list[socket.socket]:
    """Connections among the descriptors of one epoll set; none when the set isn't one of gloo."""
    pipes = listening = 0
    connections: list[socket.socket] = []
    gloo = True
    for name in descriptors:
        target = _target(name)
        if target.startswith("pipe:"):
            pipes += 1
            continue
        sock = _tcp_socket(name) if target.startswith("socket:") else None
        if sock is None:
            gloo = False
        elif sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listening += 1
            sock.close()
        else:
            connections.append(sock)
    if gloo and pipes == 1 and listening == 1:
        return connections
    for sock in connections:
        sock.close()
    return []


def _watched(epoll: str) -> list[str]:
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{epoll}") as file:
        return [line.split()[1] for line in file if line.startswith("tfd:")]
    return []


def _tcp_socket(name: str) -> socket.socket | None:
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=os.dup(int(name)))
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
            return sock
        sock.close()
    return None


def _target(name: str) -> str:
    with contextlib.suppress(OSError):  # closed meanwhile
        return os.readlink(f"{_FDS}/{name}")
    return ""


def _backends(dist: Any) -> set[str]:
    return {str(name) for name, _ in dist.distributed_c10d._world.pg_map.values()}
