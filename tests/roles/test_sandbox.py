"""SB-1 to SB-4: what code in the sandbox can do, tried for real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roles import sandbox
from roles.sandbox import run

try:
    run("")
except sandbox.SandboxError as error:
    pytest.skip(f"this kernel can't lock a process in: {error}", allow_module_level=True)


def test_a_program_reads_its_input_and_prints():
    result = run("print(int(input()) * 2)", stdin="21\n")
    assert (result.outcome, result.stdout, result.exit_code) == ("ok", "42\n", 0)


def test_the_standard_library_threads_and_the_own_folder_work():
    code = """
import collections, heapq, itertools, json, math, re, threading
done = threading.Event()
thread = threading.Thread(target=done.set)
thread.start(); thread.join()
open("notes.txt", "w").write("kept")
print(done.is_set(), open("notes.txt").read())
"""
    result = run(code)
    assert (result.outcome, result.stdout) == ("ok", "True kept\n"), result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
        "import socket; socket.socketpair()",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal; os.kill(1, signal.SIGTERM)",
        "import os, signal; os.killpg(0, signal.SIGKILL)",
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "open('/proc/1/cmdline').read()",
        "open('/tmp/sandbox-was-here', 'w')",
        "open('/dev/shm/sandbox-was-here', 'w')",
        "open('../job.json').read()",
        "import os; os.listdir('/')",
        "import os; os.symlink('/etc/passwd', 'link'); open('link').read()",
        "import os; os.unshare(os.CLONE_NEWUSER)" if sys.version_info >= (3, 12) else "import os; os.chroot('/')",
    ],
)
def test_what_reaches_outside_is_refused(code):  # SB-3
    result = run(code)
    assert result.outcome == "error"
    assert "PermissionError" in result.stderr


def test_time_is_wall_clock_time_and_the_process_is_gone_afterwards():  # SB-2
    began = time.monotonic()
    assert run("import time; time.sleep(60)", seconds=0.3).outcome == "time"
    assert run("while True: pass", seconds=0.3).outcome == "time"
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = bytearray(10**9)", "MemoryError"),
        ("x = [0]\nwhile True: x += x", "MemoryError"),
        ("while True: print('a' * 100_000)", "File too large"),
        ("open('big', 'wb').write(bytes(10_000_000))", "File too large"),
        ("files = [open(f'f{i}', 'w') for i in range(100)]", "Too many open files"),
    ],
)
def test_memory_output_and_files_are_limited_by_the_kernel(code, words):  # SB-2
    result = run(code, seconds=20)
    assert result.outcome == "error"
    assert words in result.stderr
    assert len(result.stdout) <= sandbox.OUTPUT_LIMIT


def test_a_crash_of_the_interpreter_is_told_by_its_signal():
    result = run("import ctypes; ctypes.string_at(0)")
    assert (result.outcome, result.stderr) == ("killed", "ended by SIGSEGV")
    assert run("import sys; sys.exit(3)").exit_code == 3
    assert "SyntaxError" in run("def").stderr


def test_nothing_of_our_environment_is_there(monkeypatch):  # SB-1
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = run("import os, sys; print(sorted(os.environ), sys.argv, 'site' in sys.modules, os.listdir('.'))")
    assert "SECRET_TOKEN" not in result.stdout
    assert result.stdout.endswith("['answer.py'] False []\n")


def test_it_dies_with_the_process_that_runs_it():  # SB-4
    code = "from roles.sandbox import run; run('import time; time.sleep(60)', seconds=60)"
    runner = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not (children := children_of(runner.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children
    while b"sandbox_child" not in command_of(children[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # it locks itself in first
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    while os.path.exists(f"/proc/{children[0]}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{children[0]}")


def test_a_child_that_cannot_lock_itself_in_is_an_error_of_the_sandbox_not_of_the_code(monkeypatch, tmp_path):  # SB-3
    broken = tmp_path / "child.py"
    text = sandbox.BOOT.read_text().replace("version < 1", "True")  # as on a kernel without Landlock
    broken.write_text(text)
    monkeypatch.setattr(sandbox, "BOOT", broken)
    with pytest.raises(sandbox.SandboxError, match="this kernel has no Landlock; allow less isolation to run all the"):
        run("print(1)")
    assert run("print(1)", weaker=True).stdout == "1\n"


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_a_coroutine_runs_programs_side_by_side_and_a_cancelled_one_ends():
    results = await asyncio.gather(*(sandbox.run_async(f"print({i} * {i})", seconds=20) for i in range(4)))
    assert [result.stdout for result in results] == ["0\n", "1\n", "4\n", "9\n"]
    assert (await sandbox.run_async("while True: pass", seconds=0.3)).outcome == "time"
    endless = asyncio.create_task(sandbox.run_async("import time; time.sleep(100)", seconds=100))
    await asyncio.sleep(0.3)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless  # and the suite finds that nothing is left
