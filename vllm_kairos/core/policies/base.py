# SPDX-License-Identifier: Apache-2.0
"""What a policy is. A new one is a file beside this with one class in it.

The live proxy and the simulator make policies with `make_policy` and call
`Policy.route`; no policy exists twice.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from vllm_kairos.core.chunk_rule import ChunkRule, PlannedRule
from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_model import StepModel


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How a policy wants one node set up. The live proxy takes nodes as they are.

    Attributes:
        name: Id.
        prefills: Takes ordinary prefills.
        decodes: Decodes, and may prefill what it decodes.
        prefill_pool: Counts as a prefill node: a prefill on any other is a
            deflection.
        budget_tokens: Chunk size, ``max_num_batched_tokens``; `None` keeps the
            cluster's.
        group: Nodes of one group share a GPU: KV moves between them for
            nothing.
        prefill_scale: Factor on the time of steps that prefill while another
            node of the group is busy.
        decode_scale: The same for steps that only decode.
    """

    name: str
    prefills: bool
    decodes: bool
    prefill_pool: bool
    budget_tokens: int | None = None
    group: str | None = None
    prefill_scale: float = 1.0
    decode_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What a policy that plans its nodes may know.

    Attributes:
        prefill_nodes: ``N_p`` asked for.
        decode_nodes: ``N_d`` asked for.
        model: Step model of a node.
        budget_tokens: Of a step, before the plan.
        lengths: ``(prompt, output)`` tokens of the workload.
        rate_rps: Its mean rate; `None` where unknown.
    """

    prefill_nodes: int
    decode_nodes: int
    model: StepModel
    budget_tokens: int = 8192
    lengths: Sequence[tuple[int, int]] = ()
    rate_rps: float | None = None


def split(
    prefill_nodes: int,
    decode_nodes: int,
    prefill_budget_tokens: int | None = None,
    decode_budget_tokens: int | None = None,
) -> list[NodePlan]:
    """A P/D split: nodes ``p0`` to prefill and ``d0`` to decode."""
    return [
        NodePlan(f"p{i}", True, False, True, prefill_budget_tokens)
        for i in range(prefill_nodes)
    ] + [
        NodePlan(f"d{i}", False, True, False, decode_budget_tokens)
        for i in range(decode_nodes)
    ]


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request that decodes, as a policy that moves requests sees it.

    Attributes:
        request: Its number.
        kv_tokens: KV tokens it holds.
        outputs: Tokens it has given.
        first_token_ms: When it gave the first.
        now_ms: Now.
    """

    request: int
    kv_tokens: int
    outputs: int
    first_token_ms: float
    now_ms: float

    @property
    def mean_tbt_ms(self) -> float:
        """Mean time between its tokens so far."""
        return (self.now_ms - self.first_token_ms) / max(self.outputs - 1, 1)


@dataclass(frozen=True, slots=True)
class Move:
    """A decoding request goes on on another node.

    Attributes:
        request: Its number.
        node: Where to.
    """

    request: int
    node: str


class Policy(abc.ABC):
    """One function from (request, fleet state) to a `Route`.

    Args:
        settings: SLOs and margins; a policy without use for them ignores
            them.

    Attributes:
        name: What it is called on a command line.
        source: Where it comes from, one line.
        margins: What it reads of `Settings` beside the SLOs.
        blind: Routes without a look at the request or the state of a node, so
            that a caller need not count tokens for it.
        oldest_ms: A request that has waited in the policy's queue for so long
            is sent, whatever the policy makes of it.
        sees: What it is shown of the nodes: ``reports``, state as old as the
            last heartbeat, but for the deflected prefills in flight;
            ``ledger``, the same plus what was dispatched since; ``truth``,
            the state as it is, which only a simulator has (a live policy is
            shown the ledger then).
    """

    #: Requests wait in the policy's own queue: `enqueue` and `assign` are
    #: called in place of `route`.
    late = False

    name: ClassVar[str]
    source: ClassVar[str]
    margins: ClassVar[tuple[str, ...]] = ()
    sees: Literal["reports", "ledger", "truth"] = "ledger"

    def __init__(self, settings: Settings):
        self.settings = settings
        self.blind = False
        self.oldest_ms = 8.0 * settings.ttft_slo_ms

    @abc.abstractmethod
    def route(self, request: Request, fleet: Fleet) -> Route:
        """Where `request` goes.

        Called once per request, in arrival order. Both node lists of `fleet`
        hold at least one node.
        """

    def plan(self, context: PlanContext) -> list[NodePlan]:
        """How the simulator sets up the nodes: a P/D split, by default."""
        return split(context.prefill_nodes, context.decode_nodes)

    def moves(
        self, node: str, decodes: Sequence[Decoding], fleet: Fleet
    ) -> Iterable[Move]:
        """Decodes to move off a node whose step has just ended.

        Overridden by policies that migrate running requests. The live proxy
        cannot move one and never asks.
        """
        return ()

    def chunk_rule(self, model: StepModel) -> ChunkRule:
        """How the simulated engine sizes chunks; a live one has settings."""
        return PlannedRule()

    @property
    def waiting(self) -> int:
        """Requests in the policy's queue."""
        return 0

    @property
    def waiting_late(self) -> int:
        """Of those, requests that were set aside as late at the last look."""
        return 0

    def enqueue(self, request: Request) -> None:
        """Put a request into the queue of a policy that binds late."""
        raise TypeError(f"policy {self.name!r} binds requests when they arrive")

    def withdraw(self, request_id: str) -> None:
        """Take a request out of the queue: its client has left."""
        return

    def assign(
        self, fleet: Fleet, most: int | None = None
    ) -> list[tuple[Request, Route]]:
        """Requests of the queue to be sent now, and where.

        Called whenever something has happened that could free a node, and at
        least once a heartbeat while requests wait.

        Args:
            fleet: The nodes.
            most: No more than so many: the caller asks again, with the state
                as it is then. All of them by default.
        """
        return []

    def finished(self, request: Request, route: Route) -> None:
        """Told when a request that `route` sent somewhere has finished."""
        return


class RoundRobin:
    """Hands out the nodes of a list in turn."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, nodes: Sequence[NodeState]) -> NodeState:
        """The next node in turn."""
        node = nodes[self._next % len(nodes)]
        self._next += 1
        return node


P = TypeVar("P", bound=type[Policy])

_POLICIES: dict[str, type[Policy]] = {}


def register(policy: P) -> P:
    """Class decorator: make a policy known by its `name`."""
    _POLICIES[policy.name] = policy
    return policy


def policies() -> dict[str, type[Policy]]:
    """Every registered policy by name."""
    return dict(_POLICIES)
