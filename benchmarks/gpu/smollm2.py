"""A pretrained model learns: SmolLM2-135M, trainer and vLLM on a GPU each or both on one, over degrees of asynchrony.

    python -m recipes.smollm2 --out /tmp/smollm2                     # once: weights and some minutes of demonstrations
    python -m benchmarks.gpu.smollm2 --out DIR [--model /tmp/smollm2] [--cases s1 s0 s2 s4 fp8 fp8_plain megatron]

Each case is a launch of `recipes/smollm2_reasoning_gym.toml` with a few settings of its own: 64 prompts x 8 samples a
step. Facts are written as they come (`DIR/smollm2.jsonl`); a table ends the run.

    s1         S = 1, and long: memory, descriptors, versions and accounting of 200 steps
    s0 s2 s4   the same at S = 0, 2 and 4, shorter
    fp8        the engine computes in FP8 (per channel: 576 is no multiple of 128), importance weights truncated at 2
    fp8_plain  the same without importance weights
    megatron   megatron-core as the trainer
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.launched import (
    ON_GPU,
    ROOT,
    TINY,
    end_well,
    failed_rows,
    measured,
    read_facts,
    run_case,
    saying,
    shown,
)
from benchmarks.table import Row, to_markdown

FILE = "smollm2.jsonl"
FP8 = ["staleness=1", "rollout.vllm.quantization=fp8_per_channel"]
CASES: dict[str, list[str]] = {
    "s1": ["staleness=1"],
    "s0": ["staleness=0"],
    "s2": ["staleness=2"],
    "s4": ["staleness=4"],
    "fp8": FP8,
    "fp8_plain": [*FP8, "grpo.loss_options.tis_cap=1.0", "grpo.loss_options.tis_low=1.0"],
    "megatron": ["staleness=1", "trainer.backend=megatron"],
}
GPU_ALONE = ("rollout.vllm.quantization", "trainer.backend")
"""What a dry run on CPU goes without."""
STEPS = {"s1": 200, "megatron": 30, "fp8": 40, "fp8_plain": 40}
SECONDS = {"s1": 250.0}
RISE = 0.3
"""Of the accuracy: what `time_to` looks for."""
SMOOTH = 5
"""Steps over which the reward of the samples is averaged."""


def overrides_of(case: str, model: str, steps: int, *, tiny: bool) -> list[str]:
    """Settings of one case."""
    common = TINY if tiny else ON_GPU
    own = [word for word in CASES[case] if not (tiny and word.startswith(GPU_ALONE))]
    return [
        f"model.path={model}",
        *common,
        f"steps={steps}",
        f"evaluation.every={max(1, steps // (4 if case == 's1' else 2))}",
        *own,
    ]


def time_to(facts: dict[str, Any], target: float) -> tuple[int, float] | None:
    """(step, seconds) at which the mean reward of the last `SMOOTH` batches, all of fresh prompts, reached `target`."""
    reward = facts["reward"]
    for i in range(SMOOTH - 1, len(reward)):
        if sum(value for _, _, value in reward[i - SMOOTH + 1 : i + 1]) / SMOOTH >= target:
            return int(reward[i][0]), float(reward[i][1])
    return None


def start_of(found: list[dict[str, Any]]) -> float | None:
    """Accuracy before the first step: of the first run that has it."""
    return next((facts["accuracy"][0][2] for facts in found if facts["accuracy"]), None)


def growth(looks: list[list[float]], column: int) -> float | None:
    """Mean of the last quarter over that of the second: 1 is flat."""
    count = len(looks)
    if count < 8:
        return None
    early, late = looks[count // 4 : count // 2], looks[3 * count // 4 : count - 1]
    return (sum(x[column] for x in late) / len(late)) / (sum(x[column] for x in early) / len(early))


def rows(found: list[dict[str, Any]]) -> list[Row]:
    """The table of these facts."""
    start, table = start_of(found), list[Row]()
    for facts in found:
        name = facts["name"]
        table += failed_rows(facts)
        if not measured(facts):
            continue
        accuracy = facts["accuracy"]
        if len(accuracy) > 1:
            table.append(
                Row(
                    name=f"{name}: rise of held-out accuracy",
                    ours=accuracy[-1][2] - accuracy[0][2],
                    goal=">= 0.3" if name == "s1" else "",
                    note=f"{accuracy[0][2]:.3f} -> {accuracy[-1][2]:.3f} in {facts['steps']} steps",
                )
            )
        reached = None if start is None else time_to(facts, start + RISE)
        if reached is not None:
            note = f"step {reached[0]}; reward of {SMOOTH} batches of fresh prompts, at {start:.3f} + {RISE}"
            table.append(Row(name=f"{name}: time to that accuracy", ours=reached[1], unit="s", note=note))
        busy = ", ".join(f"{b:.0f} %" for b in facts["gpu_busy"])
        idle = " ".join(f"{shown(facts[k], '.0f', 100)} %" for k in ("idle_trainer", "idle_rollout"))
        note = f"step {shown(facts['work_s'], '.2f')} s, idle trainer and rollout {idle}, GPUs busy {busy or '-'}"
        table.append(Row(name=f"{name}: trained tokens", ours=facts["tokens_per_s"], unit="tokens/s", note=note))
        age = f"age {shown(facts['age_mean'], '.2f')}, most {shown(facts['age_max'], '.0f')}"
        note = f"publish {shown(facts['sync_ms'], '.0f')} ms; {age}"
        table.append(Row(name=f"{name}: pause of generation per sync", ours=facts["pause_ms"], unit="ms", note=note))
        gap, ess, cut = (shown(facts[key], ".4f") for key in ("gap", "ess", "truncated"))
        weighed = "no importance weights" if name.endswith("plain") else f"ESS {ess}, weights cut {cut}"
        note = f"gap {gap} nat, {weighed}"
        table.append(Row(name=f"{name}: KL(rollout || trainer), k3", ours=facts["kl_k3"], unit="nat", note=note))
        if name == "s1":
            table += soak_rows(facts)
    return table


def soak_rows(facts: dict[str, Any]) -> list[Row]:
    """Of the long run: what must not grow."""
    looks, steps = facts["looks"], facts["steps"]
    names = ["host memory, all processes", "host memory, controller", "descriptors"]
    names += [f"memory of GPU {i}" for i in range(len(looks[0]) - 4)] if looks else []
    table = [
        Row(
            name=f"soak of {steps} steps: {name}",
            ours=growth(looks, 1 + i),
            goal="<= 1.02",
            note="last / second quarter",
        )
        for i, name in enumerate(names)
    ]
    exact = 1.0 if facts["exact"] else 0.0
    note = "issued = trained + dropped + buffered + in flight, one version a step, at every step"
    return [*table, Row(name=f"soak of {steps} steps: accounting exact", ours=exact, goal=">= 1", note=note)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.smollm2")
    parser.add_argument("--out", type=Path, default=Path("smollm2"))
    parser.add_argument("--model", default="/tmp/smollm2")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=80, help="of the cases that have no number of their own")
    parser.add_argument("--seconds", type=float, default=0, help="most seconds of a case, start included")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the job")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU with the start policy of the recipes")
    options = parser.parse_args()
    end_well()
    model = str(ROOT / "recipes" / "start_policy") if options.tiny else options.model
    out = options.out.resolve()
    with saying(out, FILE) as say:
        for case in options.cases:
            steps = 6 if options.tiny else STEPS.get(case, options.steps)
            settings = overrides_of(case, model, steps, tiny=options.tiny) + options.set
            run_case(say, case, settings, out, options.seconds or SECONDS.get(case, 130.0))
    print(to_markdown(rows(read_facts(out, FILE))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
