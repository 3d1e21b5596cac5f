"""Weights of roles/engine_torch.py: swaps, versions, layout, broken ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roles import native
from tests.roles.engines import build, drain, engine_of, prompt_of, request, weights_of


@pytest.fixture(params=["native", "torch"], autouse=True)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds with our C++ and without."""
    if request.param == "torch":
        monkeypatch.setattr("roles.native.library", lambda: None)
    elif native.library() is None:
        pytest.skip("no C++ compiler")


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


def test_broken_weights_are_an_error_not_a_token() -> None:
    engine = engine_of(build())
    engine.submit(request(0, prompt_of(0, 5), max_tokens=9))
    engine.step()
    broken = weights_of(engine._model)
    broken["model.norm.weight"].fill_(float("nan"))
    engine.swap(broken, version=1)
    with pytest.raises(FloatingPointError, match="weights have diverged"):
        engine.step()
