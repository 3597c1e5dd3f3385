# SPDX-License-Identifier: Apache-2.0
"""``kv_transfer_params`` of a leg: its ticket, and its chunk schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_kairos.core.messages import TICKET_KEY, schedule_params
from vllm_kairos.core.schedule import closed_form_schedule
from vllm_kairos.proxy.fleet import Node
from vllm_kairos.proxy.job import Job
from vllm_kairos.proxy.ledger import Kind
from vllm_kairos.proxy.service import Service

#: Steps of a schedule made where there is no headroom.
_MOST_STEPS = 4096


class LegParams:
    """Makes what a node is told beside the request.

    Args:
        service: The nodes' state, and the SLOs.
    """

    def __init__(self, service: Service):
        self._service = service
        self._slo = service.settings.slo

    def named(self, job: Job, node: Node, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters with the ticket, for an engine that sends reports."""
        if node.report is None:
            return {k: v for k, v in params.items() if k != TICKET_KEY}
        return {**params, TICKET_KEY: job.ticket}

    def safe(self, job: Job, node: Node) -> tuple[Kind, dict[str, Any] | None]:
        """What a decode node is sent with a prompt it has to prefill.

        A schedule within ``beta * tau``. Where there is no headroom the
        prompt must be served all the same: it gets the smallest candidate at
        every step. Without a fresh state or a profile nothing is known that
        would make one schedule safer than another.
        """
        state = self._service.state(node)
        if state.model is None or not state.fresh:
            return Kind.PREFILL, self.named(job, node, {}) or None
        decodes = state.decodes + state.awaiting_kv
        schedule = closed_form_schedule(
            state.model,
            decodes,
            state.decode_kv_tokens + state.awaiting_kv_tokens,
            job.length.longest,
            state.budget_tokens,
            self._slo.limit_ms,
            cached_tokens=job.cached.get(node.address, 0),
        )
        if schedule is not None:
            chunks = schedule.chunks
        else:
            smallest = max(
                min(self._slo.candidates), job.length.longest // _MOST_STEPS + 1
            )
            steps = math.ceil(job.length.longest / smallest)
            chunks = (smallest + decodes,) * steps
        return Kind.DEFLECTED, self.scheduled(job, node, chunks)

    def scheduled(
        self, job: Job, node: Node, chunks: tuple[int, ...]
    ) -> dict[str, Any]:
        """The chunk schedule as parameters, good for whatever is cached.

        Args:
            job: The request.
            node: Where it goes.
            chunks: ``[chi_1, ...]`` for what is not cached of the prompt.
        """
        cached = job.cached.get(node.address, 0)
        if cached:
            # The engine finds its place in a schedule by the tokens computed,
            # from the first one on. What is cached stands for chunks as safe
            # as the first, should it not be there any more.
            state = self._service.state(node)
            others = state.decodes + state.awaiting_kv
            count = -(-cached // max(1, chunks[0] - others))
            chunks = (chunks[0],) * min(count, _MOST_STEPS) + chunks
        slack_ms = round(job.slack_ms(self._slo.ttft_slo_ms), 1)
        return schedule_params(job.ticket, chunks, slack_ms)
