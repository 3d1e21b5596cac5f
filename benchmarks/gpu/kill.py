"""Killed processes of a job on two GPUs: how long until it trains again, what memory comes back, do the books hold.

    python -m benchmarks.gpu.kill --out DIR [--model /tmp/smollm2]

One job (S = 1, trainer on GPU 0, vLLM on GPU 1) and three SIGKILLs, one after the other:

    engine   the process of vLLM's engine: the replica is started anew, is sent the weights, and serves again
    leader   the rollout rank that drives it: the same, from one level above
    trainer  a trainer rank: the job ends with exit code 1 and the last checkpoint; `--resume` goes on from it

KT-1: recovered is the end of a step whose groups were sampled after the kill: three steps further, at S = 1.
KT-2: memory of a GPU is looked at from outside (NVML), five times a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.launched import (
    CACHE_BYTES,
    ON_GPU,
    ROOT,
    TINY,
    Gpus,
    Launch,
    descendants,
    end_well,
    last_error,
    last_lines,
    named,
    read_facts,
    saying,
    shown,
)
from benchmarks.table import Row, to_markdown

FILE = "kill.jsonl"
AFTER = 3
"""Steps after which nothing that was sampled before a kill is left (KT-1)."""
KILLS = {"engine": "VLLM::Engine", "leader": "rollout 0"}
SETTINGS = ["staleness=1", "rollout.vllm.eager=true", "rollout.probe_seconds=0.5", "evaluation.every=0", "steps=2000"]


def memory(gpus: Gpus) -> int:
    """Bytes in use on the last GPU, which is the engine's, or the only one; 0 without a GPU."""
    return (gpus.memory() or [0])[-1]


