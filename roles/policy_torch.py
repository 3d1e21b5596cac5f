"""A Hugging Face causal language model as a trainer uses it: logprobs, entropies or values at the trained positions.

PT-1: a micro-batch runs as one row of positions without padding (`roles.flat`), attention within each sequence alone
      (`roles.kernels.attention`). Models that can't (a state that runs along the row, attention of their own) are found
      by comparison when they are loaded, and run right-padded: attention is causal, so no real position ever reads a
      padded one.
PT-2: only the positions that predict a trained token go through the head. Prompts and padding are never projected to
      the vocabulary, and logits exist in chunks alone (`roles.logprob`).
PT-3: logits are divided by the temperature of sampling before the softmax, so that the ratio to the rollout is 1 on
      policy. The values of a critic are not.
PT-4: recorded routes replace the choice of each router, in forward and in recomputation; gate weights are computed from
      the live logits and keep their gradient (`roles.replay`).
PT-5: dropout is off: the ratio of two policies must not hold noise of its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from roles import kernels
from roles.flat import flatten
from roles.fused_modules import epsilon_of
from roles.hf_folder import holds_weights
from roles.logprob import chosen_logprobs
from roles.measures import brought
from roles.replay import Replay
from roles.types import MicroBatch

if TYPE_CHECKING:
    from roles.tensor_parallel import TensorParallel

Head = Literal["lm", "value"]

PACKED = "tutti_packed"
"""Name of our attention in transformers' registry."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """A micro-batch on the device, as the model takes it."""

    token_ids: Tensor
    """[1, T], or [B, L - 1] right-padded."""
    positions: Tensor | None
    """[1, T]; None: counted along the row."""
    packed: kernels.Packed | None
    """Sequences of the row; None when right-padded."""
    chosen: Tensor
    """[K] into all positions, in the order of the mask."""
    targets: Tensor
    """[K] the tokens that these predict."""
    routes: Tensor | None
    """[positions, MoE layers, experts per token] int64."""


