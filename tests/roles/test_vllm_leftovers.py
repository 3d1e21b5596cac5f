"""Promises of roles/vllm_leftovers.py, with processes that do what vLLM's do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from roles.vllm_leftovers import Tracker, children_of, shared_memory_of

LEADER = """
    import multiprocessing, sys, time
    from multiprocessing import shared_memory
    from roles.vllm_leftovers import Tracker

    def child(lock, pipe):
        memory = shared_memory.SharedMemory(create=True, size=4096)
        pipe.send(memory.name)
        time.sleep(60)

    if __name__ == "__main__":
        Tracker()
        context = multiprocessing.get_context("spawn")
        memory = shared_memory.SharedMemory(create=True, size=4096)
        mine, theirs = context.Pipe()
        lock = context.Lock()
        process = context.Process(target=child, args=(lock, theirs))
        process.start()
        print(memory.name, mine.recv(), flush=True)
        time.sleep(60)
"""


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "leader.py"
    script.write_text(textwrap.dedent(LEADER))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def within_a_second(gone: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 1
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone()


def runs(pid: int) -> bool:
    """Whether it does, and is not only waiting for its status to be taken."""
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_a_killed_group_has_named_is_gone_and_what_others_have_is_not_vl1(leader: subprocess.Popen[str]) -> None:
    other = shared_memory.SharedMemory(create=True, size=4096)
    assert leader.stdout is not None
    named = {Path("/dev/shm") / name for name in leader.stdout.readline().split()}
    tree = [leader.pid, *children_of(leader.pid)]
    mapped = set(shared_memory_of(tree))
    assert named <= mapped
    assert any(path.name.startswith("sem.mp-") for path in mapped)
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    assert within_a_second(lambda: not any(path.exists() for path in mapped))
    assert within_a_second(lambda: not any(runs(pid) for pid in tree))  # VL-2
    assert Path("/dev/shm", other.name.lstrip("/")).exists()
    other.close()
    other.unlink()


def test_a_tracker_that_ends_leaves_what_was_known_before() -> None:
    before = shared_memory.SharedMemory(create=True, size=4096)
    tracker = Tracker()
    within = shared_memory.SharedMemory(create=True, size=4096)
    within.close()
    tracker.end()
    assert within_a_second(lambda: not Path("/dev/shm", within.name.lstrip("/")).exists())
    assert Path("/dev/shm", before.name.lstrip("/")).exists()
    before.close()
    before.unlink()
