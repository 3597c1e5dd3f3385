# SPDX-License-Identifier: Apache-2.0
"""What a policy is. A new one is a file beside this with one class in it.

The live proxy and the simulator make policies with `make_policy` and call
`Policy.route`; no policy exists twice.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings


class Policy(abc.ABC):
    """One function from (request, fleet state) to a `Route`.

    Args:
        settings: SLOs and margins; a policy without use for them ignores
            them.

    Attributes:
        name: What it is called on a command line.
        source: Where it comes from, one line.
        blind: Routes without a look at the request or the state of a node, so
            that a caller need not count tokens for it.
    """

    name: ClassVar[str]
    source: ClassVar[str]

    def __init__(self, settings: Settings):
        self.settings = settings
        self.blind = False

    @abc.abstractmethod
    def route(self, request: Request, fleet: Fleet) -> Route:
        """Where `request` goes.

        Called once per request, in arrival order. Both node lists of `fleet`
        hold at least one node.
        """


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
