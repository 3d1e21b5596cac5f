"""Our rollout engine on one rank: continuous batching over slots, for any Llama-shaped transformers model.

Running completions are the rows 0..B-1 of a few tensors. A step runs one forward for all of them, samples, and looks
which rows ended; Python objects are touched only for those.

    submit -> waiting --admit--> row (prefill: the group's prompt once, its keys and values copied to n slots)
                                  |  decode: one token a step        swap: weights and version between two steps
                                  `-> ended (stop, length, abort): the last rows move into the holes

EN-1: logprobs equal a teacher-forced forward of the finished sequence, whatever joined or left the batch meanwhile.
EN-2: a request is admitted whole or not at all, in the order of submission; its prompt is computed once.
EN-3: rows 0..B-1 are exactly the running completions: no step computes a row that has ended.
EN-4: `swap` checks all tensors before it writes one, writes in place and moves the version at the same place. Rows that
      run keep their keys and values; a request admitted later computes its own from the new weights alone.
EN-5: each sample leaves exactly once, by `step` or by `abort`.
EN-6: a request that could not run to its end is refused at submission: memory for rows is there before they start.
EN-7: between `live_weights` and `swap` no step runs and nothing is computed: requests wait, and aborts are carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from roles import native
from roles.decoder import select
from roles.decoder_cpu import CpuDecoder
from roles.engine import Finished, Request, Sampled, check_tokens
from roles.model_folder import stop_tokens_of
from roles.pieces import as_completion
from roles.request_check import check_fits
from roles.request_queue import RequestQueue
from roles.routes_torch import RouteCapture, RouteStore
from roles.rows import LENGTH, TOKEN, Rows
from roles.rows_cpu import CpuRows
from roles.sampling import RowParameters, likeliest
from roles.served_weights import ServedWeights
from roles.types import FinishReason, Piece, Sampling

if TYPE_CHECKING:
    from roles.rollout_config import RolloutConfig
    from sync.layout import Layout


@dataclass
class _Row:
    """What Python knows of a running row."""

    request: Request
    sample: int
    news: int = -1
    """Its tokens that `news` has given; -1 where nobody asks."""
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each token: ids and logprobs of the likeliest, where they are asked for."""


