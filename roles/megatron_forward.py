"""Micro-batches through megatron's schedule: each is a row of sequences, cut for the ranks that share one, and scored
by the last stage.

MT-3 of roles/trainer_megatron.py holds here: rows are padded to a multiple of the ranks that share one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from roles import kernels, megatron_context
from roles.flat import Flat, flatten
from roles.logprob import VocabShard, chosen_logprobs
from roles.megatron_model import packed_row
from roles.megatron_replay import RouteReplay
from roles.trainer_config import TrainerConfig
from roles.types import MicroBatch
from sync.layouts.model import ModelShape


class MegatronForward:
    """What this rank computes of the model.

    Args:
        chunks: of the model, as they are trained.
        replay: lets experts be those of the samples, where the model has experts.
    """

    def __init__(
        self,
        config: TrainerConfig,
        shape: ModelShape,
        chunks: list[nn.Module],
        replay: RouteReplay | None,
        device: torch.device,
    ) -> None:
        self.config = config
        self.shape = shape
        self.chunks = chunks
        self.device = device
        self._replay = replay

    def run(
        self,
        micros: Sequence[MicroBatch],
        temperature: float,
        function: Any,
        *,
        entropy_gradient: bool = False,
        forward_only: bool = False,
    ) -> list[Any]:
        """All micro-batches through megatron's schedule. `function(scores [2, K], index)` runs on the last stage."""
        flats = [flatten(micro, multiple=self.config.row_ranks) for micro in micros]
        for chunk in self.chunks:
            chunk.train(not forward_only)
            if not forward_only:
                chunk.zero_grad_buffer()  # type: ignore[operator]

        def step(indices: Iterator[int], chunk: nn.Module) -> tuple[Tensor, Any]:
            index = next(indices)
            scores = self._chunk_forward(chunk, flats[index], temperature, entropy_gradient)
            return scores, lambda out, non_loss_data=False: function(out, index)

        data = [iter(range(len(micros))) for _ in self.chunks]
        try:
            results = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=data if len(data) > 1 else data[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(micros),
                seq_length=max(len(flat.token_ids) for flat in flats),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        finally:
            if self._replay is not None:  # also after an error: the next recomputation would take what this one left
                self._replay.clear()
        return list(results)

    def _chunk_forward(self, chunk: nn.Module, flat: Flat, temperature: float, entropy_gradient: bool) -> Tensor:
        def on_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.array(array, np.int64)).to(self.device)

        if self._replay is not None:
            routes = None if flat.routes is None else on_device(flat.routes)
            self._replay.set(_unwrapped(chunk), routes, recomputed=self.config.activation_checkpointing)
        run = megatron_context.run_of(len(flat.token_ids))
        # On the host: a GPU that is asked how many they are is waited for.
        inside = np.flatnonzero((flat.chosen >= run.start) & (flat.chosen < run.stop))
        score = functools.partial(
            self._score,
            chosen=on_device(flat.chosen[inside] - run.start),
            targets=on_device(flat.targets[inside]),
            inside=on_device(inside),
            count=len(flat.chosen),
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )
        positions = on_device(flat.positions[run])
        out: Tensor = chunk(
            input_ids=on_device(flat.token_ids[run])[None],
            position_ids=positions[None],
            attention_mask=None,
            packed_seq_params=packed_row(kernels.Packed(np.diff(flat.starts).tolist(), self.device), positions),
            output_processor=score,
        )
        return out

    def _score(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        chosen: Tensor,
        targets: Tensor,
        inside: Tensor,
        count: int,
        temperature: float,
        entropy_gradient: bool,
        **_unused: Any,
    ) -> Tensor:
        """[2, K]: logprobs and entropies of the chosen positions, from chunks of this rank's part of the vocabulary;
        of a critic values and zeros."""
        config, shard = self.config, None
        weight = output_layer.weight if output_weight is None else output_weight
        if config.tensor_parallel > 1:
            # Of a vocabulary's shards each leaves a part of the gradient, which the backward pass of this gather sums
            # (VocabShard); a critic's head is computed alike on all ranks.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=not self.shape.critic
            )
            start = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
            group = parallel_state.get_tensor_model_parallel_group()
            shard = VocabShard(group=group, start=start, count=min(weight.shape[0], self.shape.vocab - start))
        hidden = hidden_states.squeeze(1).index_select(0, chosen)
        if self.shape.critic:
            values = output_layer(hidden)
            scores = torch.stack([values, torch.zeros_like(values)])
        else:
            found = chosen_logprobs(
                hidden, weight, targets, temperature=temperature, entropy_gradient=entropy_gradient, shard=shard
            )
            scores = torch.stack(found)
        return scores if config.context_parallel == 1 else megatron_context.whole(scores, inside, count)


def _unwrapped(chunk: nn.Module) -> nn.Module:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
