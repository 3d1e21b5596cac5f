"""The registry of operations: KE-1 to KE-5 of `roles.kernels`, and the torch forms: KT-1, KT-2."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from roles import kernels, kernels_aiter, kernels_cudnn, kernels_flash, kernels_torch, native
from roles.doctor import examination
from roles.kernels import Need, Packed
from tests.roles.megatron_on_cpu import SITE

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_asked() -> Iterator[None]:
    yield
    kernels._asked.clear()
    kernels._loaded.cache_clear()


def test_cpu_gets_torch_for_everything_with_the_reasons() -> None:
    rows = kernels.report(CPU)
    assert [operation for operation, _, _ in rows] == list(kernels.OPERATIONS)
    assert {name for _, name, _ in rows} == {"torch"}
    why = {operation: reason for operation, _, reason in rows}
    assert "not built for ROCm" in why["attention"]
    assert "flash attention does not run on cpu" in why["attention"]
    assert "Triton has no back end for cpu" in why["rms_norm"]


def test_doctor_prints_every_operation_with_its_choice_and_reason() -> None:
    text = examination()
    for operation in kernels.OPERATIONS:
        assert re.search(rf"{operation} +torch +\S+: ", text), operation
    assert "not built for ROCm" in text


def test_doctor_tells_what_the_small_engine_computes_with_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_load", lambda compiler, folder: "library")
    monkeypatch.setenv("CXX", "true")
    assert re.search(r"on CPU, in float32\n  our C\+\+ +built by true for this processor\n", examination())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert re.search(r"  torch +no C\+\+ compiler \(set CXX, or install g\+\+\)\n", examination())
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert re.search(r"  torch +false can't build\s+\S+native_cpu:", examination())


def test_choice_that_was_asked_for_and_cannot_run_is_an_error_with_the_reason() -> None:
    kernels.use({"attention": "flash"})
    with pytest.raises(RuntimeError, match=r"attention was asked to be 'flash'.*does not run on cpu"):
        kernels.attention(x := torch.zeros(1, 1, 8), x, x, Packed([1], CPU))
    kernels.use({"attention": "torch"})
    assert kernels.choose("attention", Need(device=CPU, dtype=torch.float32))[0].name == "torch"


def test_names_that_are_not_there_are_told_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="no operation 'attn'; there are attention"):
        kernels.use({"attn": "torch"})
    with pytest.raises(
        ValueError, match="attention has no implementation 'cuda'; there are aiter, cudnn, flash, torch"
    ):
        kernels.use({"attention": "cuda"})


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None, sink: torch.Tensor | None
) -> torch.Tensor:
    """Position by position, as the formula says."""
    out, offset = [], 0
    for length in lengths:
        for t in range(length):
            first = 0 if window is None else max(0, t - window + 1)
            row = []
            for head in range(q.shape[1]):
                group = head * k.shape[1] // q.shape[1]
                keys, values = (x[offset + first : offset + t + 1, group] for x in (k, v))
                scores = keys @ q[offset + t, head] * q.shape[2] ** -0.5
                weights = (scores if sink is None else torch.cat([scores, sink[head, None]])).softmax(-1)
                row.append(weights[: len(values)] @ values)
            out.append(torch.stack(row))
        offset += length
    return torch.stack(out)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 3]),
    with_sink=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_packed_attention_equals_the_formula_in_each_sequence(
    lengths: list[int], window: int | None, with_sink: bool
) -> None:
    torch.manual_seed(sum(lengths))
    q, k, v = (torch.randn(sum(lengths), heads, width) for heads, width in ((4, 8), (2, 8), (2, 6)))
    sink = torch.randn(4) if with_sink else None
    got = kernels.attention(q, k, v, Packed(lengths, CPU), window=window, sink=sink)
    torch.testing.assert_close(got, plain_attention(q, k, v, lengths, window, sink), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [[9, 9, 4, 3, 8, 11], [3, 4], [16], [2, 8, 8, 8]])
def test_long_sequences_go_to_cudnn_padded_and_short_ones_packed_to_flash_kc1_kc2(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    real: Any = F.scaled_dot_product_attention

    def sdpa(q: torch.Tensor, *rest: torch.Tensor, **named: Any) -> Any:
        shapes.append(tuple(q.shape))
        return real(q, *rest, **named)

    flash: list[tuple[int, ...]] = []

    def packed_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, **named: Any) -> torch.Tensor:
        flash.append(packed.lengths)
        return torch.cat([real(*part, is_causal=True, enable_gqa=True, **named)[0].transpose(0, 1) for part in (
            [t[None, a:b].transpose(1, 2) for t in (q, k, v)]
            for a, b in itertools.pairwise([0, *itertools.accumulate(packed.lengths)])
        )])  # fmt: skip

    monkeypatch.setattr(kernels_cudnn, "LONG", 8)
    monkeypatch.setattr(kernels_cudnn, "STEP", 4)
    monkeypatch.setattr(kernels_cudnn, "BACKEND", SDPBackend.MATH)
    monkeypatch.setattr(kernels_flash, "attention", packed_flash)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    q, k, v = (torch.randn(sum(lengths), heads, 6, requires_grad=True) for heads in (4, 2, 2))
    packed = Packed(lengths, CPU)
    got = kernels_cudnn.attention(q, k, v, packed, scale=0.3)
    assert all(shape[2] % 4 == 0 for shape in shapes)
    assert sum(len(run) for run in flash) == sum(length < 8 for length in lengths)
    assert sum(shape[0] for shape in shapes) == sum(length >= 8 for length in lengths)
    expected = kernels_torch.attention(q, k, v, packed, scale=0.3)
    slope = torch.randn_like(expected)
    for one, other in zip(
        [got, *torch.autograd.grad(got, (q, k, v), slope)],
        [expected, *torch.autograd.grad(expected, (q, k, v), slope)],
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_attention_has_gradients_through_sink_and_padding() -> None:
    q, k, v = (torch.randn(7, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    packed = Packed([4, 3], CPU)
    assert torch.autograd.gradcheck(lambda q, k, v, s: kernels.attention(q, k, v, packed, sink=s), (q, k, v, sink))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_alike_sequences_are_padded_together_and_cost_little_kt2(lengths: list[int]) -> None:
    packed = Packed(sorted(lengths, reverse=True), CPU)
    area = sum(index.shape[0] * index.shape[1] ** 2 for index, _ in packed.groups)
    assert area <= sum(length**2 for length in lengths) / kernels_torch.ALIKE**2
    flat = torch.cat([index.reshape(-1)[real] for index, real in packed.groups])
    assert flat.tolist() == list(range(sum(lengths)))


def test_rms_norm_and_rope_equal_transformers() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    x = torch.randn(5, 3, 8)
    norm = Qwen3RMSNorm(8, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(kernels.rms_norm(x, norm.weight, 1e-6), norm(x))
    angles = torch.randn(5, 4)
    both = torch.cat([angles, angles], -1)[None]
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos(), both.sin())
    torch.testing.assert_close(kernels_torch.rope(x, angles.cos(), angles.sin()), expected[0].transpose(0, 1))


def test_routing_chooses_by_biased_scores_and_weighs_by_plain_ones() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, ids = kernels_torch.route(logits, 2)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0]]).softmax(-1))
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0])
    weights, ids = kernels_torch.route(logits, 2, score="sigmoid", bias=bias, normalise=False, scale=2.0)
    assert ids.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, 2 * torch.tensor([[0.0, 2.0]]).sigmoid())


def test_moe_equals_each_token_through_its_experts() -> None:
    torch.manual_seed(0)
    hidden, w1, w2 = torch.randn(6, 4), torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    weights, ids = kernels_torch.route(torch.randn(6, 3), 2)
    got = kernels_torch.moe(hidden, w1, w2, weights, ids)
    for t in range(6):
        expected = torch.zeros(4)
        for weight, expert in zip(weights[t], ids[t], strict=True):
            gate, up = (w1[expert] @ hidden[t]).chunk(2)
            expected += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(got[t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_quantised_product_is_near_the_exact_one_and_overflow_is_clipped(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 256), torch.randn(128, 256)
    x_low, x_scale = kernels.quantize_rows(x, dtype)
    blocks = w.unflatten(1, (2, 128))
    w_scale = (blocks.abs().amax((0, 2)) / torch.finfo(dtype).max)[None]
    w_low = (blocks / w_scale[0, None, :, None]).flatten(1).to(dtype)
    got = kernels_torch.gemm_blocks(x_low, w_low, x_scale, w_scale, torch.float32)
    assert (got - x @ w.T).norm() / (x @ w.T).norm() < 0.06
    assert kernels.quantize_rows(torch.full((1, 128), 1e30), dtype)[0].float().isfinite().all()
    with pytest.raises(ValueError, match="rows of 100 are no multiple of the group of 128"):
        kernels.quantize_rows(torch.zeros(1, 100), dtype)


def test_every_form_takes_what_the_torch_form_takes_ke5() -> None:
    for operation in kernels.OPERATIONS:
        if not any(one.name == "aiter" for one in kernels.IMPLEMENTATIONS if one.operation == operation):
            continue
        names = list(kernels.signature(operation).parameters)
        assert list(inspect.signature(getattr(kernels_aiter, operation)).parameters) == names, operation


# --- Triton, in its interpreter: no GPU here --------------------------------------------------------------------------

INTERPRETED = """
import torch
from roles import kernels_torch as plain, kernels_triton as fast

