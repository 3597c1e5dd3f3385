# SPDX-License-Identifier: Apache-2.0
"""Between arrivals and nodes: what a policy is shown, and when it is asked.

`Dispatcher` keeps the proxy's ledger and shows a policy its fleet.
`EagerDispatcher` binds a request to its nodes when it arrives, as the paper
does. A dispatcher that holds requests back overrides `arrive` and the hooks,
which are called at every event a queue could wait for.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.policies.base import Policy
from vllm_kairos.core.prefill import reported_work_ms, worked_off_ms
from vllm_kairos.core.route import Route
from vllm_kairos.sim.engine_request import EngineRequest, Leg, UserRequest
from vllm_kairos.sim.reports import state_of

if TYPE_CHECKING:
    from vllm_kairos.sim.cluster import Cluster, SimNode


class Ledger:
    """What was dispatched to the nodes and no report shows yet.

    The simulator's nodes count a request as soon as it is handed to them, so a
    heartbeat later than the dispatch shows it.
    """

    def __init__(self) -> None:
        #: By node: when, kind and tokens of each dispatch.
        self.sent: dict[str, list[tuple[float, str, int]]] = {}
        #: By node: deflected requests without a first token.
        self.deflected: dict[str, dict[int, PrefillWork]] = {}
        #: By node: requests that will decode there, in prefill elsewhere.
        self.expected: dict[str, dict[int, int]] = {}

    def note(self, now_ms: float, user: UserRequest, route: Route) -> None:
        """A request is being dispatched."""
        tokens = user.row.prompt_tokens
        if route.deflected:
            work = PrefillWork(tokens)
            self.deflected.setdefault(route.decode, {})[user.index] = work
            kind = "deflected" if route.chunks else "prefill"
        else:
            self.expected.setdefault(route.decode, {})[user.index] = tokens
            kind = "prefill"
        self.sent.setdefault(route.prefill, []).append((now_ms, kind, tokens))

    def prefilled(self, now_ms: float, user: UserRequest, route: Route) -> None:
        """Its prefill leg is done and its decode leg goes out."""
        self.expected[route.decode].pop(user.index, None)
        entry = (now_ms, "awaiting", user.row.prompt_tokens)
        self.sent.setdefault(route.decode, []).append(entry)

    def first_token(self, user: UserRequest, route: Route) -> None:
        """The proxy sees its first token."""
        if route.deflected:
            self.deflected[route.decode].pop(user.index, None)


class Dispatcher(abc.ABC):
    """Shows a policy its fleet and hands its routes to the cluster.

    Args:
        cluster: The cluster.
        policy: The policy.
    """

    def __init__(self, cluster: Cluster, policy: Policy):
        self.cluster = cluster
        self.policy = policy
        self.ledger = Ledger()
        self._requests: dict[int, Request] = {}
        self._show = _SHOW[policy.sees]
        self._nameless: Fleet | None = None
        #: By node: the report last shown, and what was shown of it.
        self._shown: dict[str, tuple[NodeState, NodeState]] = {}

    # ----------------------------------------------------------------- hooks

    @abc.abstractmethod
    def arrive(self, user: UserRequest) -> None:
        """A request arrives."""

    def priority(self, user: UserRequest) -> float:
        """Its priority on nodes that go by one: lower is sooner."""
        return user.arrival_ms

    def prefilled(self, user: UserRequest) -> None:
        """A prefill leg is done; its decode leg is about to go out."""
        assert user.route is not None
        self.ledger.prefilled(self.cluster.now_ms, user, user.route)

    def first_token(self, user: UserRequest) -> None:
        """A request gives its first token."""
        assert user.route is not None
        self.ledger.first_token(user, user.route)
        self._shown.pop(user.route.decode, None)

    def finished(self, user: UserRequest) -> None:
        """A request has given its last token."""
        request = self._requests.pop(user.index, None)
        if request is not None and user.route is not None:
            self.policy.finished(request, user.route)

    # ------------------------------------------------------------ for policies

    def send(self, user: UserRequest, route: Route) -> None:
        """Dispatch a request and note it in the ledger."""
        if not route.rejected:
            self.ledger.note(self.cluster.now_ms, user, route)
            self._shown.pop(route.decode, None)
        self.cluster.dispatch(user, route)

    def request_of(self, user: UserRequest) -> Request:
        """The request as a policy sees it."""
        row = user.row
        cached: dict[str, int] = {}
        if row.hash_ids and self.cluster.settings.limits.prefix_caching:
            limits = self.cluster.settings.limits
            probe = EngineRequest(user, Leg.WHOLE, block_size=limits.block_size)
            for node in self.cluster.nodes.values():
                tokens = node.kv.find_prefix(probe)
                if tokens:
                    cached[node.name] = tokens
        request = Request(
            row.prompt_tokens,
            str(user.index),
            user.arrival_ms,
            row.output_tokens,
            cached,
            row.session,
            row.turn,
        )
        self._requests[user.index] = request
        return request

    def fleet(self, user: UserRequest | None) -> Fleet:
        """The nodes as the policy may see them now."""
        cluster = self.cluster
        now = cluster.now_ms
        if self._nameless is not None:
            return self._nameless
        show = self._show
        states = {n.name: show(self, n, now) for n in cluster.nodes.values()}
        fleet = Fleet(
            [states[n.name] for n in cluster.prefill],
            [states[n.name] for n in cluster.decode],
            now,
        )
        if self.policy.blind:
            # It looks at names only: one fleet serves the whole run.
            self._nameless = fleet
        return fleet

    def _reported(self, node: SimNode, now_ms: float) -> NodeState:
        """The last report; a node with a deflected request in flight says so.

        Between heartbeats most nodes of a large fleet look the same to many
        requests: what was shown is kept until the report or the ledger changes.
        """
        state = node.reports.last(now_ms)
        kept = self._shown.get(node.name)
        if kept is not None and kept[0] is state:
            return kept[1]
        flying = self.ledger.deflected.get(node.name)
        shown = state
        if flying or state.deflected:
            shown = replace(state, deflected=list(flying.values()) if flying else [])
        self._shown[node.name] = state, shown
        return shown

    def _counted(self, node: SimNode, now_ms: float) -> NodeState:
        """The last report and what was sent since."""
        ledger = self.ledger
        state = node.reports.last(now_ms)
        beat = node.reports.beat_ms
        left_ms = state.step_in_flight_ms - (now_ms - beat)
        copy = replace(
            state,
            step_in_flight_ms=max(0.0, left_ms),
            link_backlog_bytes=self.cluster.links.backlog_bytes(now_ms, node.name),
        )
        expected = ledger.expected.get(node.name)
        if expected:
            copy.expected = len(expected)
            copy.expected_kv_tokens = sum(expected.values())
        sent_ms: float | None = None
        sent = ledger.sent.get(node.name)
        if sent:
            sent = ledger.sent[node.name] = [e for e in sent if e[0] >= beat]
            for at_ms, kind, tokens in sent:
                if kind == "awaiting":
                    copy.awaiting_kv += 1
                    copy.awaiting_kv_tokens += tokens
                    continue
                if sent_ms is None:
                    sent_ms = at_ms
                if kind == "prefill":
                    copy.prefills = [*copy.prefills, PrefillWork(tokens)]
                else:
                    copy.deflected = [*copy.deflected, PrefillWork(tokens)]
        if left_ms < 0.0:
            ago_ms = None if sent_ms is None else now_ms - sent_ms
            reported_ms = reported_work_ms(
                state.model,
                state.prefills,
                state.budget_tokens,
                state.decodes,
                bool(state.deflected),
            )
            copy.worked_off_ms = worked_off_ms(-left_ms, reported_ms, ago_ms)
        return copy

    def _true(self, node: SimNode, now_ms: float) -> NodeState:
        """The state as it is."""
        state = state_of(node, self.cluster, now_ms)
        state.link_backlog_bytes = self.cluster.links.backlog_bytes(now_ms, node.name)
        expected = self.ledger.expected.get(node.name)
        if expected:
            state.expected = len(expected)
            state.expected_kv_tokens = sum(expected.values())
        return state


_SHOW: dict[str, Callable[[Dispatcher, SimNode, float], NodeState]] = {
    "reports": Dispatcher._reported,
    "ledger": Dispatcher._counted,
    "truth": Dispatcher._true,
}


class EagerDispatcher(Dispatcher):
    """Routes every request when it arrives (the paper's way)."""

    def arrive(self, user: UserRequest) -> None:
        route = self.policy.route(self.request_of(user), self.fleet(user))
        self.send(user, route)


class LateDispatcher(Dispatcher):
    """Lets requests wait in the policy's queue, as the live proxy does.

    The queue is looked at when the proxy sees something happen: an arrival, a
    prefill leg done, a first token, a request finished; and once a heartbeat
    while requests wait.
    """

    def __init__(self, cluster: Cluster, policy: Policy):
        super().__init__(cluster, policy)
        self._users: dict[str, UserRequest] = {}
        self._timer = False

    def arrive(self, user: UserRequest) -> None:
        request = self.request_of(user)
        self._users[request.request_id] = user
        self.policy.enqueue(request)
        self._look()

    def prefilled(self, user: UserRequest) -> None:
        super().prefilled(user)
        self._look_soon()

    def first_token(self, user: UserRequest) -> None:
        super().first_token(user)
        self._look_soon()

    def finished(self, user: UserRequest) -> None:
        super().finished(user)
        self._look_soon()

    def _look_soon(self) -> None:
        """After the event at hand has been dealt with."""
        if self.policy.waiting:
            self.cluster.at(self.cluster.now_ms, self._look, None)

    def _look(self, _: object = None) -> None:
        if not self.policy.waiting:
            return
        for request, route in self.policy.assign(self.fleet(None)):
            self.send(self._users.pop(request.request_id), route)
        if self.policy.waiting and not self._timer:
            self._timer = True
            wait_ms = self.cluster.settings.heartbeat_ms or 1.0
            self.cluster.at(self.cluster.now_ms + wait_ms, self._tick, None)

    def _tick(self, _: object) -> None:
        self._timer = False
        self._look()