def seconds_until(condition: Callable[[], bool], limit: float) -> float | None:
    """None when it did not happen."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            return None
        time.sleep(0.05)
    return time.monotonic() - began


def last_step(records: list[dict[str, Any]]) -> int:
    return int(records[-1]["step"]) if records else 0


def kill_rollout(running: Launch, case: str, limit: float) -> dict[str, Any]:
    """Kill the engine or its leader, and wait until the job trains on what was sampled after it."""
    before, step = memory(running.gpus), last_step(running.records())
    victims = named(running.process.pid, KILLS[case])
    then = time.time()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    gone = [pid for pid in victims if seconds_until(lambda pid=pid: not alive(pid), 10) is None]  # type: ignore[misc]
    # Others on this GPU may take a little meanwhile.
    returned = seconds_until(lambda: memory(running.gpus) <= before - 0.8 * CACHE_BYTES, 20) if before else None
    running.wait_for(lambda records: last_step(records) >= step + AFTER, limit)
    trained = [record["time"] for record in running.records() if record["step"] >= step + AFTER]
    return {
        "name": case,
        "killed": len(victims),
        "not_gone": len(gone),
        "at_step": step,
        "recovery_s": trained[0] - then if trained else None,
        "memory_before": before,
        "memory_returned_s": returned,
        "memory_after": memory(running.gpus),
    }


def near(used: list[int], baseline: list[int]) -> bool:
    """Whether each GPU holds what it held before, give or take a context of the driver."""
    return all(a <= 1.1 * b + 2**28 for a, b in zip(used, baseline, strict=True))


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill_trainer(running: Launch, baseline: list[int]) -> dict[str, Any]:
    """Kill a trainer rank: the job must end by itself, and leave nothing."""
    step, processes = last_step(running.records()), descendants(running.process.pid)
    victims = named(running.process.pid, "trainer 0")
    began = time.monotonic()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    ended = seconds_until(lambda: running.process.poll() is not None, 30)
    left = seconds_until(lambda: not any(alive(pid) for pid in processes), 10)
    free = seconds_until(lambda: near(running.gpus.memory(), baseline), 15)
    return {
        "name": "trainer",
        "killed": len(victims),
        "at_step": step,
        "ended_s": ended,
        "code": running.process.poll(),
        "all_gone_s": None if left is None or ended is None else ended + left,
        "memory_free_s": None if free is None else time.monotonic() - began,
        "memory_baseline": baseline,
        "memory_end": running.gpus.memory(),
    }


def go_on(running: Launch, steps: int) -> None:
    """Let it train so many steps more."""
    reached = last_step(running.records())
    running.wait_for(lambda records: last_step(records) >= reached + steps, 60)


def why_not(running: Launch, else_: str) -> str:
    """What has ended the job, if it has ended."""
    code = running.process.poll()
    return else_ if code is None else f"the job has ended with exit code {code}: {last_error(running.run.log)}"


def run(out: Path, settings: list[str], say: Callable[[dict[str, Any]], None], *, start_limit: float) -> None:
    baseline = Gpus().memory()
    with Launch("kill", settings, out) as running:
        if not running.wait_for(lambda records: last_step(records) >= 6, start_limit):
            say({"name": "start", "error": why_not(running, f"no sixth step within {start_limit:.0f} s")})
            return
        for case in KILLS:
            if running.process.poll() is not None:
                say({"name": case, "error": why_not(running, "")})
                return
            say(kill_rollout(running, case, start_limit))
            go_on(running, 6)
        say(kill_trainer(running, baseline))
        whole = running.finish(5)
    say({"name": "books", "exact": whole.exact(), "steps": len(whole.steps), "kills": list(KILLS)})
    if whole.folder is not None:
        resume(out, whole.folder, last_step(whole.records), say, start_limit=start_limit)


def resume(out: Path, folder: Path, reached: int, say: Callable[[dict[str, Any]], None], *, start_limit: float) -> None:
    """`--resume` of the run that had done `reached` steps; three steps beyond them, then SIGTERM."""
    began, then = time.monotonic(), time.time()
    with Launch("kill", [], out, more=["--resume", str(folder)]) as running:
        first = running.wait_for(lambda records: bool(records) and records[-1]["time"] > then, start_limit)
        first_s = time.monotonic() - began
        running.wait_for(lambda records: last_step(records) >= reached + 3, start_limit)
        resumed = running.finish(0.1)
    numbers = [int(r["step"]) for r in resumed.records]
    say(
        {
            "name": "resume",
            "first_step_s": first_s if first else None,
            "code": resumed.code,
            "from_step": reached,
            "to_step": last_step(resumed.records),
            "each_step_once": bool(numbers) and numbers == list(range(numbers[0], numbers[-1] + 1)),
            "exact": resumed.exact(),
        }
    )


def rows(found: list[dict[str, Any]]) -> list[Row]:
    by_name, table = {facts["name"]: facts for facts in found}, list[Row]()
    for failed in (facts for facts in found if "error" in facts):
        table.append(Row(name=f"{failed['name']}: failed", note=failed["error"].split(". ")[0][:300]))
    for case in KILLS:
        if (facts := by_name.get(case)) is not None and "recovery_s" in facts:
            back, after = facts["memory_returned_s"], facts["memory_after"] / 2**30
            note = f"memory returned after {shown(back, '.2f')} s, {after:.1f} GiB again"
            name = f"SIGKILL of the {case}: until it trains on new samples"
            table.append(Row(name=name, ours=facts["recovery_s"], unit="s", note=note))
    if (facts := by_name.get("trainer")) is not None:
        free = shown(facts["memory_free_s"], ".2f")
        note = f"exit code {facts['code']}; GPU memory as before the job after {free} s"
        table.append(
            Row(name="SIGKILL of a trainer rank: the job has ended", ours=facts["ended_s"], unit="s", note=note)
        )
    if (facts := by_name.get("resume")) is not None:
        note = f"steps {facts['from_step']} -> {facts['to_step']}, each once: {facts['each_step_once']}"
        table.append(Row(name="--resume: until its first step", ours=facts["first_step_s"], unit="s", note=note))
    books = [facts["exact"] for facts in found if "exact" in facts]
    if books:
        table.append(Row(name="accounting exact over all kills", ours=float(all(books)), goal=">= 1"))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kill")
    parser.add_argument("--out", type=Path, default=Path("kill"))
    parser.add_argument("--model", default="/tmp/smollm2")
    parser.add_argument("--seconds", type=float, default=140, help="limit of each start and recovery")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU with the start policy of the recipes")
    options = parser.parse_args()
    end_well()
    model = str(ROOT / "recipes" / "start_policy") if options.tiny else options.model
    common = [word for word in (TINY if options.tiny else ON_GPU) if not word.startswith("checkpoint.")]
    settings = [f"model.path={model}", *common, *SETTINGS, "checkpoint.every=10", "rollout.prove_every=1"]
    out = options.out.resolve()
    with saying(out, FILE) as say:
        run(out, settings, say, start_limit=options.seconds)
    print(last_lines(out / "kill.log"), flush=True)
    found = read_facts(out, FILE)
    print(to_markdown(rows(found)))
    return int(all(facts["name"] != "resume" for facts in found))


if __name__ == "__main__":
    sys.exit(main())
