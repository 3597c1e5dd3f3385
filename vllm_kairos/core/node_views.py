# SPDX-License-Identifier: Apache-2.0
"""What a decision derives from a node's state, kept for the next decision.

A state lives as long as nothing new is known of its node, which is many
decisions; what follows from it alone is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_kairos.core.fleet import NodeState, Request
from vllm_kairos.core.prefill import PrefillQueue
from vllm_kairos.core.schedule import CandidatePlanner, ChunkPlanner, Schedule

#: Plans the chunks of deflected prefills on one node.
Planner = ChunkPlanner | CandidatePlanner
#: Makes the planner of a node that has a model.
MakePlanner = Callable[[NodeState], Planner]

_UNKNOWN = -1.0


class NodeView:
    """One state and what follows from it.

    Attributes:
        state: The state.
        has_slot: It has a model and room for one request more in a step.
        step_fixed_ms: Its decode step with one request more is this and
            `step_ms_per_kv_token` for each of `kv_tokens` and of the prompt.
        loaded_fixed_ms: The same with what is expected there, beside
            `loaded_kv_tokens`.
    """

    __slots__ = (
        "state",
        "step_fixed_ms",
        "step_ms_per_kv_token",
        "kv_tokens",
        "loaded_fixed_ms",
        "loaded_kv_tokens",
        "has_slot",
        "_make",
        "_planner",
        "_queue",
        "_deflected_ms",
        "_typical_ms",
    )

    def __init__(self, state: NodeState, make: MakePlanner):
        self.state = state
        self._make = make
        self._planner: Planner | None = None
        self._queue: PrefillQueue | None = None
        self._deflected_ms: float | None = _UNKNOWN
        self._typical_ms: float | None = _UNKNOWN
        slots = state.decodes + state.awaiting_kv + len(state.deflected)
        self.has_slot = state.model is not None and slots < state.max_num_seqs
        # The decode step with one request more, by its KV tokens: beside what
        # is here, and beside what is expected too.
        decodes = state.decodes + state.awaiting_kv + 1
        self.kv_tokens = state.decode_kv_tokens + state.awaiting_kv_tokens
        self.loaded_kv_tokens = self.kv_tokens + state.expected_kv_tokens
        if state.model is None:
            self.step_fixed_ms = self.step_ms_per_kv_token = 0.0
            self.loaded_fixed_ms = float(decodes + state.expected)
        else:
            one, b, k = state.model.decode_coefficients
            self.step_ms_per_kv_token = k
            self.step_fixed_ms = one + b * decodes
            self.loaded_fixed_ms = one + b * (decodes + state.expected)

    @property
    def planner(self) -> Planner:
        """Plans the chunks of a deflected prefill here; needs a model."""
        if self._planner is None:
            self._planner = self._make(self.state)
        return self._planner

    @property
    def queue(self) -> PrefillQueue:
        """Its ordinary prefills packed into steps; needs a model."""
        if self._queue is None:
            state = self.state
            assert state.model is not None
            self._queue = PrefillQueue(state.model, state.prefills, state.budget_tokens)
        return self._queue

    def drain_ms(self) -> float:
        """Time until it runs out of ordinary prefills."""
        state = self.state
        total = state.step_in_flight_ms + self.queue.drain_ms
        return max(0.0, total - state.worked_off_ms)

    def decode_step_ms(self, prompt_tokens: int) -> float:
        """A decode step here with a prompt of that length in it."""
        return self.step_fixed_ms + self.step_ms_per_kv_token * (
            self.kv_tokens + prompt_tokens
        )

    @property
    def loaded_ms(self) -> float:
        """Its decode step with what is here and what is expected."""
        return self.loaded_fixed_ms + self.step_ms_per_kv_token * self.loaded_kv_tokens

    def queued_ms(self) -> float | None:
        """Time the prefills on a decode node still take; `None` for no end."""
        total = self._deflected_ms
        if total is None:
            return None
        state = self.state
        if total < 0.0:
            total = 0.0
            for work in (*state.deflected, *state.prefills):
                tokens = work.tokens + work.computed
                one = self.planner.walk_ms(tokens, work.computed)
                if one is None:
                    self._deflected_ms = None
                    return None
                total += one
            self._deflected_ms = total
        total += state.step_in_flight_ms - state.worked_off_ms
        return total if total > 0.0 else 0.0

    def typical_ms(self, prompt_tokens: int) -> float | None:
        """Total of the schedule of a typical prompt, always the same one."""
        if self._typical_ms == _UNKNOWN:
            self._typical_ms = self.planner.walk_ms(prompt_tokens)
        return self._typical_ms

    def with_deflected(self, state: NodeState, total_ms: float) -> NodeView:
        """The view of `state`, which has one deflected prefill more.

        Args:
            state: The same node with the prefill added.
            total_ms: Total of its schedule.
        """
        view = NodeView(state, self._make)
        view._planner = self._planner
        view._typical_ms = self._typical_ms
        if self._deflected_ms is not None and self._deflected_ms >= 0.0:
            view._deflected_ms = self._deflected_ms + total_ms
        return view


class NodeViews:
    """Views by node, each kept while its state object is the node's.

    What a view is made of must not change in a state that has been shown to a
    policy: see `NodeState`.

    Args:
        make: Makes planners.
    """

    def __init__(self, make: MakePlanner):
        self._make = make
        self._views: dict[str, NodeView] = {}

    def of(self, state: NodeState) -> NodeView:
        """The view of a state."""
        view = self._views.get(state.node)
        if view is None or view.state is not state:
            view = self._views[state.node] = NodeView(state, self._make)
        return view

    def put(self, view: NodeView) -> None:
        """Keep a view made elsewhere."""
        self._views[view.state.node] = view

    def least_ttft(
        self, request: Request, nodes: Sequence[NodeState], decode_step_ms: float
    ) -> tuple[NodeState, float]:
        """The prefill node with the least `ttft_prefill_ms`, and that.

        Args:
            request: The request.
            nodes: Nodes with a model, at least one.
            decode_step_ms: As there.
        """
        prompt, prefixes = request.prompt_tokens, request.cached
        best, least = nodes[0], math.inf
        cached = 0
        alone: dict[tuple[int, int, int], float] = {}
        for node in nodes:
            if prefixes:
                cached = min(prefixes.get(node.node, 0), prompt - 1)
            queue = self.of(node).queue
            left = prompt - cached
            wait = node.step_in_flight_ms + queue.drain_with_ms(left, cached)
            if node.worked_off_ms > 0.0:
                wait -= node.worked_off_ms
                key = (id(node.model), node.budget_tokens, cached)
                floor = alone.get(key)
                if floor is None:
                    assert node.model is not None
                    empty = PrefillQueue(node.model, (), node.budget_tokens)
                    floor = alone[key] = empty.drain_with_ms(left, cached)
                if floor > wait:
                    wait = floor
            if node.link is not None:
                wait += node.link.transfer_ms(prompt, node.link_backlog_bytes)
            wait += decode_step_ms
            if wait < least:
                best, least = node, wait
        return best, least

    def least_loaded(self, prompt_tokens: int, nodes: Iterable[NodeState]) -> NodeState:
        """`least_loaded_decode`, on what is known already."""
        best: NodeState | None = None
        least = math.inf
        fullest: NodeState | None = None
        most_free = -math.inf
        views = self._views
        for node in nodes:
            if node.free_kv_tokens < prompt_tokens:
                if node.free_kv_tokens > most_free:
                    fullest, most_free = node, node.free_kv_tokens
                continue
            view = views.get(node.node)
            if view is None or view.state is not node:
                view = self.of(node)
            load = view.loaded_fixed_ms + view.step_ms_per_kv_token * (
                view.loaded_kv_tokens + prompt_tokens
            )
            if load < least:
                best, least = node, load
        chosen = best or fullest
        assert chosen is not None, "a fleet has a decode node"
        return chosen


@dataclass(frozen=True, slots=True)
class Found:
    """A decode node that can prefill a request in time.

    Attributes:
        state: The node.
        schedule: The request's schedule there.
        queued_ms: Time until its first chunk.
    """

    state: NodeState
    schedule: Schedule
    queued_ms: float

    @property
    def ttft_ms(self) -> float:
        """TTFT there."""
        return self.queued_ms + self.schedule.total_ms


def fastest(
    views: NodeViews,
    nodes: Iterable[NodeState],
    request: Request,
    bound_ms: float,
    several: bool,
) -> Found | str:
    """The decode node with the least TTFT of all within `bound_ms`.

    The answer of `decide` (steps 2 to 4 of Algorithm 1). A schedule is made
    only where two bounds from below have not ruled its node out.

    Args:
        views: Views of the nodes.
        nodes: Decode nodes.
        request: The request.
        bound_ms: What Eq. 7 allows.
        several: A node may have more than one deflected prefill.

    Returns:
        The node, or why there is none: ``unavailable``, ``infeasible`` or
        ``kept``.
    """
    prompt, prefixes = request.prompt_tokens, request.cached
    available = feasible = False
    cached = 0
    candidates: list[tuple[float, int, float, NodeView, int]] = []
    # The one loop over all decode nodes: calls that it can do without, it does.
    known_views = views._views
    for place, state in enumerate(nodes):
        view = known_views.get(state.node)
        if view is None or view.state is not state:
            view = views.of(state)
        if not (view.has_slot and state.fresh and state.free_kv_tokens > prompt):
            continue
        if state.deflected and not several:
            continue
        available = True
        queued = view._deflected_ms
        if queued is None or queued < 0.0:
            queued = view.queued_ms()
            if queued is None:
                continue
        else:
            queued += state.step_in_flight_ms - state.worked_off_ms
            if queued < 0.0:
                queued = 0.0
        if prefixes:
            cached = prefixes.get(state.node, 0)
        planner = view._planner or view.planner
        floor = planner.quick_floor_ms(prompt, cached)
        if floor == math.inf:
            continue
        feasible = True
        floor += queued
        if floor <= bound_ms:
            candidates.append((floor, place, queued, view, cached))
    candidates.sort()
    best_ms, best_place = bound_ms, math.inf
    best: Found | None = None
    # Idle nodes are alike: one schedule stands for all of them.
    walked: dict[object, tuple[float | None, bool, list[int], list[float]]] = {}
    infeasible = 0
    for floor, place, queued, view, cached in candidates:
        if floor > best_ms:
            break
        planner = view.planner
        key = (planner.key, cached)
        known = walked.get(key)
        if known is not None and known[1] and known[0] is not None:
            # Stopped on the way: its total is above that number.
            if queued + known[0] > best_ms:
                continue
            known = None
        if known is None:
            if queued + planner.floor_ms(prompt, cached) > best_ms:
                continue
            chunks: list[int] = []
            steps: list[float] = []
            most = (best_ms - queued) * (1.0 + 1e-9)
            total = planner.walk_ms(prompt, cached, most, chunks, steps)
            stopped = total is not None and total > most
            known = walked[key] = (total, stopped, chunks, steps)
        total = known[0]
        if total is None:
            infeasible += 1
            continue
        ttft = queued + total
        if ttft < best_ms or (ttft == best_ms and place < best_place):
            best_ms, best_place = ttft, place
            schedule = Schedule(tuple(known[2]), tuple(known[3]))
            best = Found(view.state, schedule, queued)
    if best is not None:
        return best
    if not available:
        return "unavailable"
    if not feasible or (candidates and infeasible == len(candidates)):
        return "infeasible"
    return "kept"
