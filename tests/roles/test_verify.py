"""Verifiers: VE-1 strictness, VE-2 no guesses, VE-3 coercion, VE-4 no signals."""

from __future__ import annotations

import signal
import threading

import msgspec
import numpy as np
import pytest

from roles import gym
from roles.types import Prompt, Scored
from roles.verify import (
    BadVerdict,
    by_task,
    exact,
    extract_answer,
    extract_boxed,
    math_equal,
    normalise,
    reasoning_gym,
    resolve_verifier,
    verdict,
)


def prompt(answer: object, task: str = "mine", **entry: object) -> Prompt:
    return Prompt(position=3, text="q", token_ids=(1,), task=task, entry={"question": "q", "answer": answer, **entry})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>4</answer>", "4"),
        ("2 + 2 = 4 <answer> 4 </answer>\n \t", "4"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
        ("4", None),
        ("", None),
        ("<answer>4", None),
        ("4</answer>", None),
        ("<answer>4</answer>.", None),
        ("<answer>4</answer> or so", None),
        ("<answer>4</answer><answer>4</answer>", None),
        ("<answer>3</answer> no, <answer>4</answer>", None),
        ("<answer><answer>4</answer>", None),
        ("<answer>4</answer></answer>", None),
        ("</answer>4<answer>", None),
        ("<Answer>4</Answer>", None),
    ],
)
def test_an_answer_counts_only_if_it_is_the_one_at_the_very_end(text: str, expected: str | None):
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{3}, better \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{4", None),
        ("4", None),
    ],
)
def test_the_last_box_counts_with_its_braces_matched(text: str, expected: str | None):
    assert extract_boxed(text) == expected


def test_reasoning_gym_gives_full_marks_or_nothing():  # VE-1
    entry = gym.Family("chain_sum", {"max_terms": 2}, base=0).entry(0)
    ask = Prompt(position=0, text="q", token_ids=(), task="chain_sum", entry=entry)
    right = entry["answer"]
    assert reasoning_gym(ask, f"<answer>{right}</answer>") == 1.0
    assert reasoning_gym(ask, right) == 0.0
    # The library gives len(right) / len(answer) to an answer that contains the right one; here that is wrong.
    assert 0.0 < gym.score("chain_sum", {}, f"{right} apples", entry) < 1.0
    assert reasoning_gym(ask, f"<answer>{right} apples</answer>") == 0.0


def test_an_answer_that_the_library_cannot_parse_is_wrong_as_long_as_the_entry_is_sound():  # VE-2
    entry = gym.Family("prime_factorization", {}, base=0).entry(0)
    with pytest.raises(ValueError, match="invalid literal"):
        gym.score("prime_factorization", {}, "abc", entry)
    ask = Prompt(position=0, text="q", token_ids=(), task="prime_factorization", entry=entry)
    assert reasoning_gym(ask, "<answer>abc</answer>") == 0.0
    broken = msgspec.structs.replace(ask, entry={**entry, "answer": "?"})
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym(broken, "<answer>abc</answer>")


def test_scoring_uses_the_parameters_that_the_entry_was_made_with():
    # decimal_arithmetic accepts an error of one unit in the last of max_num_decimal_places, which is 6 by default.
    params = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    entry = gym.Family("decimal_arithmetic", params, base=0).entry(0)
    assert entry["params"] == params
    near = f"<answer>{float(entry['answer']) + 0.05:.2f}</answer>"
    ask = Prompt(position=0, text="q", token_ids=(), task="decimal_arithmetic", entry=entry)
    assert reasoning_gym(ask, near) == 1.0
    del entry["params"]
    assert reasoning_gym(ask, near) == 0.0


def test_exact_compares_normalised_text():
    assert normalise("  New\n York ") == normalise("ｎｅｗ  york")
    assert exact(prompt("New York"), "<answer>new  york</answer>") == 1.0
    assert exact(prompt("New York"), "<answer>York</answer>") == 0.0
    assert exact(prompt(12), "<answer>12</answer>") == 1.0
    assert exact(prompt("12"), "12") == 0.0


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        (r"\frac{1}{2}", "<answer>0.5</answer>", True),
        ("1/2", r"thus \boxed{\frac{1}{2}}", True),
        ("1,234", "<answer>1234</answer>", True),
        ("x+1", "<answer>1+x</answer>", True),
        ("x+1", "<answer>x+2</answer>", False),
        ("72", "<answer>seventy-two</answer>", False),
        ("72", "72", False),
        ("72", "<answer></answer>", False),
    ],
)
def test_math_judges_equality_not_spelling(expected: str, text: str, right: bool):
    assert math_equal(prompt(expected), text) == float(right)


