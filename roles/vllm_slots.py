"""Room for one more token, answered at once where there is some. Runs in vLLM's engine.

For each running request and step vLLM's scheduler asks its cache for room. The cache looks at windows, free blocks,
hits and hashes to find, fourteen times of sixteen, that the last block of the request has room and stays unfilled. That
is half of what scheduling costs. Here two numbers tell this case, and everything else goes to vLLM.

VO-1: the answer, and what the cache holds after it, are those of vLLM.
VO-2: only for models whose layers all look at everything before, so that no block is ever let go meanwhile.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus


def install(manager: Any) -> bool:
    """Answer in place of a KVCacheManager of vLLM. False where it has more to look after (VO-2)."""
    kinds = manager.coordinator.single_type_managers
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager:
        return False
    manager.allocate_slots = _Slots(manager, kinds[0])
    return True


class _Slots:
    def __init__(self, manager: Any, blocks: Any) -> None:
        self._ask_vllm = manager.allocate_slots
        self._nothing_new = manager.empty_kv_cache_blocks
        self._blocks_of = blocks.req_to_blocks
        self._block_size = int(blocks.block_size)

    def __call__(
        self, request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **rest: Any
    ) -> Any:
        one_more = num_new_tokens == 1 and not (num_lookahead_tokens or args or rest)
        if one_more and request.status == RequestStatus.RUNNING:
            computed = request.num_computed_tokens
            is_last = computed % self._block_size == self._block_size - 1
            if not is_last and computed < len(self._blocks_of[request.request_id]) * self._block_size:
                return self._nothing_new
        return self._ask_vllm(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **rest)
