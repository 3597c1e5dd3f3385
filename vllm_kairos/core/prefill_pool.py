# SPDX-License-Identifier: Apache-2.0
"""Prefill nodes as one look at a queue sees them: who is done with what first.

Nodes may differ in speed, budget and link. Those that do not are of one kind:
a request takes as long on each of them, so that a choice among many nodes is
one among the first free of each kind.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kairos.core.fleet import NodeState, Request
from vllm_kairos.core.late_queue import Waiting
from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.prefill import marginal_prefill_ms
from vllm_kairos.core.step_model import StepModel

#: Prompt by which the speed of a node is told.
TYPICAL_TOKENS = 2048
#: A model may predict that a prompt takes no time.
LEAST_WORK_MS = 1e-9


class PrefillKind:
    """What prefill nodes have in common that serve a prompt alike.

    Args:
        model: Step model.
        budget_tokens: ``chi_p``.
        link: Egress link, `None` where transfers are free or not counted.

    Attributes:
        typical_ms: Time a prompt of `TYPICAL_TOKENS` takes of such a node.
    """

    __slots__ = ("_model", "_budget_tokens", "_link", "typical_ms")

    def __init__(self, model: StepModel, budget_tokens: int, link: LinkModel | None):
        self._model = model
        self._budget_tokens = budget_tokens
        self._link = link
        self.typical_ms = self.work_ms(TYPICAL_TOKENS)

    def work_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Time of such a node a prefill takes."""
        work_ms = marginal_prefill_ms(
            self._model, prompt_tokens, cached_tokens, self._budget_tokens
        )
        return max(work_ms, LEAST_WORK_MS)

    def transfer_ms(self, prompt_tokens: int) -> float:
        """Time of the KV transfer over a link without backlog."""
        return 0.0 if self._link is None else self._link.transfer_ms(prompt_tokens)

    def backlog_ms(self, backlog_bytes: float) -> float:
        """Time for which the link is taken already."""
        if self._link is None or backlog_bytes <= 0.0:
            return 0.0
        return 1e3 * backlog_bytes / self._link.bytes_per_s


class PrefillKinds:
    """Kinds by what makes them one, kept from look to look.

    Args:
        transfer: KV transfers are counted.
    """

    def __init__(self, transfer: bool):
        self._transfer = transfer
        self._kinds: dict[tuple[StepModel, int, LinkModel | None], PrefillKind] = {}

    def of(self, node: NodeState) -> PrefillKind:
        """The kind of a node that has a model."""
        assert node.model is not None
        link = node.link if self._transfer else None
        key = (node.model, node.budget_tokens, link)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = PrefillKind(*key)
        return kind


@dataclass(slots=True)
class Place:
    """A prefill node for a request.

    Attributes:
        node: Its id.
        work_ms: Time the prefill takes of it.
        done_ms: Time until the KV has left it, with all that comes before.
    """

    node: str
    work_ms: float
    done_ms: float


