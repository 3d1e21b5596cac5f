"""What the acceptance runs wrote, as tables and pictures: `python -m benchmarks.gpu.report --facts DIR`.

    benchmarks/results/gpu_acceptance_*.json    a table of each program
    docs/pictures/acceptance_accuracy.png       reward of fresh prompts over seconds and over steps, TRL beside ours
    docs/pictures/acceptance_idle.png           idle shares of trainer and rollout, speed and age, by staleness
    docs/pictures/acceptance_soak.png           memory and descriptors of the long run

`--suffix one_gpu` adds that to the names: runs on another machine stand beside these.
Needs matplotlib; no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.acceptance import PROGRAMS, tables
from benchmarks.gpu.launched import ROOT, read_facts
from benchmarks.gpu.smollm2 import FILE as OURS
from benchmarks.gpu.smollm2 import SMOOTH
from benchmarks.gpu.trl_grpo import FILE as THEIRS
from benchmarks.table import to_markdown

DEGREES = ("s0", "s1", "s2", "s4")
COLOURS = {"s0": "#7f7f7f", "s1": "#1f77b4", "s2": "#2ca02c", "s4": "#ff7f0e"}


def smoothed(points: list[list[float]]) -> list[list[float]]:
    """(step, seconds, mean of the last `SMOOTH` values)."""
    values = [value for _, _, value in points]
    return [
        [step, seconds, sum(values[i - SMOOTH + 1 : i + 1]) / SMOOTH]
        for i, (step, seconds, _) in enumerate(points)
        if i >= SMOOTH - 1
    ]


def draw_accuracy(ours: dict[str, Any], theirs: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, column, label in ((axes[0], 1, "seconds of training"), (axes[1], 0, "steps of 64 x 8 samples")):
        for name in (n for n in DEGREES if n in ours):
            points = smoothed(ours[name]["reward"])
            axis.plot([p[column] for p in points], [p[2] for p in points], color=COLOURS[name], label=f"S = {name[1:]}")
        for facts in theirs:
            points = smoothed(facts["reward"])
            axis.plot(
                [p[column] for p in points], [p[2] for p in points], "k--", label=facts["name"].replace("trl", "TRL")
            )
        axis.set(xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel=f"right answers, fresh prompts, mean of {SMOOTH} steps", ylim=(0, 1))
    axes[0].legend()
    figure.savefig(file, dpi=110)


def draw_idle(ours: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    found = [ours[name] for name in DEGREES if name in ours]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(len(found))
    for shift, key, label in ((-0.2, "idle_trainer", "trainer waits"), (0.2, "idle_rollout", "no group is generated")):
        left.bar([p + shift for p in places], [100 * (f[key] or 0) for f in found], width=0.4, label=label)
    left.set_xticks(list(places), [f"S = {f['name'][1:]}" for f in found])
    left.set(ylabel="% of a step")
    left.legend()
    right.bar(list(places), [f["tokens_per_s"] or 0 for f in found], color="#1f77b4")
    right.set_xticks(list(places), [f"S = {f['name'][1:]}\nage {f['age_mean'] or 0:.2f}" for f in found])
    right.set(ylabel="trained tokens a second")
    figure.savefig(file, dpi=110)


def draw_soak(facts: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    looks = facts["looks"]
    names = ["host, all processes", "host, controller", "descriptors"] + [f"GPU {i}" for i in range(len(looks[0]) - 4)]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    memory, counts = figure.subplots(1, 2)
    for column, name in enumerate(names, start=1):
        seconds, values = [look[0] for look in looks], [look[column] for look in looks]
        if name == "descriptors":
            counts.plot(seconds, values)
            counts.set(ylim=(0, 1.2 * max(values)))
        else:
            memory.plot(seconds, [value / 2**30 for value in values], label=name)
    memory.set(xlabel="seconds", ylabel="GiB", ylim=(0, None), title=f"{facts['steps']} steps, S = 1")
    counts.set(xlabel="seconds", ylabel="open descriptors, all processes")
    memory.legend()
    figure.savefig(file, dpi=110)


def write_results(facts: Path, folder: Path, machine: str, date: str, suffix: str) -> None:
    """A JSON file for each table, as the documentation reads them."""
    for (title, table), program in zip(tables(facts).items(), PROGRAMS, strict=True):
        if table:
            name = f"gpu_acceptance_{program}{suffix}"
            result = {
                "name": name,
                "title": title + suffix.replace("_", " ").replace(" ", ", ", 1),
                "command": f"python -m benchmarks.gpu.{program}",
                "date": date,
                "machine": machine,
                "rows": [row.as_dict() for row in table],
            }
            (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.report")
    parser.add_argument("--facts", type=Path, required=True, help="the folder that the runs wrote into")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--machine", default="2 x NVIDIA H200, 32 cores, torch 2.11.0+cu130, vLLM 0.25.1, Python 3.12")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--suffix", default="", help="of names of files and titles")
    options = parser.parse_args()
    suffix = options.suffix and f"_{options.suffix}"
    for folder in (options.pictures, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    ours = {facts["name"]: facts for facts in read_facts(options.facts, OURS) if facts["steps"]}
    if ours:
        draw_accuracy(ours, read_facts(options.facts, THEIRS), options.pictures / f"acceptance_accuracy{suffix}.png")
    if len(ours.keys() & set(DEGREES)) > 1:
        draw_idle(ours, options.pictures / f"acceptance_idle{suffix}.png")
    if "s1" in ours and ours["s1"]["looks"]:
        draw_soak(ours["s1"], options.pictures / f"acceptance_soak{suffix}.png")
    write_results(options.facts, options.results, options.machine, options.date, suffix)
    for title, table in tables(options.facts).items():
        if table:
            print(f"\n{title}\n\n{to_markdown(table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
