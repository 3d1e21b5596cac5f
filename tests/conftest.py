"""The suite polices itself.

PO-1: after each test no process is left that it started, itself or through others (R10); they get GRACE seconds to go.
PO-2: no entry in shared memory is left, unless a process that is not ours holds it open.
PO-3: no socket of this process stays open, and no thread that would keep the interpreter alive.
PO-4: a test that needs an accelerator (`gpu`) is skipped where there is none; torch is not imported to find out.
PO-5: several files of tests may run at a time (`make unit`): what a test looks at is its own, never the whole host's.

Processes are found by a mark in their environment, which children inherit through fork and exec, and which each process
that runs tests has of its own: nobody else's process is ever blamed, and nothing is ended by name. A test that leaves a
process fails, and that process alone is then ended, so that the next test starts clean. In the good case all of this
costs about a millisecond.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

GRACE = 2.0
"""Seconds that ended processes get to disappear: R10 says one, a loaded machine gets two."""

LOOKS = 5
"""And so many looks, however long one takes: a stranger's shared memory is there before it is seen in his hands."""

MARK = f"TUTTI_TEST_SESSION={uuid.uuid4().hex}"

SHARED_MEMORY = Path("/dev/shm")
PROC = Path("/proc")

TRACKERS = ("multiprocessing.resource_tracker",)
SESSION_LONG = (*TRACKERS, "multiprocessing.forkserver")
"""The standard library's own helpers, started once and ended with the interpreter."""


settings.register_profile(
    "suite",
    max_examples=60,
    deadline=None,  # how fast an example runs is the machine's affair
    derandomize=bool(os.environ.get("CI")),  # a change is never judged by luck; at the desk, luck may find something
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    name, _, value = MARK.partition("=")
    os.environ[name] = value
    # Tests share few cores; ranks that want more threads say so.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists():
        return
    skip = pytest.mark.skip(reason="needs an accelerator, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


class Inventory(NamedTuple):
    """What a test may not add to."""

    processes: frozenset[int]
    shared_memory: frozenset[str]
    sockets: frozenset[str]
    threads: frozenset[int]

    @classmethod
    def take(cls) -> Inventory:
        return cls(
            processes=frozenset(int(name) for name in os.listdir(PROC) if name.isdecimal()),
            shared_memory=frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else frozenset(),
            sockets=frozenset(link for link in open_files("self") if link.startswith("socket:")),
            threads=frozenset(thread.ident or 0 for thread in threading.enumerate() if not thread.daemon),
        )


def open_files(pid: int | str) -> list[str]:
    """Targets of the open file descriptors of a process; what has gone meanwhile is left out."""
    links: list[str] = []
    with suppress(OSError):
        for fd in os.listdir(PROC / str(pid) / "fd"):
            with suppress(OSError):
                links.append(os.readlink(PROC / str(pid) / "fd" / fd))
    return links


def is_ours(pid: int) -> bool:
    """True for a living process (not a zombie) that carries this session's mark."""
    try:
        if MARK.encode() not in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            return False
        return "\nState:\tZ" not in (PROC / str(pid) / "status").read_text()
    except OSError:
        return False


def command_of(pid: int) -> str:
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "?"


def left_processes(before: Inventory, after: Inventory) -> dict[int, str]:
    new = (pid for pid in after.processes - before.processes if is_ours(pid))
    commands = {pid: command_of(pid) for pid in new}
    return {pid: command for pid, command in commands.items() if not any(name in command for name in SESSION_LONG)}


def left_shared_memory(before: Inventory, after: Inventory) -> list[str]:
    """New entries that no stranger holds open: another program may use shared memory while we run."""
    new = {str(SHARED_MEMORY / name) for name in after.shared_memory - before.shared_memory}
    if not new:
        return []
    for pid in after.processes:
        if pid == os.getpid() or is_ours(pid):
            continue
        with suppress(OSError):
            held = (PROC / str(pid) / "maps").read_text()
            new -= {path for path in new if path in held}
        new -= set(open_files(pid))
    if any(name in command_of(pid) for pid in after.processes if not is_ours(pid) for name in TRACKERS):
        # What a stranger had who was killed is in nobody's hands until his resource tracker ends.
        new = {path for path in new if not path.startswith((f"{SHARED_MEMORY}/sem.mp-", f"{SHARED_MEMORY}/psm_"))}
    return sorted(path for path in new if os.path.exists(path))


def left_threads(before: Inventory, after: Inventory) -> list[str]:
    return [t.name for t in threading.enumerate() if t.ident in after.threads - before.threads and not t.daemon]


def leftovers(before: Inventory) -> tuple[list[str], dict[int, str]]:
    """What is there now and was not before, as lines for a person; the processes also by id."""
    after = Inventory.take()
    processes = left_processes(before, after)
    lines = [f"process {pid}: {command}" for pid, command in sorted(processes.items())]
    lines += [f"shared memory {path}" for path in left_shared_memory(before, after)]
    lines += [f"open {socket}" for socket in sorted(after.sockets - before.sockets)]
    lines += [f"thread {name!r} that is not a daemon" for name in left_threads(before, after)]
    return lines, processes


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails a test that leaves processes, shared memory, sockets or threads (PO-1, PO-2, PO-3)."""
    before = Inventory.take()
    yield
    lines, processes = leftovers(before)
    if not lines:
        return
    gc.collect()  # a socket in a reference cycle is not a leak of the code under test
    deadline, looks = time.monotonic() + GRACE, 0
    while lines and (time.monotonic() < deadline or looks < LOOKS):
        time.sleep(0.02)
        lines, processes = leftovers(before)
        looks += 1
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if lines:
        pytest.fail("the test left behind:\n  " + "\n  ".join(lines), pytrace=False)
