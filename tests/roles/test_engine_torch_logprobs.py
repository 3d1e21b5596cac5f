"""What roles/engine_torch.py computes, against transformers: logprobs, greedy tokens, likeliest tokens, routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from roles import native
from roles.decoder import UnsupportedModel
from roles.sampling import RowParameters, sampling_logits
from roles.types import Completion, Sampling
from tests.roles.engines import VOCAB, build, collect, drain, engine_of, forced_logprobs, prompt_of, request

FAR = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
"""Queries are scaled by their position, from 64 on."""


@pytest.fixture(params=["native", "torch"], autouse=True)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds with our C++ and without."""
    if request.param == "torch":
        monkeypatch.setattr("roles.native.library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {}),
        ("Qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}),
        ("Mistral", {"sliding_window": None}),
        ("Gemma", {"head_dim": 16}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_logprobs_equal_a_teacher_forced_forward_with_staggered_admission_en1(kind: str, changes: Any) -> None:
    model = build(kind, **changes)
    engine = engine_of(model)
    prompts = {i: prompt_of(i, 2 + 5 * i % 17) for i in range(9)}
    found: dict[tuple[int, int], Completion] = {}
    for number, prompt in prompts.items():
        engine.submit(request(number, prompt, n=1 + number % 4, max_tokens=5 + 7 * number % 40, temperature=0.9))
        for _ in range(number % 3):
            collect(found, engine.step())
    found |= drain(engine)
    assert {key: len(c.token_ids) for key, c in found.items()} == {
        (i, sample): 5 + 7 * i % 40 for i in range(9) for sample in range(1 + i % 4)
    }
    for (number, _), completion in found.items():
        expected = forced_logprobs(model, prompts[number], completion.token_ids, temperature=0.9)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.versions.tolist() == [0] * len(expected)


def test_greedy_equals_transformers_generate() -> None:
    model = build()
    prompts = [prompt_of(i, 3 + i) for i in range(6)]
    engine = engine_of(model)
    for number, prompt in enumerate(prompts):
        engine.submit(request(number, prompt, max_tokens=24, temperature=0.0))
    found = drain(engine)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert found[number, 0].token_ids.tolist() == expected[0, len(prompt) :].tolist()
        assert found[number, 0].logprobs.tolist() == [0.0] * 24


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.4, "temperature": 1.3}]
)
def test_the_likeliest_tokens_are_those_of_the_sampling_distribution(sampling: dict[str, Any]) -> None:
    model = build()
    engine = engine_of(model)
    prompt = prompt_of(3, 6)
    engine.submit(request(0, prompt, n=3, max_tokens=8))
    engine.submit(request(1, prompt, n=2, max_tokens=8, top_logprobs=5, **sampling))
    engine.submit(request(2, prompt_of(4, 2), max_tokens=8, top_logprobs=1))
    found = drain(engine)
    assert found[0, 0].top_ids is None
    assert found[2, 0].top_ids is not None
    assert found[2, 0].top_ids.shape == (8, 1)
    for key in ((1, 0), (1, 1)):
        completion = found[key]
        assert completion.top_ids is not None
        assert completion.top_logprobs is not None
        assert (completion.top_ids.shape, completion.top_ids.dtype) == ((8, 5), np.int32)
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows = RowParameters.of([Sampling(**sampling)] * 8)
        expected = sampling_logits(logits, rows).log_softmax(-1)
        for place in range(8):
            values = expected[place, completion.top_ids[place].tolist()].numpy()
            np.testing.assert_allclose(completion.top_logprobs[place], values, atol=1e-4)
            best = expected[place].topk(5).values.numpy()
            np.testing.assert_allclose(completion.top_logprobs[place], best, atol=1e-4)
            if sampling.get("temperature") != 0:
                listed = dict(zip(completion.top_ids[place], completion.top_logprobs[place], strict=True))
                token = completion.token_ids[place]
                assert listed.get(token, completion.logprobs[place]) == pytest.approx(completion.logprobs[place])


