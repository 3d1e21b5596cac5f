"""Time limits: LI-1 soft, LI-2 hard, LI-3 late is not done, LI-4 nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from roles.limits import TimeUp, limited, stuck_at


def test_what_is_quick_returns_its_value_and_its_errors():
    assert limited(lambda: 3, 10.0) == 3
    with pytest.raises(ZeroDivisionError):
        limited(lambda: 1 // 0, 10.0)


def spin() -> None:
    while True:
        pass


def backtrack() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")  # in C, but CPython's matcher looks at signals


@pytest.mark.parametrize("endless", [lambda: time.sleep(60), spin, backtrack], ids=["sleep", "spin", "regex"])
def test_python_is_interrupted_at_the_limit(endless):  # LI-1
    with pytest.raises(TimeUp):
        limited(endless, 0.1)


def test_an_except_exception_does_not_take_the_interruption():  # LI-1
    def stubborn() -> None:
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)

    with pytest.raises(TimeUp):
        limited(stubborn, 0.1)


def test_a_late_result_does_not_count_even_if_the_interruption_was_swallowed():  # LI-3
    def swallow() -> int:
        try:
            time.sleep(60)
        except BaseException:
            return 1
        return 0

    with pytest.raises(TimeUp):
        limited(swallow, 0.1)


def test_a_late_result_does_not_count_even_if_the_timer_was_taken_over():  # LI-3
    def take_over() -> int:
        signal.alarm(0)
        time.sleep(0.2)
        return 1

    with pytest.raises(TimeUp):
        limited(take_over, 0.1)


@pytest.mark.parametrize(
    "endless",
    [
        "all(itertools.repeat(True))",  # one call in C that holds the interpreter and never looks at signals
        "[swallow() for _ in iter(int, 1)]",
    ],
    ids=["stuck in C", "swallows"],
)
def test_what_cannot_be_interrupted_ends_its_process_and_says_where(endless: str):  # LI-2
    program = f"""
import itertools, time
from roles import limits
def swallow():
    try: time.sleep(60)
    except BaseException: pass
limits.HARD_MARGIN = 0.2
limits.limited(lambda: {endless}, 0.1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    place = stuck_at(ended.stderr.splitlines())
    assert place is not None
    assert re.fullmatch(r'File "<string>", line \d+ in (<lambda>|swallow)', place)


def test_where_it_was_stuck_is_read_from_the_stack_of_the_right_thread():
    # As written by faulthandler; the first stack is that of another thread.
    lines = [
        "Timeout (0:00:03)!",
        "Thread 0x1 (most recent call first):",
        '  File "loop.py", line 5 in run',
        "",
        "Thread 0x2 (most recent call first):",
        '  File "mine.py", line 26 in verify',
        '  File "roles/limits.py", line 58 in limited',
    ]
    assert stuck_at(lines) == 'File "mine.py", line 26 in verify'
    assert stuck_at(lines[:4]) == "unknown"
    assert stuck_at(["Segmentation fault"]) is None


def test_timer_and_handler_of_others_are_as_before_and_their_time_goes_on():  # LI-4
    def mine(*_: object) -> None: ...

    handler = signal.signal(signal.SIGALRM, mine)
    outer = signal.setitimer(signal.ITIMER_REAL, 40.0, 7.0)
    try:
        limited(lambda: time.sleep(0.05), 10.0)
        with pytest.raises(TimeUp):
            limited(lambda: time.sleep(60), 0.05)
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert signal.getsignal(signal.SIGALRM) is mine
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *outer)
    assert left < 39.91
    assert interval == 7.0


def test_another_thread_is_refused_rather_than_run_without_limit():
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            limited(lambda: 1, 1.0)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
