"""A worker of vLLM with what stands for its GPU (standin.py)."""

from __future__ import annotations

from typing import Any

from roles.vllm_transfer_worker import TransferExtension
from tests.engines.standin import install


class Extension(TransferExtension):
    def tutti_open(self, *args: Any) -> str:
        install()
        return super().tutti_open(*args)
