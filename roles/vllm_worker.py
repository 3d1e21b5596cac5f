"""What runs inside vLLM's own processes: weights in, counts and routes out. Imported there by name (`vllm_compat.py`).

    leader: arena (memfd) filled by the sync -> stage: to the device, a share at a time, while steps go on
                                             -> swap:  in one call of the worker, so between two steps

How weights get from there into live tensors: vllm_reload.py.

VW-1: `finish_weight_update` does the whole swap: weights change inside one call, so that no step sees half of them.
VW-2: `swap` returns, for every request that the runner holds, how many tokens it had sampled when the weights changed:
      the exact border between two versions in each completion.
VW-3: the worker dies with the process that started the engine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.v1.sample.ops import topk_topp_sampler

from roles.vllm_compat import WEIGHT_BACKEND
from roles.vllm_head import widen_heads
from roles.vllm_reload import Reloader

_PR_SET_PDEATHSIG = 1


@dataclass
class ArenaInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types for us
    """Where new weights will stand."""

    path: str = ""
    """Of the leader's memory, as this process can open it."""
    num_bytes: int = 0
    tensors: list[list[Any]] = field(default_factory=list)
    """[name, dtype, shape, offset] of each, in the order in which they are loaded."""


@dataclass
class StageInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM has no types for us
    """Nothing: the arena holds what is staged."""


class ArenaEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight transfer engine `tutti`: reads a leader's arena."""

    init_info_cls = ArenaInfo
    update_info_cls = StageInfo

    def init_transfer_engine(self, init_info: ArenaInfo) -> None:
        with open(init_info.path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), init_info.num_bytes)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._arena: dict[str, Tensor] = {}
        for name, dtype, shape, offset in init_info.tensors:
            kind = getattr(torch, dtype)
            count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            self._arena[name] = whole[offset : offset + count].view(kind).view(shape)
        if self.device.type == "cuda":
            # Without pinned memory the copies block steps; nothing else changes.
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
        table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._arena.items()}
        self._reloader = Reloader(self.model, self.vllm_config, self.device, table)
        self.is_filled = False
        self.swap_seconds = 0.0

    def start_weight_update(self) -> None:
        """VW-1."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its wait for the device: steps go on while copies run on a stream of ours."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StageInfo) -> None:
        self.is_filled = self._reloader.stage(self._arena.__getitem__)

    def is_staged(self) -> bool:
        """Whether the copies to the device have ended."""
        return self._reloader.is_staged()

    def finish_weight_update(self) -> None:
        began = time.perf_counter()
        if not self._reloader.recorded:
            self._reloader.record()
            while not self._reloader.stage(self._arena.__getitem__):
                pass
        self._reloader.swap()
        self.swap_seconds = time.perf_counter() - began

    def facts(self) -> dict[str, Any]:
        """About the last swap; waits for it."""
        return {**self._reloader.facts(), "host_seconds": self.swap_seconds}

    def shutdown(self) -> None:
        """The mapping goes with the process; tensors may still point into it."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM 0.25 wants it of every engine. Our trainers send through `sync`."""
        raise NotImplementedError("weights reach this engine through a WeightSession")


# --- the worker -------------------------------------------------------------------------------------------------------


class WorkerExtension:
    """Mixed into vLLM's worker. Reached by `collective_rpc`, which runs between two steps."""

    def tutti_open(self, arena: dict[str, Any], leader: int, record_routes: bool, wide_head: bool) -> None:
        """Map the arena and hook the routers and the head. `leader` is the process that started the engine (VW-3)."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.path.exists(f"/proc/{leader}"):
            os._exit(1)
        worker: Any = self
        worker.init_weight_transfer_engine(arena)
        if wide_head:
            widen_heads(worker.model_runner.model)
        if worker.device.type == "cuda":
            from roles import vllm_seeds

            vllm_seeds.install(topk_topp_sampler)
        worker._tutti_routes = _Routes(worker.model_runner) if record_routes else None

    def tutti_stage(self, first: bool) -> bool:
        """Bring a share of the arena to the device; True when it was the last. Steps go on between shares."""
        worker: Any = self
        if first:
            worker.start_weight_update()
        worker.update_weights({})
        return bool(worker.weight_transfer_engine.is_filled)

    def tutti_staged(self) -> bool:
        """Whether the copies have ended."""
        return bool(self.weight_transfer_engine.is_staged())  # type: ignore[attr-defined]

    def tutti_swap(self) -> dict[str, int]:
        """Put what was staged into service; returns the tokens sampled so far of every request (VW-2)."""
        worker: Any = self
        worker.finish_weight_update()
        requests = worker.model_runner.requests
        return {external(name): len(request.output_token_ids) for name, request in requests.items()}

    def tutti_facts(self) -> dict[str, Any]:
        """About the last swap."""
        return dict(self.weight_transfer_engine.facts())  # type: ignore[attr-defined]

    def tutti_probe(self) -> None:
        """Answering is the answer."""

    def tutti_take_routes(self, names: list[str]) -> list[np.ndarray | None]:
        """[T, L, K] of these requests, which have ended; None where nothing was recorded."""
        routes: _Routes | None = self._tutti_routes  # type: ignore[attr-defined]
        return [None if routes is None else routes.take(name) for name in names]


class _Routes:
    """Experts of each token, recorded by a hook on the routers, for versions that don't return them."""

    def __init__(self, runner: Any) -> None:
        self._runner = weakref.proxy(runner)
        self._lines: dict[str, np.ndarray] = {}
        routers = [m.router for m in runner.model.modules() if hasattr(getattr(m, "router", None), "set_capture_fn")]
        if not routers:
            raise ValueError("rollout.record_routes: the model has no mixture-of-experts layer; turn it off")
        self._num_layers = len(routers)
        for layer, router in enumerate(routers):
            router.set_capture_fn(lambda ids, layer=layer: self._record(layer, ids))
        config = runner.model_config.hf_text_config
        experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None) or 257
        self._dtype = np.uint8 if experts <= 256 else np.uint16

    def take(self, name: str) -> np.ndarray | None:
        return self._lines.pop(name, None)

    def _record(self, layer: int, ids: Tensor) -> None:
        batch = self._runner.input_batch
        if not batch.num_reqs:
            return  # a dry run at start
        starts = self._runner.query_start_loc.np[: batch.num_reqs + 1]
        found = ids[: starts[-1]].cpu().numpy().astype(self._dtype)
        for row, name in enumerate(batch.req_ids):
            position, count = int(batch.num_computed_tokens_cpu[row]), int(starts[row + 1] - starts[row])
            lines = self._room(external(name), position + count, found.shape[1])
            lines[position : position + count, layer] = found[starts[row] : starts[row + 1]]

    def _room(self, name: str, length: int, k: int) -> np.ndarray:
        lines = self._lines.get(name)
        if lines is None or len(lines) < length:
            grown = np.zeros((max(64, 2 * length), self._num_layers, k), self._dtype)
            if lines is not None:
                grown[: len(lines)] = lines
            self._lines[name] = lines = grown
        return lines


def external(name: str) -> str:
    """Our id of a request: vLLM appends "-" and a random suffix."""
    return name.partition("-")[0]


def register() -> None:
    """Make the backend known to vLLM, as a plug-in or on import. Repeating it does nothing."""
    if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, ArenaEngine)


register()
