"""SM-1 and SM-2: the command that predicts a job, from times that are given and from those that a run measured."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import msgspec
import pytest

from algorithms import simulate
from algorithms.job import Job
from algorithms.play import Times, play
from algorithms.simulate import measured, recommended
from algorithms.simulated import Speeds
from roles.types import Prompt, Sampling
from runtime.config import load
from tests.algorithms.test_simulation import PLAIN

RECIPE = str(Path(__file__).parents[2] / "recipes" / "default.toml")
GIVEN = [RECIPE, "--decode-step", "0.01", "--train-step", "1.0", "--length", "40", "--steps", "20"]


def test_given_times_make_a_table_and_a_recommendation(capsys):
    assert simulate.main(GIVEN) == 0
    text = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert {"S = 0", "S = 0.5", "S = 1", "S = 2", "S = 4"} <= lines.keys()
    assert "16 x 8 samples a step, 1 rollout and 1 trainer ranks; times given" in text
    one_more = text.partition("one rank more at S = 1")[2]
    assert {line.split("  ")[0] for line in one_more.splitlines()} > {"2 rollout, 1 trainer", "1 rollout, 2 trainer"}
    assert "S = 1 is enough: more is not 3 % faster" in text  # the trainer is the bottleneck from there on
    assert "Assumed: training spreads evenly over ranks" in text


def test_ranks_are_split_where_a_step_is_fastest(capsys):
    """Generation is three times the work of training: of four ranks three generate."""
    words = [*GIVEN, "rollout.ranks=2", "trainer.ranks=2", "--per-sequence", "0.001", "--train-step", "0.2"]
    assert simulate.main(words) == 0
    text = capsys.readouterr().out
    assert "splits of 4 ranks" in text
    assert "fastest: rollout.ranks = 3, trainer.ranks = 1" in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([RECIPE], "--decode-step, --train-step, --length: give them, or a run that measured them"),
        (["steps=3"], "expected one job file, got none"),
        ([RECIPE, "staleness=-1"], "staleness"),
        ([*GIVEN[:5], "--length", "900"], "--length 900: the job samples at most sampling.max_tokens = "),
    ],
)
def test_what_can_not_be_simulated_is_refused_with_exit_code_2(words, error, capsys):
    assert simulate.main(words) == 2
    assert error in capsys.readouterr().err


def record(folder: Path, outcome_of: Times, steps: int) -> float:
    """A run folder as a run of these times leaves it; returns the seconds of its steps."""
    import asyncio

    from algorithms import virtual_time
    from algorithms.play import stage

    events: list[dict[str, object]] = []
    rows: list[dict[str, float]] = []
    config = msgspec.structs.replace(PLAIN, samples_per_prompt=4)

    async def main() -> float:
        scene = stage(config, outcome_of, staleness=0, steps=steps)
        group, train, loop = scene.rollout.group, scene.trainer.train_step, asyncio.get_running_loop()

        async def timed(prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0):
            began = loop.time()
            result = await group(prompt, n, sampling, seed, attempt=attempt)
            lengths = [len(c.token_ids) for c in result.completions]  # type: ignore[union-attr]
            facts = {"tokens": sum(lengths), "longest": max(lengths)}
            events.append(
                {"ph": "X", "name": "generate", "ts": 1e6 * began, "dur": 1e6 * (loop.time() - began), "args": facts}
            )
            return result

        async def timed_step(samples, objective, temperature=1.0):
            began = loop.time()
            result = await train(samples, objective, temperature)
            tokens = sum(len(s.token_ids) for s in samples)
            rows.append(
                {
                    "step": len(rows) + 1,
                    "time/train": loop.time() - began,
                    "train/tokens": tokens,
                    "time/publish": outcome_of.speeds.publish,
                }
            )
            return result

        scene.rollout.group = timed  # type: ignore[method-assign]
        scene.trainer.train_step = timed_step  # type: ignore[method-assign]
        await scene.page.run(0, steps)
        return scene.recorder.outcome().seconds_per_step

    seconds = virtual_time.run(main())
    (folder / "trace.json").write_bytes(msgspec.json.encode(events))
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode({**row, "time": 0.0}) + b"\n" for row in rows))
    return seconds


def test_times_of_a_run_are_found_again_and_predict_it(tmp_path):
    """The run was made with known times: a step of 5 ms + .2 ms a sequence, training .5 s + .1 ms a token."""
    rng = random.Random(0)
    lengths = [rng.randint(20, 200) for _ in range(400)]

    truth = Times(
        speeds=Speeds(
            step_base=0.005, step_per_sequence=2e-4, train_base=0.5, train_per_token=1e-4, publish=0.1, max_running=64
        ),
        lengths=lambda r: lengths[r.randrange(len(lengths))],
    )
    ran = record(tmp_path, truth, steps=30)
    found = measured(tmp_path, rollout_ranks=1, trainer_ranks=1, samples=4, max_running=64)
    assert found.speeds.train_base == pytest.approx(0.5, rel=0.05)
    assert found.speeds.train_per_token == pytest.approx(1e-4, rel=0.05)
    assert found.speeds.publish == pytest.approx(0.1)
    config = msgspec.structs.replace(PLAIN, samples_per_prompt=4)
    assert play(config, found, staleness=0, steps=40).seconds_per_step == pytest.approx(ran, rel=0.15)
    real, predicted = (play(config, one, staleness=2, steps=60).seconds_per_step for one in (truth, found))
    assert predicted == pytest.approx(real, rel=0.3)  # more sequences run at once there than the run has seen (SM-1)


def test_a_run_without_steps_is_refused_with_what_it_has(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "trace.json").write_text("[]")
    assert simulate.main([RECIPE, "--run", str(tmp_path)]) == 2
    assert "has 0 steps after the first and 0 groups on its timeline; expected a run" in capsys.readouterr().err
    assert simulate.main([RECIPE, "--run", str(tmp_path / "nowhere")]) == 2
    assert "nowhere has no trace.json; expected the folder of a run" in capsys.readouterr().err


def test_what_the_run_took_stands_beside_what_is_predicted_for_it(tmp_path):
    """Steps of 2 s of which an evaluation held up .5 s; the first pays for what is done once."""
    row = {"time": 0.0, "time/step": 2.0, "time/evaluate": 0.5, "time/train": 1.0, "train/tokens": 9.0}
    rows = [{**row, "step": step, "time/step": 99.0 if step == 1 else 2.0} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in rows))
    (tmp_path / "job.toml").write_text(Path(RECIPE).read_text())
    job = load(Path(RECIPE), Job)
    speeds = Speeds(step_base=1e-9, step_per_sequence=0, train_base=1.6, train_per_token=0, publish=0)
    outcome = play(PLAIN, Times(speeds=speeds, lengths=lambda _: 1), staleness=0, steps=3)
    lines = simulate._compared(tmp_path, job, {job.staleness: outcome})
    assert lines[0] == f"the run itself took 1.5 s a step at S = {job.staleness:g}; predicted 1.6 s"
    other = load(Path(RECIPE), Job, ["rollout.ranks=2"])
    assert simulate._compared(tmp_path, other, {job.staleness: outcome}) == []


def test_the_smallest_staleness_within_three_percent_of_the_fastest_is_recommended():
    def outcome(seconds: float):
        speeds = Speeds(step_base=1e-9, step_per_sequence=0, train_base=seconds, train_per_token=0, publish=0)
        return play(PLAIN, Times(speeds=speeds, lengths=lambda _: 1), staleness=0, steps=3)

    table = {0.0: outcome(2.0), 1.0: outcome(1.02), 2.0: outcome(1.0)}
    assert recommended(table) == 1.0
    assert statistics.fmean(table[0.0].ages) == 0
