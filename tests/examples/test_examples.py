"""Every example runs, over one set of roles, and does what its text says."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from examples import best_of_n, custom_algorithm, custom_environment, no_rl, online_dpo, tool_use
from examples.custom_reward import short_and_right
from examples.started import started
from roles.reward import RewardConfig, RewardRank, check_reward
from roles.types import Group, Prompt, Scored, TrainSample, Unscored

EXAMPLES = Path(custom_algorithm.__file__).parent


def lines_between(name: str, mark: str) -> int:
    """Lines of code of the region that the documentation shows, without blank lines and docstrings."""
    text = (EXAMPLES / f"{name}.py").read_text().partition(f"[start:{mark}]\n")[2].partition("# --8<-- [end")[0]
    tree = ast.parse(text)
    prose = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(bool(line.strip()) and number not in prose for number, line in enumerate(text.splitlines(), 1))


@pytest.mark.parametrize(
    ("name", "mark", "most"),
    [
        ("custom_algorithm", "algorithm", 40),
        ("custom_reward", "reward", 5),
        ("custom_environment", "environment", 30),
    ],
)
def test_an_example_is_as_short_as_it_says(name, mark, most):
    assert 0 < lines_between(name, mark) <= most


@pytest.mark.timeout(180)
async def test_examples_that_train_run_over_one_set_of_roles():
    async with started() as roles:
        version = roles.trainer.version

        rewards = await custom_algorithm.train(roles, steps=2, prompts_per_step=4, samples=4)
        assert len(rewards) == 2
        assert all(0 <= reward <= 1 for reward in rewards)
        assert roles.trainer.version == version + 2

        kept = await best_of_n.train(roles, steps=1, prompts_per_step=4, n=8)
        assert kept[0] > 0  # the start policy is right often enough
        assert roles.trainer.version == version + 3

        losses = await online_dpo.train(roles, steps=2, pairs_per_step=2, n=8)
        assert losses[0] < 0.75  # three steps from the reference: near log 2
        assert all(math.isfinite(loss) for loss in losses)

        groups = await custom_environment.train(roles, steps=1, prompts_per_step=2, samples=2)
        masks = [c.mask for group in groups for c in group.completions if c.mask is not None]
        assert any(not mask.all() for mask in masks)  # what the environment said is masked
        assert all(isinstance(reward, Scored) for group in groups for reward in group.rewards)

        groups = await tool_use.train(roles, steps=1, prompts_per_step=2, samples=4)
        assert len(groups) == 2
        assert all(isinstance(reward, Scored) for group in groups for reward in group.rewards)
        assert {int(v) for group in groups for c in group.completions for v in c.versions} == {version + 6}


def test_the_custom_reward_is_found_by_a_job_and_prefers_short_right_answers():
    config = RewardConfig(verifier="examples.custom_reward:short_and_right")
    check_reward(config)
    entry = {"answer": "4", "verifier": "exact"}
    prompt = Prompt(position=0, text="2 + 2", token_ids=(), task="mine", entry=entry)
    short, long, wrong = RewardRank(config).score(
        prompt, ["<answer>4</answer>", "2 + 2 is of course <answer>4</answer>", "<answer>5</answer>"]
    )
    assert isinstance(short, Scored)
    assert isinstance(long, Scored)
    assert short.value > long.value > 0
    assert wrong == Scored(0.0)
    assert short_and_right(prompt, "") == 0


def test_best_against_rest_is_balanced():
    values = custom_algorithm.best_against_rest(np.array([1.0, 0, 1, 0, 0]))
    np.testing.assert_allclose(values, [1 / 2, -1 / 3, 1 / 2, -1 / 3, -1 / 3])


def test_a_pair_is_the_best_and_the_worst_and_none_without_contrast():
    prompt = Prompt(position=0, text="", token_ids=(1,), task="t", entry={})
    group = Group(prompt=prompt, completions=["a", "b", "c"], rewards=[Scored(0), Unscored("x"), Scored(1)])  # type: ignore[list-item]
    chosen = online_dpo.pair(group)
    assert chosen is not None
    assert chosen.completions == ["c", "a"]
    assert online_dpo.pair(Group(prompt=prompt, completions=[], rewards=[Scored(1), Scored(1)])) is None


async def test_the_weights_of_dpo_are_those_of_its_gradient():
    """beta sigmoid(-h) with h = .1 (2 - (-1)) = .3; the two sides are tables here."""

    class Table:
        def __init__(self, *sums: float) -> None:
            self.sums = sums

        async def logprobs(self, samples):
            return [np.array([s]) for s in self.sums]

    def sample(sign: float):
        return TrainSample(
            token_ids=np.array([1, 2], np.int32),
            prompt_length=1,
            rollout_logprobs=np.zeros(1, np.float32),
            advantages=np.array([sign], np.float32),
        )

    samples = [sample(1.0), sample(-1.0)]
    loss = await online_dpo.weigh(samples, Table(-3.0, -6.0), Table(-5.0, -5.0))  # type: ignore[arg-type]
    assert loss == pytest.approx(math.log1p(math.exp(-0.3)))
    weight = 0.1 / (1 + math.exp(0.3))
    assert [float(s.advantages[0]) for s in samples] == pytest.approx([weight, -weight])


async def test_the_runtime_runs_without_any_learning(capsys):
    assert abs(await no_rl.estimate(processes=2, darts=20_000) - math.pi) < 0.1
    assert "refused:" in capsys.readouterr().out
