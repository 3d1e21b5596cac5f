"""Generation beside training: what S gains on the embedded job and on one with a long tail, and what it costs.

Three questions, each with rows:
1. The embedded job: seconds of a step against the closed form max(T_g, T_t), with T_g and T_t of a synchronous run
   whose two sides have the threads that they have side by side; and wall-clock to the same held-out accuracy.
2. The same job with completions held back for a log-normal time: seconds of a step against the real pipeline played
   under a virtual clock with the times of the synchronous run.
3. Accuracy at S = 4 against S = 0, over seeds: with the truncated weights of the default, decoupled with the
   interpolated proximal policy, and without any correction (ratio and clip against the sampler).

About 13 minutes on two cores.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec

from algorithms import virtual_time
from algorithms.grpo import GRPOConfig
from algorithms.play import Times, stage
from algorithms.simulated import SimulatedRollout, Speeds, lognormal
from benchmarks.async_run import Measured, Settings, held_back
from benchmarks.table import Row
from roles.types import Dropped, Group, Prompt, Sampling

TITLE = "Asynchrony: steps, accuracy and waste by staleness"
ROOT = Path(__file__).parents[1]
STALENESS = (1, 2, 4)
SEEDS = (0, 1, 2)
STEPS = 50
SPEED_STEPS = 30
CURVE_STEPS = 30
TAIL_STEPS = 16
GAIN = 0.25
"""Accuracy above the start that the clock is stopped at; every S reaches it within CURVE_STEPS."""
TAIL_MEAN, TAIL_SIGMA = 0.5, 1.0
SLOWER = 1.12
"""1 / 0.9: a step may take this many times the closed form."""

CURVE = ["evaluation.every=5", "evaluation.prompts=64", "evaluation.samples=8", "evaluation.greedy=false"]
FINAL = ["evaluation.every=0", "evaluation.prompts=256", "evaluation.samples=4", "evaluation.greedy=false"]
"""Before the first step and after the last one; the same questions for all seeds."""
ONE_THREAD = ["trainer.threads=1", "rollout.threads=1"]
UNCORRECTED = ["grpo.loss=ppo", 'grpo.loss_options={ proximal = "rollout", clip_high = 0.28 }']
INTERPOLATED = ["grpo.loss=a3po", "grpo.loss_options={ clip_high = 0.28 }"]


def measure(settings: Settings) -> Measured:
    """One run in a process of its own."""
    text = msgspec.json.encode(settings).decode()
    command = [sys.executable, "-m", "benchmarks.async_run", text]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured: Measured = msgspec.convert(json.loads(output.splitlines()[-1]), Measured)
    step = statistics.median(measured.step_seconds[1:])
    print(
        f"S = {settings.staleness:g} {settings.overrides}: {step:.2f} s a step, {measured.evaluations[-1:]}", flush=True
    )
    return measured


def run() -> list[Row]:
    """Twenty-four runs."""
    return [*speed_rows(), *clock_rows(), *accuracy_rows(), *tail_rows()]


# --- the embedded job -------------------------------------------------------------------------------------------------


def speed_rows() -> list[Row]:
    """Without evaluations, so that nothing else runs on the two cores."""

    def timed(S: int) -> Measured:
        overrides = [f"steps={SPEED_STEPS}", "evaluation.prompts=0", *ONE_THREAD]
        return measure(Settings(staleness=S, overrides=overrides))

    generate, train = phases(timed(0))
    rows = []
    for S in STALENESS:
        one = timed(S)
        count = len(one.step_seconds) - 1
        beside = one.parts["train"] / count
        other = sum(one.step_seconds[1:]) / count - beside - one.parts["wait"] / count
        rows.append(
            Row(
                name=f"S = {S}: one step; peer: closed form max(T_g, T_t)",
                ours=statistics.median(one.step_seconds[1:]),
                peer=max(generate, train),
                unit="s",
                goal=f"<= {SLOWER}x",
                note=f"T_g {generate:.2f} s, T_t {train:.2f} s with one thread each, after one another. Side by side "
                f"a training step takes {beside:.2f} s, all else on its path {1e3 * other:.0f} ms, waiting for groups "
                f"{share(one, 'wait'):.0%}; engine idle {1 - one.rollout_busy / sum(one.step_seconds):.0%}; age "
                f"{statistics.fmean(one.ages):.2f}, at most {one.age_max}; {one.wasted_tokens} of "
                f"{one.wasted_tokens + one.trained_tokens} tokens wasted",
            )
        )
    return rows


def clock_rows() -> list[Row]:
    overrides = [f"steps={CURVE_STEPS}", *CURVE]
    curves = {S: measure(Settings(staleness=S, overrides=overrides)) for S in (0, *STALENESS)}
    target = curves[0].evaluations[0][1] + GAIN
    return [
        Row(
            name=f"S = {S}: time to +{GAIN:.2f} of held-out accuracy; peer: S = 0",
            ours=seconds_to(curves[S], target),
            peer=seconds_to(curves[0], target),
            unit="s",
            goal="<= 1x",
            note="median step times the steps it took; looked at every 5 steps; one seed",
        )
        for S in STALENESS
    ]


def phases(one: Measured) -> tuple[float, float]:
    """(T_g, T_t) of a synchronous run, seconds a step."""
    count = len(one.step_seconds) - 1
    other = sum(seconds for part, seconds in one.parts.items() if part in ("train", "publish"))
    return one.parts["wait"] / count, other / count


def share(one: Measured, part: str) -> float:
    return one.parts.get(part, 0.0) / sum(one.step_seconds[1:])


def seconds_to(one: Measured, accuracy: float) -> float | None:
    """Until an evaluation first was that good; None: never. Each step counts as the median one: when an evaluation gets
    its share of the engine differs by S, and is not what is compared."""
    step = statistics.median(one.step_seconds[1:])
    return next((steps * step for steps, value, _ in one.evaluations if value >= accuracy), None)


def accuracy_rows() -> list[Row]:
    """Differences from S = 0 of the same seed, after the same number of steps."""
    S = max(STALENESS)

    def finals(staleness: float, *changes: str) -> list[float]:
        overrides = [f"steps={STEPS}", *FINAL, *changes]
        runs = [measure(Settings(staleness=staleness, overrides=[*overrides, f"seed={seed}"])) for seed in SEEDS]
        return [one.evaluations[-1][1] for one in runs]

    base = finals(0)
    variants = {
        "truncated weights (the default)": (finals(S), ">= -1"),
        "decoupled, interpolated proximal policy": (finals(S, *INTERPOLATED), ">= -1"),
        "no correction, clipped against the sampler": (finals(S, *UNCORRECTED), ""),
    }
    return [accuracy_row(f"S = {S}, {name}", ours, base, goal) for name, (ours, goal) in variants.items()]


def accuracy_row(name: str, ours: list[float], base: list[float], goal: str) -> Row:
    gaps = [100 * (a - b) for a, b in zip(ours, base, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    each = ", ".join(f"{a:.3f} / {b:.3f}" for a, b in zip(ours, base, strict=True))
    return Row(
        name=f"{name}: points of accuracy above S = 0",
        ours=statistics.fmean(gaps),
        goal=goal,
        note=f"mean of {len(gaps)} seeds, +-{error:.1f} (standard error); each / S = 0: {each}",
    )


# --- the long tail ----------------------------------------------------------------------------------------------------


def tail_rows() -> list[Row]:
    def tailed(S: int) -> Measured:
        overrides = [f"steps={TAIL_STEPS}", "evaluation.prompts=0", *ONE_THREAD]
        return measure(Settings(staleness=S, overrides=overrides, tail_mean=TAIL_MEAN, tail_sigma=TAIL_SIGMA))

    synchronous = tailed(0)
    plain = statistics.fmean(synchronous.step_seconds[1:])
    rows = []
    for S in STALENESS:
        one = tailed(S)
        step = statistics.fmean(one.step_seconds[1 + TAIL_STEPS // 4 :])
        rows += [
            Row(
                name=f"long tail, S = {S}: one step; peer: S = 0",
                ours=step,
                peer=plain,
                unit="s",
                goal="<= 1x",
                note=f"groups held back {TAIL_MEAN:g} s on average, sigma {TAIL_SIGMA:g}; age "
                f"{statistics.fmean(one.ages):.2f}, at most {one.age_max}; trainer waits {share(one, 'wait'):.0%}",
            ),
            Row(
                name=f"long tail, S = {S}: one step; peer: the pipeline played with the times of S = 0",
                ours=step,
                peer=played(S, synchronous),
                unit="s",
                goal=f"<= {SLOWER}x",
                note="strict order: a straggler holds up everybody; the prediction says by how much",
            ),
        ]
    return rows


class Held(SimulatedRollout):
    """Each group takes what decoding takes, and then the very time that the real one is held back."""

    decode = 0.0

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped:
        group = await super().group(prompt, n, sampling, seed, attempt=attempt)
        await asyncio.sleep(self.decode + held_back(TAIL_MEAN, TAIL_SIGMA, seed, prompt.position, attempt))
        return group


def played(S: int, synchronous: Measured) -> float:
    """Seconds of a step of the real page under a virtual clock, over the steps that are measured. What a synchronous
    step waits beyond the slowest group that was held back is what decoding takes."""
    count = len(synchronous.step_seconds) - 1
    waited, train = phases(synchronous)
    slowest = [
        max(held_back(TAIL_MEAN, TAIL_SIGMA, 0, 16 * step + i, 0) for i in range(16)) for step in range(1, count + 1)
    ]
    speeds = Speeds(step_base=1e-9, step_per_sequence=0.0, train_base=train, train_per_token=0.0, publish=0.0)
    config = GRPOConfig(prompts_per_step=16, samples_per_prompt=1, advantage="reinforce")

    async def main() -> list[float]:
        times = Times(speeds=speeds, lengths=lognormal(1, 0, 1))
        scene = stage(config, times, staleness=S, steps=TAIL_STEPS)
        rollout = Held(scene.replicas, times.lengths)
        rollout.decode = max(waited - statistics.fmean(slowest), 0.0)
        scene.page.rollout = rollout
        await scene.page.run(0, TAIL_STEPS)
        return [mark[0] for mark in scene.recorder.marks]

    marks = virtual_time.run(main())
    first = 1 + TAIL_STEPS // 4
    return (marks[-1] - marks[first]) / (TAIL_STEPS - first)
