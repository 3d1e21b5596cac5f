"""Promises of roles/native.py, roles/decoder_cpu.py and roles/rows_cpu.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roles import native
from roles.decoder import check, select
from roles.decoder_cpu import CpuDecoder, _parts
from roles.decoder_torch import TorchDecoder
from roles.engine import Request
from roles.rows import Rows
from roles.rows_cpu import CpuRows
from roles.sampling import completion_seed
from roles.types import Sampling
from tests.roles.engines import VOCAB, build, drain, engine_of, prompt_of, request

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No library is loaded, and none was built."""
    native.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "tutti"
    native.library.cache_clear()


def decoder_of(model: Any, slots: int = 8) -> CpuDecoder:
    decoder = CpuDecoder.of(model, slots)
    assert decoder is not None
    return decoder


@needs_compiler
def test_what_is_built_is_kept_under_the_digest_of_what_it_is_made_of_na1(fresh: Path, monkeypatch: Any) -> None:
    assert native.library() is not None
    (built,) = fresh.iterdir()  # whole, under its name, nothing beside it (NA-3)
    native.library.cache_clear()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built again"))
    assert native.library() is not None
    native.library.cache_clear()
    monkeypatch.setattr(native, "_processor", lambda: "another processor")
    names: list[str] = []

    def copied(_compiler: str, path: Path) -> None:
        names.append(path.name)
        path.write_bytes(built.read_bytes())

    monkeypatch.setattr(native, "_build", copied)
    assert native.library() is not None
    assert names not in ([], [built.name])


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_computes_na2(fresh: Path, monkeypatch: Any, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert native.library() is None
    assert isinstance(select(build(), 2, native=True), TorchDecoder)
    assert not list(fresh.glob("*.so"))


def test_a_compiler_that_hangs_is_given_up_na2(fresh: Path, monkeypatch: Any) -> None:
    def hang(command: Any, **settings: Any) -> Any:
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(subprocess, "run", hang)
    assert native.library() is None


@needs_compiler
def test_a_user_without_a_home_is_no_error_na2(fresh: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert native.library() is None


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_loaded_from(fresh: Path) -> None:
    fresh.mkdir()
    fresh.chmod(0o777)
    assert native.library() is None


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {}),
        ("Qwen3", {"head_dim": 8, "hidden_size": 40, "vocab_size": 77}),
        ("Qwen3", {"head_dim": 34, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 51}),
        ("Qwen3", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": False}),
        ("Qwen2", {}),  # biases
        ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("Mistral", {"sliding_window": None}),
    ],
)
def test_prompts_of_several_tiles_equal_transformers_de1(kind: str, changes: dict[str, Any]) -> None:
    model = build(kind, **changes)
    decoder = decoder_of(model)
    check(decoder, model, 8)
    ids = torch.randint(VOCAB, (3, 101), generator=torch.Generator().manual_seed(1))  # 303 tokens, tiles of 64
    with torch.inference_mode():
        found, expected = decoder.score(ids), model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=2e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Gemma", {"head_dim": 16}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
        ("Llama", {"mlp_bias": True}),
        ("Llama", {"hidden_act": "gelu"}),
    ],
)
def test_what_it_does_not_know_is_left_to_torch(kind: str, changes: dict[str, Any]) -> None:
    assert CpuDecoder.of(build(kind, **changes), 2) is None
    assert CpuDecoder.of(build().to(torch.bfloat16), 2) is None


