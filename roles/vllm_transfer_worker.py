"""What runs inside vLLM's workers where weights come by vLLM's own engines (`rollout.vllm.weight_transfer`).

VX-1: starting, taking and finishing a version are one call, so that no step sees half of it (as VW-1); it returns the
      border between two versions in each completion (as VW-2).
VX-2: what vLLM's reload leaves wrong is put right in the same call (roles/vllm_layouts.py), and a layer that nothing
      was loaded into is an error.
VX-3: whoever joins anew has left the communicator before.
"""

from __future__ import annotations

from typing import Any

from roles.vllm_compat import ipc_engine
from roles.vllm_layouts import Packing, repack_cpu_experts, tied_layers
from roles.vllm_worker import WorkerExtension
from sync.layout import Layout
from sync.receiver import Receiver
from sync.relay import serve

ipc_engine()  # before vLLM does, which in 0.25 can't without ray


class TransferExtension(WorkerExtension):
    """Mixed into vLLM's worker, in place of `WorkerExtension`."""

    def tutti_open(self, tensors: list[list[Any]], leader: int, record_routes: bool, wide_head: bool) -> str:
        """As its base. What is served receives nothing; the end of the connection tells the leader of ours (VE-5)."""
        self._tutti_bind(leader)
        self._tutti_hook(record_routes, wide_head)
        return serve(Receiver(_Nothing()), leader).address

    def tutti_join(self, info: dict[str, Any]) -> None:
        """Join vLLM's sending half."""
        worker: Any = self
        group = getattr(worker.weight_transfer_engine, "model_update_group", None)
        if group is not None:
            group.destroy()
        worker.init_weight_transfer_engine(info)

    def tutti_receive(self, info: dict[str, Any]) -> dict[str, int]:
        """Take a version over the weights in service; returns the tokens sampled so far of every request (VX-1)."""
        worker: Any = self
        layers = dict(worker.model_runner.model.named_modules())
        worker.start_weight_update()
        with Packing() as packing:
            worker.update_weights(info)
            tied = tied_layers(layers)
            worker.finish_weight_update()
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)
        if not packing.seen:
            repack_cpu_experts(layers.values())
        return self._tutti_counts()


class _Nothing:
    """Wants no weights."""

    def weight_layout(self) -> Layout:
        return Layout(())
