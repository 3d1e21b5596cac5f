"""What a page does with rewards, groups and settings that are not as they should be. Roles and clock are simulated.

Named after the failure kinds of other frameworks that they stand for. The run goes on where one group is to blame, and
ends with an error that says what to change where the job is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from algorithms import virtual_time
from algorithms.advantages import Advantage, dr_grpo
from algorithms.grpo import GRPOConfig, NothingToTrain
from algorithms.play import Outcome, Stage, Times, stage
from algorithms.samples import to_samples
from algorithms.simulated import Speeds, lognormal
from roles.types import Group, Reward, Scored, Unscored
from tests.algorithms.helpers import completion, prompt, scored

CONFIG = GRPOConfig(prompts_per_step=4, samples_per_prompt=2, advantage="dr_grpo")
TIMES = Times(
    speeds=Speeds(step_base=0.01, step_per_sequence=0, train_base=0.5, train_per_token=0, publish=0.1),
    lengths=lognormal(20, 0.5, 100),
)


def play_with(
    change: Callable[[Group], Group], config: GRPOConfig = CONFIG, S: float = 1, steps: int = 10
) -> tuple[Outcome, Stage]:
    """A run in which every scored group is changed."""

    async def main() -> tuple[Outcome, Stage]:
        scene = stage(config, TIMES, staleness=S, steps=steps)
        score = scene.page.reward.score

        async def changed(group: Group) -> Group:
            return change(await score(group))

        scene.page.reward.score = changed  # type: ignore[method-assign]
        assert await scene.page.run(0, steps) == steps
        return scene.recorder.outcome(), scene

    return virtual_time.run(main())


def with_rewards(*rewards: Reward) -> Callable[[Group], Group]:
    return lambda group: msgspec.structs.replace(group, rewards=list(rewards))


def one_in_four(change: Callable[[Group], Group]) -> Callable[[Group], Group]:
    return lambda group: change(group) if group.prompt.position % 4 == 1 else group


def empty(group: Group) -> Group:
    return msgspec.structs.replace(group, completions=[completion([]) for _ in group.completions])


def masked(group: Group) -> Group:
    """All tokens are the environment's."""
    masks = [msgspec.structs.replace(c, mask=np.zeros(len(c.token_ids), bool)) for c in group.completions]
    return msgspec.structs.replace(group, completions=masks)


# --- one group is to blame: the run goes on, and the batch is full ----------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_rewards(Unscored("x"), Unscored("y")), "unscored"),
        (with_rewards(Scored(float("nan")), Scored(float("inf"))), "unscored"),
        (empty, "empty"),
        (masked, "empty"),
        (lambda group: msgspec.structs.replace(group, completions=[], rewards=[]), "unscored"),
    ],
    ids=["no verdict", "no finite verdict", "no token", "no token of the policy", "no completion"],
)
@pytest.mark.parametrize("S", [0, 1])
def test_a_group_that_teaches_nothing_leaves_with_its_reason_and_the_batch_is_refilled(change, reason, S):
    outcome, scene = play_with(one_in_four(change), S=S)
    assert set(outcome.dropped) == {reason}
    book = scene.page.admission.statistics()
    assert book.trained == 40
    assert book.issued == 40 + outcome.dropped[reason]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_poisons_no_group(value):
    """r = [1, NaN]: one verdict is left, no contrast, advantage 0; the other groups are as they were."""
    outcome, _ = play_with(one_in_four(with_rewards(Scored(1.0), Scored(value))))
    assert outcome.dropped == {}
    samples = to_samples(
        [Group(prompt=prompt(0), completions=[completion([0])] * 3, rewards=[Scored(1), Scored(value), Scored(0)])],
        dr_grpo,
    )
    assert [float(s.advantages[0]) for s in samples] == [0.5, -0.5]


@pytest.mark.parametrize("no_contrast", ["keep", "drop"])
def test_a_batch_without_any_signal_still_makes_its_steps(no_contrast):
    config = msgspec.structs.replace(CONFIG, no_contrast=no_contrast)
    outcome, scene = play_with(with_rewards(Scored(1.0), Scored(1.0)), config)
    assert scene.trainer.version == 10
    assert outcome.dropped == {}