class PrefillPool:
    """The prefill nodes of one look.

    Args:
        nodes: Nodes with a model, at least one.
        kinds: Their kinds.
        drain_ms: Time until a node runs dry.

    Attributes:
        nodes: By id.
        drain_ms: By id: time until it runs dry, with what was sent there since.
        fastest: The kind by whose time work is counted.
        speed: Nodes of the fastest kind that all of them are worth.
    """

    def __init__(
        self,
        nodes: Sequence[NodeState],
        kinds: PrefillKinds,
        drain_ms: Callable[[NodeState], float],
    ):
        self.nodes = {n.node: n for n in nodes}
        self.drain_ms = {n.node: drain_ms(n) for n in nodes}
        self._kinds = {n.node: kinds.of(n) for n in nodes}
        self._order = {name: place for place, name in enumerate(self.nodes)}
        self._link_ms = {
            n.node: self._kinds[n.node].backlog_ms(n.link_backlog_bytes) for n in nodes
        }
        self.fastest = min(self._kinds.values(), key=lambda kind: kind.typical_ms)
        self.speed = sum(map(self._speed, self._kinds.values()))
        #: By id: time the node keeps for requests that wait for it.
        self._promised_ms: dict[str, float] = {}
        #: By kind: when the next prompt's KV could begin to leave the node but
        #: for its own prefill, soonest first.
        self._free: dict[PrefillKind, list[tuple[float, int, str]]] = {}
        for kind in dict.fromkeys(self._kinds.values()):
            self._sort(kind)

    def _speed(self, kind: PrefillKind) -> float:
        return self.fastest.typical_ms / kind.typical_ms

    def _free_ms(self, name: str) -> float:
        kept_ms = self._promised_ms.get(name, 0.0)
        return self.drain_ms[name] + kept_ms + self._link_ms[name]

    def _sort(self, kind: PrefillKind) -> None:
        free = [
            (self._free_ms(name), self._order[name], name)
            for name, its in self._kinds.items()
            if its is kind
        ]
        heapq.heapify(free)
        self._free[kind] = free

    @property
    def mean_drain_ms(self) -> float:
        """Time until they run dry, each by its speed."""
        weighted = (
            self._speed(self._kinds[name]) * drain_ms
            for name, drain_ms in self.drain_ms.items()
        )
        return sum(weighted) / self.speed

    def appraise(self, waiting: Waiting) -> None:
        """Work out what a request takes at best, once for each fastest kind."""
        fastest, job, request = self.fastest, waiting.job, waiting.request
        waiting.fastest, waiting.hopeless = fastest, False
        job.work_ms, with_transfer_ms = self._cost(waiting, fastest)
        job.deadline_ms = waiting.due_ms - (with_transfer_ms - job.work_ms)
        for name in request.cached:
            if name in self.nodes:
                job.work_ms = min(job.work_ms, self._cached_ms(request, name))

    def on(self, name: str, waiting: Waiting) -> Place:
        """A node as the place for a request."""
        request, kind = waiting.request, self._kinds[name]
        if request.cached and name in request.cached:
            work_ms = self._cached_ms(request, name)
            cost_ms = work_ms + kind.transfer_ms(request.prompt_tokens)
        else:
            work_ms, cost_ms = self._cost(waiting, kind)
        return Place(name, work_ms, self._free_ms(name) + cost_ms)

    def soonest(self, waiting: Waiting) -> Place:
        """The node that is first done with a request."""
        least_ms = float("inf")
        for kind, free in self._free.items():
            work_ms, cost_ms = waiting.costs.get(kind) or self._cost(waiting, kind)
            done_ms = free[0][0] + cost_ms
            if done_ms < least_ms:
                least_ms, least_work_ms, name = done_ms, work_ms, free[0][2]
        best = Place(name, least_work_ms, least_ms)
        for holder in waiting.request.cached:
            if holder in self.nodes:
                there = self.on(holder, waiting)
                if there.done_ms < best.done_ms:
                    best = there
        return best

    def send(self, place: Place) -> None:
        """A request has gone to its place."""
        self.drain_ms[place.node] += place.work_ms
        self._moved(place.node)

    def promise(self, place: Place) -> None:
        """A request waits for its place: the next ones come behind it."""
        kept_ms = self._promised_ms.get(place.node, 0.0)
        self._promised_ms[place.node] = kept_ms + place.work_ms
        self._moved(place.node)

    def forget_promises(self) -> None:
        """Those that wait may go elsewhere as well."""
        names, self._promised_ms = self._promised_ms, {}
        for kind in dict.fromkeys(self._kinds[name] for name in names):
            self._sort(kind)

    def _moved(self, name: str) -> None:
        """A node is free later than before."""
        kind = self._kinds[name]
        free = self._free[kind]
        if free[0][2] == name:
            heapq.heapreplace(free, (self._free_ms(name), free[0][1], name))
        else:
            self._sort(kind)

    def _cost(self, waiting: Waiting, kind: PrefillKind) -> tuple[float, float]:
        """Time of a node of a kind, and that with the transfer; kept."""
        cost = waiting.costs.get(kind)
        if cost is None:
            tokens = waiting.request.prompt_tokens
            work_ms = kind.work_ms(tokens)
            cost = work_ms, work_ms + kind.transfer_ms(tokens)
            waiting.costs[kind] = cost
        return cost

    def _cached_ms(self, request: Request, name: str) -> float:
        """Time of a node that holds a part of the prompt."""
        cached = request.cached[name]
        return self._kinds[name].work_ms(request.prompt_tokens, cached)
