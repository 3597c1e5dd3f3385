# SPDX-License-Identifier: Apache-2.0
"""The one decision type: where a request is prefilled, where it decodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimates:
    """Predictions a decision rests on, kept for logs, metrics and reports.

    Attributes:
        ttft_prefill_ms: TTFT on the best prefill node (Eq. 1), if estimated.
        ttft_decode_ms: TTFT on the best feasible decode node (Eq. 6), if any.
        step_ms: Predicted latency of each step of the chunk schedule.
    """

    ttft_prefill_ms: float | None = None
    ttft_decode_ms: float | None = None
    step_ms: tuple[float, ...] = ()


_NO_ESTIMATES = Estimates()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        prefill: Id of the node that prefills.
        decode: Id of the node that decodes. Deflected when it is the same.
        chunks: Chunk schedule ``[chi_1, ...]`` of a deflected request: most
            tokens of each whole step that carries a part of its prefill.
        estimates: What the decision rests on.
        reason: Short name of the rule that decided, for metrics.
        rejected: The policy would turn the request away (early rejection).
            The simulator does so; a proxy that owes its users an answer takes
            the route all the same.
    """

    prefill: str
    decode: str
    chunks: tuple[int, ...] = ()
    estimates: Estimates = _NO_ESTIMATES
    reason: str = ""
    rejected: bool = False

    @property
    def deflected(self) -> bool:
        """Whether the decode node does the prefill itself."""
        return self.prefill == self.decode
