# SPDX-License-Identifier: Apache-2.0
"""One look at the queue of a policy that binds late: who is sent where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.late_queue import Waiting
from vllm_kairos.core.node_views import NodeView, fastest
from vllm_kairos.core.on_time import on_time_order
from vllm_kairos.core.prefill import queue_wait_paper_ms
from vllm_kairos.core.prefill_pool import (
    LEAST_WORK_MS,
    TYPICAL_TOKENS,
    Place,
    PrefillPool,
)
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.schedule import Schedule

if TYPE_CHECKING:
    from vllm_kairos.core.policies.kairos import Kairos

#: Requests looked at in one decision, from the front of the queue.
_WINDOW = 256
#: Of those, how many a decode node is offered.
_OFFERED = 48
#: Decode nodes that may find nothing among those before the rest, which are
#: no better off, are not asked: they are at the next look.
_MOST_IN_VAIN = 32


@dataclass(slots=True)
class _Offer:
    """A waiting request as decode nodes are offered it.

    Attributes:
        place: Where it stands in the queue.
        request: The request.
        work_ms: Time of the fastest prefill node it takes.
        elsewhere_ms: TTFT if it waits for a prefill node, but for the decode
            step.
        left_ms: Time left to its deadline.
    """

    place: int
    request: Request
    work_ms: float
    elsewhere_ms: float
    left_ms: float


class Assignment:
    """One look at the queue and the nodes: who is sent where, now.

    Args:
        policy: Settings, estimates and the queue.
        fleet: The nodes.
        known: Prefill nodes with a model and a fresh state, at least one.
    """

    def __init__(self, policy: Kairos, fleet: Fleet, known: list[NodeState]):
        self._policy = policy
        self._now_ms = fleet.now_ms
        self._views = policy.views
        self._decode = {n.node: n for n in fleet.decode}
        self._pool = PrefillPool(known, policy.prefill_kinds, self._drain_ms)
        self._offers: list[_Offer] | None = None
        #: By request: time until the prefill nodes, supplied, could have it done.
        self._soonest_ms: dict[str, float] = {}
        self._routed: list[tuple[Request, Route]] = []

    def run(self, most: int | None = None) -> list[tuple[Request, Route]]:
        """The requests to be sent now; they are taken out of the queue.

        Args:
            most: No more than so many.
        """
        most = _WINDOW if most is None else most
        decodes_ready = self._ready_decodes()
        if not decodes_ready and not self._some_prefill_ready():
            return []
        queue = self._ordered()
        self._supply(queue, most)
        self._offer_to_holders(queue, decodes_ready, most)
        routed = self._routed
        in_vain = 0
        for name in decodes_ready:
            served = len(routed)
            while queue and len(routed) < most and self._offer(queue, name):
                pass
            in_vain = 0 if len(routed) > served else in_vain + 1
            if not queue or len(routed) >= most or in_vain == _MOST_IN_VAIN:
                break
        if routed:
            self._policy.queue.take(request.request_id for request, _ in routed)
        return routed

    def _some_prefill_ready(self) -> bool:
        """Whether a prefill node is about to run dry."""
        return min(self._pool.drain_ms.values()) <= self._policy.lead_ms

    def _drain_ms(self, node: NodeState) -> float:
        """Time until a prefill node runs dry."""
        if self._policy.ttft == "exact":
            return self._views.of(node).drain_ms()
        assert node.model is not None
        tokens = sum(w.tokens for w in node.prefills)
        total = queue_wait_paper_ms(node.model, tokens, node.budget_tokens)
        return max(0.0, node.step_in_flight_ms + total - node.worked_off_ms)

    def _ready_decodes(self) -> list[str]:
        """Decode nodes with headroom and little deflected work, best first.

        Of those that could start at once the least loaded comes first.
        """
        lead, several = self._policy.lead_ms, self._policy.several
        ready: list[tuple[float, float, str]] = []
        for node in self._decode.values():
            if node.model is None or not node.fresh:
                continue
            if node.deflected and not several:
                continue
            view = self._views.of(node)
            queued = view.queued_ms()
            if queued is not None and queued <= lead:
                ready.append((queued, view.loaded_ms, node.node))
        ready.sort()
        return [name for _, _, name in ready]

    # ---------------------------------------------------------------- order

    def _ordered(self) -> list[Waiting]:
        policy = self._policy
        window = policy.queue.front(_WINDOW, self._now_ms)
        pool = self._pool
        kind = pool.fastest
        for waiting in window:
            if waiting.fastest is not kind:
                pool.appraise(waiting)
                if policy.transfer:
                    waiting.job.deadline_ms -= policy.settings.tau_ms
        if policy.order == "arrival":
            return sorted(window, key=lambda w: w.job.arrival_ms)
        if policy.order == "deadline" or len(window) == 1:
            return window
        by_key = {w.job.key: w for w in window}
        jobs = sorted((w.job for w in window), key=lambda j: j.deadline_ms)
        in_time, aside = on_time_order(
            jobs,
            self._now_ms,
            pool.mean_drain_ms,
            self._speed(),
            policy.oldest_ms,
        )
        first = [by_key[job.key] for job in in_time]
        last = [by_key[job.key] for job in aside]
        for waiting in first:
            waiting.late = False
        for waiting in last:
            waiting.late = True
            if not waiting.hopeless:
                job = waiting.job
                waiting.hopeless = self._now_ms + job.work_ms > job.deadline_ms
        return first + last

    def _speed(self) -> float:
        """Nodes of the fastest kind the fleet is worth, decode nodes included.

        Those count with their headroom.
        """
        pool = self._pool
        speed = pool.speed
        for decode in self._decode.values():
            if decode.model is None or not decode.fresh:
                continue
            total = self._views.of(decode).typical_ms(TYPICAL_TOKENS)
            if total is not None:
                speed += pool.fastest.typical_ms / max(total, LEAST_WORK_MS)
        return max(speed, LEAST_WORK_MS)

    # ----------------------------------------------------------------- send

    def _supply(self, queue: list[Waiting], most: int) -> None:
        """Prefill nodes about to run dry get what each is first to be done with.

        A request whose node is not ready waits for it, and the next are placed
        behind it: a slow node gets what it is done with before the fast ones
        have come to it, and nothing else.
        """
        pool, lead = self._pool, self._policy.lead_ms
        at = 0
        ready = self._some_prefill_ready()
        while ready and at < len(queue) and len(self._routed) < most:
            if self._policy.balance == "round_robin":
                place = pool.on(self._next_in_turn(), queue[at])
            else:
                place = pool.soonest(queue[at])
            if pool.drain_ms[place.node] > lead:
                pool.promise(place)
                at += 1
                continue
            self._send(queue.pop(at), place, alone=not queue)
            ready = self._some_prefill_ready()
        pool.forget_promises()

    def _next_in_turn(self) -> str:
        """The next in turn of the nodes that are ready."""
        nodes = list(self._pool.nodes.values())
        while True:
            name = self._policy.turns.pick(nodes).node
            if self._pool.drain_ms[name] <= self._policy.lead_ms:
                return name

    def _send(self, waiting: Waiting, place: Place, alone: bool) -> None:
        """A request goes to its prefill node, or where it is faster."""
        policy, request = self._policy, waiting.request
        prompt = request.prompt_tokens
        decode = self._views.least_loaded(prompt, self._decode.values())
        step_ms = policy.decode_step_ms(prompt, self._views.of(decode))
        ttft_pf = place.done_ms + step_ms
        if self._faster(request, ttft_pf, alone):
            return
        route = Route(place.node, decode.node, (), Estimates(ttft_pf), "prefill")
        self._routed.append((request, route))
        self._pool.send(place)
        self._decode[decode.node] = replace(
            decode,
            expected=decode.expected + 1,
            expected_kv_tokens=decode.expected_kv_tokens + prompt,
        )

    def _faster(self, request: Request, ttft_pf: float, alone: bool) -> bool:
        """Deflect a request that a decode node serves sooner.

        Only where that takes nothing from the others: nobody else waits, or
        the decode node has a part of the prompt in its cache. Otherwise decode
        nodes choose for themselves what they gain most on (`_offer`).

        Returns:
            Whether it was deflected.
        """
        policy = self._policy
        nodes = list(self._decode.values())
        if not alone:
            nodes = [n for n in nodes if n.node in request.cached]
        if not nodes:
            return False
        margin = min(policy.settings.alpha, 1.0)
        bound = min(margin * ttft_pf, policy.settings.ttft_slo_ms)
        found = fastest(self._views, nodes, request, bound, policy.several)
        if isinstance(found, str) or found.ttft_ms >= ttft_pf:
            return False
        self._deflect(request, found.state, found.schedule, ttft_pf, found.queued_ms)
        return True

    def _deflect(
        self,
        request: Request,
        node: NodeState,
        schedule: Schedule,
        ttft_pf: float,
        queued_ms: float,
    ) -> None:
        """The request goes to a decode node, which has one prefill more then."""
        name, prompt, total = node.node, request.prompt_tokens, schedule.total_ms
        estimates = Estimates(ttft_pf, queued_ms + total, schedule.step_ms)
        route = Route(name, name, schedule.chunks, estimates, "deflected")
        self._routed.append((request, route))
        cached = min(request.cached.get(name, 0) if request.cached else 0, prompt - 1)
        work = PrefillWork(prompt - cached, cached)
        state = replace(node, deflected=[*node.deflected, work])
        self._views.put(self._views.of(node).with_deflected(state, total))
        self._decode[name] = state

    def _offered(self, queue: list[Waiting]) -> list[_Offer]:
        """The front of the queue, as it stands after the last one was sent."""
        if self._offers is None:
            policy, pool = self._policy, self._pool
            slo, now = policy.settings.ttft_slo_ms, self._now_ms
            known = self._soonest_ms
            ahead = 0.0
            self._offers = []
            for place, waiting in enumerate(queue[:_OFFERED]):
                request, work = waiting.request, waiting.job.work_ms
                soonest = known.get(request.request_id)
                if soonest is None:
                    soonest = pool.soonest(waiting).done_ms
                    known[request.request_id] = soonest
                elsewhere = soonest + ahead / pool.speed
                left = request.arrival_ms + slo - now
                self._offers.append(_Offer(place, request, work, elsewhere, left))
                ahead += work
        return self._offers

    def _offer_to_holders(
        self, queue: list[Waiting], ready: list[str], most: int
    ) -> None:
        """Requests with a prefix in a decode node's cache are offered there first.

        Beside those nodes the best of all that are ready is asked: what is
        cached may be worth less than what stands before it.
        """
        waiting = [w.request for w in queue[:_OFFERED] if w.request.cached]
        for request in waiting:
            holders = [n for n in ready if n in request.cached]
            if not holders or len(self._routed) >= most:
                continue
            offer = next(o for o in self._offered(queue) if o.request is request)
            names = dict.fromkeys([ready[0], *holders])
            nodes = [self._decode[name] for name in names]
            view = self._views.of(self._decode[holders[0]])
            ttft_pf = offer.elsewhere_ms + self._policy.decode_step_ms(
                request.prompt_tokens, view
            )
            left_ms = offer.left_ms if offer.left_ms > 0 else ttft_pf
            bound = min(self._policy.settings.alpha * ttft_pf, max(left_ms, 1e-3))
            found = fastest(self._views, nodes, request, bound, self._policy.several)
            if not isinstance(found, str):
                queue.pop(offer.place)
                self._offers = None
                node, schedule = found.state, found.schedule
                self._deflect(request, node, schedule, ttft_pf, found.queued_ms)

    def _offer(self, queue: list[Waiting], name: str) -> bool:
        """Give a decode node the request it gains most on, if there is one.

        Returns:
            Whether it may be offered another.
        """
        policy = self._policy
        node = self._decode[name]
        view = self._views.of(node)
        queued = view.queued_ms()
        if queued is None or queued > policy.lead_ms:
            return False
        best = self._best_offer(self._offered(queue), view, queued)
        if best is None:
            return False
        offer, ttft_pf, schedule = best
        queue.pop(offer.place)
        self._offers = None
        self._deflect(offer.request, node, schedule, ttft_pf, queued)
        return policy.several

    def _best_offer(
        self, offers: list[_Offer], view: NodeView, queued_ms: float
    ) -> tuple[_Offer, float, Schedule] | None:
        """The request with the least time here for its time on a prefill node.

        A schedule is made only where its bounds from below leave the request
        acceptable (Eq. 7), no longer than the policy lets a prefill be, and
        better than the best so far.
        """
        policy, node = self._policy, view.state
        alpha, planner = policy.settings.alpha, view.planner
        longest = policy.longest_ms
        free_tokens = node.free_kv_tokens
        if not (view.has_slot and node.fresh) or (
            node.deflected and not policy.several
        ):
            return None
        best: tuple[_Offer, float, Schedule] | None = None
        best_cost = float("inf")
        # `decode_step_ms` without a call for each.
        fixed = policy.decode_step_ms(0, view)
        per_token = view.step_ms_per_kv_token if policy.transfer else 0.0
        for offer in offers:
            request, work = offer.request, offer.work_ms
            prompt = request.prompt_tokens
            if prompt >= free_tokens:
                continue
            ttft_pf = offer.elsewhere_ms + fixed + per_token * prompt
            left = offer.left_ms if offer.left_ms > 0 else ttft_pf
            bound = min(alpha * ttft_pf, max(left, 1e-3))
            cached = request.cached.get(node.node, 0) if request.cached else 0
            bound -= queued_ms
            if bound > longest:
                bound = longest
            most = min(bound * (1.0 + 1e-9), best_cost * work)
            if planner.quick_floor_ms(prompt, cached) > most:
                continue
            if planner.floor_ms(prompt, cached) > most:
                continue
            chunks: list[int] = []
            steps: list[float] = []
            total = planner.walk_ms(prompt, cached, most, chunks, steps)
            if total is None or total > bound:
                continue
            if total / work < best_cost:
                best_cost = total / work
                best = (offer, ttft_pf, Schedule(tuple(chunks), tuple(steps)))
        return best
