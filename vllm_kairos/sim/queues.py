# SPDX-License-Identifier: Apache-2.0
"""Limits of a node, and its queues."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_kairos.sim.engine_request import EngineRequest


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Limits of one engine, vLLM's flags of the same meaning.

    Attributes:
        budget_tokens: ``max_num_batched_tokens``.
        max_num_seqs: ``max_num_seqs``.
        kv_tokens: KV cache, tokens.
        block_size: Tokens of a block.
        prefix_caching: Share blocks of equal prefixes.
        priority: Serve by priority, not first come first served.
        held_ms: A deflected prefill held back longer than this since its
            arrival gets a smallest chunk all the same (the engine's guard).
        smallest_chunk_tokens: That chunk.
    """

    budget_tokens: int = 8192
    max_num_seqs: int = 256
    kv_tokens: int = 1_000_000
    block_size: int = 16
    prefix_caching: bool = False
    priority: bool = False
    held_ms: float = 4000.0
    smallest_chunk_tokens: int = 16


class WaitingQueue:
    """vLLM's request queue: first come first served, or by priority."""

    __slots__ = ("_fcfs", "_heap", "_by_priority")

    def __init__(self, by_priority: bool):
        self._by_priority = by_priority
        self._fcfs: deque[EngineRequest] = deque()
        self._heap: list[EngineRequest] = []

    def __len__(self) -> int:
        return len(self._heap) if self._by_priority else len(self._fcfs)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(sorted(self._heap) if self._by_priority else self._fcfs)

    def add(self, request: EngineRequest) -> None:
        """At the end, or where its priority says."""
        if self._by_priority:
            heapq.heappush(self._heap, request)
        else:
            self._fcfs.append(request)

    def put_first(self, request: EngineRequest) -> None:
        """At the front, or where its priority says."""
        if self._by_priority:
            heapq.heappush(self._heap, request)
        else:
            self._fcfs.appendleft(request)

    def peek(self) -> EngineRequest:
        return self._heap[0] if self._by_priority else self._fcfs[0]

    def pop(self) -> EngineRequest:
        return heapq.heappop(self._heap) if self._by_priority else self._fcfs.popleft()

    def remove(self, request: EngineRequest) -> None:
        if self._by_priority:
            self._heap.remove(request)
            heapq.heapify(self._heap)
        else:
            self._fcfs.remove(request)
