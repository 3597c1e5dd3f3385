# SPDX-License-Identifier: Apache-2.0
"""What a node tells of itself, as old as its last heartbeat."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_kairos.core.fleet import NodeState, PrefillWork
from vllm_kairos.sim.engine_request import Phase

if TYPE_CHECKING:
    from vllm_kairos.sim.cluster import Cluster, SimNode


class NodeReports:
    """The state of a node at its heartbeats, taken only when it matters.

    Between changes a node's state stands still, so the state at the last
    heartbeat before a change is the state before that change: one look at the
    clock a change replaces an event a heartbeat.

    Attributes:
        beat_ms: Time of the last heartbeat taken.
    """

    __slots__ = ("_node", "_cluster", "_period_ms", "_next_ms", "beat_ms", "_last")

    def __init__(self, node: SimNode, cluster: Cluster):
        self._node = node
        self._cluster = cluster
        self._period_ms = cluster.settings.heartbeat_ms
        # Nobody looks at the reports a blind policy would get.
        self._next_ms = math.inf if cluster.policy.blind else 0.0
        self.beat_ms = 0.0
        self._last = state_of(node, cluster, 0.0)

    def before_change(self, now_ms: float) -> None:
        """The node's state is about to change, or is about to be read."""
        if now_ms < self._next_ms:
            return
        period = self._period_ms
        if period <= 0:
            self.beat_ms = now_ms
            self._last = state_of(self._node, self._cluster, now_ms)
            return
        beats = int((now_ms - self._next_ms) // period)
        self.beat_ms = self._next_ms + beats * period
        self._next_ms = self.beat_ms + period
        self._last = state_of(self._node, self._cluster, self.beat_ms)

    def last(self, now_ms: float) -> NodeState:
        """The last report. Shared: to be copied before it is changed."""
        self.before_change(now_ms)
        return self._last


def state_of(node: SimNode, cluster: Cluster, now_ms: float) -> NodeState:
    """The state of a node as it is."""
    limits = node.limits
    prefills: list[PrefillWork] = []
    deflected = node.deflected
    if len(node.running) > node.decodes:
        prefills = [
            PrefillWork(r.tokens - r.computed, r.computed)
            for r in node.running
            if r.phase == Phase.PREFILL and r not in deflected
        ]
    if node.waiting:
        awaiting = node.awaiting
        prefills += [
            PrefillWork(r.tokens, 0)
            for r in node.waiting
            if r not in awaiting and r not in deflected
        ]
    return NodeState(
        node.name,
        node.model,
        limits.budget_tokens,
        limits.max_num_seqs,
        node.decodes,
        node.decode_kv_tokens,
        prefills,
        [PrefillWork(r.tokens - r.computed, r.computed) for r in deflected],
        len(node.awaiting),
        node.awaiting_tokens,
        free_kv_tokens=node.kv.free_blocks * limits.block_size,
        link=cluster.settings.link,
        limit_ms=node.rule.limit_ms,
        step_in_flight_ms=(
            max(0.0, node.step_start_ms + node.predicted_ms - now_ms)
            if node.busy
            else 0.0
        ),
    )
