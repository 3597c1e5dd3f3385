# SPDX-License-Identifier: Apache-2.0
"""Sarathi-Serve: every node does both phases, with one chunk size."""

from __future__ import annotations

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import NodePlan, PlanContext, Policy, register
from vllm_kairos.core.policies.mixed import pending_tokens
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings


@register
class Sarathi(Policy):
    """Co-located chunked prefill with a fixed token budget a step.

    Decodes are never held up by a whole prompt (stall-free batching): a step
    holds all decodes and as many prompt tokens as the budget leaves, which is
    what vLLM's scheduler does with that ``max_num_batched_tokens``. Requests
    go to the node with the least work, as a front end over replicas does;
    Sarathi itself is one node.

    Args:
        settings: Unused.
        chunk: Token budget of a step; the paper uses 512 and 2048 by SLO.
    """

    name = "sarathi"
    source = "Sarathi-Serve (Agrawal et al., OSDI 2024), arXiv 2403.02310"

    def __init__(self, settings: Settings, chunk: int = 512):
        super().__init__(settings)
        if type(chunk) is not int or chunk < 1:
            raise ValueError(f"chunk is {chunk!r}, expected tokens >= 1")
        self.chunk = chunk

    def plan(self, context: PlanContext) -> list[NodePlan]:
        nodes = context.prefill_nodes + context.decode_nodes
        return [NodePlan(f"n{i}", True, True, True, self.chunk) for i in range(nodes)]

    def route(self, request: Request, fleet: Fleet) -> Route:
        def work(node: NodeState) -> tuple[int, int]:
            return pending_tokens(node), node.decodes

        node = min(fleet.decode, key=work).node
        return Route(node, node, reason="colocated")
