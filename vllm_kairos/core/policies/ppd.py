# SPDX-License-Identifier: Apache-2.0
"""PPD: later turns are prefilled where their conversation's KV lies."""

from __future__ import annotations

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import Policy, register
from vllm_kairos.core.policies.disagg import least_loaded_decode, least_ttft
from vllm_kairos.core.policies.mixed import mixed_ttft_ms
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.settings import Settings


@register
class Ppd(Policy):
    """Prefill-capable decode: append-prefill of turn 2 and later.

    A request that continues a conversation has most of its prompt in the
    cache of the decode node that served the turn before. It is prefilled
    there when that costs less, by a weighted sum of the TTFT it gains and the
    step time its node's decodes lose, each relative to its SLO. First turns
    go the P/D way.

    Args:
        settings: SLOs.
        ttft_weight: Weight of the request's TTFT.
        tbt_weight: Weight of the delay of decodes on the node.
    """

    name = "ppd"
    source = "Not All Prefills Are Equal: PPD (Li et al., 2026), arXiv 2603.13358"

    def __init__(
        self, settings: Settings, ttft_weight: float = 1.0, tbt_weight: float = 1.0
    ):
        super().__init__(settings)
        for name, value in (("ttft_weight", ttft_weight), ("tbt_weight", tbt_weight)):
            if isinstance(value, (bool, str)) or not value >= 0:
                raise ValueError(f"{name} is {value!r}, expected a number >= 0")
        self.ttft_weight = ttft_weight
        self.tbt_weight = tbt_weight

    def route(self, request: Request, fleet: Fleet) -> Route:
        prefill, there = least_ttft(request, fleet)
        decode = least_loaded_decode(request, fleet)
        holder = self._holder(request, fleet)
        if holder is None or holder.model is None:
            return Route(prefill.node, decode.node, reason="first_turn")
        cached = request.cached[holder.node]
        here = mixed_ttft_ms(holder, request.prompt_tokens, cached)
        estimates = Estimates(there, here)
        s = self.settings
        chunk = min(request.prompt_tokens - cached, holder.budget_tokens)
        b, k = holder.decodes, holder.decode_kv_tokens
        slower = holder.model.step_ms(b, k, chunk, cached) - holder.model.step_ms(b, k)
        gain = (there - here) / s.ttft_slo_ms if there is not None else 1.0
        loss = slower / s.tau_ms if b else 0.0
        # Only what a step adds beyond one whole SLO hurts the decodes there.
        price = self.tbt_weight * max(0.0, loss - 1.0)
        if gain >= 0 and self.ttft_weight * gain >= price:
            node = holder.node
            return Route(node, node, (), estimates, "append")
        return Route(prefill.node, decode.node, (), estimates, "kept")

    @staticmethod
    def _holder(request: Request, fleet: Fleet) -> NodeState | None:
        """The decode node with the longest cached prefix of a later turn."""
        if request.turn < 2:
            return None
        nodes = [n for n in fleet.decode if request.cached.get(n.node, 0) > 0]
        if not nodes:
            return None
        return max(nodes, key=lambda n: request.cached[n.node])
