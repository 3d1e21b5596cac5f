"""Promises of roles/environment_config.py: the environment of a job file is found, tried out and judged by the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from algorithms.job import Job, Resolved, resolve
from roles.environment_config import EnvironmentConfig, environments, judge_of, tools_of
from roles.types import Group, Reward, Scored, Unscored
from roles.verifiers_env import VERSIONS, options_of
from runtime.config import ConfigError, load
from runtime.journal import read_metrics, read_samples
from tests.roles.tiny import prompt_at

ROOT = Path(__file__).parents[2]


class Sync:
    """No environment: its `step` is not async."""

    async def reset(self, prompt: Any) -> None: ...

    def step(self, text: str) -> None: ...

    async def close(self) -> None: ...


class Broken:
    """Can't be made."""

    def __init__(self) -> None:
        raise OSError("no such world")


class Needy:
    """Needs an option."""

    def __init__(self, world: str) -> None: ...


async def wins(prompt: Any, address: Any) -> float:
    """An agent."""
    return 1.0


def resolved(*overrides: str) -> Resolved:
    path = ROOT / "recipes" / "default.toml"
    return resolve(load(path, Job, overrides), folder=path.parent, source="job.toml", gpus=0, cores=2)


HERE = "tests.roles.test_environment_config"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "environment.name=tool",
            "unknown (nearest: 'tools'). Use one of gym, tools, calculator, agent, verifiers",
        ),
        ("environment.name=agent", "expected options.function = 'module:function', got ''"),
        (f"environment={{ name = 'agent', options = {{ function = '{HERE}:resolved' }} }}", "is no 'async def'"),
        (
            f"environment={{ name = 'agent', options = {{ function = '{HERE}:wins', worth = 2 }} }}",
            "can't take the other options: got an unexpected keyword argument 'worth'",
        ),
        (
            "environment={ name = 'verifiers', options = { name = 'x' } }",
            "contains unknown field `name`",
        ),
        ("environment={ name = 'gym', options = { trys = 2 } }", "no option 'trys' (nearest: 'tries')"),
        ("environment={ name = 'gym', options = { tries = 0 } }", "expected tries >= 1"),
        ("environment.name=tools", "needs options.tools"),
        ("environment={ name = 'tools', options = { tools = ['calculater'] } }", "tool 'calculater': expected one of"),
        ("environment.name=nowhere:World", "module 'nowhere' can't be imported"),
        (f"environment.name={HERE}:Synk", "has no 'Synk' (nearest: 'Sync')"),
        (f"environment.name={HERE}:Sync", "Sync has no 'async def step'"),
        (f"environment.name={HERE}:Broken", "making one raised OSError: no such world"),
        (f"environment.name={HERE}:Needy", "needs options.world"),
        ("environment={ options = { tries = 2 } }", "options are given without a name"),
        ("environment={ name = 'gym', tokens = 1000 }", "expected at most rollout.max_len = 256"),
        ("environment={ name = 'gym', turns = 0 }", "environment.turns"),
        ("environment={ name = 'gym' }", "rollout.oversample: episodes of an environment are not stopped half way"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_starts_ec1(override: str, words: str) -> None:
    more = ["rollout.oversample=2"] if "oversample" in words else []
    with pytest.raises(ConfigError) as caught:
        resolved(override, *more)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.stop=['']", "none of them empty"),
        ("sampling.top_logprobs=99", "sampling.top_logprobs: expected 0 to 20"),
        ("sampling={ stop = ['x'], ignore_eos = true }", "leave one of them out"),
        ("sampling.max_tokens=0", "sampling.max_tokens: expected at least 1"),
        ("sampling.stop_token_ids=[0, 440]", "sampling.stop_token_ids: the model has tokens 0 to 439, got [440]"),
    ],
)
def test_sampling_that_means_nothing_is_refused_with_the_job(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(override)
    assert words in str(caught.value)


def test_the_policy_is_told_of_tools_by_the_chat_template_and_a_job_without_environment_stays_as_it_is() -> None:
    job = resolved("environment={ name = 'tools', options = { tools = ['calculator'] } }").job
    assert job.environment.tokens == job.rollout.max_len == 256
    (tool,) = job.data.chat_template_options["tools"]
    assert tool["function"]["name"] == "calculator"
    plain = resolved()
    assert plain.job.environment == EnvironmentConfig()
    assert not any("environment" in key or "template" in key for key in plain.derived)
    assert tools_of(EnvironmentConfig(name="gym")) == []


def test_the_longest_episode_fits_in_a_micro_batch() -> None:
    small = ("environment.name=gym", "trainer.token_budget=100", "sampling.max_tokens=60", "evaluation.max_tokens=80")
    job = resolved(*small).job
    assert (job.environment.tokens, job.rollout.max_len) == (100, job.data.max_prompt_tokens + 80)
    assert resolved(*small, "rollout.max_len=200").job.environment.tokens == 100
    with pytest.raises(ConfigError, match=r"environment.tokens = 101 is above trainer.token_budget = 100: the longest"):
        resolved(*small, "rollout.max_len=200", "environment.tokens=101")


async def test_an_answer_is_judged_by_the_reward_of_the_job_ec2() -> None:
    verdicts: list[Reward] = [Scored(0.5), Unscored("time limit")]

    async def score(group: Group) -> Group:
        group.rewards = [verdicts.pop(0)]
        group.prompt.entry["judged"] = group.completions[0].text
        return group

    config = EnvironmentConfig(name="tools", options={"tools": ["calculator", "python"]})
    make = environments(config, judge_of(score))
    environment, prompt = make(), prompt_at(1)
    assert make() is not environment
    await environment.reset(prompt)
    reply = await environment.step(
        '<tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>'
    )
    assert (reply.text, reply.done) == ("<tool_response>42</tool_response>", False)
    assert ((await environment.step("so 42")).reward, prompt.entry["judged"]) == (0.5, "so 42")
    with pytest.raises(RuntimeError, match="time limit"):  # an unscored episode, not one that has earned nothing
        await environment.step("again")


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (["38 - 19 = ", "- 11 = ", "<answer>8</answer>"], ["19", "8"]),
        (["54 - 76 = -", "x"], ["22"]),
        (["2 * 3 =", "x"], [" 6"]),
        (["1 / 0 = ", "x"], ["error: ZeroDivisionError"]),
        (["say = ", "x"], ["error: SyntaxError"]),
        (["<answer>8</answer>"], []),
        (["a = b"], []),
    ],
)
async def test_results_of_the_calculator_stand_behind_the_sign(turns: list[str], told: list[str]) -> None:
    judged = []

    async def judge(prompt: Any, text: str) -> float:
        judged.append(text)
        return 1.0

    environment = environments(EnvironmentConfig(name="calculator"), judge)()
    await environment.reset(prompt_at(0))
    replies = [await environment.step(turn) for turn in turns]
    assert [reply.text.replace("error: ValueError", "error: SyntaxError") for reply in replies[:-1]] == told
    assert replies[-1].done
    assert {reply.role for reply in replies[:-1]} <= {""}
    whole = "".join(turn + reply.text for turn, reply in zip(turns, replies, strict=True))
    assert judged == [whole]


