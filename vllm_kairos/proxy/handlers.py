# SPDX-License-Identifier: Apache-2.0
"""The two request handlers: decide, prefill, decode, and what goes wrong.

A request takes one of these paths, told to the client in ``x-kairos-route``:

``kept``          prefill node, then decode node with the KV handle
``deflected``     decode node alone, with the policy's chunk schedule
``whole``         decode node alone: P/D cannot carry the request
``prefill_only``  prefill node alone: nothing is decoded
``fallback``      decode node alone: the path planned has failed
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from vllm_kairos.core.fleet import Fleet, NodeState
from vllm_kairos.core.policies import Policy, RoundRobin
from vllm_kairos.core.policies.disagg import least_loaded_decode, least_ttft
from vllm_kairos.core.route import Route
from vllm_kairos.proxy.body import REMOTE_DECODE, Body, decode_prefill_reply
from vllm_kairos.proxy.fleet import Node
from vllm_kairos.proxy.forward import NodeFailure, PrefillLeg, Reply, open_reply
from vllm_kairos.proxy.job import Job, NoNode
from vllm_kairos.proxy.late import LateBinder
from vllm_kairos.proxy.ledger import Kind
from vllm_kairos.proxy.leg_params import LegParams
from vllm_kairos.proxy.prompt_length import Length
from vllm_kairos.proxy.release import HeldKV
from vllm_kairos.proxy.service import Service

logger = logging.getLogger(__name__)

#: Nodes a request may bring to a failure; one that fails every engine it
#: touches must not go round the whole fleet.
_MOST_REACHED = 2


class Dispatcher:
    """Decides where requests go and brings back the answer.

    Args:
        service: Fleet, session, health, tokenizer and metrics.

    Attributes:
        late: Holds requests of a policy that binds late.
    """

    def __init__(self, service: Service):
        self._service = service
        self._params = LegParams(service)
        self._handshake = service.settings.handshake
        self._policy: Policy = service.settings.make_policy()
        self._spare_prefill = RoundRobin()
        self._spare_decode = RoundRobin()
        self.late: LateBinder | None = None
        if self._policy.late:
            self.late = LateBinder(service, self._policy)
            service.stirred = self.late.stir

    async def measure(self, body: Body) -> Length:
        """Length of the prompts; not counted for a policy that is blind."""
        counter = self._service.counter
        if self._policy.blind:
            return counter.estimate(body)
        return await counter.count(body)

    async def dispatch(self, job: Job) -> Reply:
        """The answer of whichever node gives one.

        Raises:
            NoNode: None does.
        """
        fleet = self._service.fleet.view(time.monotonic())
        if not fleet.decode:
            raise NoNode("no decode node")
        if not fleet.prefill:
            self._service.metrics.fallback("no_prefill_node")
            return await self._alone(job, "fallback", self._decode_node(job, fleet))
        if not job.body.placeable or self._too_long(job):
            if job.body.prefill_only:
                state = self._prefill_node(job, fleet)
                return await self._prefill_only(job, self._service.fleet[state.node])
            return await self._alone(job, "whole", self._decode_node(job, fleet))
        length = job.length
        job.cached = self._service.fleet.cached(length.prefixes, length.tokens)
        if self.late is None:
            bound: Route | None = self._route(job, fleet)
        else:
            bound = await self.late.bind(job.request())
        if bound is None:
            self._service.metrics.fallback("no_prefill_node")
            return await self._alone(job, "fallback", self._decode_node(job))
        route = job.route = bound
        if route.deflected:
            job.label = "deflected"
            job.predicted_ms = route.estimates.ttft_decode_ms
            node = self._service.fleet[route.decode]
            params = None
            if route.chunks:
                params = self._params.scheduled(job, node, route.chunks)
            return await self._answer(job, node, Kind.DEFLECTED, params)
        job.predicted_ms = route.estimates.ttft_prefill_ms
        if job.body.prefill_only:
            # No decode leg follows; late binding has entered one.
            self._service.fleet[route.decode].ledger.close(job.ticket)
            return await self._prefill_only(job, self._service.fleet[route.prefill])
        return await self._kept(job, route)

    def _too_long(self, job: Job) -> bool:
        """Whether the engines will refuse it for its length.

        A prefill leg would pass, being asked for one token, and be work for
        nothing when the decode node then refuses.
        """
        most, limit = job.body.output_tokens, self._service.max_model_len
        if most is None or limit is None:
            return False
        prompt = job.length.tokens if job.length.exact else 0
        return prompt + most > limit

    def _route(self, job: Job, fleet: Fleet) -> Route:
        started = time.perf_counter()
        try:
            route = self._policy.route(job.request(), fleet)
            nodes = self._service.fleet
            logger.debug(
                "Request %s: %s, prefill %s, decode %s, chunks %s",
                job.ticket,
                route.reason,
                nodes[route.prefill].address,
                nodes[route.decode].address,
                route.chunks,
            )
        except Exception:
            # A request is served whatever a policy makes of its state.
            logger.exception("Policy %s failed, plain P/D instead", self._policy.name)
            route = Route(
                self._spare_prefill.pick(fleet.prefill).node,
                self._spare_decode.pick(fleet.decode).node,
                reason="policy_error",
            )
        self._service.metrics.decided(route, time.perf_counter() - started)
        return route

    async def _kept(self, job: Job, route: Route) -> Reply:
        service = self._service
        prefill, decode = service.fleet[route.prefill], service.fleet[route.decode]
        now, tokens = time.monotonic(), job.length.tokens
        decode.ledger.open(job.ticket, Kind.EXPECTED, tokens, now)
        try:
            found = await self._prefill(job, prefill, decode)
        finally:
            decode.ledger.close(job.ticket)
            self._stir()
        if isinstance(found, Reply):
            return found
        if found is None:
            return await self._alone(job, "fallback", self._decode_node(job))
        if self.late is not None or not decode.up:
            # Decode nodes fetch the KV themselves: any of them will do, and
            # much may have changed while the prompt was prefilled.
            decode = service.fleet[self._decode_node(job).node]
        params = self._params.named(job, decode, found) or None
        prefill.fetching(job.ticket, tokens, time.monotonic())
        try:
            held = HeldKV.of(job, prefill, found)
            return await self._answer(job, decode, Kind.AWAITING_KV, params, held)
        finally:
            prefill.fetched(job.ticket, time.monotonic())

    async def _prefill(
        self, job: Job, node: Node, decode: Node
    ) -> dict[str, Any] | Reply | None:
        """Run the prefill leg.

        Args:
            job: The request.
            node: Its prefill node.
            decode: The decode node it is to go to.

        Returns:
            What to send to the decode node; the node's verdict where it
            refuses the request; `None` where there is no KV to fetch.
        """
        service = self._service
        asked = REMOTE_DECODE if self._handshake else {}
        payload = job.body.prefill_leg(self._params.named(job, node, asked))
        self._open(job, node, Kind.PREFILL)
        leg = PrefillLeg(
            open_reply(
                service.session,
                node,
                job.body.path,
                payload,
                job.headers,
                service.liveness,
                service.settings.prefill_timeout_s,
            )
        )
        try:
            reply, data = await asyncio.shield(leg.task)
            if 400 <= reply.status < 500:
                return reply
            if not 200 <= reply.status < 300:
                reply.close()
                self._no_prefill(node, f"status_{reply.status}")
                return None
        except asyncio.CancelledError:
            service.releases.abandoned(leg, job, node, decode)
            raise
        except NodeFailure as failure:
            self._no_prefill(node, failure.reason)
            return None
        finally:
            node.ledger.close(job.ticket)
            node.residency.over(job.ticket, time.monotonic())
        node.residency.note(job.length.prefixes)
        try:
            answer = decode_prefill_reply(data)
        except ValueError as error:
            logger.warning("Node %s: %s", node.address, error)
            self._no_prefill(node, "unreadable")
            return None
        if answer.prompt_tokens is not None:
            service.counter.learn(job.body, answer.prompt_tokens)
        if not self._handshake:
            return {}
        if not answer.kv_transfer_params:
            # The first token ended the text, so the node kept no KV.
            service.metrics.fallback("no_kv")
            return None
        return answer.kv_transfer_params

    async def _prefill_only(self, job: Job, node: Node) -> Reply:
        job.label = "prefill_only"
        payload = job.body.with_params(self._params.named(job, node, {}))
        try:
            reply = await self._leg(job, node, Kind.PREFILL, payload)
        except NodeFailure as failure:
            self._failed(node, failure.reason)
        else:
            if reply.status < 500:
                return reply
            reply.close()
            node.ledger.close(job.ticket)
            self._failed(node, f"status_{reply.status}")
        self._service.metrics.fallback("prefill_failed")
        return await self._alone(job, "fallback", self._decode_node(job))

    async def _alone(self, job: Job, label: str, state: NodeState) -> Reply:
        """The whole request on one decode node, with a safe schedule."""
        job.label, job.predicted_ms = label, None
        node = self._service.fleet[state.node]
        if self._policy.blind and node.profile is not None:
            job.length = await self._service.counter.count(job.body)
        kind, params = self._params.safe(job, node)
        return await self._answer(job, node, kind, params)

    async def _answer(
        self,
        job: Job,
        node: Node,
        kind: Kind,
        params: dict[str, Any] | None,
        held: HeldKV | None = None,
    ) -> Reply:
        """The decode leg, moved to another node where one fails."""
        service = self._service
        tried: set[str] = set()
        reached = 0
        last: Reply | None = None
        status = 502
        while True:
            tried.add(node.address)
            payload = job.body.with_params(params)
            lost = True
            try:
                reply = await self._leg(job, node, kind, payload, held)
            except NodeFailure as failure:
                self._failed(node, failure.reason)
                lost = failure.reached
                status = 504 if failure.reason in ("silent", "timeout") else 502
            except BaseException:
                if last is not None:
                    last.close()
                raise
            else:
                if reply.status < 500:
                    if last is not None:
                        last.close()
                    return reply
                node.ledger.close(job.ticket)
                self._failed(node, f"status_{reply.status}")
                if last is not None:
                    last.close()
                last = reply
            reached += lost
            fleet = service.fleet.view(time.monotonic(), frozenset(tried))
            if last is not None and kind is Kind.AWAITING_KV and not fleet.decode:
                # It may be the KV that could not be fetched, its prefill node
                # being dead: the only decode node may do without it.
                fleet = service.fleet.view(time.monotonic())
            if lost:
                held = None
            if reached >= _MOST_REACHED or not fleet.decode:
                if held is not None:
                    service.releases.start(held, node, last=True)
                if last is not None:
                    return last
                raise NoNode(f"decode node {node.address} failed", status)
            service.metrics.fallback("decode_failed")
            node = service.fleet[self._decode_node(job, fleet).node]
            if lost or kind is not Kind.AWAITING_KV:
                job.label, job.predicted_ms = "fallback", None
                kind, params = self._params.safe(job, node)
            else:
                # It never reached an engine: the KV is still there to fetch.
                params = self._params.named(job, node, params or {}) or None

    async def _leg(
        self,
        job: Job,
        node: Node,
        kind: Kind,
        payload: bytes,
        held: HeldKV | None = None,
    ) -> Reply:
        """One exchange, in the node's ledger until the answer has ended.

        The entry is left open on return: `finish` closes it.

        Args:
            job: The request.
            node: Where it goes.
            kind: What it is to the node.
            payload: Body.
            held: The KV it is to fetch; freed where that comes to nothing.
        """
        self._open(job, node, kind)
        sent_s = time.monotonic()
        try:
            reply = await open_reply(
                self._service.session,
                node,
                job.body.path,
                payload,
                job.headers,
                self._service.liveness,
            )
        except BaseException as error:
            if held is not None:
                self._service.releases.unfetched(held, node, error, sent_s)
            node.ledger.close(job.ticket)
            node.residency.over(job.ticket, time.monotonic())
            raise
        node.residency.over(job.ticket, time.monotonic())
        if held is not None and reply.status >= 400:
            self._service.releases.start(held, node, last=reply.status >= 500)
        if reply.status == 200:
            node.residency.note(job.length.prefixes)
        node.ledger.decoding(job.ticket, time.monotonic())
        self._stir()
        return reply

    def _open(self, job: Job, node: Node, kind: Kind) -> None:
        """Count a dispatch to a node."""
        cached = 0
        if kind is not Kind.AWAITING_KV:
            cached = job.cached.get(node.address, 0)
            node.residency.expect(job.ticket, job.length.prefixes)
        tokens = job.length.tokens
        node.ledger.open(job.ticket, kind, tokens, time.monotonic(), cached)

    def finish(self, job: Job, reply: Reply | None) -> None:
        """The request is over, whichever way."""
        if reply is not None:
            reply.close()
            reply.node.ledger.close(job.ticket)
        if job.route is not None:
            if self.late is not None:
                # Of a request that was cut short before it went out.
                self.late.release(job.ticket, job.route)
            self._policy.finished(job.request(), job.route)
        self._stir()

    def _no_prefill(self, node: Node, reason: str) -> None:
        self._failed(node, reason)
        self._service.metrics.fallback("prefill_failed")

    def broke_off(self, reply: Reply, reason: str) -> None:
        """A node died in the middle of its answer."""
        self._failed(reply.node, reason)

    def _failed(self, node: Node, reason: str) -> None:
        self._service.metrics.error(node.address, reason)
        if reason in ("refused", "broken", "timeout", "silent"):
            self._service.health.failed(node, reason == "silent")
        else:
            self._service.health.suspect(node)

    def _prefill_node(self, job: Job, fleet: Fleet) -> NodeState:
        if self._policy.blind:
            return self._spare_prefill.pick(fleet.prefill)
        return least_ttft(job.request(), fleet)[0]

    def _decode_node(self, job: Job, fleet: Fleet | None = None) -> NodeState:
        if fleet is None:
            fleet = self._service.fleet.view(time.monotonic())
        if self._policy.blind:
            return self._spare_decode.pick(fleet.decode)
        return least_loaded_decode(job.request(), fleet)

    def _stir(self) -> None:
        """A node may be free for a request that waits."""
        if self.late is not None:
            self.late.stir()
