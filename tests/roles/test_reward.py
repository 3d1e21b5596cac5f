"""Rewards: RW-1 unscored is never 0, RW-2 limits, RW-3 turns, RW-4 main thread, RW-5 stop of the run."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import cast

import msgspec
import numpy as np
import pytest

from roles import gym
from roles.reward import RewardConfig, RewardFailed, RewardPool, RewardRank, RewardStats, _Worker, check_reward, judge
from roles.tally import Tally
from roles.types import Completion, Group, Prompt, Reward, Scored, Unscored
from runtime import HostMesh, Stopped, this_host
from tests.roles.verifiers import obey
from tests.waiting import until

PRELOAD = ["roles.reward", "reasoning_gym.factory"]
"""What workers need; by itself a fork server takes along what other tests have imported, seconds of torch."""
VERIFIER = "tests.roles.verifiers:obey"
PROMPT = Prompt(position=3, text="What is 1 + 1?", token_ids=(1,), task="sums", entry={"answer": "2"})


def group_of(*texts: str, prompt: Prompt = PROMPT) -> Group:
    def completion(text: str) -> Completion:
        return Completion(
            token_ids=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            finish_reason="stop",
            text=text,
        )

    return Group(prompt=prompt, completions=[completion(text) for text in texts])


def reasons(rewards: list[Reward]) -> list[str]:
    return [reward.reason if isinstance(reward, Unscored) else f"scored {reward.value:g}" for reward in rewards]


# --- the rank as a plain object ---------------------------------------------------------------------------------------


def test_each_text_gets_the_verdict_or_the_reason_why_there_is_none():  # RW-1
    rank = RewardRank(RewardConfig(verifier=VERIFIER, timeout_s=0.1))
    late = ["sleep", "spin", "regex", "swallow once", "take the alarm"]
    assert reasons(rank.score(PROMPT, ["1", "0", "0.5", *late, "raise", "exit", "none", "nan"])) == [
        "scored 1",
        "scored 0",
        "scored 0.5",
        *["time limit: no verdict after 0.1 s"] * len(late),
        "LookupError: no such answer",
        "SystemExit: bye",
        "BadVerdict: the verifier returned NoneType None; expected a float such as 1.0",
        "BadVerdict: the verifier returned nan; expected a finite float such as 1.0",
    ]


def test_a_rank_scores_generated_and_file_tasks_by_what_their_source_says():
    rank = RewardRank(RewardConfig(timeout_s=5.0))
    entry = gym.Family("chain_sum", {"max_terms": 2}, base=0).entry(0)
    generated = Prompt(position=0, text="", token_ids=(), task="chain_sum", entry=entry)
    assert rank.score(generated, [f"<answer>{entry['answer']}</answer>", "<answer>x</answer>"]) == [
        Scored(1.0),
        Scored(0.0),
    ]
    row = Prompt(position=0, text="", token_ids=(), task="mine", entry={"answer": "1/2", "verifier": "math"})
    assert rank.score(row, [r"\boxed{0.5}"]) == [Scored(1.0)]


def test_the_first_use_of_a_library_is_not_counted_against_a_completion():
    # A limit far below what importing takes: warm-up happens outside of it.
    rank = RewardRank(RewardConfig(verifier="math", timeout_s=1.0))
    assert rank.score(PROMPT, ["<answer>4/2</answer>"]) == [Scored(1.0)]


def test_a_long_error_text_is_cut():
    def fail(_prompt: Prompt, text: str) -> object:
        raise ValueError(text)

    reward = judge(fail, PROMPT, "x" * 10_000, 1.0)
    assert isinstance(reward, Unscored)
    assert len(reward.reason) == 500


def test_an_unknown_verifier_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"\[reward\] verifier 'tests.roles.verifiers:obye': .*nearest: 'obey'"):
        check_reward(RewardConfig(verifier="tests.roles.verifiers:obye"))
    check_reward(RewardConfig(verifier=VERIFIER))
    assert obey(PROMPT, "1") == 1.0


def test_the_failure_rate_is_over_all_completions():
    stats = RewardStats(scored=6, unscored={"time limit": 1, "ValueError": 1}, replaced=0, busy_seconds=1.0)
    assert stats.failure_rate == 0.25
    assert RewardStats(scored=0, unscored={}, replaced=0, busy_seconds=0.0).failure_rate == 0.0


# --- with real processes ----------------------------------------------------------------------------------------------


async def test_a_verifier_that_cannot_be_interrupted_costs_its_group_and_the_run_goes_on():  # RW-2
    async with this_host(preload=PRELOAD) as host:
        pool = await RewardPool.start(host, RewardConfig(verifier=VERIFIER, timeout_s=0.2))
        assert (await pool.score(group_of("1", "0"))).rewards == [Scored(1.0), Scored(0.0)]
        stuck = reasons((await pool.score(group_of("1", "stuck"))).rewards)
        assert all(
            reason.startswith("time limit: a completion of this group could not be interrupted") for reason in stuck
        )
        assert "verifiers.py" in stuck[1]
        died = reasons((await pool.score(group_of("die"))).rewards)
        assert died[0].startswith("worker died: exited with code 7")
        killed = reasons((await pool.score(group_of("kill"))).rewards)
        assert killed[0].startswith("worker died: killed by SIGKILL")
        mixed = reasons((await pool.score(group_of("sleep", "raise", "1"))).rewards)
        assert mixed == ["time limit: no verdict after 0.2 s", "LookupError: no such answer", "scored 1"]
        stats = pool.stats()
        assert stats.scored == 3
        assert stats.unscored == {"time limit": 3, "worker died": 2, "LookupError": 1}
        assert stats.replaced == 3
        assert stats.failure_rate == pytest.approx(6 / 9)
        await pool.stop()


async def test_a_worker_that_dies_while_idle_costs_nothing():  # RW-2
    async with this_host(preload=PRELOAD) as host:
        pool = await RewardPool.start(host, RewardConfig(verifier=VERIFIER))
        [pid] = [reward.value for reward in (await pool.score(group_of("pid"))).rewards if isinstance(reward, Scored)]
        os.kill(int(pid), signal.SIGKILL)
        await until(lambda: pool._workers[0]._life.ended)  # white box: wait until the death is known
        assert (await pool.score(group_of("1"))).rewards == [Scored(1.0)]
        assert pool.stats().replaced == 1
        await pool.stop()


async def test_a_stopped_pool_says_so():
    async with this_host(preload=PRELOAD) as host:
        pool = await RewardPool.start(host, RewardConfig(verifier=VERIFIER))
        waiting = [asyncio.create_task(pool.score(group_of("sleep"))) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.stop()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(outcome, Stopped) for outcome in outcomes] == [True] * 3


async def test_groups_spread_over_the_workers_and_wait_for_a_free_one():  # RW-3
    async with this_host(preload=PRELOAD) as host:
        pool = await RewardPool.start(host, RewardConfig(verifier=VERIFIER, workers=2))
        groups = await asyncio.gather(*(pool.score(group_of("pid", prompt=PROMPT)) for _ in range(8)))
        pids = {reward.value for group in groups for reward in group.rewards if isinstance(reward, Scored)}
        assert len(pids) == 2
        assert pool.stats().scored == 8
        await pool.stop()


async def test_a_worker_that_does_not_run_at_all_is_stopped(monkeypatch):  # RW-2
    async with this_host(preload=PRELOAD) as host:
        pool = await RewardPool.start(host, RewardConfig(verifier=VERIFIER, timeout_s=0.2))
        with monkeypatch.context() as patch:  # for this call alone: a new worker may take long to import what it needs
            patch.setattr("roles.reward.ANSWER_MARGIN", 0.5)
            rewards = reasons((await pool.score(group_of("pause"))).rewards)
        assert rewards[0].startswith("time limit: the worker gave no answer for 1.7 s")
        assert (await pool.score(group_of("1"))).rewards == [Scored(1.0)]
        await pool.stop()


async def test_too_many_failures_stop_the_run_with_examples():  # RW-5
    config = RewardConfig(verifier=VERIFIER, window=4, max_unscored=0.5)
    async with this_host(preload=PRELOAD) as host:
        pool = await RewardPool.start(host, config)
        await pool.score(group_of("raise", "1"))
        await pool.score(group_of("raise", "1"))  # 2 of 4: at the limit, not above
        with pytest.raises(RewardFailed) as failure:
            await pool.score(group_of("raise", "raise"))
        text = str(failure.value)
        assert "3 of the last 4 completions could not be scored, expected at most 50%" in text
        assert "LookupError 4" in text
        assert "task 'sums', prompt 3: LookupError: no such answer" in text
        assert "question: 'What is 1 + 1?'" in text
        await pool.stop()


async def test_a_verifier_that_the_workers_cannot_import_fails_the_start():
    async with this_host(preload=PRELOAD) as host:
        with pytest.raises(ValueError, match="can't be imported"):
            await RewardPool.start(host, RewardConfig(verifier="no_such_module_here:f"))


async def test_a_verifier_that_forks_scores_once_and_leaves_nothing_behind():  # RW-2, LI-5
    async with this_host(preload=PRELOAD) as host:
        pool = await RewardPool.start(host, RewardConfig(verifier=VERIFIER, timeout_s=5.0))
        group = await pool.score(group_of("fork", "fork and return", "0.5"))
        assert reasons(group.rewards) == ["scored 1", "scored 1", "scored 0.5"]
        assert reasons((await pool.score(group_of("0.25"))).rewards) == ["scored 0.25"]
        await pool.stop()  # and the suite finds that no process is left


def test_a_run_after_one_that_had_too_few_verdicts_starts_anew():  # RW-5, SR-3
    tally = Tally("a reward", "Fix it", window=4)

    def count(*rewards: Reward) -> None:
        tally.count(msgspec.structs.replace(group_of(*("1",) * len(rewards)), rewards=list(rewards)))

    for _ in range(2):
        count(Scored(1.0))
        with pytest.raises(RewardFailed, match="3 of the last 4"):
            count(*[Unscored("no")] * 3)
    assert (tally.scored, tally.unscored["no"]) == (2, 6)


async def test_a_worker_whose_start_was_cancelled_leaves_no_process_behind():  # RW-2
    """The group that waited for it was not wanted any more; the next one needs the same place."""
    alive: list[Procs] = []

    class Procs:
        async def spawn(self, *_: object) -> object:
            if not starting.done():
                await asyncio.Event().wait()
            return object()

        async def stop(self, *, grace: float) -> None:
            alive.remove(self)

    class Host:
        async def spawn_procs(self, *_: object, **__: object) -> Procs:
            alive.append(Procs())
            return alive[-1]

    worker = _Worker(cast(HostMesh, Host()), RewardConfig(), 0)
    starting = asyncio.create_task(worker.start())
    await until(lambda: alive)
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    await asyncio.wait_for(worker.start(), 2)
    assert len(alive) == 1
