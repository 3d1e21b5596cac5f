"""A worker as vLLM would be without our cure of its reload (roles/vllm_layouts.py, VY-1)."""

from __future__ import annotations

from typing import Any

from roles import vllm_reload, vllm_worker


class Uncured(vllm_worker.WorkerExtension):
    def tutti_open(self, arena: dict[str, Any], leader: int, record_routes: bool, wide_head: bool) -> None:
        vars(vllm_reload)["repack_cpu_experts"] = lambda layers: 0
        super().tutti_open(arena, leader, record_routes, wide_head)
