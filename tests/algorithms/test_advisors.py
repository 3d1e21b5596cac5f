"""RC-1 to RC-4 with real trainers in processes: a frozen reference, and a critic that learns what rewards to expect."""

from __future__ import annotations

import numpy as np
import pytest

from algorithms.advisors import Advisors, CriticConfig
from roles import checkpoint
from roles.trainer import TrainerConfig
from roles.types import TrainSample
from runtime import this_host
from tests.roles.tiny import prompt_at, save_tiny_policy


def batch() -> list[TrainSample]:
    """Eight answers; those that begin with an even token are worth 1."""
    samples = []
    for i in range(8):
        prompt = prompt_at(i % 2)
        ids = np.array([*prompt.token_ids, 10 + i, 20, 30], np.int32)
        samples.append(
            TrainSample(
                token_ids=ids,
                prompt_length=len(prompt.token_ids),
                rollout_logprobs=np.full(3, -4.0, np.float32),
                advantages=np.full(3, float(i % 2 == 0), np.float32),
            )
        )
    return samples


def error(sample: TrainSample) -> float:
    assert sample.values is not None
    assert sample.returns is not None
    return float(np.mean((sample.values - sample.returns) ** 2))


@pytest.mark.timeout(180)
async def test_a_critic_learns_the_returns_and_comes_back_from_a_checkpoint_beside_a_frozen_reference(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    config = TrainerConfig(threads=1, device="cpu")
    async with this_host() as host:
        advisors = await Advisors.start(
            host, config, policy, reference=True, critic=CriticConfig(lr=1e-2, lam=1.0, value_clip=None), kl_weight=0.0
        )
        errors, references = [], []
        for _ in range(12):
            samples = batch()
            await advisors.advise(samples, temperature=1.0)
            errors.append(float(np.mean([error(s) for s in samples])))
            references.append(np.array([s.reference_logprobs for s in samples]))
            await advisors.learn(samples, temperature=1.0)
        assert errors[0] == pytest.approx(0.5, abs=1e-6)  # values begin at 0; half of the returns are 1
        assert errors[-1] < 0.2
        assert all(np.array_equal(references[0], one) for one in references)  # it never moves

        with checkpoint.folder(tmp_path / "saved") as writing:
            await advisors.begin_save(writing)
            await advisors.finish_save()
        before = batch()
        await advisors.advise(before, temperature=1.0)
        await advisors.learn(before, temperature=1.0)
        await advisors.load(tmp_path / "saved")
        after = batch()
        await advisors.advise(after, temperature=1.0)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one.values, other.values)


async def test_nobody_asked_means_nothing_changes():
    nobody = Advisors()
    samples = batch()
    await nobody.advise(samples, temperature=1.0)
    await nobody.learn(samples, temperature=1.0)
    assert all(s.values is None and s.reference_logprobs is None for s in samples)
    with pytest.raises(ValueError, match="has no reference_logprobs"):
        await Advisors(kl_weight=0.1).advise(samples, temperature=1.0)