torch.manual_seed(0)
logits = torch.randn(5, 9000) * 8
states = []
for form in (plain, fast):
    state = plain.empty_fold(logits)
    for block in logits.split(5000, dim=1):
        form.softmax_fold(state, block.contiguous(), 0.7)
    states.append(state)
torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
top, total, weighted = states[0]
logsum = top + total.log()
torch.testing.assert_close(logsum, (logits / 0.7).logsumexp(-1))
entropy = total.log() - weighted / total
target = torch.tensor([3, -1, 8999, 0, -1])
for of_entropy in (None, torch.randn(5)):
    slopes = [
        form.softmax_slope(logits.clone(), 0.7, logsum, target, torch.linspace(-1, 1, 5), of_entropy, entropy)
        for form in (plain, fast)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-6)
print("equal")
"""


@pytest.mark.skipif(not SITE.exists(), reason="triton is not here; `make test` installs it")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", ["softmax", "layer"])
def test_triton_forms_equal_the_torch_forms_in_tritons_interpreter(program: str) -> None:
    code = INTERPRETED if program == "softmax" else "from tests.roles.gpu_layers import main; main('cpu')"
    path = os.pathsep.join([str(Path.cwd()), str(SITE)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


# --- AITER, with a stand-in for the package: no AMD GPU here ----------------------------------------------------------


class StandIn:
    """The functions of amd-aiter that we call, with its published parameters, computed by the torch forms."""

    class RoPECached:
        @staticmethod
        def apply(x, cos, sin, rotate_style, reuse_freqs_front_part, nope_first, transpose_output=False):
            assert (rotate_style, reuse_freqs_front_part, nope_first, transpose_output) == (0, True, False, False)
            assert cos.shape == (x.shape[0], 1, 1, x.shape[3] // 2)
            return kernels_torch.rope(x[:, 0], cos[:, 0, 0], sin[:, 0, 0])[:, None]

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, min_seqlen_q=0, dropout_p=0.0,
        softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), bias=None, alibi_slopes=None,
        deterministic=False, return_lse=False, block_table=None, out=None, sink_ptr=None,
    ):  # fmt: skip
        assert causal
        assert v.shape[-1] == q.shape[-1]
        assert cu_seqlens_q.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert max(lengths) == max_seqlen_q == max_seqlen_k
        window = None if window_size[0] < 0 else window_size[0] + 1
        return kernels_torch.attention(q, k, v, Packed(lengths, CPU), scale=softmax_scale, window=window, sink=sink_ptr)

    @staticmethod
    def rms_norm(input, weight, epsilon, use_model_sensitive_rmsnorm=0):
        return kernels_torch.rms_norm(input, weight, epsilon)

    @staticmethod
    def topk_gating(
        topk_weights, topk_indices, gating_output, correction_bias=None, need_renorm=True, routed_scaling_factor=1.0,
        score_func="sqrtsoftplus",
    ):  # fmt: skip
        assert topk_indices.dtype == torch.int32
        weights, ids = kernels_torch.route(
            gating_output,
            topk_weights.shape[1],
            score=score_func,
            bias=correction_bias,
            normalise=need_renorm,
            scale=routed_scaling_factor,
        )
        topk_weights.copy_(weights)
        topk_indices.copy_(ids)

    @staticmethod
    def fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None):
        assert topk_ids.dtype == torch.int32
        return kernels_torch.moe(hidden_states, w1, w2, topk_weight, topk_ids)

    @staticmethod
    def per_group_quant_hip(x, scale=None, quant_dtype=torch.int8, group_size=128, transpose_scale=False):
        return kernels_torch.quantize_rows(x, quant_dtype, group_size)

    @staticmethod
    def gemm_a8w8_blockscale(XQ, WQ, x_scale, w_scale, dtype=torch.bfloat16, isBpreshuffled=False):
        return kernels_torch.gemm_blocks(XQ, WQ, x_scale, w_scale, dtype)


def published(name: str) -> list[list[str]]:
    """Parameters of the functions of this name in the package's source, which can't be imported without an AMD GPU."""
    spec = importlib.util.find_spec("aiter")
    assert spec is not None
    found = []
    for folder in spec.submodule_search_locations or ():
        for file in Path(folder).rglob("*.py"):
            if f"def {name}(" not in (text := file.read_text(errors="replace")):
                continue
            functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
            found += [[a.arg for a in (*f.args.args, *f.args.kwonlyargs)] for f in functions if f.name == name]
    return found


@pytest.mark.skipif(not kernels._installed("aiter", "ops"), reason="no aiter (pip install --pre --no-deps amd-aiter)")
@pytest.mark.parametrize(
    ("name", "later"),
    [
        ("flash_attn_varlen_func", {"sink_ptr"}),
        ("rms_norm", set()),
        ("fused_moe", set()),
        ("per_group_quant_hip", set()),
        ("gemm_a8w8_blockscale", {"isBpreshuffled"}),
    ],
)
def test_the_stand_in_takes_what_the_installed_aiter_takes_ke5(name: str, later: set[str]) -> None:
    ours = [one for one in inspect.signature(getattr(StandIn, name)).parameters if one not in later]
    assert any(set(ours) <= set(theirs) for theirs in published(name)), (ours, published(name))


def test_aiter_adapters_give_what_the_torch_forms_give_with_a_stand_in_for_aiter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels_aiter, "_aiter", lambda _module: StandIn)
    torch.manual_seed(0)
    q, k, v, sink = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 6), torch.randn(4)
    hidden, w1, w2, logits = torch.randn(7, 8), torch.randn(4, 10, 8), torch.randn(4, 8, 5), torch.randn(7, 4)
    angles, packed = torch.randn(7, 4), Packed([4, 3], CPU)
    weights, ids = kernels_torch.route(logits, 2)
    low, scale = kernels_torch.quantize_rows(torch.randn(3, 128), torch.float8_e4m3fn)
    square = torch.randn(128, 128).to(torch.float8_e4m3fn)
    calls: dict[str, list[tuple[tuple[object, ...], dict[str, object]]]] = {
        "attention": [((q, k, v, packed), {}), ((q, k, v, packed), {"window": 2, "sink": sink, "scale": 0.3})],
        "rms_norm": [((hidden, hidden[0], 1e-6), {})],
        "rope": [((q, angles.cos(), angles.sin()), {})],
        "route": [((logits, 2), {}), ((logits, 2), {"score": "sigmoid", "bias": logits[0], "normalise": False})],
        "moe": [((hidden, w1, w2, weights, ids), {})],
        "quantize_rows": [((torch.randn(3, 128), torch.float8_e4m3fnuz), {})],
        "gemm_blocks": [((low, square, scale, torch.ones(1, 1), torch.bfloat16), {})],
    }
    assert set(calls) == {one.operation for one in kernels.IMPLEMENTATIONS if one.name == "aiter"} | {"rms_norm"}
    for operation, arguments in calls.items():
        for positional, named in arguments:
            got, expected = (
                getattr(module, operation)(*positional, **named) for module in (kernels_aiter, kernels_torch)
            )
            torch.testing.assert_close(got, expected)
