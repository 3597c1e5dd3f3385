# SPDX-License-Identifier: Apache-2.0
"""Splitwise: prompt pool, token pool, and machines that help out."""

from __future__ import annotations

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import Policy, register
from vllm_kairos.core.policies.mixed import pending_tokens
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings


@register
class Splitwise(Policy):
    """Static split with a mixed pool, join the shortest queue.

    The cluster-level scheduler assigns prompt and token machine together, each
    the one with the fewest pending tokens. A machine whose queue is longer
    than a threshold is passed over for one of the other pool, which then
    serves both phases with mixed batching until its other work is done: a
    prompt goes to a token machine when every prompt machine has more than
    `queue_tokens` pending, and decodes stay on a prompt machine when no token
    machine has KV room.

    Args:
        settings: Unused.
        queue_tokens: Pending prompt tokens from which the other pool helps.
    """

    name = "splitwise"
    source = "Splitwise (Patel et al., ISCA 2024), arXiv 2311.18677, §IV"

    def __init__(self, settings: Settings, queue_tokens: int = 16384):
        super().__init__(settings)
        if type(queue_tokens) is not int or queue_tokens < 0:
            raise ValueError(f"queue_tokens is {queue_tokens!r}, expected tokens >= 0")
        self.queue_tokens = queue_tokens

    def route(self, request: Request, fleet: Fleet) -> Route:
        prompt = min(fleet.prefill, key=pending_tokens)

        def load(node: NodeState) -> int:
            return (
                node.decode_kv_tokens
                + node.awaiting_kv_tokens
                + node.expected_kv_tokens
                + pending_tokens(node)
            )

        token = min(fleet.decode, key=load)
        if token.free_kv_tokens < request.prompt_tokens:
            return Route(prompt.node, prompt.node, reason="mixed_prompt")
        if pending_tokens(prompt) > self.queue_tokens:
            helper = min(fleet.decode, key=pending_tokens)
            if pending_tokens(helper) < pending_tokens(prompt):
                return Route(helper.node, helper.node, reason="mixed_token")
        return Route(prompt.node, token.node, reason="split")
