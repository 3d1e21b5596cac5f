"""The acceptance runs on two GPUs, as many as fit into a budget of seconds, most valuable first.

    python -m benchmarks.gpu.acceptance --out DIR --json DIR/acceptance.jsonl --budget 600 [--cases s1 s0 ...]

    s1 s0 s2 s4 fp8 fp8_plain megatron   benchmarks.gpu.smollm2 (s1 is also the soak of 200 steps)
    trl_server trl_colocate              benchmarks.gpu.trl_grpo
    shapes_0.6B shapes_8B                benchmarks.gpu.shapes
    moe                                  benchmarks.gpu.moe
    kill                                 benchmarks.gpu.kill

AC-1: each case is a process with a time limit, its own log, and rows that are written at once: whatever happens to one,
      the others run, and what was measured stays.
AC-2: a case that is not expected to fit into what is left of the budget is passed over; a later, shorter one may run.
AC-3: cases joined by `+` run at the same time, for figures that are no times (`moe+fp8`). Times of such a group are not
      comparable with others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import kill, moe, shapes, smollm2, trl_grpo
from benchmarks.gpu.launched import last_lines, read_facts
from benchmarks.table import Row, to_markdown


@dataclass(frozen=True)
class Case:
    program: str
    words: list[str] = field(default_factory=list)
    expected: float = 80.0
    """Seconds, start included."""
    limit: float = 130.0


CASES = {
    "s1": Case("smollm2", ["--cases", "s1"], 170, 260),
    "s0": Case("smollm2", ["--cases", "s0"], 90),
    "s2": Case("smollm2", ["--cases", "s2"], 80),
    "s4": Case("smollm2", ["--cases", "s4"], 80),
    "fp8": Case("smollm2", ["--cases", "fp8"], 70),
    "fp8_plain": Case("smollm2", ["--cases", "fp8_plain"], 70),
    "megatron": Case("smollm2", ["--cases", "megatron"], 70),
    "trl_server": Case("trl_grpo", ["--cases", "server"], 130, 200),
    "trl_colocate": Case("trl_grpo", ["--cases", "colocate"], 120, 200),
    "shapes_0.6B": Case("shapes", ["--cases", "0.6B"], 90),
    "shapes_8B": Case("shapes", ["--cases", "8B"], 150, 220),
    "moe": Case("moe", [], 120, 240),
    "kill": Case("kill", [], 120, 240),
}
PROGRAMS = ("smollm2", "trl_grpo", "shapes", "moe", "kill")
ORDER = "s1 s0 trl_server kill s4 moe+fp8+fp8_plain+megatron shapes_0.6B s2 shapes_8B trl_colocate".split()


def steps_of(options: argparse.Namespace) -> tuple[int, int]:
    """Steps of the shorter runs of ours, and of TRL: enough for the accuracy that s1 reached, with some to spare."""
    ours = read_facts(options.out, smollm2.FILE)
    begun, long = smollm2.start_of(ours), next((facts for facts in ours if facts["name"] == "s1"), None)
    reached = None if long is None or begun is None else smollm2.time_to(long, begun + smollm2.RISE)
    enough = 80 if reached is None else reached[0]
    return options.steps or min(max(enough + 25, 50), 130), options.trl_steps or min(max(enough + 15, 40), 80)


def start(name: str, options: argparse.Namespace, left: float) -> tuple[subprocess.Popen[bytes], float]:
    """The process of a case, and its limit."""
    case = CASES[name]
    limit = 1500.0 if options.tiny else min(case.limit, left)
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.gpu.{case.program}", "--out", str(options.out)]
    steps, trl_steps = steps_of(options)
    command += ["--model", options.model, *case.words, *(["--tiny"] if options.tiny else [])]
    if case.program == "smollm2":
        command += ["--seconds", str(limit - 20), "--steps", str(steps), "--set", *options.set]
    if case.program == "trl_grpo":
        command += ["--seconds", str(limit - 10), "--steps", str(trl_steps), "--set", *options.set]
    if case.program == "shapes":
        command += ["--seconds", str(limit - 20)]
    if case.program == "moe":
        command += ["--seconds", str(limit / 2 - 5), "--layout", options.layout]
    if case.program == "kill":
        command += ["--seconds", str(min(90.0, limit / 2))]
    with (options.out / f"case_{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True), limit


def run_group(group: list[str], options: argparse.Namespace, left: float) -> dict[str, Any]:
    """Cases at the same time; returns how each ended."""
    began = time.monotonic()
    running = {name: start(name, options, left) for name in group}
    ended: dict[str, Any] = {}
    for name, (process, limit) in running.items():
        try:
            ended[name] = process.wait(max(1.0, limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            ended[name] = "too long"
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return ended


def tables(out: Path) -> dict[str, list[Row]]:
    """Every table of what a folder holds, in the order of `PROGRAMS`."""
    ours = read_facts(out, smollm2.FILE)
    return {
        "SmolLM2-135M by GRPO, FSDP2 and vLLM": smollm2.rows(ours),
        "Beside TRL": trl_grpo.rows(read_facts(out, trl_grpo.FILE), ours),
        "Parts of a step, shapes of Qwen3": shapes.rows(read_facts(out, shapes.FILE)),
        "Routes of a mixture of experts": moe.rows(read_facts(out, moe.FILE)),
        "Killed processes": kill.rows(read_facts(out, kill.FILE)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.acceptance")
    parser.add_argument("--out", type=Path, default=Path("acceptance"))
    parser.add_argument("--json", type=Path, help="a line for each group: what ran, how it ended, what is left")
    parser.add_argument("--budget", type=float, default=600, help="seconds")
    parser.add_argument("--cases", nargs="*", default=ORDER)
    parser.add_argument("--model", default="/tmp/smollm2")
    parser.add_argument("--steps", type=int, default=0, help="of s0, s2, s4; 0: from s1")
    parser.add_argument("--trl-steps", type=int, default=0, help="0: from s1")
    parser.add_argument("--layout", default="ep", choices=list(moe.LAYOUTS), help="of the mixture of experts")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of all jobs")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU")
    options = parser.parse_args()
    groups = [text.split("+") for text in options.cases]
    if unknown := {name for group in groups for name in group} - set(CASES):
        parser.error(f"--cases: {', '.join(sorted(unknown))}: expected some of {', '.join(CASES)}")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.json or options.out / "acceptance.jsonl"
    until = time.monotonic() + options.budget
    for group in groups:
        left, expected = until - time.monotonic(), max(CASES[name].expected for name in group)
        if expected > left and not options.tiny:
            print(f"{'+'.join(group)}: passed over, {left:.0f} s are left of which it needs {expected:.0f}", flush=True)
            continue
        ended = run_group(group, options, 3600 if options.tiny else left)
        print(f"{'+'.join(group)}: {ended}, {until - time.monotonic():.0f} s left", flush=True)
        for name in group:
            print(last_lines(options.out / f"case_{name}.log", 25), flush=True)
        with file.open("a") as lines:
            lines.write(json.dumps({"ended": ended, "left_s": round(until - time.monotonic(), 1)}) + "\n")
    for title, table in tables(options.out).items():
        if table:
            print(f"\n{title}\n\n{to_markdown(table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