def test_groups_of_variable_size_are_compared_over_their_survivors():
    def lose_one(group: Group) -> Group:
        return msgspec.structs.replace(group, completions=group.completions[:1], rewards=group.rewards[:1])

    with pytest.raises(ValueError, match=r"1 completion\(s\).*raise the number of samples per prompt"):
        play_with(one_in_four(lose_one))
    config = msgspec.structs.replace(CONFIG, samples_per_prompt=3)

    def lose_the_last(group: Group) -> Group:
        return msgspec.structs.replace(group, completions=group.completions[:2], rewards=group.rewards[:2])

    outcome, _ = play_with(one_in_four(lose_the_last), config)
    assert outcome.dropped == {}


def test_the_filter_looks_at_the_verdict_and_not_at_what_shaping_makes_of_it():
    """All right, with different lengths: the penalty would make contrast, but there is nothing to learn of answers."""
    config = msgspec.structs.replace(CONFIG, no_contrast="refill", overlong_buffer=32)

    def all_right(group: Group) -> Group:
        lengths = [completion([0] * n) for n in (40, 60)]
        return msgspec.structs.replace(group, completions=lengths, rewards=[Scored(1.0), Scored(1.0)])

    outcome, _ = play_with(one_in_four(all_right), config)
    assert outcome.dropped["no_contrast"] >= 10


def test_a_file_with_fewer_rows_than_a_step_has_prompts_is_asked_again_and_again(tmp_path):
    """Two questions, one of them twice; a step of four: epochs follow each other, the last step is full as well."""
    from examples.started import POLICY
    from roles.prompts import DataConfig, PromptEncoder, PromptSource

    rows = [{"question": q, "answer": "1"} for q in ("one?", "two?", "two?")]
    file = tmp_path / "few.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    data = DataConfig(file=str(file))
    source = PromptSource(data, PromptEncoder(POLICY, data))

    async def main() -> Stage:
        scene = stage(CONFIG, TIMES, staleness=1, steps=5, prompts=source)  # type: ignore[arg-type]
        assert await scene.page.run(0, 5) == 5
        return scene

    book = virtual_time.run(main()).page.admission.statistics()
    assert (book.trained, book.issued) == (20, 20)
    assert sorted(source.at(i).text for i in range(3)) == ["one?", "two?", "two?"]


# --- the job is to blame: the run ends, and the error says what to change ---------------------------------------------


def test_refilling_without_end_ends_the_run_with_the_reasons():
    """Every completion is right: no group has contrast, no batch could ever be filled."""
    config = msgspec.structs.replace(CONFIG, no_contrast="refill", max_refill=5)

    async def main() -> None:
        await stage(config, TIMES, staleness=1, steps=5, success=1.0).page.run(0, 5)

    with pytest.raises(NothingToTrain, match=r"20 groups have left untrained .* \(no_contrast 20\); expected"):
        virtual_time.run(main())


def test_rewards_of_another_number_than_completions_are_refused_by_the_prompt():
    with pytest.raises(ValueError, match="prompt 0 has 2 completions and 1 rewards"):
        to_samples([Group(prompt=prompt(0), completions=[completion([0])] * 2, rewards=scored([1]))])


def test_an_advantage_of_the_user_that_returns_nonsense_is_told_with_its_rewards():
    def wrong(rewards: Any) -> Any:
        return rewards[:-1]

    async def main() -> None:
        scene = stage(CONFIG, TIMES, staleness=0, steps=3)
        scene.page.advantage = Advantage(group=wrong)
        await scene.page.run(0, 3)

    with pytest.raises(ValueError, match=r"wrong returned \[.*\] for rewards \[.*\]; expected 2 finite numbers"):
        virtual_time.run(main())


def test_an_error_of_the_reward_ends_the_run_with_it():
    def broken(group: Group) -> Group:
        raise LookupError("no such column")

    with pytest.raises(LookupError, match="no such column"):
        play_with(one_in_four(broken))
