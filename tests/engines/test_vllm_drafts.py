"""Promises of roles/vllm_drafts.py: by a real vLLM on CPU with a draft, and by its decision alone for many requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from roles.rollout import RolloutConfig, RolloutRank, VllmConfig
from roles.types import Completion, Sampling
from sync.explain import coverage
from tests.engines.models import (
    build,
    check_versions_over_a_swap,
    checkpoint,
    forced_logprobs,
    save_mtp_policy,
    save_policy,
)
from tests.engines.sending import put, sides_of
from tests.engines.test_vllm import ENDLESS, PROMPT, publish, seeds_of, until_decoding

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"temperature": 0.0},
]


async def started(path: str, **vllm: Any) -> RolloutRank:
    config = RolloutConfig(
        engine="vllm",
        max_running=8,
        max_len=512,
        record_routes=not {"ngram", "mtp"} & set(vllm.values()),
        vllm=VllmConfig(**vllm),
    )
    rank = RolloutRank(config, path)
    await rank.weight_parts()
    return rank


async def ended(rank: RolloutRank) -> None:
    await rank.__cleanup__()
    await rank.tasks.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def drafted(policy: str) -> AsyncIterator[RolloutRank]:
    """A replica whose draft is what the policy was before any training."""
    rank = await started(policy, draft=policy, draft_tokens=3)
    yield rank
    await ended(rank)


async def kept_of(rank: RolloutRank) -> tuple[int, int]:
    await rank._engine.probe()
    stats = rank._stats()
    return stats.drafted, stats.kept


async def completions_of(rank: RolloutRank, sampling: Sampling) -> list[Completion]:
    calls = [rank.generate(PROMPT[: 3 + i], sampling, seeds_of(i, 2)) for i in range(3)]
    return [completion for group in await asyncio.gather(*calls) for completion in group]


@pytest.mark.parametrize("kind", KINDS)
async def test_completions_are_those_without_a_draft_dr1(
    rank: RolloutRank, drafted: RolloutRank, tmp_path: Path, kind: dict
) -> None:
    await publish(rank, 0, tmp_path / "a")
    await publish(drafted, 0, tmp_path / "b")
    sampling = Sampling(max_tokens=24, **kind)
    before = await kept_of(drafted)
    for mine, theirs in zip(await completions_of(drafted, sampling), await completions_of(rank, sampling), strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.finish_reason == theirs.finish_reason
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
        assert mine.routes is not None
        assert theirs.routes is not None
        assert np.sort(mine.routes).tolist() == np.sort(theirs.routes).tolist()
    after = await kept_of(drafted)
    looked_at, kept = (b - a for a, b in zip(before, after, strict=True))
    assert kept > 0.6 * looked_at > 0  # DR-3: it is the policy itself; drafts beyond the end are not kept


async def test_likeliest_tokens_stand_beside_each_that_was_sampled(drafted: RolloutRank, tmp_path: Path) -> None:
    model = await publish(drafted, 0, tmp_path)
    (completion,) = await drafted.generate(PROMPT, Sampling(max_tokens=20, top_logprobs=3), seeds_of(0, 1))
    assert completion.top_logprobs is not None
    for place, best in enumerate(completion.top_ids.tolist()):  # type: ignore[union-attr]
        prompt = [*PROMPT, *completion.token_ids[:place].tolist()]
        for token, told in zip(best, completion.top_logprobs[place], strict=True):
            assert abs(forced_logprobs(model, prompt, np.array([token]))[0] - told) < 1e-4


@pytest.mark.parametrize("seeds", [(0, 2), (1, 2)])
async def test_a_request_that_spans_an_update_has_exact_versions_w5(
    drafted: RolloutRank, tmp_path: Path, seeds: tuple[int, int]
) -> None:
    """From weights that the draft knows by heart, and from others."""
    old = await publish(drafted, seeds[0], tmp_path / "old")
    first = drafted._engine.version
    before = await kept_of(drafted)
    call = asyncio.create_task(drafted.generate(PROMPT, ENDLESS, seeds_of(0, 3)))
    await until_decoding(drafted, call)
    new = await publish(drafted, seeds[1], tmp_path / "new")
    for completion in await call:
        check_versions_over_a_swap(completion, first, 300, old, new, PROMPT)
    assert (await kept_of(drafted))[1] > before[1]


async def test_ngram_drafts_are_kept_where_they_are_right(tmp_path: Path) -> None:
    rank = await started(save_policy(tmp_path / "policy", "Qwen3"), draft="ngram", draft_tokens=4)
    model = build("Qwen3")
    for kind in KINDS:
        sampling = Sampling(max_tokens=60, ignore_eos=True, **kind)
        for completion in await rank.generate(PROMPT, sampling, seeds_of(0, 4)):
            if set(kind) <= {"temperature"} and kind.get("temperature") != 0:
                expected = forced_logprobs(model, PROMPT, completion.token_ids, kind.get("temperature", 1.0))
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    looked_at, kept = await kept_of(rank)
    assert looked_at > kept > 0  # both kinds of places were looked at
    await put(rank, checkpoint(build("Qwen3", 1), tmp_path / "new"), 1)
    (score,) = await rank.score([[*PROMPT, 8, 7]])
    np.testing.assert_allclose(
        score, forced_logprobs(build("Qwen3", 1), PROMPT[:1], np.array([*PROMPT[1:], 8, 7])), atol=1e-4
    )
    await ended(rank)


async def test_mtp_layers_draft_and_are_declared_constant_beside_what_they_share_dr5(tmp_path: Path) -> None:
    path, model = save_mtp_policy(tmp_path / "policy")
    rank = await started(path, draft="mtp", draft_tokens=1)
    (side,) = await sides_of(rank)
    assert side.layout is not None
    assert all(name.startswith("draft.model.mtp_layers.") for name in side.layout.constant)
    assert {name.split(".")[4] for name in side.layout.constant} == {
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "mtp_block",
        "final_layernorm",
    }  # embedding and head are the policy's
    assert "constant" in coverage([side.layout])
    for version, seed in ((0, 0), (1, 1)):
        if version:
            _, model = save_mtp_policy(tmp_path / "new", seed)
            await put(rank, dict(model.state_dict()), version)
        before = await kept_of(rank)
        for temperature in (1.0, 0.7):
            sampling = Sampling(max_tokens=40, temperature=temperature, ignore_eos=True)
            for completion in await rank.generate(PROMPT, sampling, seeds_of(0, 3)):
                expected = forced_logprobs(model, PROMPT, completion.token_ids, temperature)
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
                assert set(completion.versions.tolist()) == {version}
        assert (await kept_of(rank))[1] > before[1]
    await ended(rank)


# --- the decision alone -----------------------------------------------------------------------------------------------

MANY, SMALL = 20_000, 7
LIMIT = 22.5
"""A chi-square of 6 degrees of freedom is beyond it once in a thousand; seeds are fixed, so it is or it isn't."""


