"""vLLM as a rollout engine that takes weights by vLLM's own way to move them (`rollout.vllm.weight_transfer`).

It stages nothing (VT-1): a version is written over the one in service, in one call between two steps. One that has not
come whole is the end of this engine (RE-5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roles.engine_vllm import VllmEngine
from roles.whole_weights import by_layer
from sync.layout import Layout
from sync.transport import SyncError

if TYPE_CHECKING:
    from torch import Tensor

    from sync.receiver import Part


class TransferEngine(VllmEngine):
    """One that takes weights by vLLM's own engine (`rollout.vllm.weight_transfer`). It stages nothing."""

    @property
    def weight_transfer(self) -> str:
        return self._config.vllm.weight_transfer

    @property
    def num_workers(self) -> int:
        return self._config.vllm.tensor_parallel

    def weight_layout(self) -> Layout:
        """In the order in which vLLM's loaders need the least memory."""
        return Layout(tuple(sorted(self._layout.entries, key=lambda entry: by_layer(entry.name))))

    async def weight_workers(self) -> Sequence[Part]:
        raise SyncError(
            f"rollout.vllm.weight_transfer = {self.weight_transfer!r}: weights come by vLLM's own engine, which stages "
            "nothing; publish them through a VllmTransfer, or set it to 'sync'"
        )

    async def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self.weight_workers()

    async def join(self, info: Mapping[str, Any]) -> None:
        """Join vLLM's sending half. Raises EngineFailed."""
        await self._workers("tutti_join", info)

    async def receive(self, info: Mapping[str, Any], version: int) -> None:
        """Take a version over the weights in service: decoding stands still from its first byte to its last.

        Raises:
            EngineFailed: it has not come whole, which is final: the engine may hold parts of two versions.
        """
        await self._changing(version, "tutti_receive", info)
