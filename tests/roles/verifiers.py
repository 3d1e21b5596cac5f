"""Verifiers that misbehave on demand: the text of a completion says how. Imported by reward workers."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time

from roles.types import Prompt


def obey(prompt: Prompt, text: str) -> object:
    """Numbers are returned as the verdict; words are obeyed."""
    match text:
        case "sleep":
            time.sleep(60)
        case "spin":
            while True:
                pass
        case "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "stuck":  # in C, holding the interpreter: no signal handler runs
            all(itertools.repeat(True))
        case "swallow":
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    pass
        case "swallow once":
            try:
                time.sleep(60)
            except BaseException:
                return 1.0
        case "take the alarm":
            signal.alarm(0)
            time.sleep(0.3)
            return 1.0
        case "raise":
            raise LookupError("no such answer")
        case "exit":
            sys.exit("bye")
        case "die":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "none":
            return None
        case "fork":  # and leaves the child running
            if os.fork() == 0:
                time.sleep(60)
            return 1.0
        case "fork and return":
            os.fork()
            return 1.0
        case "pid":
            return float(os.getpid())
        case _:
            return float(text)
    return 0.0
