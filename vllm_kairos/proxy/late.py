# SPDX-License-Identifier: Apache-2.0
"""Late binding: requests wait here until their policy sends them somewhere.

A look at the queue follows every event that could free a node: an arrival, a
prefill leg done, a first byte, a request over, a state report, a node back;
and once a heartbeat while requests wait, since time alone works queues off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from vllm_kairos.core.fleet import Fleet, Request
from vllm_kairos.core.policies import Policy, RoundRobin
from vllm_kairos.core.route import Route
from vllm_kairos.proxy.ledger import Kind
from vllm_kairos.proxy.service import Service

logger = logging.getLogger(__name__)

#: Longest time between two looks while requests wait.
HEARTBEAT_S = 0.1
#: A look is followed by a pause so many times as long, so that a storm of
#: reports leaves the event loop to the requests.
_PAUSE = 4.0
#: Requests sent in one look. Where there are more the event loop gets a turn
#: before the next look, which sees what has changed meanwhile.
_BATCH = 32


@dataclass(slots=True)
class _Held:
    """A request that waits.

    Attributes:
        request: As the policy sees it.
        bound: Takes its route; `None` where no prefill node is left.
    """

    request: Request
    bound: asyncio.Future[Route | None]


class LateBinder:
    """Holds requests in the policy's queue and hands out its routes.

    Args:
        service: Fleet and metrics.
        policy: A policy that binds late.
    """

    def __init__(self, service: Service, policy: Policy):
        self._service = service
        self._policy = policy
        self._held: dict[str, _Held] = {}
        self._next: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        self._rested_s = 0.0
        self._spare_prefill = RoundRobin()
        self._spare_decode = RoundRobin()
        service.metrics.watch_queue(self.classes)
        # A request waits no longer than this and a heartbeat, whatever its
        # policy makes of it.
        self._oldest_ms = policy.oldest_ms

    def __len__(self) -> int:
        return len(self._held)

    def oldest_s(self, now_s: float) -> float:
        """Age of the request that has waited longest."""
        first = next(iter(self._held.values()), None)
        return 0.0 if first is None else now_s - first.request.arrival_ms / 1e3

    def classes(self) -> tuple[int, int]:
        """Requests that wait: those to be in time, and those late already."""
        late = self._policy.waiting_late
        return len(self._held) - late, late

    async def bind(self, request: Request) -> Route | None:
        """Wait until the policy sends the request somewhere.

        Its dispatch is in the ledger of both nodes when this returns. A caller
        that is cancelled leaves nothing behind.

        Returns:
            The route, `None` where no prefill node is left.
        """
        name = request.request_id
        held = _Held(request, asyncio.get_running_loop().create_future())
        self._held[name] = held
        try:
            self._policy.enqueue(request)
            self.stir()
            return await held.bound
        except BaseException:
            if held.bound.done() and not held.bound.cancelled():
                route = held.bound.result()
                if route is not None:
                    self.release(name, route)
            raise
        finally:
            if self._held.pop(name, None) is not None:
                self._policy.withdraw(name)

    def release(self, name: str, route: Route) -> None:
        """Take a dispatch out of the ledger of both nodes."""
        for address in (route.prefill, route.decode):
            self._service.fleet[address].ledger.close(name)

    def stir(self) -> None:
        """Something has happened that could free a node."""
        if self._held:
            self._look_at(max(time.monotonic(), self._rested_s))

    def _look_at(self, when_s: float) -> None:
        if self._next is not None:
            if self._next_s <= when_s:
                return
            self._next.cancel()
        loop = asyncio.get_running_loop()
        self._next_s = when_s
        self._next = loop.call_later(max(0.0, when_s - time.monotonic()), self._look)

    def _look(self) -> None:
        self._next = None
        if not self._held:
            return
        started_s = time.monotonic()
        try:
            self._look_now(started_s)
        finally:
            # Whatever went wrong in this look, there is another.
            if self._held:
                self._look_at(started_s + HEARTBEAT_S)

    def _look_now(self, started_s: float) -> None:
        fleet = self._service.fleet.view(started_s)
        try:
            routed = self._routes(fleet)
        except Exception:
            # A request is served whatever a policy makes of its state.
            logger.exception("Policy %s failed, plain P/D instead", self._policy.name)
            routed = self._plain(fleet)
        took_s = time.monotonic() - started_s
        for request, route in routed:
            self._send(request, route, started_s, took_s / len(routed))
        ended_s = time.monotonic()
        # One that was cut short goes on as soon as others have had as long.
        whole = len(routed) < _BATCH
        pause = _PAUSE if whole else 1.0
        self._rested_s = ended_s + pause * (ended_s - started_s)
        if not whole:
            self.stir()

    def _routes(self, fleet: Fleet) -> list[tuple[Request, Route | None]]:
        """What the policy sends now, and what has waited too long."""
        if not fleet.prefill or not fleet.decode:
            return [(held.request, None) for held in self._held.values()]
        routed: list[tuple[Request, Route | None]] = []
        routed += self._policy.assign(fleet, _BATCH)
        sent = {request.request_id for request, _ in routed}
        oldest_ms = fleet.now_ms - self._oldest_ms
        for name, held in self._held.items():
            if held.request.arrival_ms > oldest_ms or len(routed) >= _BATCH:
                break
            if name not in sent:
                self._policy.withdraw(name)
                routed.append((held.request, self._policy.route(held.request, fleet)))
        for _, route in routed:
            if route is not None:
                # A node that is not there is the policy's failure.
                fleet.node(route.prefill)
                fleet.node(route.decode)
        return routed

    def _plain(self, fleet: Fleet) -> list[tuple[Request, Route | None]]:
        """Every request on nodes in turn."""
        return [
            (
                held.request,
                Route(
                    self._spare_prefill.pick(fleet.prefill).node,
                    self._spare_decode.pick(fleet.decode).node,
                    reason="policy_error",
                ),
            )
            for held in self._held.values()
        ]

    def _send(
        self, request: Request, route: Route | None, now_s: float, took_s: float
    ) -> None:
        held = self._held.pop(request.request_id, None)
        self._policy.withdraw(request.request_id)
        if held is None or held.bound.done():
            return
        # First of all: nothing below may keep the request waiting.
        held.bound.set_result(route)
        if route is not None:
            waited_s = now_s - request.arrival_ms / 1e3
            slo_s = self._policy.settings.ttft_slo_ms / 1e3
            metrics = self._service.metrics
            metrics.decided(route, took_s)
            metrics.waited("in_time" if waited_s <= slo_s else "late", waited_s)
            self._note(request, route, now_s)

    def _note(self, request: Request, route: Route, now_s: float) -> None:
        """Count the dispatch at once: the next look may come before it is out."""
        name, tokens = request.request_id, request.prompt_tokens
        prefill = self._service.fleet[route.prefill].ledger
        kind = Kind.DEFLECTED if route.deflected else Kind.PREFILL
        cached = request.cached.get(route.prefill, 0)
        prefill.open(name, kind, tokens, now_s, cached)
        if route.deflected:
            return
        self._service.fleet[route.decode].ledger.open(
            name, Kind.EXPECTED, tokens, now_s
        )

    def stop(self) -> None:
        """No more looks."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