class Policy(nn.Module):
    """The model and its head as one module, so that one forward call does all (what FSDP2 hooks into)."""

    def __init__(self, model: nn.Module, *, head: Head = "lm") -> None:
        super().__init__()
        self.model = model
        hf = cast(Any, model)
        # in tuples: a second registration would give every parameter two names
        self._backbone = (hf.base_model,)
        self._head = (hf.get_output_embeddings() if head == "lm" else hf.score,)
        self.head = head
        self.packed = False
        self.replay: Replay | None = None
        self.tensor_parallel: TensorParallel | None = None

    def positions(self, micro: MicroBatch, device: torch.device) -> Positions:
        """Bring a micro-batch to the device in the form that this model takes (PT-1)."""

        def on_device(array: np.ndarray) -> Tensor:
            return brought(np.asarray(array, np.int64), device)

        flat = flatten(micro)
        if self.packed:
            return Positions(
                token_ids=on_device(flat.token_ids)[None],
                positions=on_device(flat.positions)[None],
                packed=kernels.Packed(np.diff(flat.starts).tolist(), device),
                chosen=on_device(flat.chosen),
                targets=on_device(flat.targets),
                routes=None if flat.routes is None else on_device(flat.routes),
            )
        rows, columns = np.nonzero(micro.mask)
        width = max(1, micro.token_ids.shape[1] - 1)
        routes = None
        if flat.routes is not None:
            routes = np.broadcast_to(
                np.arange(flat.routes.shape[2]), (micro.mask.shape[0], width, *flat.routes.shape[1:])
            )
            routes = routes.copy()
            real = np.arange(width) < np.maximum(1, micro.lengths - 1)[:, None]
            routes[real] = flat.routes
        return Positions(
            token_ids=on_device(micro.token_ids[:, :width]),
            positions=None,
            packed=None,
            chosen=on_device(rows * width + columns - 1),
            targets=on_device(flat.targets),
            routes=None if routes is None else on_device(routes.reshape(-1, *routes.shape[2:])),
        )

    def forward(
        self, inputs: Positions, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Score the chosen positions.

        Returns:
            lm: logprob of each target under softmax(logits / temperature) and entropy in nats; value: the value of the
            state before each target, and zeros. [K] float32 each, in the order of the mask.
        """
        if self.replay is not None:
            self.replay.routes = inputs.routes
        arguments: dict[str, Any] = {"input_ids": inputs.token_ids, "use_cache": False}
        if inputs.packed is not None:
            arguments |= {"position_ids": inputs.positions, "packed": inputs.packed}
        hidden = self._backbone[0](**arguments).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, inputs.chosen)
        head = self._head[0]
        if self.head == "value":
            values = head(hidden).squeeze(-1).float()
            return values, torch.zeros_like(values)
        kind = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
        weight, bias = head.weight, head.bias
        if kind is not None:
            hidden, weight = hidden.to(kind), weight.to(kind)
        with torch.autocast(hidden.device.type, enabled=False):
            shard = None
            if self.tensor_parallel is not None:
                hidden, weight, bias, shard = self.tensor_parallel.head(hidden, weight, bias)
            return chosen_logprobs(
                hidden,
                weight,
                inputs.targets,
                temperature=temperature,
                bias=bias,
                entropy_gradient=entropy_gradient,
                shard=shard,
            )


def load_policy(path: str, *, dtype: torch.dtype = torch.float32, head: Head = "lm") -> Policy:
    """Read a Hugging Face folder (config and safetensors) into a policy on the CPU, without dropout.

    Args:
        path: local folder.
        dtype: of the master weights, whatever the checkpoint holds. Only float32 keeps small updates.
        head: "value" replaces the language-model head by one number a position, `score`; all values are 0 at first
            unless the folder holds a `score`.

    Raises:
        OSError: the folder is missing or incomplete.
        ValueError: the architecture is not a causal model whose logits are its head applied to its last hidden state.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar per rank, for a second's work, would drown the log (R11)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
    if head == "lm":
        policy = Policy(AutoModelForCausalLM.from_pretrained(path, **options).eval())
        _check_head(policy, path)
    else:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # that `score` is new is what we are here for
        model, found = AutoModelForTokenClassification.from_pretrained(
            path, num_labels=1, output_loading_info=True, **options
        )
        logging.set_verbosity(verbosity)
        policy = Policy(model.eval(), head="value")
        if any(name.startswith("score.") for name in found["missing_keys"]):
            for parameter in cast(Any, model).score.parameters():
                nn.init.zeros_(parameter)
    policy.packed = _can_pack(policy)
    policy.replay = Replay.of(policy.model)
    return policy


def _check_head(policy: Policy, path: str) -> None:
    """Refuse models that do more to their logits than their head does (soft caps, scales)."""
    model = cast(Any, policy.model)
    head = policy._head[0]
    if head is None:
        raise ValueError(
            f"model {path}: {type(model).__name__} has no language-model head; give a causal language model"
        )
    token_ids = torch.arange(4)[None] % head.weight.shape[0]
    with torch.no_grad():
        expected = model(input_ids=token_ids, use_cache=False).logits
        got = head(policy._backbone[0](input_ids=token_ids, use_cache=False).last_hidden_state)
    if not torch.allclose(expected, got, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"model {path}: the logits of {type(model).__name__} are not its head applied to its last hidden state "
            f"(largest difference {(expected - got).abs().max():.3g}); models with soft-capped or scaled logits "
            "can't be trained by this back end, choose another architecture"
        )


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: kernels.Packed | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Our attention with the signature of transformers' registry: [1, heads, T, D] in, [1, T, heads, D'] out."""
    if packed is None or attention_mask is not None or softcap is not None or dropout:
        raise ValueError(
            "this model hands its attention no sequences of a row, or a mask of its own, or caps its scores"
        )
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    out = kernels.attention(q, k, v, packed, scale=scaling, window=sliding_window, sink=s_aux)
    return out.unsqueeze(0), None


def keep_attention_out_of_graphs() -> None:
    """Let torch.compile break its graph around our attention, which chooses its kernel at run time."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, torch.compiler.disable(_packed_attention))


