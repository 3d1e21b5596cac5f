"""ME-1 to ME-4."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from algorithms import metrics
from roles.types import Completion, Group, Reward, Scored, Unscored
from tests.algorithms.helpers import completion, prompt, scored


def group(completions: list[Completion], rewards: list[Reward]) -> Group:
    return Group(prompt=prompt(0), completions=completions, rewards=rewards)


def test_group_metrics_worked_by_hand():
    groups = [
        group([completion([0] * 4), completion([0] * 2)], scored([1, 1])),  # solved by all
        group([completion([0] * 8, "length"), completion([])], scored([0, 0.5])),  # by none
        group([completion([0] * 2), completion([0] * 2)], [Scored(1), Unscored("timeout")]),  # by all that were judged
        group([completion([0]), completion([0])], scored([1, 0])),
        group([completion([0]), completion([0])], [Unscored("x"), Scored(math.nan)]),  # not judged
    ]
    m = metrics.of_groups(groups, ages=[0, 1, 1, 0, 2])
    assert m == pytest.approx(
        {
            "reward/mean": (2 + 0.5 + 1 + 1) / 7,
            "reward/solved_all_fraction": 2 / 4,
            "reward/solved_none_fraction": 1 / 4,
            "reward/no_contrast_fraction": 2 / 4,
            "reward/unscored_fraction": 3 / 10,
            "length/mean": 22 / 10,
            "length/max": 8,
            "length/truncated_fraction": 1 / 10,
            "length/empty_fraction": 1 / 10,
            "age/mean": 0.8,
            "age/max": 2,
            "rollout/tokens": 22,
        }
    )


def test_metric_without_a_denominator_is_absent():
    assert metrics.of_groups([]) == {"rollout/tokens": 0}
    assert metrics.finish({"tokens": 0.0, "entropy": 0.0}, {}) == {"train/tokens": 0}


def test_unequal_ranks_weigh_by_their_tokens():
    """10 tokens of entropy 1 and 1000 of entropy 2 on two ranks: 1.990, not 1.5 (ME-1)."""
    assert metrics.finish({"tokens": 1010.0, "entropy": 10 * 1.0 + 1000 * 2.0}, {})["policy/entropy"] == 2010 / 1010


def test_sums_of_an_objective_of_ones_own_pass_through_under_their_name():
    m = metrics.finish({"tokens": 4.0, "my_margin": 2.0}, {"my_margin": 1.5})
    assert (m["custom/my_margin"], m["custom/my_margin_max"]) == (0.5, 1.5)


def test_values_out_of_range_are_told_with_the_range():
    told = metrics.unhealthy({"mismatch/kl_k3": 0.5, "policy/entropy": 1.0, "unknown": 9.0})
    assert told == [f"mismatch/kl_k3 is 0.5 nat: healthy is {metrics.METRICS['mismatch/kl_k3'].healthy}"]


def test_every_metric_has_unit_formula_and_range_and_a_row_in_the_table():
    table = metrics.markdown()
    assert len(metrics.METRICS) == len(metrics.STEP_METRICS) + len(metrics.GROUP_METRICS)
    for metric in metrics.METRICS.values():
        assert metric.unit
        assert metric.formula
        assert metric.healthy
        assert metric.low <= metric.high
        assert f"| `{metric.name}` |" in table
    rows = table.splitlines()
    assert {row.replace(r"\|", "").count("|") for row in rows} == {5}


def test_printing_the_table_needs_no_torch():
    code = (
        "import runpy, sys; runpy.run_module('algorithms.metrics', run_name='__main__'); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == metrics.markdown()
