# SPDX-License-Identifier: Apache-2.0
"""Nodes, links and a dispatcher in virtual time: the event loop.

An event is ``(time, number, function, argument)`` on a heap; the number makes
the order of simultaneous events their order of creation, so that a run
depends on its inputs only.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm_kairos.core.chunk_rule import ChunkRule
from vllm_kairos.core.policies.base import (
    Decoding,
    Move,
    NodePlan,
    PlanContext,
    Policy,
)
from vllm_kairos.core.route import Route
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.files import UserError
from vllm_kairos.sim.cluster_settings import ClusterSettings, ModelError
from vllm_kairos.sim.dispatch import EagerDispatcher, LateDispatcher
from vllm_kairos.sim.engine_request import EngineRequest, Leg, Phase, UserRequest
from vllm_kairos.sim.links import Links
from vllm_kairos.sim.node import Node
from vllm_kairos.sim.queues import NodeLimits
from vllm_kairos.sim.reports import NodeReports
from vllm_kairos.sim.traces import TraceRow

#: Virtual time without an arrival or a token after which a cluster is stuck.
_STUCK_MS = 3_600_000.0


class SimNode(Node):
    """A node with its place in the plan, its clock and its reports."""

    __slots__ = (
        "plan",
        "model",
        "busy",
        "step_start_ms",
        "step_end_ms",
        "predicted_ms",
        "ended",
        "reports",
        "steps",
        "noise",
    )

    def __init__(
        self, plan: NodePlan, model: StepModel, limits: NodeLimits, rule: ChunkRule
    ):
        super().__init__(plan.name, limits, rule)
        self.plan = plan
        self.model = model
        self.busy = False
        self.step_start_ms = 0.0
        self.step_end_ms = 0.0
        self.predicted_ms = 0.0
        #: A step not yet judged: what it held, predicted and true time.
        self.ended: tuple[StepLoad, float, float] | None = None
        self.reports: NodeReports
        self.steps = 0
        self.noise: random.Random | None = None


class Cluster:
    """One run of one policy over one workload.

    Args:
        settings: The cluster.
        policy: Decides; one object a run, it has state.
        rows: The workload, sorted by arrival.
        seed: Of the model error.

    Attributes:
        now_ms: Virtual time.
        nodes: By name, in the order of the plan.
        requests: Every request of the run.
        on_step: Called after every step with node, load and its time, if set.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        policy: Policy,
        rows: Sequence[TraceRow],
        seed: int = 0,
    ):
        self.settings = settings
        self.policy = policy
        self.now_ms = 0.0
        self.links = Links(settings.link)
        self.requests: list[UserRequest] = []
        self.on_step: Callable[[SimNode, StepLoad, float], None] | None = None
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._number = 0
        self._open = 0
        #: When the cluster is stuck, unless something happens before.
        self._stuck_ms = math.inf
        self._held: dict[tuple[UserRequest, str], tuple[SimNode, EngineRequest]] = {}
        self._rows = rows
        plans = policy.plan(self._context())
        self.nodes: dict[str, SimNode] = {}
        for place, plan in enumerate(plans):
            self.nodes[plan.name] = self._make_node(plan, f"{seed}/{place}")
        self.prefill = [n for n in self.nodes.values() if n.plan.prefills]
        self.decode = [n for n in self.nodes.values() if n.plan.decodes]
        default = LateDispatcher if policy.late else EagerDispatcher
        make = settings.dispatcher or default
        self.dispatcher = make(self, policy)
        self._moves = type(policy).moves is not Policy.moves

    def _context(self) -> PlanContext:
        rows = self._rows
        span_s = rows[-1].arrived_at_s if rows else 0.0
        return PlanContext(
            self.settings.prefill_nodes,
            self.settings.decode_nodes,
            self.settings.model,
            self.settings.limits.budget_tokens,
            [(row.prompt_tokens, row.output_tokens) for row in rows],
            len(rows) / span_s if span_s > 0 else None,
        )

    def _make_node(self, plan: NodePlan, seed: str) -> SimNode:
        limits = self.settings.limits
        if plan.budget_tokens is not None:
            limits = replace(limits, budget_tokens=plan.budget_tokens)
        model = self.settings.models.get(plan.name, self.settings.model)
        if self.settings.rule is not None:
            rule = self.settings.rule(plan.name)
        else:
            rule = self.policy.chunk_rule(model)
        node = SimNode(plan, model, limits, rule)
        node.reports = NodeReports(node, self)
        if self.settings.error.noise > 0:
            node.noise = random.Random(seed)
        return node

    # ----------------------------------------------------------------- loop

    def at(self, time_ms: float, call: Callable[[Any], None], argument: Any) -> None:
        """Call something at a time, with `now_ms` set to it."""
        self._number += 1
        heapq.heappush(self._events, (time_ms, self._number, call, argument))

    def run(self) -> list[UserRequest]:
        """Serve the workload to its end.

        Raises:
            UserError: A request does not fit a node's KV cache, or nodes that
                are full wait for one another.
        """
        rows = self._rows
        limits = self.settings.limits
        most = limits.kv_tokens // limits.block_size * limits.block_size
        for index, row in enumerate(rows):
            tokens = row.prompt_tokens + row.output_tokens
            if tokens > most:
                raise UserError(
                    f"request {index}: {row.prompt_tokens} prompt and "
                    f"{row.output_tokens} output tokens are more than the "
                    f"{most} KV tokens of a node"
                )
        self.requests = [UserRequest(i, row) for i, row in enumerate(rows)]
        self._open = len(self.requests)
        events = self._events
        arrivals = iter(self.requests)
        coming = next(arrivals, None)
        while events or coming is not None:
            if coming is not None and (not events or coming.arrival_ms <= events[0][0]):
                self.now_ms = coming.arrival_ms
                self._stuck_ms = coming.arrival_ms + _STUCK_MS
                self.dispatcher.arrive(coming)
                coming = next(arrivals, None)
                continue
            time_ms, _, call, argument = heapq.heappop(events)
            if time_ms < self.now_ms:
                raise RuntimeError("an event lies in the past")
            if time_ms > self._stuck_ms:
                raise UserError(
                    f"policy {self.policy.name}: an hour passes without an arrival or "
                    f"a token, at {self.now_ms / 1e3:.0f} s with {self._open} of "
                    f"{len(self.requests)} requests open, expected faster steps and "
                    "links, or more KV tokens for prompts that never fit"
                )
            self.now_ms = time_ms
            call(argument)
        if self._open:
            raise self._stuck()
        return self.requests

    def _stuck(self) -> Exception:
        """Why requests were never finished."""
        full = [node.name for node in self.nodes.values() if node.waiting]
        if not full:
            return RuntimeError(f"{self._open} requests were never finished")
        # Prefilled KV stays until it is read, which takes blocks elsewhere, and
        # a node that keeps some and wants more waits; vLLM's connectors drop it
        # after minutes, and the requests with it.
        return UserError(
            f"policy {self.policy.name}: {self._open} of {len(self.requests)} "
            f"requests are stuck for want of KV blocks on {', '.join(full)}, expected "
            f"nodes with more than {self.settings.limits.kv_tokens} KV tokens, or a "
            "lower rate"
        )

    # ------------------------------------------------------------- dispatch

    def dispatch(self, user: UserRequest, route: Route) -> None:
        """Send a request where a route says."""
        user.route = route
        if route.rejected:
            user.rejected = True
            self._open -= 1
            return
        node = self.nodes[route.prefill]
        if route.deflected:
            user.deflected = not node.plan.prefill_pool
            self._add(node, user, Leg.WHOLE, chunks=route.chunks)
        else:
            self._add(node, user, Leg.PREFILL)

    def _add(
        self,
        node: SimNode,
        user: UserRequest,
        leg: Leg,
        *,
        chunks: tuple[int, ...] = (),
        source: SimNode | None = None,
        outputs: int = 0,
    ) -> None:
        request = EngineRequest(
            user,
            leg,
            outputs=outputs,
            chunks=chunks,
            block_size=node.limits.block_size,
            priority=self.dispatcher.priority(user),
        )
        request.due_ms = user.arrival_ms + node.limits.held_ms
        request.source = source.name if source else None
        node.reports.before_change(self.now_ms)
        node.add(request)
        if not node.busy:
            self._start_step(node)

    # ----------------------------------------------------------------- steps

    def _start_step(self, node: SimNode) -> None:
        now = self.now_ms
        some = node.schedule(now)
        if node.ended is not None:
            # As in an engine: a step is judged beside the one after it, which
            # is put together without what the first one tells.
            node.rule.observe(*node.ended)
            node.ended = None
        for request, tokens in node.loads:
            self._load(node, request, tokens)
        if not some and node.preempted:
            # All that ran was put back, and nobody waiting was looked at: an
            # engine with requests goes round again at once.
            self._start_step(node)
            return
        if not some:
            node.busy = False
            return
        load = node.load
        predicted = node.model.load_ms(load)
        if node.plan.group is not None:
            predicted *= self._shared_gpu_scale(node)
        error = self.settings.error
        true_ms = predicted * (1.0 + error.bias)
        if node.noise is not None:
            true_ms *= math.exp(node.noise.gauss(0.0, error.noise))
        node.busy = True
        node.steps += 1
        node.step_start_ms = now
        node.predicted_ms = predicted
        node.step_end_ms = now + true_ms
        for request in node.joined:
            if request.user.prefill_start_ms < 0:
                request.user.prefill_start_ms = now
        self._number += 1
        heapq.heappush(
            self._events, (node.step_end_ms, self._number, self._end_step, node)
        )

    def _shared_gpu_scale(self, node: SimNode) -> float:
        """How much longer a step takes while the GPU is shared right now."""
        plan = node.plan
        for other in self.nodes.values():
            if other is not node and other.plan.group == plan.group and other.busy:
                return (
                    plan.prefill_scale
                    if node.load.prefill_tokens
                    else plan.decode_scale
                )
        return 1.0

    def _end_step(self, node: SimNode) -> None:
        now = self.now_ms
        node.reports.before_change(now)
        load = node.load
        start = node.step_start_ms
        node.ended = load, node.predicted_ms, now - start
        got, done = node.finish_step()
        if got:
            self._stuck_ms = now + _STUCK_MS
        for request in got:
            user = request.user
            if request.leg == Leg.PREFILL:
                user.prefill_end_ms = now
                continue
            tokens = user.token_ms
            if not tokens:
                self._first_token(request, start)
            tokens.append(now)
        if self.on_step is not None:
            self.on_step(node, load, now - start)
        for request in done:
            self._leg_done(node, request)
        if self._moves:
            self._move(node)
        self._start_step(node)

    def _first_token(self, request: EngineRequest, step_start_ms: float) -> None:
        user = request.user
        if request.leg == Leg.WHOLE:
            # The step that ends the prompt gives the token: no transfer, no
            # wait for a decode step.
            user.prefill_end_ms = user.kv_arrived_ms = self.now_ms
            user.decode_start_ms = self.now_ms
        else:
            user.decode_start_ms = step_start_ms
        self.dispatcher.first_token(user)

    def _leg_done(self, node: SimNode, request: EngineRequest) -> None:
        user = request.user
        if request.leg != Leg.PREFILL:
            user.finished += 1
            self._open -= 1
            self.dispatcher.finished(user)
            return
        assert user.route is not None
        target = self.nodes[user.route.decode]
        self.dispatcher.prefilled(user)
        self._hand_over(node, request, target, outputs=0)

    # ------------------------------------------------------------- transfers

    def _hand_over(
        self, node: SimNode, request: EngineRequest, target: SimNode, outputs: int
    ) -> None:
        """A leg's KV is to be read by another node."""
        self._held[request.user, target.name] = (node, request)
        self._add(target, request.user, Leg.DECODE, source=node, outputs=outputs)

    def _load(self, node: SimNode, request: EngineRequest, tokens: int) -> None:
        """The engine asks for remote KV: it has blocks for it now."""
        source, held = self._held.pop((request.user, node.name))
        if source.plan.group is not None and source.plan.group == node.plan.group:
            end = self.now_ms
        else:
            end = self.links.send(self.now_ms, source.name, node.name, tokens)
        self.at(end, self._loaded, (node, request, source, held))

    def _loaded(
        self, what: tuple[SimNode, EngineRequest, SimNode, EngineRequest]
    ) -> None:
        node, request, source, held = what
        now = self.now_ms
        source.reports.before_change(now)
        source.release(held)
        node.reports.before_change(now)
        node.kv_arrived(request)
        if request.user.kv_arrived_ms < 0:
            request.user.kv_arrived_ms = now
        for each in (node, source):
            if not each.busy and not each.idle:
                self._start_step(each)

    # ------------------------------------------------------------ migrations

    def _move(self, node: SimNode) -> None:
        """Let the policy move decodes off the node whose step has ended."""
        decodes = [
            Decoding(
                request.user.index,
                request.tokens,
                len(request.user.token_ms),
                request.user.token_ms[0],
                self.now_ms,
            )
            for request in node.running
            if request.phase == Phase.DECODE and request.user.token_ms
        ]
        fleet = self.dispatcher.fleet(None)
        for move in self.policy.moves(node.name, decodes, fleet):
            self._migrate(node, move)

    def _migrate(self, node: SimNode, move: Move) -> None:
        for request in node.running:
            if request.user.index == move.request and not request.user.finished:
                break
        else:
            return
        target = self.nodes[move.node]
        node.withdraw(request)
        request.user.migrations += 1
        outputs = len(request.user.token_ms)
        self._hand_over(node, request, target, outputs=outputs)


__all__ = ["Cluster", "ClusterSettings", "ModelError", "SimNode"]
