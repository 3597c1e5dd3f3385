# SPDX-License-Identifier: Apache-2.0
"""Engines that damage KV on purpose, to see that the harness notices.

Test only: nothing of the product names this module. An engine loads it when
its command line does, by ``kv_connector_module_path`` and a dotted
``--scheduler-cls``, with this folder on PYTHONPATH. Which fault is on is read
from the file that KAIROS_TEST_FAULT_FILE names, so that one engine serves all.

``corrupt_block``    one KV block of each deflected request is overwritten
                     after its first chunk
``swap_blocks``      the first and the last block of each transfer change
                     places
``drop_last_chunk``  the last chunk of each deflected request is taken for
                     computed, all but the token that yields the answer

Two full blocks of one request could change places unseen: a key carries its
position in itself, and attention sums over keys in whatever order. The last
block is filled in part, so that its place matters.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import NixlConnector
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_kairos.core.messages import SCHEDULE_KEY
from vllm_kairos.engine.scheduler import KairosScheduler

logger = init_logger(__name__)

FAULTS = ("corrupt_block", "swap_blocks", "drop_last_chunk")
FAULT_FILE = "KAIROS_TEST_FAULT_FILE"


def fault() -> str:
    """The fault that is on, empty for none."""
    path = os.environ.get(FAULT_FILE)
    return Path(path).read_text().strip() if path else ""


def is_deflected(request: Request) -> bool:
    """Whether a request came with a chunk schedule."""
    return SCHEDULE_KEY in (request.kv_transfer_params or {})


class FaultyNixlConnector(NixlConnector):  # type: ignore[misc]
    """NIXL's connector, with the faults of KV blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fresh: dict[str, tuple[list[int], int]] = {}
        if self.connector_worker is not None:
            self._read_blocks = self.connector_worker._read_blocks
            self.connector_worker._read_blocks = self._read_blocks_swapped

    # Scheduler side: choose the block.

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if fault() == "corrupt_block" and is_deflected(request):
            ids = blocks.get_block_ids()[0]
            size = self._vllm_config.cache_config.block_size
            self._fresh[request.request_id] = (list(ids), size)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.kairos_corrupt = []
        for request_id, (ids, size) in list(self._fresh.items()):
            tokens = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if tokens:
                del self._fresh[request_id]
                block = ids[min(tokens // size, len(ids)) // 2]
                meta.kairos_corrupt.append(block)
        return meta

    # Worker side: damage it.

    def wait_for_save(self) -> None:
        super().wait_for_save()
        for block in self._connector_metadata.kairos_corrupt:
            logger.warning("Test fault: KV block %d overwritten", block)
            for cache in self.connector_worker.device_kv_caches.values():
                # Keys and values of all heads, shape [2, blocks, ...].
                part = cache[:, block]
                part.copy_(torch.flip(part, dims=(-1,)).neg_())

    def _read_blocks_swapped(self, local_block_ids: Any, **rest: Any) -> None:
        if fault() == "swap_blocks" and local_block_ids and len(local_block_ids[0]) > 1:
            first, *middle, last = local_block_ids[0]
            logger.warning("Test fault: KV blocks %d and %d swapped", first, last)
            local_block_ids = ([last, *middle, first], *local_block_ids[1:])
        self._read_blocks(local_block_ids=local_block_ids, **rest)


class DropsLastChunk(KairosScheduler):
    """Kairos's scheduler, which forgets the last chunk of a schedule."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if fault() != "drop_last_chunk":
            return
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            left = request.num_prompt_tokens - request.num_computed_tokens
            # A chunk is the last where what is left would fit one like it.
            if is_deflected(request) and 1 < left <= tokens:
                logger.warning("Test fault: %d prompt tokens dropped", left - 1)
                request.num_computed_tokens += left - 1
