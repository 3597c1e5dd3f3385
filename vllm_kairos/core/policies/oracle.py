# SPDX-License-Identifier: Apache-2.0
"""The paper's Oracle: Algorithm 1 on the simulator's own state (§3.4)."""

from __future__ import annotations

from vllm_kairos.core.decision import decide
from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import Policy, RoundRobin, register
from vllm_kairos.core.prefill import ttft_prefill_ms
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.schedule import Schedule, paper_schedule
from vllm_kairos.core.settings import Settings


@register
class Oracle(Policy):
    """Deflects if a TBT-safe (decode node, chunks) pair beats the prefill node.

    It sees the nodes as they are, with the models that also make the step
    times: no heartbeat, no error. Not deployable; it shows what there is to
    gain. The prefill node is assigned round robin as in the paper's baseline,
    and a decode node takes one deflected prefill at a time.

    Args:
        settings: SLOs and candidates.
        margin: ``alpha`` of the comparison; 1, since the paper's Oracle asks
            for a pair that beats the prefill node.
        transfer: Count the KV transfer in what is to be beaten; Eq. 1 does not.
    """

    name = "oracle"
    source = "Kairos §3.4, Oracle"
    margins = ("beta", "candidates")
    sees = "truth"

    def __init__(self, settings: Settings, margin: float = 1.0, transfer: bool = False):
        super().__init__(settings.with_options(alpha=margin))
        self.transfer = transfer
        self._prefill = RoundRobin()
        self._decode = RoundRobin()

    def route(self, request: Request, fleet: Fleet) -> Route:
        s = self.settings
        prefill = self._prefill.pick(fleet.prefill)
        kept_decode = self._decode.pick(fleet.decode)
        assert prefill.model is not None
        link = prefill.link
        if not self.transfer:
            prefill.link = None
        ttft_pf = ttft_prefill_ms(prefill, request.prompt_tokens)
        prefill.link = link

        def build(node: NodeState) -> Schedule | None:
            assert node.model is not None
            # Requests on their way will share the steps of the schedule.
            return paper_schedule(
                node.model,
                node.decodes + node.awaiting_kv,
                node.decode_kv_tokens + node.awaiting_kv_tokens,
                request.prompt_tokens,
                [c for c in s.candidates if c <= node.budget_tokens],
                s.limit_ms,
            )

        def ttft_decode(node: NodeState, schedule: Schedule) -> float:
            return node.step_in_flight_ms + schedule.total_ms

        nodes = [
            node
            for node in fleet.decode
            if not node.deflected
            and node.free_kv_tokens > request.prompt_tokens
            and node.decodes + node.awaiting_kv < node.max_num_seqs
        ]
        found = decide(nodes, ttft_pf, s, build, ttft_decode)
        if found is None or not found.accepted:
            return Route(prefill.node, kept_decode.node, reason="kept")
        estimates = Estimates(ttft_pf, found.ttft_ms, found.schedule.step_ms)
        node = found.node.node
        return Route(node, node, found.schedule.chunks, estimates, "deflected")