def _can_pack(policy: Policy) -> bool:
    """Whether two sequences in one row give what each gives alone; if so, the model is left in that mode (PT-1)."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, _packed_attention)
    model, backbone = cast(Any, policy.model), policy._backbone[0]
    embedding = model.get_input_embeddings().weight
    size, device = embedding.shape[0], embedding.device
    first, second = (torch.arange(length, device=device) * 7 % size for length in (5, 3))
    row = torch.cat([first, second])[None]
    positions = torch.cat([torch.arange(5), torch.arange(3)])[None].to(device)
    before = model.config._attn_implementation
    with torch.no_grad(), narrow_windows(model):
        alone = [backbone(input_ids=ids[None], use_cache=False).last_hidden_state for ids in (first, second)]
        model.set_attn_implementation(PACKED)
        packed = kernels.Packed([5, 3], row.device)
        try:
            together = backbone(input_ids=row, position_ids=positions, packed=packed, use_cache=False).last_hidden_state
        except (TypeError, ValueError):  # of this architecture, with these arguments
            together = torch.full_like(torch.cat(alone, dim=1), torch.nan)
    same = torch.allclose(torch.cat(alone, dim=1), together, rtol=1e-3, atol=1e-3)
    if not same:
        model.set_attn_implementation(before)
    return same


@contextlib.contextmanager
def narrow_windows(model: nn.Module) -> Iterator[None]:
    """Attention that looks back two positions where it looks back over some number: a few tokens then show whether it
    is told so, or whether only the mask says it, which ours does not read."""
    owners = {id(owner): owner for module in model.modules() for owner in (module, getattr(module, "config", module))}
    changed = [
        (owner, name, value)
        for owner in owners.values()
        for name in ("sliding_window", "attention_chunk_size")
        if isinstance(value := getattr(owner, name, None), int) and value > 2
    ]
    try:
        for owner, name, _ in changed:
            setattr(owner, name, 2)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, which FSDP2 shards one by one: what the architecture says must not be split.

    Raises:
        ValueError: the architecture names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} names no decoder block (_no_split_modules); use [trainer] strategy = 'ddp'"
        )
    return blocks


def checkpoint_activations(blocks: list[nn.Module]) -> None:
    """Keep only the input of each block and recompute the rest in the backward pass.

    Only `forward` is replaced, not the module: names stay, and FSDP2's hooks stay outside, so that the recomputation
    runs on gathered weights.
    """
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def fuse_norms(model: nn.Module, device: torch.device) -> int:
    """Replace the RMS norms' chain of eight kernels by one where both say the same; returns how many.

    A tenth of a step of a small model on CPU, where it is torch's own function. That one is for float32 compute only:
    in bf16 the order of the casts differs.
    """
    form = _rms_norm if device.type == "cpu" else _rms_norm_kernel
    count = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and epsilon_of(module) is not None:
            module.forward = types.MethodType(form, module)
            count += 1
    return count


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _rms_norm_kernel(self: Any, hidden_states: Tensor) -> Tensor:
    return kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def export_policy(policy: Policy, state: dict[str, Tensor], folder: str, *, dtype: str, start_path: str) -> None:
    """Write weights under the model's own names as a Hugging Face folder that transformers and vLLM load.

    Args:
        state: full tensors by parameter name, on the CPU, in the type to write. A tied head is left out.
        folder: made if missing.
        dtype: torch's name of that type, for config.json.
        start_path: the folder the model came from; its tokenizer and generation settings are copied.
    """
    model = cast(Any, policy.model)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config._attn_implementation = None  # of this process, not of the model
    model.config, live = config, model.config
    try:  # transformers writes the names of the checkpoint format, which for experts differ from those in memory
        model.save_pretrained(target, state_dict={name: tensor.contiguous() for name, tensor in state.items()})
        config.dtype = dtype  # the above has noted the type of the weights in memory
        config.save_pretrained(target)
    finally:
        model.config = live
    for file in Path(start_path).iterdir():
        if file.is_file() and file.name not in ("config.json", "README.md") and not holds_weights(file):
            shutil.copy2(file, target / file.name)
