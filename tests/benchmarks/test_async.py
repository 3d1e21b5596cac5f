"""What the benchmark of asynchrony computes itself."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.__main__ import available
from benchmarks.async_ import TAIL_MEAN, TAIL_SIGMA, TAIL_STEPS, accuracy_row, phases, played, seconds_to
from benchmarks.async_run import Measured, held_back


def test_it_is_called_async_although_that_is_no_name_for_a_module():
    assert "async" in available()


def synchronous(decode: float, train: float) -> tuple[Measured, list[float]]:
    """A synchronous run whose steps take what the slowest group of each is held back, and decoding and training."""
    slowest = [
        max(held_back(TAIL_MEAN, TAIL_SIGMA, 0, 16 * step + i, 0) for i in range(16)) for step in range(TAIL_STEPS)
    ]
    steps = [decode + late + train for late in slowest]
    parts = {"wait": sum(slowest[1:]) + decode * (TAIL_STEPS - 1), "train": train * (TAIL_STEPS - 1)}
    return Measured(step_seconds=steps, parts=parts), steps


def test_the_pipeline_played_without_overlap_takes_what_the_synchronous_run_took():
    measured, steps = synchronous(decode=0.4, train=0.6)
    assert phases(measured)[1] == pytest.approx(0.6)
    assert played(0, measured) == pytest.approx(statistics.fmean(steps[1 + TAIL_STEPS // 4 :]), rel=1e-3)
    assert played(1, measured) < 0.8 * played(0, measured)
    assert played(4, measured) < played(1, measured)


def test_accuracy_is_compared_seed_by_seed():
    """Gaps of -1, 0 and -2 points: mean -1, deviation 1, error 1 / sqrt(3)."""
    row = accuracy_row("x", [0.79, 0.85, 0.88], [0.80, 0.85, 0.90], ">= -1.01")
    assert row.ours == pytest.approx(-1.0)
    assert "+-0.6 (standard error)" in row.note
    assert row.met


def test_the_clock_stops_at_the_first_evaluation_that_is_good_enough_and_counts_median_steps():
    one = Measured(step_seconds=[9.0, 2.0, 2.0, 7.0, 2.0], evaluations=[(0, 0.3, 0.1), (5, 0.5, 0.1), (9, 0.7, 0.1)])
    assert (seconds_to(one, 0.5), seconds_to(one, 0.8)) == (10.0, None)
