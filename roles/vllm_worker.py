"""What runs inside vLLM's own processes: weights in, counts and routes out. Imported there by name (`vllm_compat.py`).

    leader: arena (memfd) filled by the sync -> stage: copies to the device on a side stream, while steps go on
                                             -> swap:  in one call of the worker, so between two steps

VW-1: `finish_weight_update` does the whole reload: layers leave their places and come back inside one call, so that no
      step ever sees a layer without weights. That is why `start` does nothing: vLLM may run steps between the two.
VW-2: `swap` returns, for every request that the runner holds, how many tokens it had sampled when the weights changed:
      the exact border between two versions in each completion.
VW-3: a layer that nothing was loaded into is an error that names it (W2), never the old weights under a new number.
VW-4: what a kernel wants in another layout is laid out again after each reload, by us when vLLM does not: experts on
      CPU, and a tied head on CPU, which keeps a packed copy of the embedding.
VW-5: the worker dies with the process that started the engine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from roles.vllm_compat import WEIGHT_BACKEND

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
        self._shadow = self._arena
        self._staged: Any = None
        if self.device.type == "cuda":
            # Without pinned memory the copies block steps; nothing else changes.
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
            self._shadow = {name: torch.empty_like(t, device=self.device) for name, t in self._arena.items()}
            self._stream = torch.cuda.Stream(self.device)

    def start_weight_update(self) -> None:
        """VW-1."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its wait for the device: steps go on while copies run on our stream."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StageInfo) -> None:
        if self.device.type != "cuda":
            return
        with torch.cuda.stream(self._stream):
            for name, tensor in self._arena.items():
                self._shadow[name].copy_(tensor, non_blocking=True)
            self._staged = self._stream.record_event()

    def is_staged(self) -> bool:
        """Whether the copies to the device have ended."""
        return self._staged is None or bool(self._staged.query())

    def finish_weight_update(self) -> None:
        if self._staged is not None:
            torch.cuda.current_stream().wait_event(self._staged)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(self.model)
            with _Packing() as packing:
                self.model.load_weights(iter(self._shadow.items()))
                tied = _tied_layers(self.model)
                finalize_layerwise_reload(self.model, self.model_config)
            for layer in tied:
                layer.quant_method.process_weights_after_loading(layer)
            if not packing.seen:
                repack_cpu_experts(self.model)

    def shutdown(self) -> None:
        """The mapping goes with the process; tensors may still point into it."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM 0.25 wants it of every engine. Our trainers send through `sync`."""
        raise NotImplementedError("weights reach this engine through a WeightSession")


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """Layers without weights of their own, such as a tied head: what their kernel has made of the shared ones is old.

    Called after loading, before layers are finalised.

    Raises:
        ValueError: nothing was loaded into a layer that has weights of its own (VW-3).
    """
    loaded: set[int] = set()
    empty: dict[str, tuple[Any, set[int]]] = {}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        own = dict(layer.named_parameters(recurse=False))
        if info.can_load():  # its parameters are not back in their places yet
            own = info.kernel_tensors[0] if info.kernel_tensors else {}
        places = {p.data_ptr() for key, p in own.items() if not key.endswith("_scale") and p.numel()}
        if info.can_load() and (info.load_numel_total or 0) > 0 and info.load_numel == 0:
            empty[name] = (layer, places)
        else:
            loaded |= places
    missing = [name for name, (_, places) in empty.items() if places - loaded]
    if missing:
        raise ValueError(
            f"vllm: the new weights hold nothing for {', '.join(missing[:5])} ({len(missing)} layers): the trainer's "
            "names and the model's differ; trainer and rollout must load one model"
        )
    return [layer for layer, places in empty.values() if places and hasattr(layer, "quant_method")]


# --- layouts (VW-4) ---------------------------------------------------------------------------------------------------


class _Packing:
    """Whether vLLM packs the experts of CPU kernels by itself during a reload.

    0.32.0 does so at start and not at a reload: shape and dtype are equal, so nothing fails, and every logprob is off.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> _Packing:
        self._module = _cpu_moe()
        if self._module is not None:
            self._pack = self._module.cpu_prepack_moe_weight

            def seen(*args: Any) -> Any:
                self.seen = True
                return self._pack(*args)

            self._module.cpu_prepack_moe_weight = seen
        return self

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            self._module.cpu_prepack_moe_weight = self._pack


def _cpu_moe() -> Any:
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    except ImportError:  # 0.25 keeps CPU experts elsewhere, unpacked
        return None
    return cpu_moe if hasattr(cpu_moe, "cpu_prepack_moe_weight") else None


def repack_cpu_experts(model: Any) -> int:
    """Lay experts out as the CPU kernel reads them; returns how many layers."""
    module = _cpu_moe()
    count = 0
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(getattr(kernel, "impl", None), "fused_experts", None)
        known = module is not None and isinstance(experts, module.CPUUnquantizedExperts)
        if not known or getattr(experts, "_use_zentorch", False):
            continue
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(module.cpu_prepack_moe_weight(weight.data.clone(), experts.isa))
        count += 1
    return count


# --- the worker -------------------------------------------------------------------------------------------------------


class WorkerExtension:
    """Mixed into vLLM's worker. Reached by `collective_rpc`, which runs between two steps."""

    def tutti_open(self, arena: dict[str, Any], leader: int, record_routes: bool) -> None:
        """Map the arena and hook the routers. `leader` is the process that started the engine (VW-5)."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.path.exists(f"/proc/{leader}"):
            os._exit(1)
        worker: Any = self
        worker.init_weight_transfer_engine(arena)
        worker._tutti_routes = _Routes(worker.model_runner) if record_routes else None

    def tutti_stage(self) -> None:
        """Begin to copy the arena to the device. Steps go on."""
        worker: Any = self
        worker.start_weight_update()
        worker.update_weights({})

    def tutti_staged(self) -> bool:
        """Whether the copies have ended."""
        return bool(self.weight_transfer_engine.is_staged())  # type: ignore[attr-defined]

    def tutti_swap(self) -> dict[str, int]:
        """Put what was staged into service; returns the tokens sampled so far of every request (VW-2)."""
        worker: Any = self
        worker.finish_weight_update()
        requests = worker.model_runner.requests
        return {external(name): len(request.output_token_ids) for name, request in requests.items()}

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
