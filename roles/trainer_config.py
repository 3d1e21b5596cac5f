"""The settings of a trainer, and what can be said against them before any process starts.

TC-1: a setting without a meaning is refused with the table's key: out of range, of the other back end, or a mesh that
      does not come out even.
TC-2: `check_model` reads config.json alone: an architecture that a back end can't train and sizes that a layout doesn't
      divide are told before torch is imported anywhere.
TC-3: the learning rate is a function of the version alone, so that a resumed run can't advance a schedule twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from sync.layout import LayoutError
from sync.layouts import megatron as megatron_layout
from sync.layouts.model import ModelShape

__all__ = ["TrainerConfig", "adapted_weights", "check_model", "learning_rate", "megatron_parallel"]

PARALLEL_SIZES = (
    "tensor_parallel",
    "pipeline_parallel",
    "pipeline_chunks",
    "expert_parallel",
    "expert_tensor_parallel",
    "context_parallel",
)
AT_LEAST_ZERO = (
    "lr",
    "weight_decay",
    "grad_clip",
    "warmup_steps",
    "total_steps",
    "threads",
    "max_skipped",
    "lora_rank",
    "lora_alpha",
)
OF_MEGATRON = (*PARALLEL_SIZES[1:], "pipeline_layers")
OF_FSDP = ("strategy", "replicas", "compile", "offload_weights")


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[trainer]` table of a job."""

    backend: Literal["fsdp", "megatron"] = "fsdp"
    """`fsdp`: any causal language model of transformers, on torch alone. `megatron`: megatron-core, with tensor,
    context, pipeline and expert parallelism, for Llama, Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V3."""
    ranks: int = 1
    """Processes. On GPU one each; on CPU they share the cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where torch sees a GPU (ROCm too), else cpu."""
    strategy: Literal["auto", "fsdp2", "ddp"] = "auto"
    """`fsdp2` shards weights, gradients and optimizer over the ranks; `ddp` keeps a whole copy on each and sums the
    gradients. `auto`: fsdp2 on GPU, ddp on CPU, where memory is shared and small models gain nothing from sharding.
    Of backend `fsdp`."""
    replicas: int = 1
    """Groups of ranks that hold a whole model each, sharded inside (HSDP). Of strategy `fsdp2`."""
    tensor_parallel: int = 1
    """Ranks that share every matrix. With backend `fsdp`: for models that transformers has a plan for."""
    pipeline_parallel: int = 1
    """Ranks that hold the layers in turn. Of backend `megatron`, as the next three."""
    pipeline_chunks: int = 1
    """Model chunks of each pipeline rank. More than 1: the interleaved schedule, with less idle time."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each chunk, in the order of the layers. Empty: even. 43 layers on 4 ranks: [11, 11, 11, 10]."""
    expert_parallel: int = 1
    """Ranks that share the experts, out of the data-parallel ones."""
    expert_tensor_parallel: int = 1
    """Ranks that share each expert."""
    context_parallel: int = 1
    """Ranks that share each row of positions, long sequences above all: a rank has 1/n of `token_budget`, and in
    attention 1/n of the heads. With `tensor_parallel` each part is split over its ranks once more."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the matrix products. Master weights, gradients' sums, softmax and optimizer are float32 always."""
    lr: float = 1e-6
    """Peak learning rate of AdamW. 0 leaves every weight bit-identical."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, scaled by the learning rate; on matrices only, not on norms and biases."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient over all ranks; it is scaled down to this. 0: no clipping."""
    warmup_steps: int = 0
    """The learning rate rises linearly over this many steps; the first of them already has a share of it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at `total_steps`."""
    total_steps: int = 0
    """Where `linear` and `cosine` reach 0, in steps counted from the start of the run. Must be 0 for `constant`."""
    token_budget: int = 4096
    """Most tokens of one micro-batch, without padding. Bounds the length of a sequence, and memory: a token takes 25 to
    55 bytes x layers x hidden size in bfloat16 (.4 to 1 MB of a model of 135M), 4 with `activation_checkpointing`."""
    updates_per_step: int = 1
    """Optimizer updates from one batch. With more than one, logprobs under the weights at the start of the step are
    computed once more before the first update."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the decoder blocks and compute them again in the backward pass: less memory, a third more
    work."""
    compile: bool = False
    """Compile each decoder block (torch.compile). The first steps take minutes. Of backend `fsdp`."""
    offload_optimizer: bool = False
    """Keep the moments of Adam in CPU memory: 8 bytes a parameter less on the GPU. They travel while it computes."""
    offload_weights: bool = False
    """Keep weights, gradients and moments in CPU memory, and update there. Of strategy `fsdp2` on GPU."""
    max_skipped: int = 3
    """Updates in a row that may be left out because a loss or gradient is not finite. One more ends the run."""
    lora_rank: int = 0
    """Train adapters of this rank (LoRA) instead of the weights. 0: train the weights."""
    lora_alpha: float = 32.0
    """The adapter's product is scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last part of the names of the linear layers that get an adapter; with backend `megatron` each expert's too."""
    lora_send: Literal["merged", "adapter"] = "merged"
    """What rollouts receive: whole weights with the adapter added, or the adapter alone, in PEFT's names."""
    frozen: bool = False
    """Never train: no optimizer, no gradients. For reference models."""
    head: Literal["lm", "value"] = "lm"
    """`value`: one number a position in place of the language-model head, for critics."""
    kernels: dict[str, str] = {}
    """Implementations asked for by operation, as {attention = "torch"}; what is not named is chosen, see `--doctor`."""
    threads: int = 0
    """Of torch in each process. 0: derived from the cores of the host and whether generation runs at the same time."""
    seed: int = 0
    """Of torch, numpy and random on the ranks, for objectives that draw. The ranks of the r-th part of the data get
    seed + r. 0: that of the job."""

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(f"[trainer] {problem}")

    def _problems(self) -> Iterator[str]:
        for name in (*PARALLEL_SIZES, "ranks", "replicas", "token_budget", "updates_per_step"):
            if getattr(self, name) < 1:
                yield f"{name} = {getattr(self, name)}: expected at least 1"
        for name in AT_LEAST_ZERO:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                yield f"{name} = {value}: expected a finite number, at least 0"
        if not all(0 <= beta < 1 for beta in self.betas) or self.eps <= 0:
            yield f"betas = {list(self.betas)}, eps = {self.eps}: expected betas in [0, 1) and eps above 0"
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            yield (
                f"schedule = {self.schedule!r} needs total_steps above warmup_steps ({self.warmup_steps}), "
                f"got {self.total_steps}; set total_steps to the steps of the run, or schedule = 'constant'"
            )
        if self.schedule == "constant" and self.total_steps:
            yield (
                f"total_steps = {self.total_steps} has no meaning with schedule = 'constant'; "
                "remove it or set schedule = 'linear' or 'cosine'"
            )
        yield from self._foreign()
        yield from self._mesh()

    def _foreign(self) -> Iterator[str]:
        """Settings of the other back end, which would silently do nothing."""
        other = OF_MEGATRON if self.backend == "fsdp" else OF_FSDP
        owner = "megatron" if self.backend == "fsdp" else "fsdp"
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        for name in other:
            if getattr(self, name) != defaults[name]:
                yield (
                    f"{name} = {getattr(self, name)!r} is of backend = {owner!r}, and backend is {self.backend!r}; "
                    "change one of the two"
                )
        if self.lora_rank and (self.frozen or self.head == "value"):
            yield "lora_rank is for a policy that is trained; not with frozen = true or head = 'value'"
        if self.lora_rank and "lm_head" in self.lora_targets:
            yield "lora_targets: the head is computed in blocks and takes no adapter; leave lm_head out"

    def _mesh(self) -> Iterator[str]:
        """Ranks that don't come out even (the model's sizes are checked where it is known: `check_model`)."""
        if self.ranks % self.replicas:
            yield f"replicas = {self.replicas} does not divide ranks = {self.ranks}"
        if self.backend == "fsdp" and self.tensor_parallel > 1:
            for name in ("lora_rank", "offload_weights"):
                if getattr(self, name):
                    yield f"tensor_parallel = {self.tensor_parallel} does not go with {name} yet; leave one of them out"
            if self.strategy == "ddp":
                yield f"tensor_parallel = {self.tensor_parallel} is of strategy = 'fsdp2'; set it"
            if self.ranks % (self.replicas * self.tensor_parallel):
                yield (
                    f"replicas x tensor_parallel = {self.replicas} x {self.tensor_parallel} does not divide "
                    f"ranks = {self.ranks}"
                )
        if self.replicas > 1 and self.strategy == "ddp":
            yield f"replicas = {self.replicas} is of strategy = 'fsdp2', which shards each replica; set it"
        model = self.row_ranks * self.pipeline_parallel
        if self.ranks % model:
            yield (
                f"tensor_parallel x context_parallel x pipeline_parallel = {self.tensor_parallel} x "
                f"{self.context_parallel} x {self.pipeline_parallel} = {model} does not divide ranks = {self.ranks}"
            )
        experts = self.expert_parallel * self.expert_tensor_parallel * self.pipeline_parallel
        if self.ranks % experts:
            yield (
                f"expert_parallel x expert_tensor_parallel x pipeline_parallel = {self.expert_parallel} x "
                f"{self.expert_tensor_parallel} x {self.pipeline_parallel} = {experts} does not divide "
                f"ranks = {self.ranks}"
            )
        if self.pipeline_chunks > 1 and self.pipeline_parallel == 1:
            yield f"pipeline_chunks = {self.pipeline_chunks} needs pipeline_parallel of at least 2"

    @property
    def row_ranks(self) -> int:
        """Ranks that compute on one row of positions together."""
        return self.tensor_parallel * self.context_parallel

    @property
    def data_parallel(self) -> int:
        """Sets of ranks that compute on data of their own."""
        return self.ranks // (self.row_ranks * self.pipeline_parallel)

    def data_rank(self, rank: int) -> int:
        """Whose data a rank computes on: ranks count tensor-parallel neighbours first, then those that share a row,
        pipeline stages last."""
        return rank // self.row_ranks % self.data_parallel

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: the interleaved schedule goes by rounds of stages."""
        return self.pipeline_parallel if self.pipeline_chunks > 1 else 1


def learning_rate(config: TrainerConfig, version: int) -> float:
    """The rate of the step that makes version + 1 out of `version`. Reaches 0 at `total_steps` and stays there."""
    rise = min(1.0, (version + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant" or version < config.warmup_steps:
        return config.lr * rise
    done = min(1.0, (version - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def megatron_parallel(config: TrainerConfig) -> megatron_layout.MegatronParallel:
    """The layout of backend `megatron`, as sync knows it."""
    return megatron_layout.MegatronParallel(
        tp=config.tensor_parallel,
        pp=config.pipeline_parallel,
        vpp=config.pipeline_chunks,
        ep=config.expert_parallel,
        etp=config.expert_tensor_parallel,
        layers=config.pipeline_layers,
        vocab_divisor=1,
    )


def adapted_weights(config: TrainerConfig, shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Shapes of the weights that get an adapter with backend `megatron`, in Hugging Face names: each expert has its
    own."""
    return {name: size for name, size in _linear(shape).items() if name.split(".")[-2] in config.lora_targets}


