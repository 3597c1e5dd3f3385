# SPDX-License-Identifier: Apache-2.0
"""`kairos` by the book: every node, every schedule, nothing kept.

What the policy's short cuts are held against.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vllm_kairos.core.decision import Deflection, decide
from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.late_queue import Waiting
from vllm_kairos.core.on_time import on_time_order
from vllm_kairos.core.policies.disagg import least_loaded_decode
from vllm_kairos.core.policies.kairos import Kairos
from vllm_kairos.core.prefill import (
    drain_ms,
    marginal_prefill_ms,
    queue_wait_paper_ms,
    ttft_prefill_paper_ms,
)
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.schedule import Schedule, paper_schedule
from vllm_kairos.core.step_model import StepModel

_WINDOW = 256
_OFFERED = 48
_TYPICAL_TOKENS = 2048


def closed_form_schedule(
    model: StepModel,
    decodes: int,
    decode_kv_tokens: int,
    prompt_tokens: int,
    budget_tokens: int,
    limit_ms: float,
    *,
    cached_tokens: int = 0,
    smallest_tokens: int = 16,
) -> Schedule | None:
    """The largest safe chunk of each step, one call of the model at a time."""
    served = min(cached_tokens, prompt_tokens - 1)
    chunks: list[int] = []
    steps: list[float] = []
    while served < prompt_tokens:
        most = min(prompt_tokens - served, budget_tokens - decodes)
        chunk = model.largest_chunk(decodes, decode_kv_tokens, served, limit_ms, most)
        if chunk < min(smallest_tokens, prompt_tokens - served) or chunk <= 0:
            return None
        chunks.append(chunk + decodes)
        steps.append(model.step_ms(decodes, decode_kv_tokens, chunk, served))
        served += chunk
    return Schedule(tuple(chunks), tuple(steps))


def exact_ttft_ms(
    node: NodeState, prompt_tokens: int, cached_tokens: int, decode_step_ms: float
) -> float:
    """`ttft_prefill_ms` with the whole queue packed for every prompt."""
    assert node.model is not None
    cached = min(cached_tokens, prompt_tokens - 1)
    queue = [w for w in node.prefills if w.tokens > 0]
    queue.append(PrefillWork(prompt_tokens - cached, cached))
    wait = node.step_in_flight_ms + drain_ms(node.model, queue, node.budget_tokens)
    alone = drain_ms(node.model, queue[-1:], node.budget_tokens)
    if node.worked_off_ms > 0.0:
        wait = max(wait - node.worked_off_ms, alone)
    if node.link is not None:
        wait += node.link.transfer_ms(prompt_tokens, node.link_backlog_bytes)
    return wait + decode_step_ms


class ExhaustiveKairos(Kairos):
    """The policy without its short cuts."""

    def route(self, request: Request, fleet: Fleet) -> Route:
        decode = least_loaded_decode(request, fleet)
        prefill, ttft_pf = self._best_prefill(request, fleet.prefill, decode)
        if ttft_pf is None:
            return Route(prefill.node, decode.node, reason="no_state")
        found = self._deflection(request, fleet.decode, ttft_pf)
        return self._resolve(prefill, decode, ttft_pf, found)

    def _resolve(
        self,
        prefill: NodeState,
        decode: NodeState,
        ttft_pf: float,
        found: Deflection | None,
    ) -> Route:
        if found is None:
            return Route(
                prefill.node, decode.node, (), Estimates(ttft_pf), "infeasible"
            )
        estimates = Estimates(ttft_pf, found.ttft_ms, found.schedule.step_ms)
        if not found.accepted:
            return Route(prefill.node, decode.node, (), estimates, "kept")
        node = found.node.node
        return Route(node, node, found.schedule.chunks, estimates, "deflected")

    # ----------------------------------------------------------- estimates

    def _best_prefill(
        self, request: Request, nodes: Iterable[NodeState], decode: NodeState
    ) -> tuple[NodeState, float | None]:
        """The prefill node and its TTFT; no TTFT where no node is known."""
        nodes = list(nodes)
        known = [n for n in nodes if n.model is not None and n.fresh]
        if not known:
            fewest = min(nodes, key=lambda n: sum(w.tokens for w in n.prefills))
            return fewest, None
        if self.balance == "round_robin":
            known = [self._prefill.pick(known)]
        step = self._step_with_ms(request, decode)
        estimated = [(self._ttft_prefill_ms(request, n, step), n) for n in known]
        ttft, node = min(estimated, key=lambda pair: pair[0])
        return node, ttft

    def _ttft_prefill_ms(
        self, request: Request, node: NodeState, decode_step_ms: float
    ) -> float:
        if self.ttft == "paper":
            ttft = ttft_prefill_paper_ms(node, request.prompt_tokens)
            return ttft + self._kv_ms(request, node) + decode_step_ms
        cached = request.cached.get(node.node, 0)
        if self.transfer:
            return exact_ttft_ms(node, request.prompt_tokens, cached, decode_step_ms)
        return exact_ttft_ms(
            replace(node, link=None), request.prompt_tokens, cached, decode_step_ms
        )

    def _kv_ms(self, request: Request, node: NodeState) -> float:
        if not self.transfer or node.link is None:
            return 0.0
        return node.link.transfer_ms(request.prompt_tokens, node.link_backlog_bytes)

    def _step_with_ms(self, request: Request, node: NodeState) -> float:
        """The step of a decode node with the request in it."""
        if node.model is None or not self.transfer:
            return 0.0
        return node.model.step_ms(
            node.decodes + node.awaiting_kv + 1,
            node.decode_kv_tokens + node.awaiting_kv_tokens + request.prompt_tokens,
        )

    def _limit_ms(self, node: NodeState) -> float:
        """Bound on a step there: what the engine says is in force, or ours."""
        if self.chunks == "adaptive" and node.limit_ms is not None:
            if node.limit_ms and node.adaptive and not node.decodes + node.awaiting_kv:
                # Nobody there can be late.
                least = self.settings.beta * self.settings.tau_ms
                return max(least, min(node.limit_ms, self.settings.tau_ms))
            return min(node.limit_ms, self.settings.tau_ms)
        return self.settings.limit_ms

    def _schedule(
        self, node: NodeState, prompt_tokens: int, cached_tokens: int
    ) -> Schedule | None:
        assert node.model is not None
        decodes = node.decodes + node.awaiting_kv
        kv_tokens = node.decode_kv_tokens + node.awaiting_kv_tokens
        if self.sizes == "continuous":
            return closed_form_schedule(
                node.model,
                decodes,
                kv_tokens,
                prompt_tokens,
                node.budget_tokens,
                self._limit_ms(node),
                cached_tokens=cached_tokens,
            )
        return paper_schedule(
            node.model,
            decodes,
            kv_tokens,
            prompt_tokens,
            [c for c in self.settings.candidates if c <= node.budget_tokens],
            self._limit_ms(node),
            cached_tokens=cached_tokens,
        )

    def _queued_ms(self, node: NodeState) -> float | None:
        """Time the deflected prefills there still take; `None` for no end."""
        total = node.step_in_flight_ms
        for work in (*node.deflected, *node.prefills):
            schedule = self._schedule(node, work.tokens + work.computed, work.computed)
            if schedule is None:
                return None
            total += schedule.total_ms
        return max(0.0, total - node.worked_off_ms)

    def _deflection(
        self,
        request: Request,
        nodes: Iterable[NodeState],
        ttft_pf: float | None,
        most_ms: float | None = None,
    ) -> Deflection | None:
        queued: dict[str, float] = {}

        def build(node: NodeState) -> Schedule | None:
            wait = self._queued_ms(node)
            if wait is None:
                return None
            queued[node.node] = wait
            cached = request.cached.get(node.node, 0)
            return self._schedule(node, request.prompt_tokens, cached)

        def ttft_decode(node: NodeState, schedule: Schedule) -> float:
            return queued[node.node] + schedule.total_ms

        settings = self.settings
        if most_ms is not None:
            settings = replace(settings, ttft_slo_ms=max(most_ms, 1e-3))
        available = [n for n in nodes if self._takes(n, request)]
        return decide(available, ttft_pf, settings, build, ttft_decode)

    def _takes(self, node: NodeState, request: Request) -> bool:
        """Whether a decode node may be given a deflected prefill at all."""
        return (
            node.model is not None
            and node.fresh
            and (self.several or not node.deflected)
            and node.free_kv_tokens > request.prompt_tokens
            and node.decodes + node.awaiting_kv + len(node.deflected)
            < node.max_num_seqs
        )

    def assign(self, fleet: Fleet) -> list[tuple[Request, Route]]:
        known = [n for n in fleet.prefill if n.model is not None and n.fresh]
        if not self.queue or not known:
            return super().assign(fleet)
        return _Assignment(self, fleet, known).run()


class _Assignment:
    """One look at the queue and the nodes: who is sent where, now."""

    def __init__(self, policy: ExhaustiveKairos, fleet: Fleet, known: list[NodeState]):
        self.policy = policy
        self.fleet = fleet
        self.prefill = {n.node: n for n in known}
        self.decode = {n.node: n for n in fleet.decode}
        self.drain = {n.node: self._drain_ms(n) for n in known}
        self.routed: list[tuple[Request, Route]] = []

    def run(self) -> list[tuple[Request, Route]]:
        lead = self.policy.lead_ms
        decodes_ready = self._ready_decodes()
        if min(self.drain.values()) > lead and not decodes_ready:
            return []
        queue = self._ordered()
        self._supply(queue)
        for name in decodes_ready:
            while queue and self._offer(queue, name):
                pass
        taken = {request.request_id for request, _ in self.routed}
        if taken:
            self.policy.queue.take(taken)
        return self.routed

    def _work_ms(self, request: Request, node: NodeState) -> float:
        assert node.model is not None
        cached = request.cached.get(node.node, 0)
        return marginal_prefill_ms(
            node.model, request.prompt_tokens, cached, node.budget_tokens
        )

    def _typical_ms(self, node: NodeState) -> float:
        return self._work_ms(Request(_TYPICAL_TOKENS), node)

    def _fastest(self) -> NodeState:
        return min(self.prefill.values(), key=self._typical_ms)

    def _speeds(self) -> dict[str, float]:
        """By node: nodes of the fastest kind it is worth."""
        fastest_ms = self._typical_ms(self._fastest())
        return {
            name: fastest_ms / self._typical_ms(node)
            for name, node in self.prefill.items()
        }

    def _done_ms(self, request: Request, busy_ms: dict[str, float]) -> dict[str, float]:
        """By node: time until it is done with the request and its KV has left."""
        return {
            name: busy_ms[name]
            + self._work_ms(request, node)
            + self.policy._kv_ms(request, node)
            for name, node in self.prefill.items()
        }

    def _supply(self, queue: list[Waiting]) -> None:
        """Each request in turn to the node that is done first, if it is ready.

        If not it waits, and the next ones think of it as sent.
        """
        busy_ms = dict(self.drain)
        for waiting in list(queue):
            if min(self.drain.values()) > self.policy.lead_ms:
                return
            done_ms = self._done_ms(waiting.request, busy_ms)
            name = min(done_ms, key=done_ms.__getitem__)
            work_ms = self._work_ms(waiting.request, self.prefill[name])
            if self.drain[name] > self.policy.lead_ms:
                busy_ms[name] += work_ms
                continue
            queue.remove(waiting)
            if self._send(waiting.request, name, done_ms[name], alone=not queue):
                self.drain[name] += work_ms
                busy_ms[name] += work_ms

    def _drain_ms(self, node: NodeState) -> float:
        """Time until a prefill node runs dry."""
        assert node.model is not None
        queue = [w for w in node.prefills if w.tokens > 0]
        total = node.step_in_flight_ms
        if queue and self.policy.ttft == "paper":
            tokens = sum(w.tokens for w in queue)
            total += queue_wait_paper_ms(node.model, tokens, node.budget_tokens)
        elif queue:
            total += drain_ms(node.model, queue, node.budget_tokens)
        return max(0.0, total - node.worked_off_ms)

    def _ready_decodes(self) -> list[str]:
        """Decode nodes with headroom and little deflected work, best first."""
        ready = []
        for node in self.fleet.decode:
            if node.model is None or not node.fresh:
                continue
            if node.deflected and not self.policy.several:
                continue
            queued = self.policy._queued_ms(node)
            if queued is not None and queued <= self.policy.lead_ms:
                decodes = node.decodes + node.awaiting_kv + node.expected + 1
                kv_tokens = (
                    node.decode_kv_tokens
                    + node.awaiting_kv_tokens
                    + node.expected_kv_tokens
                )
                load = node.model.step_ms(decodes, kv_tokens)
                ready.append((queued, load, node.node))
        return [name for _, _, name in sorted(ready)]

    def _ordered(self) -> list[Waiting]:
        policy = self.policy
        window = policy.queue.front(_WINDOW, self.fleet.now_ms)
        fastest = self._fastest()
        for waiting in window:
            job, request = waiting.job, waiting.request
            job.work_ms = self._work_ms(request, fastest)
            quiet = replace(fastest, link_backlog_bytes=0.0)
            job.deadline_ms = waiting.due_ms - policy._kv_ms(request, quiet)
            if policy.transfer:
                job.deadline_ms -= policy.settings.tau_ms
        if policy.order == "arrival":
            return sorted(window, key=lambda w: w.job.arrival_ms)
        if policy.order == "deadline":
            return window
        speeds = self._speeds()
        by_key = {w.job.key: w for w in window}
        jobs = sorted((w.job for w in window), key=lambda j: j.deadline_ms)
        in_time, late = on_time_order(
            jobs,
            self.fleet.now_ms,
            sum(speeds[name] * self.drain[name] for name in speeds)
            / sum(speeds.values()),
            self._speed(),
            policy.oldest_ms,
        )
        return [by_key[job.key] for job in (*in_time, *late)]

    def _speed(self) -> float:
        """Prefill nodes the fleet is worth, its decode nodes' headroom included."""
        work = self._typical_ms(self._fastest())
        speed = sum(self._speeds().values())
        for decode in self.fleet.decode:
            if decode.model is None or not decode.fresh:
                continue
            schedule = self.policy._schedule(decode, _TYPICAL_TOKENS, 0)
            if schedule is not None:
                speed += work / schedule.total_ms
        return speed

    def _send(self, request: Request, name: str, done_ms: float, alone: bool) -> bool:
        """The request goes to a prefill node, or where it is faster.

        Returns:
            Whether to the prefill node.
        """
        policy = self.policy
        fleet = Fleet((), list(self.decode.values()), self.fleet.now_ms)
        decode = least_loaded_decode(request, fleet)
        ttft_pf = done_ms + policy._step_with_ms(request, decode)
        if alone:
            # Nobody else waits: the least TTFT of all nodes.
            margin = min(policy.settings.alpha, 1.0)
            most = min(margin * ttft_pf, policy.settings.ttft_slo_ms)
            found = policy._deflection(request, self.decode.values(), None)
            if found is not None and found.ttft_ms <= most and found.ttft_ms < ttft_pf:
                self._deflect(request, found, ttft_pf)
                return False
        route = Route(name, decode.node, (), Estimates(ttft_pf), "prefill")
        self._routed(request, route)
        self.decode[decode.node] = replace(
            decode,
            expected=decode.expected + 1,
            expected_kv_tokens=decode.expected_kv_tokens + request.prompt_tokens,
        )
        return True

    def _offer(self, queue: list[Waiting], name: str) -> bool:
        """Give a decode node the request it gains most on, if there is one."""
        policy = self.policy
        node = self.decode[name]
        queued = policy._queued_ms(node)
        if queued is None or queued > policy.lead_ms:
            return False
        ahead = 0.0
        now = self.fleet.now_ms
        speed = sum(self._speeds().values())
        best: tuple[float, int, Deflection, float] | None = None
        for place, waiting in enumerate(queue[:_OFFERED]):
            request = waiting.request
            work = waiting.job.work_ms
            ttft_pf = (
                min(self._done_ms(request, self.drain).values())
                + ahead / speed
                + policy._step_with_ms(request, node)
            )
            ahead += work
            left = request.arrival_ms + policy.settings.ttft_slo_ms - now
            found = policy._deflection(
                request, (node,), ttft_pf, left if left > 0 else ttft_pf
            )
            if found is None or not found.accepted:
                continue
            if found.schedule.total_ms > policy.longest_ms:
                continue
            cost = found.schedule.total_ms / work
            if best is None or cost < best[0]:
                best = (cost, place, found, ttft_pf)
        if best is None:
            return False
        _, place, found, ttft_pf = best
        self._deflect(queue.pop(place).request, found, ttft_pf)
        return policy.several

    def _deflect(self, request: Request, found: Deflection, ttft_pf: float) -> None:
        node = found.node
        estimates = Estimates(ttft_pf, found.ttft_ms, found.schedule.step_ms)
        route = Route(
            node.node, node.node, found.schedule.chunks, estimates, "deflected"
        )
        self._routed(request, route)
        self.decode[node.node] = replace(
            node, deflected=[*node.deflected, PrefillWork(request.prompt_tokens)]
        )

    def _routed(self, request: Request, route: Route) -> None:
        self.routed.append((request, route))