@needs_compiler
@torch.inference_mode()
def test_a_rows_logits_have_the_same_bits_whatever_is_computed_with_it_dc1() -> None:
    model, count = build(), 83
    prompts = [prompt_of(i, 1 + 7 * i % 40) for i in range(count)]
    crowd, alone = decoder_of(model, count), decoder_of(model, 1)
    together = crowd.prefill(prompts, range(count), 0)
    positions = torch.tensor([len(prompt) for prompt in prompts])
    steps = [crowd.decode(torch.arange(count) % VOCAB, positions + i, 40 + i) for i in range(2)]
    for row, prompt in enumerate(prompts):
        assert torch.equal(alone.prefill([prompt], [0], 0)[0], together[row])
        for i in range(2):
            position = torch.tensor([len(prompt) + i])
            logits = alone.decode(torch.tensor([row % VOCAB]), position, len(prompt) + i)
            assert torch.equal(logits[0], steps[i][row])


@needs_compiler
@torch.inference_mode()
def test_threads_share_rows_and_change_no_bit_dc1() -> None:
    model, count = build(), 75
    prompts = [prompt_of(i, 1 + 5 * i % 30) for i in range(count)]
    owners = [i // 3 for i in range(count)]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            decoder = decoder_of(model, count)
        finally:
            torch.set_num_threads(1)
        first = decoder.prefill(prompts[:25], owners, 0)
        lengths = torch.tensor([len(prompts[owner]) for owner in owners])
        found.append(
            (
                first,
                decoder.decode(torch.arange(count) % VOCAB, lengths, 30),
                decoder.score(torch.arange(60).view(4, 15)),
            )
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_shares_begin_at_whole_vectors_and_leave_nothing_out() -> None:
    for rows in range(1, 200):
        for threads in range(1, 6):
            parts = _parts(rows, threads)
            assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1][1] == rows
            assert len(parts) <= threads
            assert all(begin % 16 == 0 for begin, _ in parts)


@needs_compiler
@torch.inference_mode()
def test_weights_written_in_place_are_used_at_once_dc2() -> None:
    model, other = build(seed=0), build(seed=1)
    decoder = decoder_of(model)
    decoder.prefill([[1, 2]], [0], 0)
    for name, parameter in model.named_parameters():
        parameter.copy_(dict(other.named_parameters())[name])
    assert torch.equal(decoder.prefill([[1, 2]], [0], 0), decoder_of(other).prefill([[1, 2]], [0], 0))


def rows_of(kind: type[Rows], settings: list[Sampling], tokens: int = 4) -> Rows:
    count = len(settings)
    library = native.library()
    rows = CpuRows(count, 7, library) if kind is CpuRows else Rows(count, torch.device("cpu"), 7)  # type: ignore[arg-type]
    rows.reserve(tokens, 2)
    requests = [Request(id=i, prompt_ids=(1,), seeds=(0,), sampling=s, first=i % 3) for i, s in enumerate(settings)]
    rows.add(requests, [completion_seed(3, i, 0) for i in range(count)], [(5, i % VOCAB) for i in range(count)])
    return rows


@needs_compiler
@torch.inference_mode()
def test_tokens_and_logprobs_are_those_of_sampling_ro3() -> None:
    settings = [Sampling(max_tokens=4, temperature=(1.0, 0.7, 0.0, 1.6)[i % 4]) for i in range(37)]
    settings[20:] = [Sampling(max_tokens=4)] * 17
    ours, expected = rows_of(CpuRows, settings), rows_of(Rows, settings)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        logits = torch.randn(48, VOCAB, generator=generator) * 4
        logits[:, 9] = -torch.inf  # impossible
        lanes = logits.t().contiguous().t()[:37]
        owner = [i % 11 for i in range(37)] if step == 0 else None
        ended = [rows.draw(0, given, owner) for rows, given in ((ours, lanes), (expected, logits[:37]))]
        assert ended[0] == ended[1]
        assert bool(ended[0]) or step < 3
    for row in range(37):
        for mine, right in zip(ours.drawn(row, 0, 4), expected.drawn(row, 0, 4), strict=True):
            np.testing.assert_allclose(mine, right, atol=2e-6)
            assert mine.dtype == right.dtype


@needs_compiler
@torch.inference_mode()
def test_a_rows_draw_has_the_same_bits_whatever_is_drawn_with_it_rc1() -> None:
    logits = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(0)) * 3
    crowd = rows_of(CpuRows, [Sampling(max_tokens=4, temperature=0.9 + 0.1 * (i % 3)) for i in range(20)])
    crowd.draw(0, logits.t()[:20])
    plain = rows_of(CpuRows, [Sampling(max_tokens=4)] * 20)
    plain.draw(0, logits.t()[:20])
    for row in range(1, 20, 3):  # those of temperature 1, beside others and among their like
        for one, other in zip(crowd.drawn(row, 0, 1), plain.drawn(row, 0, 1), strict=True):
            assert one.tobytes() == other.tobytes()


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@torch.inference_mode()
def test_logits_that_give_no_distribution_name_the_row_sa3(bad: float) -> None:
    rows = rows_of(CpuRows, [Sampling(max_tokens=4)] * 18)
    logits = torch.zeros(VOCAB, 32)
    logits[:, 17] = bad
    with pytest.raises(FloatingPointError, match=r"in 1 of 18 rows \(first: row 17\)"):
        rows.draw(0, logits.t()[:18])
    assert rows.counts([0, 17]) == [0, 0]