def _linear(shape: ModelShape) -> dict[str, tuple[int, int]]:
    return {w.name: (w.shape[0], w.shape[1]) for w in shape.weights() if w.role == "matrix"}


def check_model(config: TrainerConfig, model_path: str | Path) -> None:
    """Whether this model can be trained this way, from its config.json.

    Raises:
        ValueError: with the first thing that is wrong: the architecture, or a size that the layout doesn't divide.
    """
    if config.backend == "fsdp" and config.tensor_parallel == 1:
        return  # any causal language model; shards need no even division
    file = Path(model_path) / "config.json"
    hugging: dict[str, Any] = json.loads(file.read_text())
    if config.backend == "fsdp":
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (size := hugging.get(name)) and size % config.tensor_parallel:
                raise ValueError(
                    f"[trainer] tensor_parallel = {config.tensor_parallel} does not divide {name} = {size} (model "
                    f"{model_path}); use a divisor of it"
                )
        return
    try:
        shape = ModelShape.of(hugging)
        parallel = megatron_parallel(config)
        for rank in range(config.ranks):
            megatron_layout.held(shape, parallel, parallel.rank(rank, config.ranks))
    except LayoutError as error:
        raise ValueError(f"[trainer] backend = 'megatron', model {model_path}: {error}") from error
    for problem in _uneven(config, shape, hugging):
        raise ValueError(f"[trainer] {problem} (model {model_path})")