def test_bfloat16_logprobs_are_close_to_its_own_forward() -> None:
    model = build().bfloat16()
    engine = engine_of(model)
    engine.submit(request(0, prompt_of(0, 9), n=4, max_tokens=20))
    for completion in drain(engine).values():
        expected = forced_logprobs(model.float(), prompt_of(0, 9), completion.token_ids)
        assert float(np.abs(completion.logprobs - expected).mean()) < 0.1
        model.bfloat16()


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("Mistral", {"sliding_window": 8}, "expected full attention"),
        ("Ministral3", {"head_dim": 16, "rope_parameters": FAR}, "llama_4_scaling_beta scales queries beyond 64"),
        ("Granite", {"residual_multiplier": 0.5}, "logits of the torch engine differ from transformers' by"),
        ("Olmo2", {}, "expected the modules of a Llama or Qwen3 model, but .* 'input_layernorm'"),
        ("GPTNeoX", {}, "expected the modules of a Llama or Qwen3 model"),
    ],
)
def test_models_that_are_not_reproduced_are_refused_de1(kind: str, changes: Any, text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        engine_of(build(kind, **changes))


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@torch.no_grad()
def forced_routes(model: Any, ids: Sequence[int]) -> list:
    """[T, L, K] of one pass over the whole sequence."""
    seen: list[torch.Tensor] = []
    routers = [layer.mlp.gate for layer in model.model.layers]
    hooks = [router.register_forward_hook(lambda _module, _args, out: seen.append(out[2])) for router in routers]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).tolist()


def test_routes_are_those_of_a_teacher_forced_forward_whatever_joins_and_leaves() -> None:
    model = build("Qwen3Moe", **MOE)
    engine = engine_of(model, record_routes=True)
    prompts = {i: prompt_of(i, 3 + i) for i in range(6)}
    found: dict[tuple[int, int], Completion] = {}
    for number, prompt in prompts.items():
        engine.submit(request(number, prompt, n=1 + number % 3, max_tokens=4 + 9 * number % 20))
        collect(found, engine.step())
    found |= drain(engine)
    for (number, _), completion in found.items():
        ids = [*prompts[number], *completion.token_ids.tolist()][:-1]
        assert completion.routes is not None
        assert completion.routes.dtype == np.uint8
        assert completion.routes.tolist() == forced_routes(model, ids)


def test_recording_routes_of_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no mixture-of-experts layer"):
        engine_of(build(), record_routes=True)


def test_score_is_a_teacher_forced_forward_and_leaves_running_rows_alone() -> None:
    model = build()
    engine, alone = engine_of(model), engine_of(build())
    for one in (engine, alone):
        one.submit(request(1, prompt_of(1, 5), n=2, max_tokens=12))
        one.step()
    sequences = [prompt_of(2, 9), prompt_of(3, 4)]
    scores = engine.score(sequences)
    for ids, got in zip(sequences, scores, strict=True):
        np.testing.assert_allclose(got, forced_logprobs(model, ids[:1], np.array(ids[1:])), atol=1e-4)
    assert {k: c.token_ids.tolist() for k, c in drain(engine).items()} == {
        k: c.token_ids.tolist() for k, c in drain(alone).items()
    }


@pytest.mark.parametrize("ids", [[1, 2, VOCAB], [1, -1], [VOCAB, 1]])
def test_no_token_is_scored_that_the_model_does_not_have(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=f"tokens in 0..{VOCAB - 1}"):
        engine_of(build()).score([[1, 2], ids])


@pytest.mark.parametrize(("sampling"), [{"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from_re2(sampling: dict) -> None:
    model = build()
    engine = engine_of(model)
    engine.submit(request(1, prompt_of(1, 5), n=4, max_tokens=15, **sampling))
    for completion in drain(engine).values():
        ids = torch.tensor([[*prompt_of(1, 5), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, 4:-1] / sampling.get("temperature", 1.0)
        kept = torch.full_like(logits, -torch.inf)
        for row in range(len(logits)):
            order = logits[row].argsort(descending=True)[: sampling.get("top_k") or None]
            mass = logits[row, order].softmax(-1)
            order = order[: int((mass.cumsum(-1) - mass < sampling.get("top_p", 1.0)).sum())]
            kept[row, order] = logits[row, order]
        expected = kept.log_softmax(-1).gather(1, ids[0, 5:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
