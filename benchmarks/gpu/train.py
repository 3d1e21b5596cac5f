"""Training steps on NVIDIA GPUs: utilisation, memory and what parallelism and offload cost.

    python -m benchmarks.gpu.train [--out DIR] [--gpus 0 1] [--cases mfu offload deep logprobs ...]

Random weights in the shapes of Qwen3. `pairs` and `shards` need two GPUs, the others one: those run beside each other,
one on each of `--gpus`. Each case is a process of its own with a limit; each line is printed as it comes and written to
DIR/train.jsonl, so that a run that is cut short has said what it knew. Without a GPU the cases run in small on the
CPU, to see that they run.

Model FLOPs of a step (utilisation is these over seconds over the card's dense bf16 peak, 989 TFLOP/s on H200):
    6 x (parameters of all matrices, head included, embedding not) x tokens      products, forward and backward
    + 6 x layers x heads x head_dim x sum(length^2)                              attention, causal
Recomputed activations are work of the machine, not of the model, and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.gpu.sync_ranks import SIZES
from benchmarks.gpu.train_split import Phases, by_kind
from benchmarks.table import Row, to_markdown

PEAK = 989e12
CASES = ("checks", "mfu", "offload", "deep", "logprobs", "attention", "kernels", "megatron", "pairs", "shards")
SECONDS = {"checks": 45, "mfu": 110, "offload": 110, "deep": 120, "logprobs": 45, "attention": 45, "kernels": 60}
"""Limit of each case; what it has not said by then stays unsaid."""
LIMIT = 150
"""Of the cases without one."""

GPU = torch.cuda.is_available()
DEVICE: Literal["cuda", "cpu"] = "cuda" if GPU else "cpu"


def config_of(size: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    settings = {**SIZES[size], "max_position_embeddings": 40960, "rope_theta": 1e6, **changes}
    if not GPU:
        settings |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 998}
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    kind = settings.pop("model_type")
    return AutoConfig.for_model(kind, **settings)


def samples_of(vocab: int, lengths: list[int], prompt: int = 64) -> list[Any]:
    from roles.types import TrainSample

    rng = np.random.default_rng(0)
    return [
        TrainSample(
            token_ids=rng.integers(0, vocab, length).astype(np.int32),
            prompt_length=prompt,
            rollout_logprobs=np.full(length - prompt, -10, np.float32),
            advantages=rng.normal(size=length - prompt).astype(np.float32),
        )
        for length in lengths
    ]


def model_flops(config: Any, lengths: list[int]) -> float:
    """See the top."""
    head_dim, heads, groups = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    attention = config.hidden_size * head_dim * (2 * heads + 2 * groups)
    matrices = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    products = 6 * (matrices + config.vocab_size * config.hidden_size) * sum(lengths)
    return float(products + 6 * config.num_hidden_layers * heads * head_dim * sum(length**2 for length in lengths))


def say(**facts: Any) -> None:
    print("RESULT " + json.dumps(facts), flush=True)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0


def milliseconds(function: Callable[[], Any], rounds: int = 20) -> float:
    if not GPU:
        began = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - began)
    for _ in range(3):
        function()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


# --- one GPU ----------------------------------------------------------------------------------------------------------


def compare(name: str, ours: Any, theirs: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """Two forms of one operation, forward and backward: relative differences of results and gradients, and times."""
    slope = torch.randn_like(theirs(*inputs))

    def run(form: Any) -> list[torch.Tensor]:
        out = form(*inputs)
        return [out, *torch.autograd.grad(out, inputs, slope)]

    gaps = [
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(run(ours), run(theirs), strict=True)
    ]
    spent = [milliseconds(lambda form=form: run(form), 10) for form in (ours, theirs)]  # type: ignore[misc]
    say(case=name, ours_ms=spent[0], peer_ms=spent[1], relative_gaps=gaps)


def random_inputs(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)


def case_kernels() -> None:
    """Triton and flash against the torch forms."""
    from roles import kernels, kernels_flash, kernels_torch, kernels_triton

    say(case="doctor", rows=kernels.report())
    torch.manual_seed(0)
    for width in (128, 4096):
        compare(
            f"rms_norm 8192 x {width}, forward and backward",
            lambda x, w: kernels_triton.rms_norm(x, w, 1e-6),
            lambda x, w: kernels_torch.rms_norm(x, w, 1e-6),
            random_inputs((8192, width), (width,)),
        )
    x, kind = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16), torch.float8_e4m3fn
    ours, theirs = kernels_triton.quantize_rows(x, kind), kernels_torch.quantize_rows(x, kind)
    say(
        case="quantize_rows 8192 x 4096 to float8_e4m3fn",
        ours_ms=milliseconds(lambda: kernels_triton.quantize_rows(x, kind)),
        peer_ms=milliseconds(lambda: kernels_torch.quantize_rows(x, kind)),
        equal_values=float((ours[0].view(torch.uint8) == theirs[0].view(torch.uint8)).float().mean()),
        equal_scales=bool(torch.allclose(ours[1], theirs[1], rtol=1e-6)),
    )
    packed = kernels.Packed([4096, 2048, 1024, 700, 324], torch.device("cuda"))
    for width, value_width in ((128, 128), (192, 128)):
        for window in (None, 512):
            name = f"attention, 8192 packed positions, widths {width} and {value_width}, window {window}"
            try:
                compare(
                    name,
                    functools.partial(kernels_flash.attention, packed=packed, window=window),
                    functools.partial(kernels_torch.attention, packed=packed, window=window),
                    random_inputs((8192, 32, width), (8192, 8, width), (8192, 8, value_width)),
                )
            except RuntimeError as error:
                say(case=name, error=str(error)[:300])


def case_logprobs() -> None:
    """Peak memory and time of logprob and entropy of 4096 and 8192 positions over 151,936 tokens, by torch's and
    Triton's forms of the softmax, against full logits."""
    from roles import kernels
    from roles.logprob import chosen_logprobs

    for positions in (4096, 8192) if GPU else (64,):
        tokens, width = (151936, 4096) if GPU else (999, 64)
        hidden, weight = random_inputs((positions, width), (tokens, width))
        with torch.no_grad():
            weight /= width**0.5
        targets = torch.randint(0, tokens, (positions,), device=DEVICE)

        def ours(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> torch.Tensor:
            return chosen_logprobs(hidden, weight, targets)[0]

        def full(hidden: Any = hidden, weight: Any = weight, targets: Any = targets) -> torch.Tensor:
            return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)

        facts: dict[str, Any] = {"case": f"logprobs of {positions} positions, {tokens} tokens, forward and backward"}
        results: dict[str, list[torch.Tensor]] = {}
        for name, form in (("peer", full), ("torch", ours), ("triton", ours)):
            try:
                if name != "peer":
                    kernels.use({"softmax_fold": name, "softmax_slope": name})
                run = functools.partial(_forward_and_backward, form, (hidden, weight))
                run()
                if GPU:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    results[name] = run()
                    facts[f"{name}_GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
                facts[f"{name}_ms"] = milliseconds(run, 5)
            except RuntimeError as error:
                facts[f"{name}_error"] = str(error)[:300]
        for name in ("torch", "triton"):
            if name in results:
                pairs = zip(results[name], results["peer"], strict=True)
                facts[f"{name}_relative_gaps"] = [
                    float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs
                ]
        best = "triton" if "triton_ms" in facts else "torch"
        if f"{best}_GiB" in facts:
            facts |= {"ours_GiB": facts[f"{best}_GiB"], "ours_ms": facts[f"{best}_ms"]}
        say(**facts)


def _forward_and_backward(form: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    out = form()
    return [out.detach(), *torch.autograd.grad(out.sum(), inputs)]


def case_checks() -> None:
    """Right values before fast ones: offloaded moments against resident ones, cuDNN's attention against torch's."""
    from roles import kernels, kernels_cudnn, kernels_torch
    from roles.adamw import AdamW
    from roles.moments import Travelling
    from roles.trainer_config import TrainerConfig

    torch.manual_seed(0)
    shapes = [(3000, 4096), (4096,), (1 << 23,), (512, 512)]
    config = TrainerConfig(lr=1e-2, weight_decay=0.1)
    start = {str(i): torch.randn(shape, device=DEVICE) for i, shape in enumerate(shapes)}
    both = [AdamW({name: p.clone() for name, p in start.items()}, config, offload=offload) for offload in (False, True)]
    both[1]._travelling = Travelling(both[1].params, bucket=1 << 20)
    for step in range(6):
        grads = {name: torch.randn_like(p) for name, p in start.items()}
        both[1].prefetch(step * (8 << 20))
        work = torch.randn(4096, 4096, device=DEVICE) @ torch.randn(
            4096, 4096, device=DEVICE
        )  # something to run ahead of
        for one in both:
            one.step(grads, 1e-2)
        del work
    equal = [torch.equal(both[0].params[name], both[1].params[name]) for name in start]
    moments = [
        torch.equal(both[0].moments(name)[part], both[1].moments(name)[part])
        for name in start
        for part in both[0].moments(name)
    ]
    say(case="offloaded moments", equal_weights=all(equal), equal_moments=all(moments))
    packed = kernels.Packed([2600, 2600, 2049, 700, 243], torch.device(DEVICE))
    inputs = random_inputs((packed.total, 32, 128), (packed.total, 8, 128), (packed.total, 8, 128))
    form = kernels_cudnn.attention if GPU else kernels_torch.attention
    compare(
        "attention of 2600, 2600, 2049, 700, 243: cuDNN and flash, against torch",
        functools.partial(form, packed=packed),
        functools.partial(kernels_torch.attention, packed=packed),
        inputs,
    )


def case_attention() -> None:
    """Forward and backward over rows of 8192 positions by what torch has: flash over packed rows, and padded forms."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from roles import kernels, kernels_flash, kernels_torch

    size = 8192 if GPU else 64
    for lengths in ([size], [size // 2] * 2, [size // 2, size // 4, size // 8, size // 16, size // 16]):
        packed = kernels.Packed(lengths, torch.device(DEVICE))
        inputs = random_inputs((size, 32, 128), (size, 8, 128), (size, 8, 128))
        flops = 3.5 * 2 * 2 * 32 * 128 * sum(length**2 for length in lengths) / 2
        for name, form, only in (
            ("flash, packed", kernels_flash.attention, None),
            ("padded, flash", kernels_torch.attention, SDPBackend.FLASH_ATTENTION),
            ("padded, cuDNN", kernels_torch.attention, SDPBackend.CUDNN_ATTENTION),
        ):
            slope = torch.randn_like(inputs[0])

            def run(form: Any = form, packed: Any = packed, inputs: Any = inputs, slope: Any = slope) -> None:
                torch.autograd.grad(form(*inputs, packed), inputs, slope)

            try:
                with sdpa_kernel(only) if only is not None else contextlib.nullcontext():
                    spent = milliseconds(run, 10)
                say(case=f"attention of {lengths}, {name}", ms=spent, tflops=flops / spent / 1e9)
            except (RuntimeError, ImportError) as error:
                say(case=f"attention of {lengths}, {name}", error=str(error)[:200])


@contextmanager
def random_policy(config: Any) -> Iterator[None]:
    """The torch back end with random weights made on the GPU instead of a folder's."""
    from transformers import AutoModelForCausalLM

    from roles import policy_torch

    back_end: Any = importlib.import_module("roles.trainer_fsdp")

    def made(_path: str, **_options: Any) -> Any:
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        policy = policy_torch.Policy(model)
        policy.packed = policy_torch._can_pack(policy)
        assert policy.packed
        return policy

    kept, back_end.load_policy = back_end.load_policy, made
    try:
        yield
    finally:
        back_end.load_policy = kept


def torch_step(name: str, config: Any, lengths: list[int], budget: int, steps: int = 3, **changes: Any) -> None:
    """Steps of the torch back end under FSDP2 on the GPUs of this group; on one, also where a step goes."""
    from algorithms import catalog
    from roles import logprob
    from roles.packing import pack
    from roles.trainer import TrainerConfig
    from roles.trainer_fsdp import TorchTrainer

    if not GPU:
        lengths, budget = [max(70, length // 32) for length in lengths], max(256, budget // 32)
    started = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = TrainerConfig(
        ranks=world, device=DEVICE, strategy="fsdp2", dtype="bfloat16", token_budget=budget, lr=1e-6, **changes
    )
    torch.manual_seed(0)  # all ranks make the same model
    with random_policy(config):
        trainer = TorchTrainer(settings, "random")
    ready = time.perf_counter() - started
    if rank == 0:
        say(case=f"{name}: loaded", ready_s=ready, GiB=torch.cuda.memory_allocated() / 2**30 if GPU else 0)
    batches = pack(samples_of(config.vocab_size, lengths), world=settings.data_parallel, token_budget=budget)
    batch = batches[settings.data_rank(rank)]
    objective = catalog.objective("grpo", {})
    phases = Phases()
    phases.watch("forward", trainer, "_score")
    phases.watch("backward", trainer, "_backward")
    phases.watch("update", trainer, "_apply")
    phases.watch("head, forward", logprob._ChosenLogprobs, "forward")
    phases.watch("head, backward", logprob._ChosenLogprobs, "backward")
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    first, seconds = time.perf_counter(), []
    for index in range(2 + steps):
        if index == 2:  # from here on nothing waits for the device but the steps themselves
            synchronize()
            began = time.perf_counter()
        if index in (0, 2 + steps - 1):
            phases.on = index > 0
        step_began = time.perf_counter()
        result = trainer.train_step(batch, objective, 1.0)
        seconds.append(time.perf_counter() - step_began)
    synchronize()
    best = (time.perf_counter() - began) / steps
    phases.on = False
    if rank:
        return
    say(
        case=name,
        step_s=[best, best],
        each_s=seconds,
        warm_up_s=began - first,
        tokens=sum(lengths),
        tokens_per_s=sum(lengths) / best,
        mfu=model_flops(config, lengths) / best / PEAK / world,
        peak_GiB=peak_gib(),
        reserved_GiB=torch.cuda.max_memory_reserved() / 2**30 if GPU else 0,
        micro_batches=len(batch.updates[0]),
        grad_norm=result.grad_norm,
        phases_s=phases.seconds(),
    )
    if world == 1:
        say(case=f"{name}: kernels of a step", **by_kind(lambda: trainer.train_step(batch, objective, 1.0)))


ROWS = [8192] * 4 + [4096] * 4 + [2048] * 8
"""64k tokens: what a GPU gets in a step of 256 answers of 4k tokens on 16 GPUs."""


def case_mfu() -> None:
    alone()
    small = config_of("8B", num_hidden_layers=10)
    torch_step(
        "8B shapes, 10 of 36 layers, compiled",
        small,
        ROWS,
        8192,
        steps=4,
        compile=GPU,
    )


def case_offload() -> None:
    alone()
    small = config_of("8B", num_hidden_layers=10)
    changes: dict[str, Any] = {"compile": GPU, "offload_optimizer": True}
    torch_step("8B shapes, 10 of 36 layers, compiled, moments offloaded", small, ROWS, 8192, **changes)


def case_deep() -> None:
    """All layers without recomputation: what the head's share of ten layers hides."""
    alone()
    changes: dict[str, Any] = {"compile": GPU, "offload_optimizer": True}
    try:
        torch_step("8B shapes, 36 layers, compiled, moments offloaded", config_of("8B"), ROWS, 8192, **changes)
    except RuntimeError as error:
        say(case="8B shapes, 36 layers", error=str(error)[:400])


def case_shards() -> None:
    """Two GPUs, eager: rows of the weights spread over both, and every matrix split."""
    for way in ("shards", "tensor"):
        torch.multiprocessing.spawn(_shards, args=(way, 29643 if way == "shards" else 29645), nprocs=2)


def _shards(rank: int, way: str, port: int) -> None:
    if GPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = f"{rank},{1 - rank}"
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=rank, world_size=2)
    changes: dict[str, Any] = {"tensor_parallel": 2} if way == "tensor" else {}
    name = f"8B shapes, 10 of 36 layers, eager, two GPUs, {'TP2' if changes else 'two shards'}"
    torch_step(name, config_of("8B", num_hidden_layers=10), ROWS, 8192, steps=2, **changes)
    dist.destroy_process_group()


def alone() -> None:
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)


# --- megatron ---------------------------------------------------------------------------------------------------------


def write_model(folder: Path, config: Any) -> str:
    """A folder with random weights, written from the GPU."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").exists():
        with torch.device("cuda"):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        torch.cuda.empty_cache()
    return str(folder)


def megatron_step(name: str, model: str, lengths: list[int], budget: int, **changes: Any) -> None:
    """Steps of the megatron back end on this rank; rank 0 speaks."""
    from algorithms import catalog
    from roles.packing import pack
    from roles.trainer import TrainerConfig
    from roles.trainer_megatron import MegatronTrainer

    rank, world = dist.get_rank(), dist.get_world_size()
    settings = TrainerConfig(
        backend="megatron", ranks=world, device="cuda", dtype="bfloat16", token_budget=budget, lr=1e-6, **changes
    )
    torch.cuda.reset_peak_memory_stats()
    trainer = MegatronTrainer(settings, model)
    hugging = json.loads((Path(model) / "config.json").read_text())
    samples = samples_of(hugging["vocab_size"], lengths)
    multiple = settings.micro_batch_multiple
    batch = pack(samples, world=settings.data_parallel, token_budget=budget, multiple=multiple)[
        settings.data_rank(rank)
    ]
    seconds = []
    for _ in range(4):
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        result = trainer.train_step(batch, catalog.objective("grpo", {}), 1.0)
        synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        say(
            case=name,
            step_s=seconds,
            tokens_per_s=sum(lengths) / min(seconds[1:]),
            peak_GiB=torch.cuda.max_memory_allocated() / 2**30,
            micro_batches=len(batch.updates[0]),
            grad_norm=result.grad_norm,
        )
    del trainer
    torch.cuda.empty_cache()


DENSE = {"num_hidden_layers": 8, "vocab_size": 32768}
"""1.8 B parameters in the matrices of the 8B model: what a rank of a larger layout computes with."""
MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
PACKED = [2048] * 8 + [1024] * 16
"""32k tokens: 8 micro-batches of 4096."""


def megatron_models() -> tuple[str, str]:
    dense = write_model(Path("/tmp/dense"), config_of("8B", **DENSE))
    return dense, write_model(Path("/tmp/moe"), config_of("0.6B", **MOE))


def case_megatron() -> None:
    alone()
    dense, moe = megatron_models()
    for name, changes in (
        ("", {}),
        (", moments offloaded", {"offload_optimizer": True}),
        (", recomputed", {"activation_checkpointing": True}),
    ):
        megatron_step(f"megatron, 1.8B, one GPU{name}", dense, PACKED, 4096, **changes)
    megatron_step("megatron, 16 experts, one GPU", moe, PACKED, 4096)


def case_pairs() -> None:
    """Two GPUs. Of a pipeline of p stages and m micro-batches (p - 1) / (m + p - 1) is idle: 1 / 9 of PP2 here, so that
    it should take 9/16 of one GPU's time."""
    megatron_models()
    torch.multiprocessing.spawn(_pair, nprocs=2)


def _pair(rank: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = f"{rank},{1 - rank}"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    store = dist.TCPStore("127.0.0.1", 29641, 2, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    for name, model, changes in (
        ("TP2", "/tmp/dense", {"tensor_parallel": 2}),
        ("PP2", "/tmp/dense", {"pipeline_parallel": 2}),
        ("DP2", "/tmp/dense", {}),
        ("PP2 with 2 chunks", "/tmp/dense", {"pipeline_parallel": 2, "pipeline_chunks": 2}),
        ("16 experts, EP2", "/tmp/moe", {"expert_parallel": 2}),
    ):
        megatron_step(f"megatron, two GPUs, {name}", model, PACKED, 4096, **changes)
    dist.destroy_process_group()


# --- the program ------------------------------------------------------------------------------------------------------


def rows_of(results: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for result in results:
        name = result["case"]
        if "mfu" in result:
            goal = ">= 40" if "compiled" in name else ""
            note = f"{result['tokens_per_s']:.0f} tokens/s, {result['peak_GiB']:.0f} GiB"
            rows.append(Row(name=name, ours=100 * result["mfu"], unit="% MFU", goal=goal, note=note))
        elif "step_s" in result:
            note = f"{result['tokens_per_s']:.0f} tokens/s, {result['peak_GiB']:.1f} GiB"
            rows.append(Row(name=name, ours=min(result["step_s"][1:]), unit="s", note=note))
        elif "ours_GiB" in result and "peer_GiB" in result:
            rows.append(Row(name=name, ours=result["ours_GiB"], peer=result["peer_GiB"], unit="GiB", goal="<= 0.7x"))
            rows.append(Row(name="the same, time", ours=result["ours_ms"], peer=result["peer_ms"], unit="ms"))
        elif "ours_ms" in result:
            rows.append(Row(name=name, ours=result["ours_ms"], peer=result["peer_ms"], unit="ms", note="peer: torch"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.train")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--gpus", nargs="*", default=["0"])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        globals()[f"case_{options.case}"]()
        return 0
    with (options.out / "train.jsonl").open("a") as record:
        runner = Runner(record)
        together = [case for case in options.cases if case in ("pairs", "shards")]
        runner.side_by_side([case for case in options.cases if case not in together], options.gpus)
        for case in together:
            runner.case(case, ",".join(options.gpus))
    print(to_markdown(rows_of(runner.results)))
    return 0


class Runner:
    """Cases as processes; what they say is kept at once."""

    def __init__(self, record: IO[str]) -> None:
        self.results: list[dict[str, Any]] = []
        self._record = record
        self._lock = threading.Lock()

    def side_by_side(self, cases: list[str], gpus: list[str]) -> None:
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for case in cases:
            waiting.put(case)

        def work(gpu: str) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self.case(waiting.get_nowait(), gpu)

        threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def case(self, case: str, gpus: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.train", "--case", case]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": gpus,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            timer = threading.Timer(SECONDS.get(case, LIMIT), os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
            reader.start()
            for line in process.stdout or ():
                if line.startswith("RESULT "):
                    self._keep(line)
            reader.join()
            timer.cancel()
        spent = time.perf_counter() - began
        with self._lock:
            print(f"{case}: exit code {process.returncode}, {spent:.0f} s", flush=True)
            if process.returncode:
                print("".join(errors[-15:]), flush=True)

    def _keep(self, line: str) -> None:
        with self._lock:
            print(line, end="", flush=True)
            self._record.write(line.removeprefix("RESULT "))
            self._record.flush()
            self.results.append(json.loads(line.removeprefix("RESULT ")))


if __name__ == "__main__":
    sys.exit(main())
