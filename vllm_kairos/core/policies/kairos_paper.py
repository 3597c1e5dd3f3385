# SPDX-License-Identifier: Apache-2.0
"""Kairos as printed: the literal Algorithm 1."""

from __future__ import annotations

from vllm_kairos.core.decision import decide, eq6_ms
from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import Policy, RoundRobin, register
from vllm_kairos.core.prefill import ttft_prefill_paper_ms
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.schedule import Schedule, paper_schedule
from vllm_kairos.core.settings import Settings


@register
class KairosPaper(Policy):
    """Algorithm 1 as printed (paper §4.4).

    The prefill node is assigned round robin, TTFTs are Eq. 1 to 3 and Eq. 6
    without transfer, cache or decode-side queue, the schedule is greedy over
    X, and a decode node takes one deflected request at a time.

    Args:
        settings: SLOs, margins and candidates.
        literal_progress: Count a whole chunk as served, as the algorithm
            prints it, instead of the ``chi - B`` of §3.2.
    """

    name = "kairos-paper"
    source = "Kairos, Algorithm 1"
    margins = ("alpha", "beta", "candidates")
    sees = "reports"

    def __init__(self, settings: Settings, literal_progress: bool = True):
        super().__init__(settings)
        self.literal_progress = literal_progress
        self._prefill = RoundRobin()
        self._decode = RoundRobin()

    def route(self, request: Request, fleet: Fleet) -> Route:
        s = self.settings
        prefill = self._prefill.pick(fleet.prefill)
        kept_decode = self._decode.pick(fleet.decode)
        if prefill.model is None or not prefill.fresh:
            return Route(prefill.node, kept_decode.node, reason="no_state")
        ttft_pf = ttft_prefill_paper_ms(prefill, request.prompt_tokens)

        def build(node: NodeState) -> Schedule | None:
            assert node.model is not None
            return paper_schedule(
                node.model,
                node.decodes,
                node.decode_kv_tokens,
                request.prompt_tokens,
                [c for c in s.candidates if c <= node.budget_tokens],
                s.limit_ms,
                literal_progress=self.literal_progress,
            )

        available = [n for n in fleet.decode if takes_deflections(n, request)]
        found = decide(available, ttft_pf, s, build, eq6_ms)
        if found is None:
            reason = "infeasible" if available else "unavailable"
            estimates = Estimates(ttft_prefill_ms=ttft_pf)
            return Route(prefill.node, kept_decode.node, (), estimates, reason)
        estimates = Estimates(ttft_pf, found.ttft_ms, found.schedule.step_ms)
        if not found.accepted:
            return Route(prefill.node, kept_decode.node, (), estimates, "kept")
        node = found.node.node
        return Route(node, node, found.schedule.chunks, estimates, "deflected")


def takes_deflections(node: NodeState, request: Request) -> bool:
    """Whether a decode node may be given a deflected prefill at all.

    It has a profile, a fresh state, KV room for the prompt, and no deflected
    prefill in flight (the paper's one per decode node, §5.3).
    """
    return (
        node.model is not None
        and node.fresh
        and not node.deflected
        and node.free_kv_tokens > request.prompt_tokens
        and node.decodes + node.awaiting_kv < node.max_num_seqs
    )
