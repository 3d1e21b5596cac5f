"""The acceptance runs, as many as fit into a budget of seconds, most valuable first.

    python -m benchmarks.gpu.acceptance --out DIR --budget 1300 [--cases s1 s0 ...]      [--layout one]  on one GPU
    python -m benchmarks.gpu.acceptance --out DIR --collect FOLDER --wait 560     of one in the background

    s1 s0 s2 s4 fp8 fp8_plain megatron   runs of benchmarks.gpu.smollm2 (s1 is also the soak of 200 steps)
    trl_server trl_colocate              benchmarks.gpu.trl_grpo
    shapes_0.6B shapes_8B                benchmarks.gpu.shapes
    moe                                  benchmarks.gpu.moe
    kill                                 benchmarks.gpu.kill

`benchmarks.gpu.sweep` runs them over one start of the processes. This program plans, watches over it, and gathers.

AC-1: whatever happens to one case, the others run, and what was measured stays. If the sweep itself ends early, another
      one takes the cases that are left.
AC-2: when the budget is used up everything is ended, whatever it does.
AC-3: what is gathered is at most eight files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import kill, moe, programs, shapes, smollm2, sweep, trl_grpo
from benchmarks.gpu.launched import adopt_orphans, end_well, kill_descendants, last_lines, read_facts
from benchmarks.table import Row, to_markdown

PROGRAMS = ("smollm2", "trl_grpo", "shapes", "moe", "kill")
ORDER = {
    "ep": "s1 s0 trl_server s4 kill+moe+megatron+fp8+fp8_plain s2 shapes_0.6B shapes_8B".split(),
    "one": "s1 s0 trl_colocate s4 kill+moe+megatron+fp8+fp8_plain s2 shapes_0.6B".split(),
}
"""By layout of the mixture of experts, which says how many GPUs there are."""
TOLD = "acceptance.jsonl"
KEPT = (".log", ".jsonl", ".json", ".toml")
LARGEST = 16 << 20
"""Bytes of a file that is gathered: trace.json of some hundred steps is smaller, and packs well."""
END = "ended"
"""A file that says that there is nothing to wait for."""


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


def as_text(out: Path) -> str:
    """All tables, for people."""
    found = [f"{title}\n\n{to_markdown(table)}" for title, table in tables(out).items() if table]
    return "\n\n".join([*found, *(json.dumps(line) for line in told(out))])


def told(out: Path) -> list[dict[str, Any]]:
    """What the sweeps have said so far: a line for the start, and one for each case."""
    file = out / TOLD
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def started(lines: list[dict[str, Any]]) -> int:
    """How often the roles came up."""
    return sum("started" in line for line in lines)


def left_of(groups: list[str], lines: list[dict[str, Any]]) -> list[str]:
    """The cases that nothing was said of, and those that the end of the sweep has cut short, in their groups."""
    known = {line["case"] for line in lines if "case" in line} | {
        case for line in lines if "passed" in line for case in line["passed"]
    }
    rest = [[case for case in group.split("+") if case not in known] for group in groups]
    return ["+".join(group) for group in rest if group]


def run_sweep(options: argparse.Namespace, cases: list[str]) -> int | str:
    """One sweep, ended with the budget (AC-2)."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.sweep", "--out", str(options.out)]
    command += ["--cases", *cases, "--model", options.model, "--engine-model", options.engine_model]
    command += ["--until", str(options.until), "--steps", str(options.steps), "--trl-steps", str(options.trl_steps)]
    command += ["--s1-steps", str(options.s1_steps)]
    command += ["--layout", options.layout, *(["--tiny"] if options.tiny else []), "--set", *options.set]
    with (options.out / "sweep.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            return process.wait(max(1.0, options.until - time.time()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            return "out of time"
        finally:
            kill_descendants()


def run(options: argparse.Namespace) -> None:
    """Sweeps until nothing is left to run (AC-1). A case that takes the sweep with it is not tried again; if the roles
    don't even start, twice, only programs are left."""
    (options.out / END).unlink(missing_ok=True)
    print("\n".join(sweep.plan_of(options)), flush=True)
    cases, failed_starts = list(options.cases), 0
    before = len(told(options.out))  # of an earlier one, with the same folder
    while cases and (options.tiny or options.until - time.time() > 60):
        starts = started(told(options.out))
        how = run_sweep(options, cases)
        rest = left_of(cases, told(options.out)[before:])
        print(
            f"sweep of {' '.join(cases)}: {how}, {options.until - time.time():.0f} s left, not run: {rest}", flush=True
        )
        if how:
            print(last_lines(options.out / "sweep.log", 25), flush=True)
        came_up = started(told(options.out)) > starts
        failed_starts += not came_up
        if rest and not came_up and failed_starts > 1:
            able = [case for case in "+".join(rest).split("+") if case in programs.PROGRAMS]
            rest = able[1:] if able == cases else able
        elif rest == cases and came_up:
            rest = ["+".join(one) for one in [rest[0].split("+")[1:], *(g.split("+") for g in rest[1:])] if one]
        cases = rest
    (options.out / END).touch()


def collect(out: Path, into: Path, seconds: float) -> None:
    """Wait for the end, and at most so long; then copy what there is (AC-3)."""
    until = time.monotonic() + seconds
    while not (out / END).exists() and time.monotonic() < until:
        time.sleep(0.5)
    into.mkdir(parents=True, exist_ok=True)
    for name in (smollm2.FILE, trl_grpo.FILE, shapes.FILE, moe.FILE, kill.FILE, TOLD):
        if (out / name).exists():
            shutil.copy(out / name, into / name)
    text = as_text(out)
    (into / "tables.md").write_text(text)
    with tarfile.open(into / "logs.tgz", "w:gz") as logs:
        for file in [*out.glob("*.log"), *(out / "ranks").glob("*"), *out.glob("runs/*/*.*")]:
            with contextlib.suppress(OSError):
                if file.stat().st_size <= LARGEST and file.suffix in KEPT:
                    logs.add(file, str(file.relative_to(out)))
    for line in told(out):
        if isinstance(line.get("ended"), int) and line["ended"]:  # a program's, which says why in its log alone
            log = out / f"case_{line['case']}.log"
            print(f"{log.name}:\n{last_lines(log)}")
    print(text if (out / END).exists() else f"{text}\n\nit goes on")


def main() -> int:
    parser = sweep.parser_of()
    parser.prog = "python -m benchmarks.gpu.acceptance"
    parser.add_argument("--budget", type=float, default=1200, help="seconds for everything")
    parser.add_argument("--collect", type=Path, help="run nothing: wait for the end of what runs in --out, and copy")
    parser.add_argument("--wait", type=float, default=0, help="with --collect: most seconds to wait")
    parser.set_defaults(cases=None, out=Path("acceptance"))
    options = parser.parse_args()
    if options.collect is not None:
        collect(options.out.resolve(), options.collect, options.wait)
        return 0
    options.cases = options.cases or ORDER["one" if options.layout == "one" else "ep"]
    options.until = options.until or time.time() + options.budget
    sweep.check(parser, options)
    options.out.mkdir(parents=True, exist_ok=True)
    end_well()
    adopt_orphans()
    run(options)
    print(as_text(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
