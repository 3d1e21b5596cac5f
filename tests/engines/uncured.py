"""A worker as vLLM would be without our cure of its reload (roles/vllm_layouts.py, VY-1)."""

from __future__ import annotations

from typing import Any

from roles import vllm_reload, vllm_worker


class Uncured(vllm_worker.WorkerExtension):
    def tutti_open(self, tensors: list[list[Any]], leader: int, record_routes: bool, wide_head: bool) -> str:
        vars(vllm_reload)["repack_cpu_experts"] = lambda layers: 0
        return super().tutti_open(tensors, leader, record_routes, wide_head)
