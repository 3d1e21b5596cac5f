"""What the start policy is taught (DE-1, DE-2), and the files that ship."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import reasoning_gym
from transformers import AutoTokenizer

from algorithms.job import Job
from recipes.demonstrations import LEVELS, WORKINGS, Level, held_out_questions, write_demonstrations
from recipes.make_start_policy import prompt_text
from roles.prompts import PromptEncoder, held_out
from runtime.config import load

RECIPES = Path(__file__).parents[2] / "recipes"
POLICY = RECIPES / "start_policy"


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"{level.family}-{level.hardness}")
def test_working_without_a_slip_ends_in_the_right_answer(level: Level) -> None:
    dataset = reasoning_gym.create_dataset(level.family, seed=5, size=100, **level.params)
    for i in range(100):
        working = WORKINGS[level.family](dataset[i], None, random.Random(i))
        assert str(working.answer) == dataset[i]["answer"]


@pytest.mark.parametrize("family", list(WORKINGS))
def test_a_slip_changes_nearly_every_text(family: str) -> None:
    dataset = reasoning_gym.create_dataset(family, seed=6, size=100)
    working = WORKINGS[family]
    rng = random.Random(0)
    # In gcd a slip stays below the divisor, which now and then gives the right remainder back.
    assert sum(working(dataset[i], 0, rng).text != working(dataset[i], None, rng).text for i in range(100)) >= 90


def test_demonstrations_are_a_function_of_the_seed() -> None:
    first, again = (write_demonstrations(200, 0.5, set(), seed=3).texts for _ in range(2))
    assert first == again
    assert first != write_demonstrations(200, 0.5, set(), seed=4).texts


@pytest.mark.parametrize("recipe", ["default", "harder"])
def test_no_held_out_question_of_a_recipe_is_demonstrated(recipe: str) -> None:
    job = load(RECIPES / f"{recipe}.toml", Job)
    prompts = held_out(job.data, job.evaluation.prompts, job.evaluation.seed, PromptEncoder(POLICY, job.data))
    questions = {prompt.entry["question"] for prompt in prompts}
    excluded = held_out_questions([RECIPES / "default.toml", RECIPES / "harder.toml"])
    assert questions <= excluded
    assert not excluded & {question for question, _ in write_demonstrations(3000, 0.5, excluded, seed=0).texts}


def test_prompt_is_what_the_chat_template_makes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    turns = [{"role": "user", "content": "Calculate 1 + 2."}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == prompt_text("Calculate 1 + 2.")


def test_digits_and_answer_tags_are_single_tokens_that_decoding_keeps() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    ids = tokenizer.encode("12 + 7 = 19<answer>19</answer><|endoftext|>")
    tokens = [tokenizer.decode([i]) for i in ids]
    assert tokens == ["1", "2", " + ", "7", " = ", "1", "9", "<answer>", "1", "9", "</answer>", "<|endoftext|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12 + 7 = 19<answer>19</answer>"


def test_start_policy_takes_at_most_8_megabytes() -> None:
    assert sum(path.stat().st_size for path in POLICY.iterdir()) <= 8e6


def test_a_pretrained_policy_is_taught_on_the_prompts_that_its_job_asks() -> None:  # SM-2
    from recipes.smollm2 import asker

    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    job = load(RECIPES / "smollm2_reasoning_gym.toml", Job)
    encoder = PromptEncoder(POLICY, job.data)
    question = "State the final answer to the following arithmetic problem: 2 + 3 ="
    _, ids = encoder.encode(question)
    assert tuple(tokenizer.encode(asker(tokenizer)(question), add_special_tokens=False)) == ids