class TorchEngine:
    """A `roles.engine.StepEngine`.

    Args:
        model: a transformers causal LM with its weights, on its device; the engine takes it over.
        max_running: rows that may run at once.
        max_len: longest prompt and completion together; 0 is the model's own limit. Memory grows with what is used.
        stop_token_ids: end of a completion for requests that name none.
        version: policy version of the weights as loaded.
        record_routes: completions carry the experts of each token.
        native: on CPU in float32, compute with our C++ where a compiler is there (roles/native.py).

    Raises:
        roles.decoder_torch.UnsupportedModel: the model is not one that this engine reproduces.
        ValueError: `max_len` is beyond the model's positions, or there are no routes to record.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_running: int,
        max_len: int = 0,
        stop_token_ids: Sequence[int] = (),
        version: int = 0,
        record_routes: bool = False,
        native: bool = True,
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._decoder = select(model, max_running, native=native and not record_routes)
        if max_len > self._decoder.max_positions:
            raise ValueError(
                f"max_len: expected at most the model's {self._decoder.max_positions} positions, got {max_len}; lower "
                f"it, or set it to 0 for the model's own limit"
            )
        self._max_running = max_running
        self._max_len = max_len or self._decoder.max_positions
        self._stop_token_ids = tuple(stop_token_ids)
        self._version = version
        self._num_tokens = 0
        self._held = False  # its weights are being written over
        self._waiting = RequestQueue()
        self._known: set[int] = set()
        self._told: set[int] = set()  # requests whose tokens `news` has
        self._news: list[Sampled] = []  # of rows that have ended
        self._unwanted: set[tuple[int, int]] = set()  # samples that were aborted while their request waited
        self._rows: list[_Row] = []
        self._num_top = self._num_told = 0
        self._device = next(model.parameters()).device
        with torch.inference_mode():
            self._state = self._make_rows(version)
        base: Any = getattr(model, "base_model", model)
        self._capture = RouteCapture(base.layers) if record_routes else None
        self._routes = RouteStore(max_running)
        self._weights = ServedWeights(model)

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_samples

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def check(self, request: Request) -> None:
        """Raise ValueError for what could never run (EN-6)."""
        check_fits(request, self._max_running, self._max_len, self._decoder.vocab_size)

    def submit(self, request: Request, *, told: bool = False) -> None:
        """Queue a request. Raises ValueError like `check`, or when its id is in use.

        Args:
            told: `news` has its tokens.
        """
        self.check(request)
        if request.id in self._known:
            raise ValueError(f"rollout: request id {request.id} is in use; give each request its own id")
        self._known.add(request.id)
        if told:
            self._told.add(request.id)
        self._waiting.add(request)

    def abort(self, request_id: int, sample: int | None = None) -> list[Finished]:
        """End what is left of a request, or one sample of it; what is unknown or has ended is no error."""
        if request_id not in self._known:
            return []
        if (request := self._waiting.find(request_id)) is not None:
            return self._abort_waiting(request, sample)
        rows = [
            index
            for index, row in enumerate(self._rows)
            if row.request.id == request_id and sample in (None, row.sample)
        ]
        with torch.inference_mode():
            return self._end(rows, ["abort"] * len(rows)) if rows else []

    def _abort_waiting(self, request: Request, sample: int | None) -> list[Finished]:
        """A request is admitted whole (EN-2): one sample of it ends with its first step."""
        if sample is not None:
            self._unwanted.add((request.id, sample))
            return []
        self._waiting.remove(request)
        self._known.discard(request.id)
        self._told.discard(request.id)
        self._unwanted -= {(request.id, index) for index in range(len(request.seeds))}
        nothing = np.zeros(0, np.int32)
        piece = Piece(token_ids=nothing, logprobs=nothing.astype(np.float32), versions=nothing)
        return [_finished(request, index, piece, "abort") for index in range(len(request.seeds))]

    def step(self) -> list[Finished]:
        """Admit what fits, then one token for each running row. Returns the samples that ended.

        Raises:
            FloatingPointError: logits are not finite: the weights of this version are broken.
        """
        if self._held:
            return []
        with torch.inference_mode():
            ended = self._admit()
            if self._rows:
                state = self._state.ints[: len(self._rows)]
                logits = self._decoder.decode(state[:, TOKEN], state[:, LENGTH], self._state.longest)
                if self._capture is not None:
                    self._routes.put(torch.arange(len(state)), state[:, LENGTH], self._capture.take())
                self._state.advance()
                ended += self._draw(0, logits)
            if self._unwanted:
                ended += self._end_unwanted()
        return ended

    def news(self) -> list[Sampled]:
        """Tokens of requests submitted with `told` since the last call, those of ended samples included."""
        found, self._news = self._news, []
        if not self._num_told:
            return found
        told = [index for index, row in enumerate(self._rows) if row.news >= 0]
        for index, count in zip(told, self._state.counts(told), strict=True):
            found += self._news_of(index, count)
        return found

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logprobs of the tokens of each sequence but its first, [T - 1] float32 each. Running rows are not touched."""
        if not sequences:
            return []
        for ids in sequences:
            self.check(Request(id=0, prompt_ids=tuple(ids[:-1]), seeds=(0,), sampling=Sampling(max_tokens=1)))
            check_tokens("scored", ids[-1:], self._decoder.vocab_size)
        width = max(len(ids) for ids in sequences)
        tokens = self._tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences])
        with torch.inference_mode():
            logprobs = self._decoder.score(tokens)[:, :-1].float().log_softmax(-1)
            values = logprobs.gather(2, tokens[:, 1:, None]).squeeze(2).cpu().numpy()
        return [row[: len(ids) - 1] for row, ids in zip(values, sequences, strict=True)]

    def weight_layout(self) -> Layout:
        """All tensors of the model: parameters, tied ones derived, buffers constant."""
        return self._weights.layout

    @property
    def live_weights(self) -> Callable[[], Mapping[str, Tensor]]:
        """Stop until the next `swap` (EN-7) and give the tensors in service, to be written over.

        Raises:
            AttributeError: versions come through memory of the host, and this engine's tensors lie on a GPU.
        """
        if self._device.type != "cpu":
            raise AttributeError("live_weights: on a GPU a version is copied in by swap")
        return self._hold

    def _hold(self) -> Mapping[str, Tensor]:
        self._held = True
        return self._weights.live()

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy into the live tensors and move the version, in one go (EN-4).

        Raises:
            ValueError: a tensor is missing, unknown or has another shape; nothing was changed.
        """
        self._weights.write(weights, version)
        with torch.inference_mode():
            self._state.stamp(version)
        self._version = version
        self._held = False

    def _admit(self) -> list[Finished]:
        """Prefill the waiting requests that fit, in order, and draw their first tokens."""
        first = len(self._rows)
        batch = self._waiting.take(self._max_running - first)
        if not batch:
            return []
        self._reserve(batch)
        owners = [index for index, request in enumerate(batch) for _ in request.seeds]
        logits = self._decoder.prefill([request.prompt_ids for request in batch], owners, first)
        if self._capture is not None:
            routes = self._capture.take().unflatten(0, (len(batch), -1))
            self._routes.put_prompts(first, self._tensor(owners), routes)
        requests = [batch[index] for index in owners]
        seeds = [seed for request in batch for seed in request.seeds]
        self._state.add(requests, seeds, [self._stops_of(request) for request in requests])
        for request in batch:
            news = 0 if request.id in self._told else -1
            self._rows.extend(_Row(request, i, news) for i in range(len(request.seeds)))
            self._num_told += (news == 0) * len(request.seeds)
            self._num_top += (request.sampling.top_logprobs > 0) * len(request.seeds)
        return self._draw(first, logits, owners)

    def _make_rows(self, version: int) -> Rows:
        library = native.library() if isinstance(self._decoder, CpuDecoder) else None
        if library is not None:
            return CpuRows(self._max_running, version, library)
        return Rows(self._max_running, self._device, version)

    def _reserve(self, batch: list[Request]) -> None:
        """Room in cache and outputs for the whole life of the new rows, so that a step never runs out (EN-6)."""
        self._decoder.reserve(max(len(r.prompt_ids) + r.sampling.max_tokens for r in batch))
        longest = max(request.sampling.max_tokens for request in batch)
        self._state.reserve(longest, max(len(self._stops_of(request)) for request in batch))

    def _stops_of(self, request: Request) -> tuple[int, ...]:
        if request.sampling.ignore_eos:
            return ()
        return request.sampling.stop_token_ids or self._stop_token_ids

    def _draw(self, first: int, logits: Tensor, owner: Sequence[int] | None = None) -> list[Finished]:
        """A token for each row from `first` on, from its logits; returns the samples that ended with it."""
        ended = self._state.draw(first, logits, owner)
        if self._num_top:
            self._note_likeliest(first, logits if owner is None else logits[self._tensor(owner)])
        self._num_tokens += len(self._rows) - first
        if not ended:
            return []
        return self._end([row for row, _ in ended], ["stop" if stop else "length" for _, stop in ended])

    def _note_likeliest(self, first: int, logits: Tensor) -> None:
        """The likeliest tokens of the rows from `first` on that ask for them."""
        asking = [index for index in range(first, len(self._rows)) if self._rows[index].request.sampling.top_logprobs]
        if not asking:
            return
        rows = [self._rows[index] for index in asking]
        count = max(row.request.sampling.top_logprobs for row in rows)
        parameters = RowParameters.of([row.request.sampling for row in rows], self._device)
        ids, logprobs = likeliest(logits[self._tensor(asking) - first], parameters, count)
        for row, row_ids, row_logprobs in zip(rows, ids.int().cpu(), logprobs.cpu(), strict=True):
            k = row.request.sampling.top_logprobs
            row.top.append((row_ids[:k], row_logprobs[:k]))

    def _news_of(self, index: int, count: int) -> list[Sampled]:
        """What a row has sampled since it was asked last, up to `count` tokens."""
        row = self._rows[index]
        if row.news < 0 or row.news == count:
            return []
        piece = self._piece(index, row.news, count)
        row.news = count
        return [Sampled(request_id=row.request.id, sample=row.sample, piece=piece)]

    def _piece(self, index: int, start: int, stop: int) -> Piece:
        """Tokens of a row, out of the tensors of all."""
        tokens, logprobs, versions = self._state.drawn(index, start, stop)
        top = self._rows[index].top[start:stop]
        return Piece(
            token_ids=tokens,
            logprobs=logprobs,
            versions=versions,
            top_ids=torch.stack([ids for ids, _ in top]).numpy() if top else None,
            top_logprobs=torch.stack([logprobs for _, logprobs in top]).numpy() if top else None,
        )

    def _end_unwanted(self) -> list[Finished]:
        rows = [index for index, row in enumerate(self._rows) if (row.request.id, row.sample) in self._unwanted]
        self._unwanted -= {(self._rows[index].request.id, self._rows[index].sample) for index in rows}
        return self._end(rows, ["abort"] * len(rows)) if rows else []

    def _end(self, rows: list[int], reasons: Sequence[FinishReason]) -> list[Finished]:
        """Take rows out, in ascending order; the last running rows move into the holes (EN-3)."""
        finished = []
        for row, count, reason in zip(rows, self._state.counts(rows), reasons, strict=True):
            owner = self._rows[row]
            self._news += self._news_of(row, count)
            self._num_told -= owner.news >= 0
            self._num_top -= owner.request.sampling.top_logprobs > 0
            ended = _finished(owner.request, owner.sample, self._piece(row, 0, count), reason)
            if self._capture is not None:
                ended.completion.routes = self._routes.take(row, len(owner.request.prompt_ids) + count - 1)
            finished.append(ended)
        left = len(self._rows) - len(rows)
        gone = set(rows)
        holes = [row for row in rows if row < left]
        movers = [row for row in range(left, len(self._rows)) if row not in gone]
        if holes:
            self._decoder.move(movers, holes, self._state.longest)
            if self._capture is not None:
                self._routes.move(self._tensor(movers), self._tensor(holes))
            for mover, hole in zip(movers, holes, strict=True):
                self._rows[hole] = self._rows[mover]
        self._state.remove(rows, movers, holes)
        ids = {owner.request_id for owner in finished}
        del self._rows[left:]
        gone_ids = ids - {row.request.id for row in self._rows}
        self._known -= gone_ids
        self._told -= gone_ids
        self._unwanted = {one for one in self._unwanted if one[0] not in gone_ids}
        return finished

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _finished(request: Request, sample: int, piece: Piece, reason: FinishReason) -> Finished:
    return Finished(request_id=request.id, sample=sample, completion=as_completion(piece, reason))


def load_engine(path: str, config: RolloutConfig) -> TorchEngine:
    """The engine for a folder in Hugging Face format; completions end at the end tokens of its generation settings."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar per rank, for a second's work, would drown the log (R11)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype), local_files_only=True)
    model.to(device)
    return TorchEngine(
        model,
        max_running=config.max_running,
        max_len=config.max_len,
        stop_token_ids=stop_tokens_of(path),
        record_routes=config.record_routes,
    )
