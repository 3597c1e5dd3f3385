# SPDX-License-Identifier: Apache-2.0
"""DistServe: the ratio of prefill to decode nodes that carries most."""

from __future__ import annotations

import math

from vllm_kairos.core.fleet import Fleet, Request
from vllm_kairos.core.policies.base import (
    NodePlan,
    PlanContext,
    Policy,
    register,
    split,
)
from vllm_kairos.core.policies.disagg import least_loaded_decode
from vllm_kairos.core.policies.mixed import pending_tokens
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings


@register
class DistServe(Policy):
    """Placement search over N_p:N_d, then plain P/D with shortest queues.

    DistServe finds the goodput of a prefill and of a decode instance apart
    and provisions as many of each as the target rate needs. Here the number
    of nodes is given and the split is searched: prefill nodes as M/G/1 queues
    whose mean TTFT is to stay within `ttft_share` of the SLO (its §3.1 uses
    M/D/1), decode nodes at the largest batch whose step stays within the TBT
    SLO.

    Args:
        settings: SLOs.
        search: Off, the split asked for is kept.
        ttft_share: Mean prefill latency the queueing model may reach, as a
            share of the TTFT SLO, so that the tail meets it.
    """

    name = "distserve"
    source = "DistServe (Zhong et al., OSDI 2024), arXiv 2401.09670, §4"

    def __init__(
        self, settings: Settings, search: bool = True, ttft_share: float = 0.3
    ):
        super().__init__(settings)
        if not isinstance(search, bool):
            raise ValueError(f"search is {search!r}, expected true or false")
        if isinstance(ttft_share, (bool, str)) or not 0 < ttft_share <= 1:
            raise ValueError(f"ttft_share is {ttft_share!r}, expected 0 to 1")
        self.search = search
        self.ttft_share = ttft_share

    def plan(self, context: PlanContext) -> list[NodePlan]:
        nodes = context.prefill_nodes + context.decode_nodes
        if not self.search or not context.lengths or nodes < 2:
            return split(context.prefill_nodes, context.decode_nodes)
        best = max(range(1, nodes), key=lambda n: self.goodput_rps(context, n, nodes))
        return split(best, nodes - best)

    def goodput_rps(self, context: PlanContext, prefill: int, nodes: int) -> float:
        """Rate that a split carries within both SLOs."""
        return min(
            prefill * self.prefill_rps(context),
            (nodes - prefill) * self.decode_rps(context),
        )

    def prefill_rps(self, context: PlanContext) -> float:
        """Rate of one prefill node, as an M/G/1 queue (Pollaczek-Khinchine)."""
        times = [
            context.model.step_ms(0, 0, prompt) / 1e3 for prompt, _ in context.lengths
        ]
        mean = sum(times) / len(times)
        square = sum(t * t for t in times) / len(times)
        allowed = self.ttft_share * self.settings.ttft_slo_ms / 1e3 - mean
        if allowed <= 0:
            return 0.0
        # Wait = rate · E[S²] / (2 (1 - rate · E[S])) <= allowed
        return 2 * allowed / (square + 2 * allowed * mean)

    def decode_rps(self, context: PlanContext) -> float:
        """Rate of one decode node at its largest batch within the TBT SLO."""
        count = len(context.lengths)
        outputs = sum(output for _, output in context.lengths) / count
        kv = sum(prompt + output / 2 for prompt, output in context.lengths) / count
        tau = self.settings.tau_ms
        batch = 1
        while (
            batch < 1024 and context.model.step_ms(batch + 1, (batch + 1) * kv) <= tau
        ):
            batch += 1
        step_s = context.model.step_ms(batch, batch * kv) / 1e3
        return 0.0 if step_s * 1e3 > tau else batch / (step_s * math.ceil(outputs))

    def route(self, request: Request, fleet: Fleet) -> Route:
        prefill = min(fleet.prefill, key=pending_tokens)
        decode = least_loaded_decode(request, fleet)
        return Route(prefill.node, decode.node, reason="shortest_queue")
