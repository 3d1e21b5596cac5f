"""What a job will do before it does it: throughput, age and idle time, for several S and splits of the ranks.

    python -m algorithms.simulate job.toml --run runs/first          # times measured by a run of that job
    python -m algorithms.simulate job.toml --decode-step 0.02 --train-step 8 --publish 1.5 --length 900

The real page, admission, buffer and routing play the job under a virtual clock (`algorithms.play`): a prediction can't
differ from the run in its order of things, only in how long they take.

SM-1: what a run measured is taken as it is: lengths from its timeline, times from its records. What the model adds is
      told in the output: a decoding step takes a + b x (sequences that run), training is spread evenly over ranks. a
      and b are fitted to how long groups took among others: a prediction is best for a job that keeps about as many
      sequences running as the run did, and within a third or so where it keeps many more.
SM-2: the same job, times and seed give the same prediction.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from algorithms.job import Job, count_cores, resolve
from algorithms.play import Outcome, Times, play
from algorithms.simulated import Speeds, lognormal
from runtime.config import ConfigError, load
from runtime.journal import read_metrics

# --- times ------------------------------------------------------------------------------------------------------------


def measured(run: Path, *, rollout_ranks: int, trainer_ranks: int, samples: int, max_running: int) -> Times:
    """The times of a run folder (SM-1).

    Raises:
        ConfigError: the run has no steps or no timeline of its groups.
    """
    rows = _steps_of(run)
    groups = _groups_of(run)
    if len(rows) < 2 or not groups:
        found = f"{len(rows)} steps after the first and {len(groups)} groups on its timeline"
        problem = f"{run} has {found}; expected a run of several steps"
        raise ConfigError("--run", [problem])
    base, per_token = _line([row["train/tokens"] for row in rows], [row["time/train"] for row in rows])
    step_base, step_per_sequence = _decode_line(groups, rollout_ranks)
    return Times(
        speeds=Speeds(
            step_base=step_base,
            step_per_sequence=step_per_sequence,
            train_base=base,
            train_per_token=per_token,
            publish=statistics.median(row["time/publish"] for row in rows),
            max_running=max_running,
        ),
        lengths=_Observed([group.length for group in groups], samples),
        rollout_ranks=rollout_ranks,
        trainer_ranks=trainer_ranks,
        source=f"{len(rows)} steps and {len(groups)} groups of {run}",
    )


def ran(run: Path) -> tuple[Job, float]:
    """The job of a run folder, and the mean seconds of its steps without evaluations and checkpoints, which are not
    played."""
    rows = _steps_of(run)
    extra = ("time/evaluate", "time/save")
    return load(run / "job.toml", Job), statistics.fmean(
        row["time/step"] - sum(row.get(name, 0.0) for name in extra) for row in rows
    )


def _steps_of(run: Path) -> list[dict[str, Any]]:
    """Records of its training steps but the first, which pays for what is done once."""
    return [row for row in read_metrics(run) if "time/train" in row and "train/tokens" in row][1:]


class _Span(msgspec.Struct):
    start: float
    end: float
    length: float
    """Tokens of the longest completion."""
    tokens: float


def _groups_of(run: Path) -> list[_Span]:
    try:
        events = msgspec.json.decode((run / "trace.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError("--run", [f"{run} has no trace.json; expected the folder of a run"]) from None
    events = events["traceEvents"] if isinstance(events, dict) else events
    return [
        _Span(
            start=event["ts"] / 1e6,
            end=(event["ts"] + event["dur"]) / 1e6,
            length=float(event["args"]["longest"]),
            tokens=float(event["args"]["tokens"]),
        )
        for event in events
        if event.get("name") == "generate" and event.get("ph") == "X" and event.get("args", {}).get("longest")
    ]


class _Observed:
    """Draws lengths like those of a run: the longest of a group as seen, the others below it at the seen mean."""

    def __init__(self, longest: Sequence[float], samples: int) -> None:
        self._longest = sorted(longest)
        self._power = max(samples, 1)

    def __call__(self, rng: Random) -> int:
        # The longest of n draws has the distribution F^n, so one draw is the seen quantile at u^n.
        place = rng.random() ** self._power * (len(self._longest) - 1)
        return max(1, round(self._longest[round(place)]))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, both at least 0, of least squares."""
    if len(x) < 2 or max(x) == min(x):
        return 0.0, statistics.fmean(y) / max(statistics.fmean(x), 1e-12)
    slope, base = np.polyfit(np.asarray(x), np.asarray(y), 1)
    if slope < 0:
        return statistics.fmean(y), 0.0
    if base < 0:
        return 0.0, statistics.fmean(y) / statistics.fmean(x)
    return float(base), float(slope)