def trained(recipe: str, runs: Path) -> Path:
    """The folder of two steps of a recipe."""
    overrides = ["steps=2", "grpo.prompts_per_step=2", "evaluation.prompts=0"]
    command = [sys.executable, "-m", "runtime.launch", f"recipes/{recipe}.toml", f"run_dir={runs}", *overrides]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return runs / recipe


@pytest.mark.timeout(240)
def test_the_recipe_with_a_tool_trains_on_episodes_of_several_turns(tmp_path: Path) -> None:
    folder = trained("tools", tmp_path)
    texts = [str(sample["completion"]) for sample in read_samples(folder)]
    right = ("38 - 19 = 19 - 11 = 8 + 90 = 98", "54 - 76 = -22 - 76 = -98", "54 + 38 = 92 + 77 = 169")
    assert any(text.startswith(right) for text in texts), texts
    counts = [(row["train/tokens"], row["rollout/tokens"]) for row in read_metrics(folder) if "train/tokens" in row]
    assert len(counts) == 2
    assert all(0 < sampled < whole for sampled, whole in counts)  # results were read, and not trained on


@pytest.mark.timeout(240)
def test_the_recipe_with_an_agent_of_its_own_loop_trains_on_what_the_endpoint_recorded(tmp_path: Path) -> None:
    folder = trained("agent", tmp_path)
    samples = list(read_samples(folder))
    asked_again = [str(s["completion"]) for s in samples if "State the final answer" in str(s["completion"])]
    assert 0 < len(asked_again) < len(samples)  # who was right at once was not asked again
    assert {float(s["reward"]) for s in samples} <= {0.0, 0.5, 1.0}
    counts = [(row["train/tokens"], row["rollout/tokens"]) for row in read_metrics(folder) if "train/tokens" in row]
    assert len(counts) == 2
    assert all(0 < sampled < whole for sampled, whole in counts)  # the second question was read, and not trained on


@pytest.mark.parametrize("name", ["nowhere", "nowhere.deeper", ""])
def test_an_environment_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("roles.verifiers_env.version", lambda _package: VERSIONS)
    with pytest.raises(ValueError, match=f"options.id '{name}': there is no module '{name}'; install the environment"):
        options_of({"id": name})