def decide(logits: torch.Tensor, said: Sequence[int], **sampling: Any) -> Any:
    """[MANY, S + 1] tokens, and their logprobs, of as many requests whose drafts say the same and whose rows are
    `logits`."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from roles.vllm_drafts import Drafts

    current_platform.import_kernels()

    def of_all(value: Any, dtype: torch.dtype) -> torch.Tensor | None:
        return None if value is None else torch.full((MANY,), value, dtype=dtype)

    metadata = SimpleNamespace(
        all_greedy=False,
        temperature=of_all(sampling["temperature"], torch.float32),
        top_k=of_all(sampling.get("top_k"), torch.int32),
        top_p=of_all(sampling.get("top_p"), torch.float32),
        generators={row: torch.Generator().manual_seed(row) for row in range(MANY)},
        max_num_logprobs=0,
    )
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(num_reqs=MANY, sampling_metadata=metadata),
        sampler=SimpleNamespace(topk_topp_sampler=TopKTopPSampler("processed_logprobs")),
    )
    drafts = SimpleNamespace(num_draft_tokens=[len(said)] * MANY, draft_token_ids=torch.tensor(list(said) * MANY))
    with torch.compiler.set_stance("force_eager"):  # what compiles keeps threads for the rest of this process
        output = Drafts(runner).sample(logits.repeat(MANY, 1), drafts)
    return output.sampled_token_ids, output.logprobs_tensors.logprobs.view(MANY, -1)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 4}],
)
async def test_tokens_of_each_place_have_the_distribution_of_the_policy_dr1(sampling: dict) -> None:
    logits = torch.randn(3, SMALL, generator=torch.Generator().manual_seed(3)) * 1.5
    said = [int(row.argsort(descending=True)[1]) for row in logits[:2]]  # neither right nor hopeless
    tokens, logprobs = decide(logits, said, **sampling)
    reached = torch.ones(MANY, dtype=torch.bool)
    for place in range(3):
        expected = filtered(logits[place], **sampling)
        seen = torch.bincount(tokens[reached, place], minlength=SMALL).double()
        share = seen.sum() * expected.double()
        assert seen[expected == 0].sum() == 0
        assert ((seen - share)[expected > 0] ** 2 / share[expected > 0]).sum() < LIMIT
        other = seen.sum() * torch.softmax(logits[place].double() / 0.5, 0)
        assert ((seen - other) ** 2 / other).sum() > 4 * LIMIT  # it tells distributions apart
        assert (tokens[~reached, place] == -1).all()
        told = logprobs[reached, place]
        assert torch.allclose(told, expected.log()[tokens[reached, place].long()], atol=1e-5)
        if place < 2:
            reached &= tokens[:, place] == said[place]
            assert 500 < reached.sum() < MANY


def filtered(logits: torch.Tensor, temperature: float, top_k: int = SMALL, top_p: float = 1.0) -> torch.Tensor:
    """[V] probabilities."""
    order = logits.argsort(descending=True)[:top_k]
    mass = (logits[order] / temperature).softmax(0)
    order = order[mass.cumsum(0) - mass < top_p]
    kept = torch.full_like(logits, -torch.inf)
    kept[order] = logits[order] / temperature
    return kept.softmax(0)


async def test_what_vllm_does_instead_on_a_cpu() -> None:
    """Why temperature, top_k and top_p of drafted places are not left to it: its kernel writes into a copy (vLLM issue
    55005). Once this fails, it has been mended."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    out = torch.full((3,), -5.0)
    _expand_kernel_impl(out, torch.tensor([0.7, 1.0]), torch.tensor([2, 3], dtype=torch.int32), 0, 1)
    assert out.tolist() == [-5.0] * 3