def _decode_line(groups: Sequence[_Span], ranks: int) -> tuple[float, float]:
    """Seconds of a decoding step, alone and for each further sequence, from how long groups took among others.

    A group counts as its sequences that run on average: tokens / longest, since short ones end before the longest.
    """
    edges = sorted([(g.start, g.tokens / g.length) for g in groups] + [(g.end, -g.tokens / g.length) for g in groups])
    area, running, last, table = 0.0, 0.0, edges[0][0], [(edges[0][0], 0.0)]
    for at, change in edges:
        area += running * (at - last)
        table.append((at, area))
        running, last = running + change, at
    times, areas = np.array([t for t, _ in table]), np.array([a for _, a in table])
    spans = [g for g in groups if g.end > g.start]
    sequences = [
        float(np.interp(g.end, times, areas) - np.interp(g.start, times, areas)) / (g.end - g.start) / ranks
        for g in spans
    ]
    return _line(sequences, [(g.end - g.start) / g.length for g in spans])


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 2 for a job or times that can't be used."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        sys.stdout.write(_report(options))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m algorithms.simulate", description="Predict throughput, age and idle time of a job."
    )
    parser.add_argument("words", nargs="+", metavar="job.toml | key=value", help="a job file, then overrides")
    parser.add_argument("--run", type=Path, help="take the times from this run folder")
    parser.add_argument("--decode-step", type=float, help="seconds of one decoding step of a busy replica")
    parser.add_argument("--per-sequence", type=float, default=0.0, help="seconds that each running sequence adds to it")
    parser.add_argument("--train-step", type=float, help="seconds of a training step of the job's size")
    parser.add_argument("--publish", type=float, default=0.0, help="seconds to bring new weights to the rollout ranks")
    parser.add_argument("--length", type=float, help="mean tokens of a completion")
    parser.add_argument("--spread", type=float, default=0.6, help="deviation of the logarithm of the length")
    parser.add_argument("--success", type=float, default=0.5, help="chance that a completion is solved")
    parser.add_argument("--steps", type=int, default=60, help="steps to play for each line")
    return parser


def _report(options: Any) -> str:
    files = [word for word in options.words if "=" not in word]
    if len(files) != 1:
        raise ConfigError("command line", [f"expected one job file, got {', '.join(files) or 'none'}"])
    path = Path(files[0])
    job = load(path, Job, [word for word in options.words if "=" in word])
    job = resolve(job, folder=path.resolve().parent, source=str(path), gpus=0, cores=count_cores()).job
    times = _times(options, job)
    began = time.monotonic()

    def outcome(staleness: float, rollout: int, trainer: int) -> Outcome:
        ranks = times.of_ranks(rollout, trainer)
        return play(job.grpo, ranks, staleness=staleness, steps=options.steps, seed=job.seed, success=options.success)

    speeds, rollout, trainer = times.speeds, job.rollout.ranks, job.trainer.ranks
    size = f"{job.grpo.prompts_per_step} x {job.grpo.samples_per_prompt} samples a step"
    decoding = f"{1e3 * speeds.step_base:.3g} ms + {1e3 * speeds.step_per_sequence:.3g} ms a sequence"
    training = f"{speeds.train_base:.3g} s + {1e3 * speeds.train_per_token:.3g} ms a token"
    lines = [
        f"{job.name}: {size}, {rollout} rollout and {trainer} trainer ranks; times {times.source}",
        f"a decoding step {decoding}, training {training}, publishing {speeds.publish:.3g} s",
        "",
        HEADING,
    ]
    by_staleness = {s: outcome(s, rollout, trainer) for s in sorted({0.0, 0.5, 1.0, 2.0, 4.0, job.staleness})}
    lines += [_row(f"S = {s:g}", one) for s, one in by_staleness.items()]
    best = recommended(by_staleness)
    lines += ["", f"S = {best:g} is enough: more is not 3 % faster, and samples get older", ""]
    if options.run is not None:
        lines += _compared(options.run, job, by_staleness)
    more = {(n, m): outcome(best, n, m) for n, m in ((rollout + 1, trainer), (rollout, trainer + 1))}
    lines += [f"one rank more at S = {best:g}", HEADING]
    lines += [_row(f"{n} rollout, {m} trainer", one) for (n, m), one in more.items()]
    lines += [""]
    if rollout + trainer > 2:
        splits = {n: outcome(best, n, rollout + trainer - n) for n in range(1, rollout + trainer)}
        lines += [f"splits of {rollout + trainer} ranks at S = {best:g}", HEADING]
        lines += [_row(f"{n} rollout, {rollout + trainer - n} trainer", one) for n, one in splits.items()]
        fastest = min(splits, key=lambda n: splits[n].seconds_per_step)
        lines += ["", f"fastest: rollout.ranks = {fastest}, trainer.ranks = {rollout + trainer - fastest}", ""]
    played = f"played in {time.monotonic() - began:.1f} s"
    lines.append(f"{played}. Assumed: training spreads evenly over ranks, replicas do not slow each other down")
    return "\n".join(lines) + "\n"


