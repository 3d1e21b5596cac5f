"""A Hugging Face causal language model as a trainer uses it: logprobs and entropies at the trained positions only.

PT-1: sequences are right-padded and attention is causal, so no real position ever reads a padded one: no mask is given,
      and scaled-dot-product attention takes its causal fast path. Results equal those with a mask.
PT-2: only the positions that predict a trained token go through the language-model head. Prompts and padding are never
      projected to the vocabulary.
PT-3: logits are divided by the temperature of sampling before the softmax, so that the ratio to the rollout is 1 on
      policy; log-softmax and entropy are float32 whatever the compute type.
PT-4: at most `LOGITS_AT_ONCE` logits are held. More rows are done in chunks, recomputed in the backward pass.
PT-5: dropout is off: the ratio of two policies must not hold noise of its own.
"""

from __future__ import annotations

import copy
import functools
import shutil
import types
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**26
"""Logits kept for the backward pass, in elements: 256 MiB of float32."""


class Policy(nn.Module):
    """The model and its head as one module, so that one forward call does all (what FSDP2 hooks into)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        hf = cast(Any, model)
        self._backbone = (hf.base_model,)  # in tuples: a second registration would give every parameter two names
        self._head = (hf.get_output_embeddings(),)

    def forward(
        self, token_ids: Tensor, mask: Tensor, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprob of each trained token under softmax(logits / temperature), and the entropy of that distribution.

        Args:
            token_ids: [B, L] int64, right-padded.
            mask: [B, L] bool, True on trained tokens; column 0 is False (nothing predicts it).
            temperature: above 0.
            entropy_gradient: whether the entropy may be part of a loss.

        Returns:
            logprobs and entropy in nats, [B, L] float32 each, 0 outside the mask.
        """
        width = max(1, token_ids.shape[1] - 1)  # what the last token would predict is never asked
        hidden = self._backbone[0](input_ids=token_ids[:, :width], use_cache=False).last_hidden_state
        rows, columns = mask.nonzero(as_tuple=True)
        needed = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows * width + columns - 1)
        logprobs, entropy = self._score(needed, token_ids[mask], temperature, entropy_gradient)
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy)

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        head = self._head[0]
        rows_at_once = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        if len(targets) <= rows_at_once:
            return _logprobs_and_entropy(head, hidden, targets, temperature, entropy_gradient)
        score = functools.partial(_logprobs_and_entropy, head)
        if torch.is_grad_enabled():
            score = functools.partial(checkpoint, score, use_reentrant=False)
        parts = [
            score(
                hidden[start : start + rows_at_once],
                targets[start : start + rows_at_once],
                temperature,
                entropy_gradient,
            )
            for start in range(0, len(targets), rows_at_once)
        ]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)


def _logprobs_and_entropy(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    all_logprobs = F.log_softmax(logits, dim=-1)
    logprobs = all_logprobs.gather(1, targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # entr(p) = -p ln p with 0 at p = 0, where p * logprob would be 0 * -inf
        entropy = torch.special.entr(all_logprobs.exp()).sum(-1)
    return logprobs, entropy


def load_policy(path: str, *, dtype: torch.dtype = torch.float32) -> Policy:
    """Read a Hugging Face folder (config and safetensors) into a policy on the CPU, without dropout.

    Args:
        path: local folder.
        dtype: of the master weights, whatever the checkpoint holds. Only float32 keeps small updates.

    Raises:
        OSError: the folder is missing or incomplete.
        ValueError: the architecture is not a causal model whose logits are its head applied to its last hidden state.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar per rank, for a second's work, would drown the log (R11)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    policy = Policy(model.eval())
    _check_head(policy, path)
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


def fuse_norms(model: nn.Module) -> int:
    """Replace the RMS norms' chain of five kernels by torch's own function where both say the same; returns how many.

    A tenth of a step of a small model on CPU. For float32 compute only: in bf16 the order of the casts differs.
    """
    count = 0
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or epsilon is None or weight is None or weight.ndim != 1:
            continue
        probe = torch.linspace(-2, 3, 2 * len(weight), dtype=weight.dtype).reshape(2, -1)
        with torch.no_grad():
            same = torch.allclose(module(probe), F.rms_norm(probe, weight.shape, weight, epsilon), rtol=1e-5, atol=1e-6)
        if same:
            module.forward = types.MethodType(_rms_norm, module)
            count += 1
    return count


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


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
    config.save_pretrained(target)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, target / "model.safetensors", {"format": "pt"}
    )
    for file in Path(start_path).iterdir():
        if file.is_file() and file.name not in ("config.json", "README.md") and not _holds_weights(file):
            shutil.copy2(file, target / file.name)


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")
