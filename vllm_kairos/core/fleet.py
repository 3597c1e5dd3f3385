# SPDX-License-Identifier: Apache-2.0
"""What a policy sees: one request, and the state of every node.

Plain data. The live proxy fills it from state reports and its own ledger, the
simulator from its nodes; the policies cannot tell which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.step_model import StepModel


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """A prompt, or what is left of one, that a node has yet to prefill.

    Attributes:
        tokens: Prompt tokens left to compute.
        computed: Prompt tokens already in the node's KV cache.
    """

    tokens: int
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the dispatcher sees it before it is routed.

    Attributes:
        prompt_tokens: Prompt length, ``l_r`` in the paper.
        request_id: Name for logs and ledgers.
        arrival_ms: Arrival on the caller's clock.
        output_tokens: Output length if a policy is told or predicts it.
        cached: Prompt tokens each node already holds in its prefix cache, by
            node id; absent means none.
        session: Conversation the request belongs to, if known.
        turn: Turn within it, starting at 1.
    """

    prompt_tokens: int
    request_id: str = ""
    arrival_ms: float = 0.0
    output_tokens: int | None = None
    cached: Mapping[str, int] = field(default_factory=dict)
    session: str | None = None
    turn: int = 1


@dataclass(slots=True)
class NodeState:
    """One engine as last reported, plus what was dispatched to it since.

    A policy may keep what it derives from a state, by the object. Once one has
    seen it only `fresh`, `step_in_flight_ms`, `worked_off_ms` and
    `link_backlog_bytes` may change in place; what else is new makes a new
    state.

    Attributes:
        node: Id, unique in the fleet.
        model: Step-latency model of this node, `None` if it has no profile.
        budget_tokens: Most tokens of a step, ``chi_p`` on a prefill node
            (vLLM ``max_num_batched_tokens``).
        max_num_seqs: Most requests of a step (vLLM ``max_num_seqs``).
        decodes: Decode batch size ``B``.
        decode_kv_tokens: Their KV tokens ``K``.
        prefills: Ordinary prefills here, in the order they will be served,
            the one being computed first.
        deflected: Deflected prefills here, in arrival order; counted in
            neither `prefills` nor `decodes`.
        awaiting_kv: Requests that will decode here once their KV arrives.
        awaiting_kv_tokens: KV tokens of those.
        expected: Requests routed to decode here that are still being
            prefilled elsewhere. They weigh in the choice of a decode node;
            they are not in a step yet, so no schedule counts them.
        expected_kv_tokens: Prompt tokens of those.
        free_kv_tokens: Room in the KV cache, tokens.
        link: Egress link of this node, `None` where transfers are free.
        link_backlog_bytes: Bytes queued on that link.
        step_in_flight_ms: Expected remainder of the step running now.
        worked_off_ms: Time the node has worked since the report beyond the
            step then in flight: that much of its queue is done.
        limit_ms: Bound on a predicted step that the engine's loop has in
            force, `None` where it has none.
        adaptive: The engine sizes chunks by its true state, not as scheduled.
        fresh: False where the last report is too old to act on.
    """

    node: str
    model: StepModel | None = None
    budget_tokens: int = 8192
    max_num_seqs: int = 256
    decodes: int = 0
    decode_kv_tokens: int = 0
    prefills: Sequence[PrefillWork] = ()
    deflected: Sequence[PrefillWork] = ()
    awaiting_kv: int = 0
    awaiting_kv_tokens: int = 0
    expected: int = 0
    expected_kv_tokens: int = 0
    free_kv_tokens: int = 1 << 60
    link: LinkModel | None = None
    link_backlog_bytes: float = 0.0
    step_in_flight_ms: float = 0.0
    worked_off_ms: float = 0.0
    limit_ms: float | None = None
    adaptive: bool = True
    fresh: bool = True


@dataclass(slots=True)
class Fleet:
    """Every node a policy may choose from.

    A node that may serve both phases stands in both lists.

    Attributes:
        prefill: Nodes that take ordinary prefills.
        decode: Nodes that decode, and may take deflected prefills.
        now_ms: Time on the caller's clock.
    """

    prefill: Sequence[NodeState]
    decode: Sequence[NodeState]
    now_ms: float = 0.0
    _by_id: dict[str, NodeState] = field(default_factory=dict, repr=False)

    def node(self, node_id: str) -> NodeState:
        """The node of that id.

        Raises:
            KeyError: No node has it.
        """
        if not self._by_id:
            self._by_id = {n.node: n for n in (*self.prefill, *self.decode)}
        return self._by_id[node_id]
