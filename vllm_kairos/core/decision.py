# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: the deflection decision (paper §4.4, Eq. 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_kairos.core.fleet import NodeState
from vllm_kairos.core.schedule import Schedule
from vllm_kairos.core.settings import Settings

#: Builds the TBT-safe schedule of the request on one decode node.
ScheduleBuilder = Callable[[NodeState], Schedule | None]

#: TTFT on a decode node given a feasible schedule there, milliseconds.
DecodeTtft = Callable[[NodeState, Schedule], float]


def eq6_ms(node: NodeState, schedule: Schedule) -> float:
    """Eq. 6: the sum of the schedule's steps, blind to what waits there."""
    return schedule.total_ms


@dataclass(frozen=True, slots=True)
class Deflection:
    """The fastest feasible decode node and whether Eq. 7 lets it be used.

    Attributes:
        node: The node.
        schedule: Its TBT-safe schedule.
        ttft_ms: TTFT there.
        accepted: Eq. 7 holds.
    """

    node: NodeState
    schedule: Schedule
    ttft_ms: float
    accepted: bool


def decide(
    decode_nodes: Iterable[NodeState],
    ttft_prefill_ms: float | None,
    settings: Settings,
    build: ScheduleBuilder,
    ttft_decode_ms: DecodeTtft = eq6_ms,
) -> Deflection | None:
    """Steps 2 to 4 of Algorithm 1.

    Args:
        decode_nodes: Candidates; the caller has left out those unavailable.
        ttft_prefill_ms: Step 1's estimate; `None` where no prefill node can
            take the request, which makes any feasible node acceptable.
        settings: SLOs and margins.
        build: Builds a schedule that holds Eq. 5 at every step.
        ttft_decode_ms: TTFT of a schedule on a node, Eq. 6 by default.

    Returns:
        `None` where no node is feasible. Otherwise the fastest one; only when
        `accepted` is it to be used.
    """
    best: tuple[float, NodeState, Schedule] | None = None
    for node in decode_nodes:
        schedule = build(node)
        if schedule is None:
            continue
        ttft = ttft_decode_ms(node, schedule)
        if best is None or ttft < best[0]:
            best = (ttft, node, schedule)
    if best is None:
        return None
    ttft, node, schedule = best
    accepted = ttft_prefill_ms is None or (
        ttft <= settings.alpha * ttft_prefill_ms and ttft <= settings.ttft_slo_ms
    )
    return Deflection(node, schedule, ttft, accepted)
