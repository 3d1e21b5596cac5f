"""RS-1 to RS-4 with real checkpoints, page and pipeline; roles and clock are simulated.

The weights of the simulated trainer are a digest of every token, advantage and age that it was trained on, in order:
two runs with the same digest trained the same, bit for bit. Times are multiples of 1/64 s: all clocks agree exactly.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from algorithms import virtual_time
from algorithms.grpo import GRPOConfig
from algorithms.play import Stage, Times, stage
from algorithms.resume import GROUPS, Checkpoints
from algorithms.simulated import CountedPrompts, SimulatedTrainer, Speeds, lognormal
from roles import checkpoint

STEPS, EVERY = 12, 3
PLAIN = GRPOConfig(prompts_per_step=4, samples_per_prompt=2, advantage="reinforce")
TIMES = Times(
    speeds=Speeds(
        step_base=1 / 64, step_per_sequence=0, train_base=2.0, train_per_token=0, publish=1 / 4, max_running=6
    ),
    lengths=lognormal(60, 0.8, 400),
)


class SlowDisk:
    """Saves of the simulated trainer that take a while, and what was there when each step began."""

    def __init__(self, folder: Path, *, seconds: float, breaks: int | None = None) -> None:
        self.seen: list[tuple[int, list[int]]] = []
        self._folder, self._seconds, self._breaks = folder, seconds, breaks
        self._until = 0.0

    def of(self, trainer: SimulatedTrainer) -> SlowDisk:
        self._trainer, real = trainer, trainer.train_step

        async def train_step(*args: Any, **named: Any) -> Any:
            steps = [int(path.name.removeprefix("step-")) for path in checkpoint.complete(self._folder)]
            self.seen.append((trainer.version, steps))
            if trainer.version == self._breaks:
                raise RuntimeError("the trainer broke")
            return await real(*args, **named)

        trainer.train_step = train_step  # type: ignore[method-assign]
        return self

    async def begin_save(self, path: str | Path) -> None:
        await self._trainer.begin_save(path)
        self._until = asyncio.get_running_loop().time() + self._seconds

    async def save_ended(self) -> bool:
        return asyncio.get_running_loop().time() >= self._until

    async def finish_save(self) -> None:
        await asyncio.sleep(max(0.0, self._until - asyncio.get_running_loop().time()))

    async def load(self, path: str | Path) -> None:
        await self._trainer.load(path)


def run(
    folder: Path,
    *,
    S: float,
    exact: bool,
    resume: int | None = None,
    until: int = STEPS,
    trainer: SlowDisk | None = None,
    config: GRPOConfig = PLAIN,
) -> tuple[Stage, list[int]]:
    """Train to the end, from the start or from the checkpoint of a step; also the positions trained, in order."""
    order: list[int] = []

    async def main() -> Stage:
        prompts = CountedPrompts()
        scene = stage(config, TIMES, staleness=S, steps=STEPS, seed=5, prompts=prompts)
        page = scene.page
        page.checkpoints = Checkpoints(
            run=folder,
            every=EVERY,
            keep=99,
            trainer=scene.trainer if trainer is None else trainer.of(scene.trainer),
            admission=page.admission,
            prompts=prompts,
            exact=exact,
        )
        took = page.buffer.take

        async def take(num_groups: int, *, version: int):
            taken = await took(num_groups, version=version)
            order.extend(one.group.prompt.position for one in taken)
            return taken

        page.buffer.take = take  # type: ignore[method-assign]
        start = 0 if resume is None else await page.checkpoints.restore(checkpoint.step_folder(folder, resume))
        assert await page.run(start, until) == until
        return scene

    return virtual_time.run(main()), order


@pytest.mark.parametrize("S", [0, 0.5, 1, 3])
def test_exact_checkpoints_continue_bit_for_bit_from_every_one_of_them(tmp_path, S):
    whole, order = run(tmp_path, S=S, exact=True)
    for step in range(EVERY, STEPS, EVERY):
        resumed, rest = run(tmp_path, S=S, exact=True, resume=step)
        assert resumed.trainer.weights == whole.trainer.weights
        assert rest == order[4 * step :]
        assert resumed.recorder.ages == whole.recorder.ages[step:]


@pytest.mark.parametrize("S", [1, 3])
def test_a_run_that_is_stopped_lets_what_is_in_flight_finish_too_rs4(tmp_path, S):
    """The step that is under way is one after which a checkpoint is due."""
    whole, _ = run(tmp_path / "whole", S=S, exact=True)

    async def stopped() -> int:
        prompts = CountedPrompts()
        scene = stage(PLAIN, TIMES, staleness=S, steps=STEPS, seed=5, prompts=prompts)
        page, real = scene.page, scene.trainer.train_step

        async def train_step(*args: Any, **named: Any) -> Any:
            result = await real(*args, **named)
            if scene.trainer.version == EVERY:
                page.stop()
            return result

        scene.trainer.train_step = train_step  # type: ignore[method-assign]
        page.checkpoints = Checkpoints(
            run=tmp_path,
            every=EVERY,
            keep=99,
            trainer=scene.trainer,
            admission=page.admission,
            prompts=prompts,
            exact=True,
        )
        return await page.run(0, STEPS)

    assert virtual_time.run(stopped()) == EVERY
    resumed, _ = run(tmp_path, S=S, exact=True, resume=EVERY)
    assert resumed.trainer.weights == whole.trainer.weights


def test_what_is_left_of_a_checkpoint_is_no_obstacle_to_the_same_step_rs2(tmp_path):
    run(tmp_path, S=0, exact=False, until=EVERY)
    torn = checkpoint.step_folder(tmp_path, 2 * EVERY)
    torn.mkdir()
    (torn / GROUPS).write_bytes(b"half")
    run(tmp_path, S=0, exact=False, resume=EVERY)
    assert checkpoint.is_complete(torn)


def test_without_staleness_every_checkpoint_is_exact(tmp_path):
    whole, _ = run(tmp_path, S=0, exact=False)
    resumed, _ = run(tmp_path, S=0, exact=False, resume=EVERY)
    assert resumed.trainer.weights == whole.trainer.weights


@pytest.mark.parametrize("S", [1, 3])
def test_in_flight_prompts_are_issued_again_in_their_places_and_finished_groups_are_kept(tmp_path, S):
    _, order = run(tmp_path, S=S, exact=False)
    for step in range(EVERY, STEPS, EVERY):
        resumed, rest = run(tmp_path, S=S, exact=False, resume=step)
        assert rest == order[4 * step :]  # the same prompts in the same order, none lost and none twice
        assert max(max(ages) for ages in resumed.recorder.ages) <= S


@pytest.mark.parametrize(("seconds", "late"), [(0.0, 1), (5.0, 2), (99.0, 3)])
def test_training_goes_on_while_a_checkpoint_is_written_and_resumes_from_its_moment_rs5(tmp_path, seconds, late):
    """A step takes from 2.5 to 4 seconds. What lasts longer than three of them is waited for when the next is due."""
    disk = SlowDisk(tmp_path, seconds=seconds)
    whole, _ = run(tmp_path, S=0, exact=False, trainer=disk)
    for version, steps in disk.seen:
        assert steps == [step for step in range(EVERY, STEPS, EVERY) if step + late <= version]
    assert [int(path.name[5:]) for path in checkpoint.complete(tmp_path)] == list(range(EVERY, STEPS + 1, EVERY))
    resumed, _ = run(tmp_path, S=0, exact=False, resume=EVERY)
    assert resumed.trainer.weights == whole.trainer.weights


def test_a_run_that_fails_keeps_the_checkpoint_that_was_under_way_rs5(tmp_path):
    disk = SlowDisk(tmp_path, seconds=5.0, breaks=EVERY + 1)
    with pytest.raises(RuntimeError, match="the trainer broke"):
        run(tmp_path, S=0, exact=False, trainer=disk)
    assert disk.seen[-1] == (EVERY + 1, [])
    assert checkpoint.latest(tmp_path) == checkpoint.step_folder(tmp_path, EVERY)
    whole, _ = run(tmp_path / "other", S=0, exact=False)
    resumed, _ = run(tmp_path, S=0, exact=False, resume=EVERY)
    assert resumed.trainer.weights == whole.trainer.weights


@pytest.mark.parametrize("groups_per_step", [1, 3, 6])
def test_a_job_may_go_on_with_another_number_of_groups_a_step(tmp_path, groups_per_step):
    """Counted from the steps that are left, or the last of them would wait for groups that nobody may generate."""
    run(tmp_path, S=1, exact=False, until=EVERY)
    config = msgspec.structs.replace(PLAIN, prompts_per_step=groups_per_step)
    scene, order = run(tmp_path, S=1, exact=False, resume=EVERY, config=config)
    assert len(order) == (STEPS - EVERY) * groups_per_step
    book = scene.page.admission.statistics()
    assert book.trained == EVERY * PLAIN.prompts_per_step + len(order)
    assert scene.page.admission.needs_no_more


def test_groups_come_back_with_every_field_as_it_was(tmp_path):
    run(tmp_path, S=3, exact=True, until=EVERY)
    saved = (checkpoint.step_folder(tmp_path, EVERY) / GROUPS).read_bytes()
    groups = msgspec.msgpack.decode(saved)
    assert len(groups) == 12  # three steps ahead, all of them finished

    async def main() -> None:
        prompts = CountedPrompts()
        scene = stage(PLAIN, TIMES, staleness=3, steps=STEPS, prompts=prompts)
        checkpoints = Checkpoints(
            run=tmp_path, every=0, keep=1, trainer=scene.trainer, admission=scene.page.admission, prompts=prompts
        )
        await checkpoints.restore(checkpoint.step_folder(tmp_path, EVERY))
        back = scene.page.admission.buffered()
        assert [group.prompt.position for group in back] == list(range(12, 24))
        for one in back:
            fresh = await scene.rollout.generate(one.prompt, 2, scene.page.sampling, 5)
            for a, b in zip(one.completions, fresh.completions, strict=True):
                np.testing.assert_array_equal(a.token_ids, b.token_ids)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
                assert (a.versions.dtype, a.versions.shape) == (b.versions.dtype, b.versions.shape)
            assert len(one.rewards) == 2

    virtual_time.run(main())


def test_a_damaged_file_of_groups_is_told_with_its_path(tmp_path):
    run(tmp_path, S=1, exact=False, until=EVERY)
    path = checkpoint.step_folder(tmp_path, EVERY) / GROUPS
    path.write_bytes(path.read_bytes()[:-1] if path.stat().st_size > 1 else b"\xff")
    with pytest.raises(checkpoint.CheckpointError, match=r"groups\.msgpack: .*resume from another one"):
        run(tmp_path, S=1, exact=False, resume=EVERY)
