# SPDX-License-Identifier: Apache-2.0
"""A KV connector without a network: KV arrives when the test says so."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class RemoteKv(KVConnectorBase_V1):
    """Every prompt token of a ``do_remote_prefill`` request is elsewhere."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        return max(0, request.num_prompt_tokens - num_computed_tokens), True

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise AssertionError("worker side, not used")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise AssertionError("worker side, not used")

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("worker side, not used")

    def wait_for_save(self) -> None:
        raise AssertionError("worker side, not used")
