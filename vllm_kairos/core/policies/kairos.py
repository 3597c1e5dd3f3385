# SPDX-License-Identifier: Apache-2.0
"""Kairos beyond the paper: late binding over the full estimates of both paths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from vllm_kairos.core.chunk_rule import AdaptiveRule, ChunkRule, PlannedRule
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.late_binding import Assignment
from vllm_kairos.core.late_queue import LateQueue
from vllm_kairos.core.node_views import NodeView, NodeViews, Planner, fastest
from vllm_kairos.core.policies.base import Policy, RoundRobin, register
from vllm_kairos.core.prefill import ttft_prefill_ms, ttft_prefill_paper_ms
from vllm_kairos.core.prefill_pool import PrefillKinds
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.schedule import CandidatePlanner, ChunkPlanner
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_model import StepModel

#: Every part that goes beyond the paper, and what it is without.
PARTS = {
    "dispatch": "eager",
    "chunks": "planned",
    "feedback": "false",
    "order": "arrival",
    "several": "false",
    "sizes": "candidates",
    "ttft": "paper",
    "balance": "round_robin",
    "longest_slos": "1000",
    "transfer": "false",
    "ledger": "false",
}


@register
class Kairos(Policy):
    """Algorithm 1 with what the paper leaves out, each part a setting.

    Args:
        settings: SLOs and margins.
        dispatch: ``late``: requests wait here until a prefill node is about to
            run dry or a decode node has headroom; ``eager``: bound to a node
            when they arrive.
        chunks: ``adaptive``: the engine sizes each chunk by its true state;
            ``planned``: by the schedule sent.
        order: Of the queue: ``on_time`` (Moore-Hodgson), ``deadline`` or
            ``arrival``.
        several: Deflected prefills in flight on a decode node: any number, or
            one.
        sizes: ``continuous``: chunks in closed form; ``candidates``: of X.
        ttft: ``exact``: the queue packed into steps as vLLM does;
            ``paper``: Eq. 2 and 3.
        balance: The prefill node: ``least`` predicted TTFT or
            ``round_robin``.
        transfer: Count the KV transfer and the wait for a decode step.
        feedback: The engine's loop learns from its errors.
        ledger: Count what was dispatched and is in no report yet.
        lead_ms: Work a node is kept supplied with, so that it does not idle
            between two looks at it.
        oldest_slos: A request older than this many TTFT SLOs goes first.
        longest_slos: Of requests that wait, a decode node takes none whose
            chunks need longer than this many TTFT SLOs: it would be lost for
            that long to many short ones, and its decodes will have changed.
            One that is late already may need longer than an SLO and be better
            off there for all that: only a value far above 1 leaves this out.
    """

    name = "kairos"
    source = "Kairos, Algorithm 1, extended"
    margins = ("alpha", "beta", "candidates")

    def __init__(
        self,
        settings: Settings,
        dispatch: str = "late",
        chunks: str = "adaptive",
        order: str = "on_time",
        several: bool = True,
        sizes: str = "continuous",
        ttft: str = "exact",
        balance: str = "least",
        transfer: bool = True,
        feedback: bool = True,
        ledger: bool = True,
        lead_ms: float = 150.0,
        oldest_slos: float = 8.0,
        longest_slos: float = 0.5,
    ):
        super().__init__(settings)
        for option, value, known in (
            ("dispatch", dispatch, ("late", "eager")),
            ("chunks", chunks, ("adaptive", "planned")),
            ("order", order, ("on_time", "deadline", "arrival")),
            ("sizes", sizes, ("continuous", "candidates")),
            ("ttft", ttft, ("exact", "paper")),
            ("balance", balance, ("least", "round_robin")),
        ):
            if value not in known:
                raise ValueError(f"{option} is {value!r}, expected one of {known}")
        for option, number, least in (
            ("lead_ms", lead_ms, 0.0),
            ("oldest_slos", oldest_slos, 0.1),
            ("longest_slos", longest_slos, 0.0),
        ):
            if not (
                isinstance(number, (int, float)) and least <= number < float("inf")
            ):
                raise ValueError(
                    f"{option} is {number!r}, expected a number >= {least:g}"
                )
        for option, flag in (
            ("several", several),
            ("transfer", transfer),
            ("feedback", feedback),
            ("ledger", ledger),
        ):
            if not isinstance(flag, bool):
                raise ValueError(f"{option} is {flag!r}, expected true or false")
        self.late = dispatch == "late"
        self.chunks = chunks
        self.order = order
        self.several = several
        self.sizes = sizes
        self.ttft = ttft
        self.balance = balance
        self.transfer = transfer
        self.feedback = feedback
        self.sees = "ledger" if ledger else "reports"
        self.lead_ms = lead_ms
        self.oldest_ms = oldest_slos * settings.ttft_slo_ms
        self.longest_ms = longest_slos * settings.ttft_slo_ms
        self.turns = RoundRobin()
        self.queue = LateQueue()
        self.prefill_kinds = PrefillKinds(transfer)
        self.views = NodeViews(self._planner)

    def chunk_rule(self, model: StepModel) -> ChunkRule:
        if self.chunks == "planned":
            return PlannedRule()
        s = self.settings
        return AdaptiveRule(model, Feedback(s.tau_ms, s.beta, learns=self.feedback))

    # --------------------------------------------------------------- eager

    def route(self, request: Request, fleet: Fleet) -> Route:
        decode = self.views.least_loaded(request.prompt_tokens, fleet.decode)
        prefill, ttft_pf = self._best_prefill(request, fleet.prefill, decode)
        if ttft_pf is None:
            return Route(prefill.node, decode.node, reason="no_state")
        bound_ms = min(self.settings.alpha * ttft_pf, self.settings.ttft_slo_ms)
        found = fastest(self.views, fleet.decode, request, bound_ms, self.several)
        if isinstance(found, str):
            estimates = Estimates(ttft_pf)
            return Route(prefill.node, decode.node, (), estimates, found)
        estimates = Estimates(ttft_pf, found.ttft_ms, found.schedule.step_ms)
        node = found.state.node
        return Route(node, node, found.schedule.chunks, estimates, "deflected")

    # ----------------------------------------------------------- estimates

    def _best_prefill(
        self, request: Request, nodes: Sequence[NodeState], decode: NodeState
    ) -> tuple[NodeState, float | None]:
        """The prefill node and its TTFT; no TTFT where no node is known."""
        known = [n for n in nodes if n.model is not None and n.fresh]
        if not known:
            fewest = min(nodes, key=lambda n: sum(w.tokens for w in n.prefills))
            return fewest, None
        if self.balance == "round_robin":
            known = [self.turns.pick(known)]
        step = self.decode_step_ms(request.prompt_tokens, self.views.of(decode))
        if self.ttft == "exact" and self.transfer:
            return self.views.least_ttft(request, known, step)
        best, least = known[0], math.inf
        for node in known:
            ttft = self._ttft_prefill_ms(request, node, step)
            if ttft < least:
                best, least = node, ttft
        return best, least

    def _ttft_prefill_ms(
        self, request: Request, node: NodeState, decode_step_ms: float
    ) -> float:
        prompt = request.prompt_tokens
        if self.ttft == "paper":
            ttft = ttft_prefill_paper_ms(node, prompt)
            return ttft + self.transfer_ms(request, node) + decode_step_ms
        cached = request.cached.get(node.node, 0) if request.cached else 0
        queue = self.views.of(node).queue
        if not self.transfer:
            node = replace(node, link=None)
        return ttft_prefill_ms(node, prompt, cached, decode_step_ms, queue)

    def transfer_ms(self, request: Request, node: NodeState) -> float:
        """Time of the KV transfer from a prefill node; zero if not counted."""
        if not self.transfer or node.link is None:
            return 0.0
        return node.link.transfer_ms(request.prompt_tokens, node.link_backlog_bytes)

    def decode_step_ms(self, prompt_tokens: int, view: NodeView) -> float:
        """The step of a decode node with the request in it; zero if not counted."""
        if view.state.model is None or not self.transfer:
            return 0.0
        return view.decode_step_ms(prompt_tokens)

    def _limit_ms(self, node: NodeState) -> float:
        """Bound on a step there: what the engine says is in force, or ours."""
        if self.chunks != "adaptive" or node.limit_ms is None:
            return self.settings.limit_ms
        limit_ms = min(node.limit_ms, self.settings.tau_ms)
        if limit_ms and node.adaptive and not node.decodes and not node.awaiting_kv:
            # As `AdaptiveRule` has it where nobody decodes. A schedule that the
            # engine follows as planned is kept to when somebody joins it.
            return max(limit_ms, self.settings.limit_ms)
        return limit_ms

    def _planner(self, node: NodeState) -> Planner:
        assert node.model is not None
        decodes = node.decodes + node.awaiting_kv
        kv_tokens = node.decode_kv_tokens + node.awaiting_kv_tokens
        limit_ms = self._limit_ms(node)
        if self.sizes == "continuous":
            return ChunkPlanner(
                node.model, decodes, kv_tokens, node.budget_tokens, limit_ms
            )
        sizes = [c for c in self.settings.candidates if c <= node.budget_tokens]
        return CandidatePlanner(node.model, decodes, kv_tokens, sizes, limit_ms)

    # ---------------------------------------------------------------- late

    @property
    def waiting(self) -> int:
        return len(self.queue)

    @property
    def waiting_late(self) -> int:
        return self.queue.late

    def enqueue(self, request: Request) -> None:
        self.queue.add(request, request.arrival_ms + self.settings.ttft_slo_ms)

    def withdraw(self, request_id: str) -> None:
        self.queue.remove(request_id)

    def assign(
        self, fleet: Fleet, most: int | None = None
    ) -> list[tuple[Request, Route]]:
        if not self.queue:
            return []
        known = [n for n in fleet.prefill if n.model is not None and n.fresh]
        if not known:
            # Nothing is known that would make waiting worth it.
            taken = self.queue.drain(most)
            return [(request, self.route(request, fleet)) for request in taken]
        return Assignment(self, fleet, known).run(most)