def _compared(run: Path, job: Job, outcomes: dict[float, Outcome]) -> list[str]:
    """What the run really took beside what is predicted for it; nothing when another job is asked about."""
    own, seconds = ran(run)
    same = (own.grpo, own.rollout.ranks, own.trainer.ranks) == (job.grpo, job.rollout.ranks, job.trainer.ranks)
    if not same or own.staleness not in outcomes:
        return []
    predicted = outcomes[own.staleness].seconds_per_step
    return [f"the run itself took {seconds:.3g} s a step at S = {own.staleness:g}; predicted {predicted:.3g} s", ""]


HEADING = (
    f"{'':<24}{'s/step':>9}{'tokens/s':>11}{'age mean':>10}{'max':>5}{'rollout idle':>14}{'trainer idle':>14}"
    f"{'dropped':>9}"
)


def _row(name: str, one: Outcome) -> str:
    return (
        f"{name:<24}{one.seconds_per_step:>9.3g}{one.tokens_per_second:>11,.0f}{one.age_mean:>10.2f}{one.age_max:>5}"
        f"{one.rollout_idle:>14.0%}{one.trainer_idle:>14.0%}{sum(one.dropped.values()):>9}"
    )


def recommended(outcomes: dict[float, Outcome]) -> float:
    """The smallest S within 3 % of the fastest."""
    fastest = min(one.seconds_per_step for one in outcomes.values())
    return min(s for s, one in outcomes.items() if one.seconds_per_step <= 1.03 * fastest)


def _times(options: Any, job: Job) -> Times:
    grpo = job.grpo
    if options.run is not None:
        return measured(
            options.run,
            rollout_ranks=job.rollout.ranks,
            trainer_ranks=job.trainer.ranks,
            samples=grpo.samples_per_prompt,
            max_running=job.rollout.max_running,
        )
    wanted = {"--decode-step": options.decode_step, "--train-step": options.train_step, "--length": options.length}
    missing = [name for name, value in wanted.items() if value is None]
    if missing:
        raise ConfigError("times", [f"{', '.join(missing)}: give them, or a run that measured them (--run FOLDER)"])
    if options.length > job.sampling.max_tokens:
        problem = (
            f"--length {options.length:g}: the job samples at most sampling.max_tokens = {job.sampling.max_tokens}"
        )
        raise ConfigError("times", [f"{problem}; lower it, or override that"])
    return Times(
        speeds=Speeds(
            step_base=options.decode_step,
            step_per_sequence=options.per_sequence,
            train_base=options.train_step,
            train_per_token=0.0,
            publish=options.publish,
            max_running=job.rollout.max_running,
        ),
        lengths=lognormal(options.length, options.spread, job.sampling.max_tokens),
        rollout_ranks=job.rollout.ranks,
        trainer_ranks=job.trainer.ranks,
    )


if __name__ == "__main__":
    sys.exit(main())