def _uneven(config: TrainerConfig, shape: ModelShape, hugging: dict[str, Any]) -> Iterator[str]:
    tp = config.tensor_parallel
    if shape.heads % tp:
        yield f"tensor_parallel = {tp} does not divide the {shape.heads} attention heads"
    if shape.mla is None and shape.kv_heads % tp:
        yield f"tensor_parallel = {tp} does not divide the {shape.kv_heads} key-value heads; use at most as many ranks"
    elif (heads := shape.heads if shape.mla else shape.kv_heads) % config.row_ranks:
        yield (
            f"tensor_parallel x context_parallel = {tp} x {config.context_parallel} does not divide the {heads} "
            "key-value heads, which attention shares out; use at most as many ranks"
        )
    if shape.experts is None and config.expert_parallel * config.expert_tensor_parallel > 1:
        yield "expert_parallel is for mixture-of-experts models; set it and expert_tensor_parallel to 1"
    if hugging.get("model_type") not in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"):
        yield f"backend = 'megatron' has no model of type {hugging.get('model_type')!r}; use backend = 'fsdp'"
    if config.lora_rank and not adapted_weights(config, shape):
        known = sorted({name.split(".")[-2] for name in _linear(shape)})
        yield (
            f"lora_targets = {list(config.lora_targets)} names none of the model's linear layers; it has "
            f"{', '.join(known)}"
        )
    rope = hugging.get("rope_parameters") or hugging.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn" if shape.mla else "default"):
        yield f"backend = 'megatron' has no rotary positions of type {kind!r} for this model; use backend = 'fsdp'"
    if hugging.get("use_sliding_window") or (hugging.get("model_type") == "mistral" and hugging.get("sliding_window")):
        yield "backend = 'megatron' has no models with sliding windows yet; use backend = 'fsdp'"
