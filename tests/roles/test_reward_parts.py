"""Weighted sums of verifiers, their options, code as an answer, and a reward model on a rank of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from roles.reward import RewardConfig, RewardFailed, RewardRank, check_reward
from roles.reward_config import PartConfig, RewardModelConfig
from roles.reward_model import RewardModel
from roles.types import Prompt, Scored, Unscored
from roles.verify import boxed, code, extract_code, number, parse_number
from runtime import this_host
from tests.roles.test_reward import PROMPT, VERIFIER, group_of, reasons
from tests.roles.tiny import END, VOCAB, save_tiny_policy


def asks(answer: object, **entry: object) -> Prompt:
    return Prompt(position=3, text="q", token_ids=(1,), task="mine", entry={"answer": answer, **entry})


# --- numbers and boxes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42), ("-3", -3), ("1,000", 1000), ("$ 7.50", 7.5), ("50%", 0.5), ("3/4", 0.75), ("1e3", 1000), ("−2", -2)],
)
def test_numbers_are_read_however_they_are_written(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "five", "1/0", "1.5/2", "4 apples", "--1", "nan", "inf", "1e99999"])
def test_what_is_no_number_is_none(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "options", "right"),
    [
        ("<answer>1,000</answer>", {}, True),
        (r"so \boxed{1000.0}", {}, True),
        ("it is 1000", {}, False),  # strict: no final answer
        ("it is 7, no, 1000.", {"anywhere": True}, True),
        ("it is 1000, no, 7", {"anywhere": True}, False),
        ("<answer>1001</answer>", {}, False),
        ("<answer>1001</answer>", {"tolerance": 0.01}, True),
        ("<answer>much</answer>", {"anywhere": True}, False),
    ],
)
def test_number_compares_values_not_spelling(text, options, right):
    assert number(asks("1000"), text, **options) == float(right)


def test_an_expected_answer_that_is_no_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="'much' is no number; use 'exact'"):
        number(asks("much"), "<answer>1</answer>")


def test_boxed_compares_the_last_box():
    assert boxed(asks("x + 1"), r"\boxed{2} then \boxed{X  + 1}") == 1.0
    assert boxed(asks("x + 1"), "x + 1") == 0.0


# --- code -------------------------------------------------------------------------------------------------------------

TESTS = [{"input": "1 2\n", "output": "3"}, {"input": "5 6\n", "output": "11\n"}]


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", True),
        ("print(3)", False),
        ("import os; os.fork()", False),
        ("while True: pass", False),
        ("def", False),
    ],
)
def test_a_program_is_right_if_it_prints_what_every_test_wants(program, right):
    assert code(asks("", tests=TESTS), f"Here:\n```python\n{program}\n```", seconds=0.5) == float(right)


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("def double(x): return 2 * x", True),
        ("def double(x): return x", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
    ],
)
def test_assertions_have_to_be_reached_and_hold(program, right):
    prompt = asks("", test_code="assert double(4) == 8")
    assert code(prompt, f"```py\n{program}\n```", seconds=5) == float(right)


def test_no_program_is_wrong_and_no_tests_are_an_error():
    assert code(asks("", tests=TESTS), "no code") == 0.0
    assert extract_code("```python\nfirst\n```\n```\nlast\n```") == "last\n"
    with pytest.raises(ValueError, match="prompt 3 has neither 'tests' nor 'test_code'"):
        code(asks(""), "```python\n1\n```")


# --- weighted sums ----------------------------------------------------------------------------------------------------


def length(prompt: Prompt, text: str, *, most: int) -> float:
    return min(len(text), most) / most


def partly(prompt: Prompt, text: str) -> Scored:
    return Scored(3, {"a": 1, "b": 2})


def test_the_sum_of_parts_is_weighted_and_keeps_them():
    parts = {
        "right": PartConfig(verifier="exact", weight=1.0),
        "long": PartConfig(verifier="tests.roles.test_reward_parts:length", weight=-0.5, options={"most": 100}),
    }
    rank = RewardRank(RewardConfig(parts=parts))
    (reward,) = rank.score(PROMPT, ["<answer>2</answer>"])  # 18 characters
    assert reward == Scored(1 - 0.5 * 0.18, {"right": 1.0, "long": 0.18})


def test_a_part_without_verdict_leaves_the_whole_without_one():  # RW-1
    parts = {"right": PartConfig(verifier="exact"), "odd": PartConfig(verifier=VERIFIER)}
    rank = RewardRank(RewardConfig(parts=parts, timeout_s=0.2))
    assert reasons(rank.score(PROMPT, ["raise", "none", "sleep"])) == [
        "LookupError: no such answer",
        "BadVerdict: the verifier returned NoneType None; expected a float such as 1.0",
        "time limit: no verdict after 0.2 s",
    ]


def test_a_verifier_may_give_parts_itself():
    rank = RewardRank(RewardConfig(verifier="tests.roles.test_reward_parts:partly"))
    assert rank.score(PROMPT, [""]) == [Scored(3.0, {"a": 1.0, "b": 2.0})]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RewardConfig(verifier="number", options={"tolerence": 1}), r"no option 'tolerence' \(nearest: 'tolerance'\)"),
        (
            RewardConfig(parts={"a": PartConfig(verifier="judge")}),
            r"\[reward\.parts\.a\] verifier 'judge': needs",
        ),
        (
            RewardConfig(verifier="exact", parts={"a": PartConfig()}),
            "both given; make the verifier one of the parts",
        ),
        (RewardConfig(verifier="exact", model=RewardModelConfig(path="x")), "a reward model judges alone"),
    ],
)
def test_contradictions_and_wrong_options_are_refused_before_a_run(config, words):
    with pytest.raises(ValueError, match=words):
        check_reward(config)


# --- a reward model ---------------------------------------------------------------------------------------------------


def save_classifier(folder: Path) -> Any:
    """A random classifier of one label, saved with a tokenizer."""
    save_tiny_policy(folder)  # for the tokenizer
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_labels=1, pad_token_id=END, eos_token_id=END,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model


async def test_a_reward_model_scores_groups_as_the_model_does_in_one_process(tmp_path):
    model = save_classifier(tmp_path)
    texts = ["w1 w2 w3", "w9", "", "w5 w5 w5 w5 w5"]
    prompt = Prompt(position=0, text="w7 w8 ", token_ids=(7, 8), task="words", entry={})
    async with this_host() as host:
        reward = await RewardModel.start(host, RewardModelConfig(path=str(tmp_path), batch=3, device="cpu"))
        scored = await reward.score(group_of(*texts, prompt=prompt))
    values = [r.value for r in scored.rewards if isinstance(r, Scored)]
    for text, value in zip(texts, values, strict=True):
        ids = torch.tensor([[int(word[1:]) for word in (prompt.text + text).split()]])
        assert value == pytest.approx(model(ids).logits.item(), abs=1e-4)


async def test_scores_that_are_not_finite_are_no_verdicts_and_stop_the_run_when_they_are_many(tmp_path):
    model = save_classifier(tmp_path)
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    async with this_host() as host:
        config = RewardModelConfig(path=str(tmp_path), device="cpu")
        reward = await RewardModel.start(host, config, max_unscored=0.5, window=4)
        scored = await reward.score(group_of("w1", "w2"))
        assert scored.rewards == [Unscored("not finite: the model said nan")] * 2
        with pytest.raises(RewardFailed, match="not finite 4"):
            await reward.score(group_of("w1", "w2"))


# --- first use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        "RewardConfig(parts={'right': PartConfig()}, timeout_s=0.2)",
        "RewardConfig(verifier='examples.custom_reward:short_and_right', timeout_s=0.2)",
        "RewardConfig(parts={'m': PartConfig(verifier='math')}, timeout_s=0.2)",
    ],
)
def test_the_first_use_of_a_library_within_a_sum_or_by_the_user_is_not_counted(config):
    """In an interpreter of its own: importing reasoning-gym takes seconds, and half an import would fail for ever."""
    code = f"""
from roles import gym
from roles.reward import RewardConfig, RewardRank
from roles.reward_config import PartConfig
from roles.types import Prompt, Scored
entry = {{"question": "4 + 3 =", "answer": "7", "metadata": {{"difficulty": {{}}}}}}
prompt = Prompt(position=0, text="", token_ids=(), task="chain_sum", entry=entry)
rewards = RewardRank({config}).score(prompt, ["<answer>7</answer>", "<answer>8</answer>"])
assert all(isinstance(r, Scored) for r in rewards), rewards
assert rewards[0].value > rewards[1].value == 0, rewards
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
