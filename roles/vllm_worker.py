"""What runs inside vLLM's own processes: weights in, counts and routes out. Imported there by name (`vllm_compat.py`).

    trainer ranks ==bytes==> a thread here: transport, shadow memory on the device      while steps go on
    session -> rank -> relay -'                       |
                              process, if need be <---'--> swap     calls of the worker, so between steps

The receiving half of the sync (`sync.receiver`) lives here, on the device, one in each worker; the rank that owns the
engine only relays (`sync.relay`). How weights get from the shadow into live tensors: vllm_reload.py.

VW-1: `finish_weight_update` does the whole swap: weights change inside one call, so that no step sees half of them.
VW-2: `swap` returns, for every request that the runner holds, how many tokens it had sampled when the weights changed:
      the exact border between two versions in each completion.
VW-3: the worker dies with the process that started the engine.
VW-4: what a swap puts into service is the version that it names, staged by this worker's receiver: anything else is an
      error, and final.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.v1.sample.ops import topk_topp_sampler

from roles.vllm_compat import WEIGHT_BACKEND
from roles.vllm_drafts import constants_of
from roles.vllm_drafts import install as install_drafts
from roles.vllm_head import widen_heads
from roles.vllm_reload import Reloader
from sync.layout import Entry
from sync.receiver import Receiver
from sync.relay import serve

_PR_SET_PDEATHSIG = 1


@dataclass
class Opening(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types for us
    """What may come, and who will say so."""

    leader: int = 0
    """The process that relays."""
    tensors: list[list[Any]] = field(default_factory=list)
    """[name, dtype, shape] of each that trainers have."""


@dataclass
class Version(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM has no types for us
    """Staged by the receiver."""

    version: int = 0


class DirectEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight transfer engine `tutti`: this process is a rank of the sync."""

    init_info_cls = Opening
    update_info_cls = Version
    constants: Sequence[Entry] = ()
    """Tensors of a draft, which nobody sends."""

    def init_transfer_engine(self, init_info: Opening) -> None:
        checkpoint = [Entry.whole(name, shape, dtype) for name, dtype, shape in init_info.tensors]
        self._reloader = Reloader(self.model, self.vllm_config, self.device, checkpoint, self.constants)
        self._receiver = Receiver(self._reloader, place=self._reloader.weight_device)
        self.address = serve(self._receiver, init_info.leader).address
        self._weights: Mapping[str, Tensor] = {}
        self._version: int | None = None
        self.is_updating = self.is_filled = False
        self.swap_seconds = self.share_seconds = 0.0

    def start_weight_update(self) -> None:
        self.is_updating, self.is_filled = True, False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, without its wait for the device: steps go on while copies run on a stream of ours."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Version) -> None:
        """Processes a share of the layers that a kernel wants otherwise than they are sent."""
        self._take(update_info.version)
        began = time.perf_counter()
        if not self.is_filled:  # ranks of a replica may have different numbers of shares
            self.is_filled = not self._reloader.proven or self._reloader.process(self._weights)
        self.share_seconds = max(self.share_seconds, time.perf_counter() - began)

    def is_processed(self) -> bool:
        """Whether the device has done its part."""
        return self._reloader.is_processed()

    def choose(self, version: int) -> None:
        """What `finish_weight_update` puts into service. Raises SyncError if it is not staged (VW-4)."""
        self._take(version)

    def finish_weight_update(self) -> None:
        began = time.perf_counter()
        weights, reloader = self._weights, self._reloader
        if not reloader.proven:
            reloader.prove()
            self.is_filled = False
        while not self.is_filled:
            self.is_filled = reloader.process(weights)
        reloader.swap(weights)
        assert self._version is not None
        self._receiver.busy_until = reloader.swapped
        self._receiver.applied(self._version, weights, None)
        self._weights, self._version, self.is_updating = {}, None, False
        self.swap_seconds = time.perf_counter() - began

    def facts(self) -> dict[str, Any]:
        """About the last swap, and the longest share before it; waits for it."""
        seconds = {"host_seconds": self.swap_seconds, "share_host_seconds": self.share_seconds}
        return {**self._reloader.facts(), **seconds}

    def shutdown(self) -> None:
        """The thread of the receiver ends when the leader leaves."""

    def _take(self, version: int) -> None:
        staged = self._receiver.shadow
        again = staged is not None and staged.version == version
        if self._version != version or again:
            self._weights = self._receiver.take(version)
            self._version = version
            self._reloader.begin()  # a version before it may have been given up half processed
            self.is_filled, self.share_seconds = False, 0.0

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM 0.25 wants it of every engine. Our trainers send through `sync`."""
        raise NotImplementedError("weights reach this engine through a WeightSession")


# --- the worker -------------------------------------------------------------------------------------------------------


class WorkerExtension:
    """Mixed into vLLM's worker. Reached by `collective_rpc`, which runs between two steps."""

    def tutti_open(self, tensors: list[list[Any]], leader: int, record_routes: bool, wide_head: bool) -> str:
        """Open the receiver, and hook the routers and the head; returns where the receiver is reached.

        Args:
            tensors: of `Opening`.
            leader: the process that started the engine (VW-3).
        """
        worker: Any = self
        self._tutti_bind(leader)
        worker.weight_transfer_engine.constants = constants_of(worker.model_runner)
        worker.init_weight_transfer_engine({"tensors": tensors, "leader": leader})
        self._tutti_hook(record_routes, wide_head)
        return str(worker.weight_transfer_engine.address)

    def _tutti_bind(self, leader: int) -> None:
        """End with that process (VW-3)."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.path.exists(f"/proc/{leader}"):
            os._exit(1)

    def _tutti_hook(self, record_routes: bool, wide_head: bool) -> None:
        worker: Any = self
        if wide_head:
            widen_heads(worker.model_runner.model)
        if worker.device.type == "cuda":
            from roles import vllm_seeds

            vllm_seeds.install(topk_topp_sampler, worker.model_runner)
        worker._tutti_routes = _Routes(worker.model_runner) if record_routes else None
        worker._tutti_drafts = install_drafts(worker.model_runner)

    def tutti_process(self, version: int) -> bool:
        """Process a share of what was staged of a version; True when it was the last. Steps go on between shares."""
        worker: Any = self
        worker.weight_transfer_engine.choose(version)  # before vLLM counts an update as begun
        if not worker.weight_transfer_engine.is_updating:
            worker.start_weight_update()
        worker.update_weights({"version": version})
        return bool(worker.weight_transfer_engine.is_filled)

    def tutti_processed(self) -> bool:
        """Whether the device has done so too."""
        return bool(self.weight_transfer_engine.is_processed())  # type: ignore[attr-defined]

    def tutti_swap(self, version: int) -> dict[str, int]:
        """Put a version into service; returns the tokens sampled so far of every request (VW-2)."""
        worker: Any = self
        worker.weight_transfer_engine.choose(version)
        if not worker.weight_transfer_engine.is_updating:
            worker.start_weight_update()
        worker.finish_weight_update()
        return self._tutti_counts()

    def _tutti_counts(self) -> dict[str, int]:
        requests = self.model_runner.requests  # type: ignore[attr-defined]
        return {external(name): len(request.output_token_ids) for name, request in requests.items()}

    def tutti_facts(self) -> dict[str, Any]:
        """About the last swap."""
        return dict(self.weight_transfer_engine.facts())  # type: ignore[attr-defined]

    def tutti_probe(self) -> tuple[int, int]:
        """Answering is the answer. Returns tokens drafted, and those of them that were kept, since start."""
        drafts = self._tutti_drafts  # type: ignore[attr-defined]
        return (0, 0) if drafts is None else drafts.counts()

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
        WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, DirectEngine)


register()