def test_math_works_in_a_thread_and_leaves_the_alarm_alone():  # VE-4
    before = signal.getsignal(signal.SIGALRM)
    verdicts: list[float] = []
    thread = threading.Thread(target=lambda: verdicts.append(math_equal(prompt("1/2"), "<answer>0.5</answer>")))
    thread.start()
    thread.join()
    assert verdicts == [1.0]
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_expected_answer_that_is_no_mathematics_is_an_error_not_a_zero():  # VE-2
    with pytest.raises(ValueError, match=r"no mathematical expression; use 'exact'"):
        math_equal(prompt("$$"), "<answer>4</answer>")
    with pytest.raises(ValueError, match="prompt 3 of task 'mine' has no 'answer'"):
        exact(prompt(None), "<answer>4</answer>")


def test_by_task_follows_what_the_source_named():
    assert by_task(prompt("A", verifier="exact"), "<answer>a</answer>") == 1.0
    assert by_task(prompt("0.5", verifier="math"), "<answer>1/2</answer>") == 1.0


def test_a_verifier_of_the_user_is_found_by_module_and_function():
    assert resolve_verifier("roles.verify:exact") is exact
    assert resolve_verifier("task") is by_task


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", r"unknown 'exat' \(nearest: 'exact'\).*module:function"),
        ("no_such_module_here:f", "can't be imported.*Python path"),
        ("roles.verify:exat", r"no function 'exat' \(nearest: 'exact'\)"),
        (":f", "unknown"),
    ],
)
def test_a_verifier_that_is_not_there_is_named_with_the_nearest(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_verifier(name)


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (0.25, 0.25), (True, 1.0), (np.bool_(False), 0.0), (np.float32(0.5), 0.5), (np.array(2), 2.0)],
)
def test_numbers_of_any_kind_become_floats(value: object, number: float):
    result = verdict(value)
    assert result == Scored(number)
    assert type(result.value) is float


@pytest.mark.parametrize("value", ["1", None, (1.0, "ok"), [1.0], {"score": 1.0}, float("nan"), np.inf, np.ones(2), 1j])
def test_what_is_not_a_finite_number_is_refused_by_name(value: object):
    with pytest.raises(BadVerdict, match=r"the verifier returned .*expected a"):
        verdict(value)


def test_an_unknown_family_or_parameter_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"families\[0\]: unknown task family 'chain_sums' \(nearest: 'chain_sum'\)"):
        gym.check_family("chain_sums", {}, "[data] families[0]")
    with pytest.raises(ValueError, match=r"params.max_term: .*\(nearest: 'max_terms'\). Valid: min_terms, max_terms"):
        gym.check_family("chain_sum", {"max_term": 3}, "[data] families[0]")
    with pytest.raises(ValueError, match=r"params.seed: the stream sets it"):
        gym.check_family("chain_sum", {"seed": 3}, "[data] families[0]")
    with pytest.raises(ValueError, match=r"refuses \{'min_terms': 9\}: max_terms must be >= min_terms"):
        gym.check_family("chain_sum", {"min_terms": 9}, "[data] families[0]")


def test_families_whose_scorer_cannot_be_trusted_are_refused():  # GY-3
    with pytest.raises(ValueError, match="gives full marks to 'nan'"):
        gym.check_family("complex_arithmetic", {}, "[data] families[0]")
    with pytest.raises(ValueError, match="gives full marks to '§'"):
        gym.check_family("game_of_life_halting", {}, "[data] families[0]")
    with pytest.raises(ValueError, match="tells lists from tuples"):
        gym.check_family("rearc", {}, "[data] families[0]")


def test_entries_are_builtins_that_a_message_does_not_change():  # GY-2
    for name in ("chain_sum", "knights_knaves"):  # the latter draws numpy strings
        entry = gym.Family(name, {}, base=0).entry(5)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry)) == entry


def test_entries_go_on_across_the_chunks_of_a_stream():  # GY-1
    low, high = gym.Family("chain_sum", {}, base=0), gym.Family("chain_sum", {}, base=gym.CHUNK)
    # Entry CHUNK + 3 of base 0 is drawn from seed CHUNK + 3, as is entry 3 of base CHUNK (GY-1).
    assert low.entry(gym.CHUNK + 3)["question"] == high.entry(3)["question"]
    assert low.entry(3)["question"] != high.entry(3)["question"]
