"""R10: whatever ends the controller leaves no process, no socket and no folder. Real signals to a real program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LEFT_SECONDS = 2.0
"""R10 says one second; a loaded machine gets two."""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("start", ["fork", "fresh", "tcp"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_signal_to_the_controller_leaves_nothing(number, start):
    root = Path(__file__).parents[2]
    controller = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.controllers", start],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test runner in the background of a shell ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert controller.stdout is not None
    words = controller.stdout.readline().split()
    folder, pids = Path(words[0]), [int(word) for word in words[1:]]
    assert len(pids) == 6
    assert all(alive(pid) for pid in pids)
    os.kill(controller.pid, number)
    _, stderr = controller.communicate(timeout=20)
    deadline = time.monotonic() + LEFT_SECONDS
    while (any(alive(pid) for pid in pids) or folder.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in pids if alive(pid)] == []
    assert not folder.exists()
    assert controller.returncode == -number
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in stderr
