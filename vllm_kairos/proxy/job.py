# SPDX-License-Identifier: Apache-2.0
"""A client's request while the proxy has it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from multidict import CIMultiDict

from vllm_kairos.core.fleet import Request
from vllm_kairos.core.route import Route
from vllm_kairos.proxy.body import Body
from vllm_kairos.proxy.prompt_length import Length


@dataclass(slots=True)
class Job:
    """One request on its way.

    Attributes:
        body: What the client sent.
        headers: Headers for the nodes.
        ticket: Names its dispatches.
        arrived_s: Monotonic arrival.
        length: Length of its prompts.
        label: Path it took.
        predicted_ms: TTFT the decision predicts for that path.
        route: What the policy decided, if it was asked.
        cached: Prompt tokens by node that are believed to be in its cache.
    """

    body: Body
    headers: CIMultiDict[str]
    ticket: str
    arrived_s: float
    length: Length
    label: str = "kept"
    predicted_ms: float | None = None
    route: Route | None = None
    cached: Mapping[str, int] = field(default_factory=dict)

    def request(self) -> Request:
        """The request as a policy sees it."""
        return Request(
            self.length.tokens,
            self.ticket,
            arrival_ms=self.arrived_s * 1e3,
            cached=self.cached,
        )

    def slack_ms(self, ttft_slo_ms: float) -> float:
        """Time left to its TTFT target."""
        return ttft_slo_ms - 1e3 * (time.monotonic() - self.arrived_s)


class NoNode(Exception):
    """No node is left that could answer.

    Attributes:
        status: HTTP status for the client: 502, or 504 where the last node
            asked gave no sign of life.
    """

    def __init__(self, message: str, status: int = 502):
        super().__init__(message)
        self.status = status
