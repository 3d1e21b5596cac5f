"""Promises of roles/engine_torch.py and roles/decoder_torch.py, on small random models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from roles.decoder_torch import UnsupportedModel
from roles.engine import Finished, Request
from roles.engine_torch import TorchEngine
from roles.pieces import joined_piece
from roles.sampling import RowParameters, completion_seed, sampling_logits
from roles.types import Completion, Piece, Sampling

VOCAB = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(kind: str = "Qwen3", seed: int = 0, **changes: Any) -> Any:
    """A random model whose norms and biases are random as well, so that leaving one out shows."""
    torch.manual_seed(seed)
    own = {"head_dim": 16, "tie_word_embeddings": True} if kind.startswith("Qwen3") else {}
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **own, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
            if "embed_tokens" in name or "lm_head" in name:
                parameter.mul_(3)  # logits with some spread, so that sampling is not uniform
    return model


def engine_of(model: Any, max_running: int = 16, **settings: Any) -> TorchEngine:
    return TorchEngine(model, max_running=max_running, **settings)


def request(number: int, prompt: Sequence[int], n: int = 1, **sampling: Any) -> Request:
    seeds = tuple(completion_seed(5, number, i) for i in range(n))
    return Request(id=number, prompt_ids=tuple(prompt), seeds=seeds, sampling=Sampling(**sampling))


def prompt_of(number: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(0, VOCAB, length)]


def drain(engine: TorchEngine) -> dict[tuple[int, int], Completion]:
    found: dict[tuple[int, int], Completion] = {}
    while engine.num_running or engine.num_waiting:
        collect(found, engine.step())
    return found


def collect(found: dict[tuple[int, int], Completion], finished: list[Finished]) -> None:
    for one in finished:
        assert (one.request_id, one.sample) not in found
        found[one.request_id, one.sample] = one.completion


@torch.no_grad()
def forced_logprobs(model: Any, prompt: Sequence[int], tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    return np.asarray(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0])


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


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd_re3() -> None:
    alone = engine_of(build())
    alone.submit(request(3, prompt_of(3, 7), n=4, max_tokens=80, top_p=0.9))
    expected = drain(alone)
    crowd = engine_of(build(), max_running=64)
    for number in range(40):  # newcomers at every place of the numbers that are drawn ahead
        n, top_p = (4, 0.9) if number == 3 else (1, 1.0)
        crowd.submit(request(number, prompt_of(number, 7), n=n, max_tokens=80, top_p=top_p))
        crowd.step()
    found = drain(crowd)
    for sample in range(4):
        assert found[3, sample].token_ids.tolist() == expected[3, sample].token_ids.tolist()
        np.testing.assert_allclose(found[3, sample].logprobs, expected[3, sample].logprobs, atol=1e-5)
    assert len({tuple(found[3, i].token_ids.tolist()) for i in range(4)}) == 4  # siblings differ
    for number in (0, 30, 31, 32, 39):
        alone.submit(request(number, prompt_of(number, 7), max_tokens=80))
        assert found[number, 0].token_ids.tolist() == drain(alone)[number, 0].token_ids.tolist()


def test_a_prompt_is_computed_once_for_its_group_en2() -> None:
    engine = engine_of(build())
    widths: list[torch.Size] = []
    prefill = engine._decoder.prefill

    def counted(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        widths.append(token_ids.shape)
        return prefill(token_ids, *rest)

    engine._decoder.prefill = counted  # type: ignore[method-assign, assignment]
    engine.submit(request(0, prompt_of(0, 5), n=8, max_tokens=3))
    engine.submit(request(1, prompt_of(1, 9), n=8, max_tokens=3))
    drain(engine)
    assert widths == [torch.Size([2, 9])]


def test_requests_are_admitted_whole_and_in_order_en2() -> None:
    engine = engine_of(build(), max_running=4)
    engine.submit(request(0, prompt_of(0, 5), n=3, max_tokens=6))
    engine.submit(request(1, prompt_of(1, 5), n=2, max_tokens=6))
    engine.submit(request(2, prompt_of(2, 5), n=1, max_tokens=6))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (3, 3)  # 1 doesn't fit, 2 would but waits its turn
    found = drain(engine)
    assert list(found) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]


def test_no_step_computes_a_row_that_has_ended_en3() -> None:
    engine = engine_of(build(), max_running=8)
    computed: list[int] = []
    decode = engine._decoder.decode

    def counted(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(len(token_ids))
        return decode(token_ids, *rest)

    engine._decoder.decode = counted  # type: ignore[method-assign, assignment]
    for number, limit in enumerate((1, 2, 4, 7)):
        engine.submit(request(number, prompt_of(number, 4), max_tokens=limit))
    found = drain(engine)
    assert computed == [3, 2, 2, 1, 1, 1]  # the first tokens come from prefill
    assert engine.num_tokens == sum(len(c.token_ids) for c in found.values()) == 14


def test_a_stop_token_ends_a_completion_and_is_part_of_it() -> None:
    model = build()
    free = engine_of(model)
    free.submit(request(0, prompt_of(0, 5), n=4, max_tokens=40))
    unbounded = drain(free)
    stops = (7, int(unbounded[0, 0].token_ids[5]))
    engine = engine_of(model, stop_token_ids=(int(unbounded[0, 1].token_ids[9]),))
    engine.submit(request(0, prompt_of(0, 5), n=4, max_tokens=40, stop_token_ids=stops))
    for key, completion in drain(engine).items():
        tokens = unbounded[key].token_ids.tolist()
        end = min((tokens.index(stop) + 1 for stop in stops if stop in tokens), default=40)
        assert completion.token_ids.tolist() == tokens[:end]
        assert completion.finish_reason == ("stop" if tokens[end - 1] in stops else "length")


def test_the_models_end_token_stops_where_a_request_names_none() -> None:
    model = build()
    free = engine_of(model)
    free.submit(request(0, prompt_of(0, 5), max_tokens=20))
    tokens = drain(free)[0, 0].token_ids.tolist()
    engine = engine_of(model, stop_token_ids=(tokens[8],))
    engine.submit(request(0, prompt_of(0, 5), max_tokens=20))
    completion = drain(engine)[0, 0]
    assert completion.token_ids.tolist() == tokens[: tokens.index(tokens[8]) + 1]
    assert completion.finish_reason == "stop"


def test_abort_is_legal_in_any_state_and_each_sample_leaves_once_en5() -> None:
    engine = engine_of(build(), max_running=4)
    engine.submit(request(0, prompt_of(0, 5), n=2, max_tokens=20))
    engine.submit(request(1, prompt_of(1, 5), n=2, max_tokens=20))
    engine.submit(request(2, prompt_of(2, 5), n=2, max_tokens=20))
    for _ in range(3):
        engine.step()
    running, waiting = engine.abort(0), engine.abort(2)
    assert [(f.request_id, f.sample, f.completion.finish_reason) for f in running + waiting] == [
        (0, 0, "abort"),
        (0, 1, "abort"),
        (2, 0, "abort"),
        (2, 1, "abort"),
    ]
    assert [len(f.completion.token_ids) for f in running + waiting] == [4, 4, 0, 0]
    assert engine.abort(0) == engine.abort(99) == []
    found = drain(engine)
    assert set(found) == {(1, 0), (1, 1)}
    assert engine.abort(1) == []
    again = engine_of(build())
    again.submit(request(1, prompt_of(1, 5), n=2, max_tokens=20))
    for key, completion in drain(again).items():
        assert completion.token_ids.tolist() == found[key].token_ids.tolist()


def test_one_sample_of_a_request_can_be_aborted_alone_in_any_state() -> None:
    engine = engine_of(build(), max_running=4)
    engine.submit(request(1, prompt_of(1, 4), n=3, max_tokens=30))
    engine.submit(request(2, prompt_of(2, 4), n=2, max_tokens=6))  # waits: it does not fit beside the first
    assert engine.step() == []
    (ended,) = engine.abort(1, 1)
    assert (ended.request_id, ended.sample, len(ended.completion.token_ids)) == (1, 1, 2)
    assert engine.abort(1, 1) == engine.abort(1, 7) == engine.abort(2, 0) == []
    found = drain(engine)
    assert {key: c.finish_reason for key, c in found.items()} == {
        (1, 0): "length",
        (1, 2): "length",
        (2, 0): "abort",
        (2, 1): "length",
    }
    assert len(found[2, 0].token_ids) <= 2
    assert engine.abort(2, 1) == []


def test_news_are_the_tokens_of_completions_piece_by_piece_re6() -> None:
    engine = engine_of(build(), max_running=8)
    told: dict[tuple[int, int], list[Piece]] = {}
    found: dict[tuple[int, int], Completion] = {}
    engine.submit(request(0, prompt_of(0, 5), n=2, max_tokens=9))  # nobody reads along
    engine.submit(request(1, prompt_of(1, 5), n=3, max_tokens=20, stop_token_ids=tuple(range(8))), told=True)
    engine.submit(request(2, prompt_of(2, 3), n=1, max_tokens=15, top_logprobs=2), told=True)
    for number in range(40):
        collect(found, engine.step())
        if number == 6:
            collect(found, engine.abort(1, 2))
        if number % 2:  # sometimes after two steps
            for one in engine.news():
                told.setdefault((one.request_id, one.sample), []).append(one.piece)
    assert told.keys() == {(1, 0), (1, 1), (1, 2), (2, 0)}
    for key, pieces in told.items():
        whole = joined_piece(pieces)
        for name in ("token_ids", "logprobs", "versions", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(found[key], name))
    assert max(len(piece.token_ids) for piece in told[2, 0]) == 3  # prefill, and two steps
    assert engine.news() == []


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


def test_rows_that_move_into_holes_go_on_unchanged() -> None:
    model = build()
    engine = engine_of(model, max_running=32)
    rng = np.random.default_rng(0)
    prompts: dict[int, list[int]] = {}
    found: dict[tuple[int, int], Completion] = {}
    for number in range(40):
        prompts[number] = prompt_of(number, int(rng.integers(1, 20)))
        engine.submit(request(number, prompts[number], n=int(rng.integers(1, 5)), max_tokens=int(rng.integers(1, 60))))
        collect(found, engine.step())
        if number % 7 == 3:
            collect(found, engine.abort(number - 1))
    found |= drain(engine)
    for (number, _), completion in found.items():
        if len(completion.token_ids):
            expected = forced_logprobs(model, prompts[number], completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_swap_keeps_running_rows_and_stamps_each_token_with_its_version_en4() -> None:
    engine = engine_of(build(seed=0))
    engine.submit(request(0, prompt_of(0, 5), n=2, max_tokens=12))
    engine.step()
    engine.step()  # three tokens each: prefill, then two decode steps
    engine.swap(weights_of(build(seed=1)), version=4)
    engine.submit(request(1, prompt_of(1, 5), max_tokens=3))
    found = drain(engine)
    assert engine.version == 4
    assert found[0, 0].versions.tolist() == [0] * 3 + [4] * 9
    assert found[0, 0].oldest_version == 0
    assert found[1, 0].versions.tolist() == [4] * 3
    # Frozen keys and values: the first three tokens are what the old weights alone would have given.
    old = engine_of(build(seed=0))
    old.submit(request(0, prompt_of(0, 5), n=2, max_tokens=12))
    before = drain(old)
    assert found[0, 0].token_ids[:3].tolist() == before[0, 0].token_ids[:3].tolist()


def test_after_a_swap_a_new_request_sees_only_the_new_weights_en4() -> None:
    engine = engine_of(build(seed=0))
    engine.submit(request(0, prompt_of(2, 6), n=4, max_tokens=20))
    drain(engine)
    engine.submit(request(1, prompt_of(2, 6), n=4, max_tokens=20))  # waits while the weights move
    engine.swap(weights_of(build(seed=1)), version=1)
    found = drain(engine)
    fresh = engine_of(build(seed=1))
    fresh.submit(request(1, prompt_of(2, 6), n=4, max_tokens=20))
    for key, completion in drain(fresh).items():
        assert found[key].token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_array_equal(found[key].logprobs, completion.logprobs)


def test_a_refused_swap_changes_nothing_en4() -> None:
    engine = engine_of(build(seed=0))
    before = weights_of(engine._model)
    weights = weights_of(build(seed=1))
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.mlp.down_proj.weight'\].*one model"):
        engine.swap({k: v for k, v in weights.items() if k != name}, version=1)
    with pytest.raises(ValueError, match=r"unknown \['extra'\]"):
        engine.swap({**weights, "extra": torch.zeros(1)}, version=1)
    with pytest.raises(ValueError, match=rf"{name}: expected shape \[32, 48\], got \[48, 32\]"):
        engine.swap({**weights, name: weights[name].T}, version=1)
    assert engine.version == 0
    for key, value in weights_of(engine._model).items():
        assert torch.equal(value, before[key])


def test_swap_casts_to_the_engines_dtype_and_reads_any_strides() -> None:
    engine = engine_of(build(seed=0).bfloat16())
    new = weights_of(build(seed=1))
    engine.swap({name: w.T.contiguous().T if w.ndim == 2 else w for name, w in new.items()}, version=1)
    for name, weight in weights_of(engine._model).items():
        assert torch.equal(weight, new[name].bfloat16())


def test_layout_names_every_tensor_and_tells_tied_and_constant_ones() -> None:
    layout = engine_of(build()).weight_layout()
    assert layout.derived == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {e.name for e in layout.entries} == {
        *weights_of(build()),
        "lm_head.weight",
        *(name for name, _ in build().named_buffers()),
    }
    assert set(layout.constant) == {name for name, _ in build().named_buffers()}
    entry = layout.by_name["model.layers.0.self_attn.k_proj.weight"]
    assert (entry.shape, entry.box.shape, entry.dtype) == ((32, 32), (32, 32), "float32")
    assert engine_of(build(tie_word_embeddings=False)).weight_layout().derived == {}


def test_bfloat16_logprobs_are_close_to_its_own_forward() -> None:
    model = build().bfloat16()
    engine = engine_of(model)
    engine.submit(request(0, prompt_of(0, 9), n=4, max_tokens=20))
    for completion in drain(engine).values():
        expected = forced_logprobs(model.float(), prompt_of(0, 9), completion.token_ids)
        assert float(np.abs(completion.logprobs - expected).mean()) < 0.1
        model.bfloat16()


def test_requests_that_could_not_run_to_their_end_are_refused_en6() -> None:
    engine = engine_of(build(), max_running=4, max_len=32)
    with pytest.raises(ValueError, match=r"within max_len = 32 tokens, got 20 \+ 13 .*raise max_len"):
        engine.submit(request(0, prompt_of(0, 20), max_tokens=13))
    with pytest.raises(ValueError, match=r"expected 1 to 4 samples .* got 5; raise max_running"):
        engine.submit(request(0, prompt_of(0, 2), n=5, max_tokens=3))
    with pytest.raises(ValueError, match=r"expected 1 to 4 samples .* got 0"):
        engine.submit(request(0, prompt_of(0, 2), n=0, max_tokens=3))
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit(request(0, [], max_tokens=3))
    with pytest.raises(ValueError, match=r"stop tokens in 0..60, got 3 to 61"):
        engine.submit(request(0, [5], max_tokens=3, stop_token_ids=(3, 61)))
    with pytest.raises(ValueError, match=r"sampling.stop: expected at most 16 strings, none of them empty"):
        engine.submit(request(0, [5], max_tokens=3, stop=("",)))
    with pytest.raises(ValueError, match=r"prompt tokens in 0..60, got 5 to 61"):
        engine.submit(request(0, [5, 61], max_tokens=3))
    with pytest.raises(ValueError, match="temperature"):
        engine.submit(request(0, [5], max_tokens=3, temperature=-1.0))
    engine.submit(request(0, [5], max_tokens=3))
    with pytest.raises(ValueError, match="request id 0 is in use"):
        engine.submit(request(0, [5], max_tokens=3))
    assert set(drain(engine)) == {(0, 0)}
    with pytest.raises(ValueError, match=r"max_len: expected at most the model's 256 positions, got 300"):
        engine_of(build(), max_len=300)


def test_broken_weights_are_an_error_not_a_token() -> None:
    engine = engine_of(build())
    engine.submit(request(0, prompt_of(0, 5), max_tokens=9))
    engine.step()
    broken = weights_of(engine._model)
    broken["model.norm.weight"].fill_(float("nan"))
    engine.swap(broken, version=1)
    with pytest.raises(FloatingPointError, match="weights have diverged"):
        engine.step()


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("Mistral", {"sliding_window": 8}, "expected full attention"),
        ("Granite", {"residual_multiplier": 0.5}, "logits of the torch engine differ from transformers' by"),
        ("Olmo2", {}, "expected the modules of a Llama or Qwen3 model, but .* 'input_layernorm'"),
        ("GPTNeoX", {}, "expected the modules of a Llama or Qwen3 model"),
    ],
)
def test_models_that_are_not_reproduced_are_refused_de1(kind: str, changes: Any, text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        engine_of(build(kind, **changes))


def test_step_without_work_returns_at_once() -> None:
    assert engine_of(build()).step() == []


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


def test_a_completion_that_goes_on_draws_the_numbers_it_would_have_drawn() -> None:
    whole, parts = engine_of(build()), engine_of(build())
    whole.submit(request(1, prompt_of(1, 5), max_tokens=20))
    expected = drain(whole)[1, 0].token_ids.tolist()
    parts.submit(request(1, prompt_of(1, 5), max_tokens=8))
    begun = drain(parts)[1, 0].token_ids.tolist()
    rest = Request(
        id=2,
        prompt_ids=(*prompt_of(1, 5), *begun),
        seeds=(completion_seed(5, 1, 0),),
        sampling=Sampling(max_tokens=12),
        first=8,
    )
    parts.submit(rest)
    assert begun + drain(parts)[2, 0].token_ids.tolist() == expected