@needs_compiler
def test_a_completion_has_the_same_bits_alone_and_in_a_crowd_re3() -> None:
    alone, crowd = engine_of(build()), engine_of(build(), max_running=64)
    for number in range(20):
        crowd.submit(request(number, prompt_of(number, 3 + number), n=3, max_tokens=30 + number))
        crowd.step()
    found = drain(crowd)
    for number in (0, 7, 19):
        alone.submit(request(number, prompt_of(number, 3 + number), n=3, max_tokens=30 + number))
        for key, completion in drain(alone).items():
            assert completion.token_ids.tolist() == found[key].token_ids.tolist()
            assert completion.logprobs.tobytes() == found[key].logprobs.tobytes()


@needs_compiler
@pytest.mark.parametrize("name", ["layers.1.self_attn.k_norm", "layers.1.self_attn.o_proj", "layers.1.mlp.up_proj"])
def test_another_shape_than_the_config_has_is_never_read(name: str) -> None:
    model = build()
    module = model.model.get_submodule(name)
    module.weight = torch.nn.Parameter(module.weight[:8].clone())
    assert CpuDecoder.of(model, 2) is None


@needs_compiler
@torch.inference_mode()
def test_filters_of_other_rows_change_no_bit_rc1() -> None:
    logits = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    filters: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_k": 9, "top_p": 0.8, "temperature": 0.7},
        {"top_k": 2},
    )
    mixed = [Sampling(max_tokens=4, **filters[i % 5]) for i in range(20)]
    mixed[4] = Sampling(max_tokens=4, top_k=2, temperature=0.0)
    crowd, plain = rows_of(CpuRows, mixed), rows_of(CpuRows, [Sampling(max_tokens=4)] * 20)
    expected = rows_of(Rows, mixed)
    expected.draw(0, logits.t()[:20], range(20))
    for rows in (crowd, plain):
        rows.draw(0, logits.t()[:20])
    for row in range(20):
        found = crowd.drawn(row, 0, 1)
        if row % 5 == 0:
            assert [one.tobytes() for one in found] == [one.tobytes() for one in plain.drawn(row, 0, 1)]
        for mine, right in zip(found, expected.drawn(row, 0, 1), strict=True):
            np.testing.assert_allclose(mine, right, atol=2e-6)
    assert torch.equal(logits, before)  # the likeliest tokens are looked for in them


@needs_compiler
def test_a_compiler_may_have_options_and_none_at_all_na2(fresh: Path, monkeypatch: Any) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(native, "_load", lambda compiler, _folder: asked.append(compiler))
    for text in ("g++ -O2", ""):
        monkeypatch.setenv("CXX", text)
        native.library.cache_clear()
        native.library()
    assert asked == [["g++", "-O2"], ["g++"]]
