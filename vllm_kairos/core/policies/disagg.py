# SPDX-License-Identifier: Apache-2.0
"""Plain P/D disaggregation: every prefill on a prefill node."""

from __future__ import annotations

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import Policy, RoundRobin, register
from vllm_kairos.core.prefill import ttft_prefill_ms
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.settings import Settings


@register
class Disagg(Policy):
    """DistServe-style P/D disaggregation (paper §6.1.2).

    Args:
        settings: Unused.
        balance: ``round_robin``, as in the paper, or ``least``: the prefill
            node with the least predicted TTFT.
    """

    name = "disagg"
    source = "DistServe (Zhong et al., 2024); the paper's baseline, §6.1.2"

    def __init__(self, settings: Settings, balance: str = "round_robin"):
        super().__init__(settings)
        if balance not in ("round_robin", "least"):
            raise ValueError(
                f"balance is {balance!r}, expected 'round_robin' or 'least'"
            )
        self.balance = balance
        self.blind = balance == "round_robin"
        self._prefill = RoundRobin()
        self._decode = RoundRobin()

    def route(self, request: Request, fleet: Fleet) -> Route:
        decode = self._decode.pick(fleet.decode)
        if self.balance == "round_robin":
            prefill = self._prefill.pick(fleet.prefill)
            return Route(prefill.node, decode.node, reason="round_robin")
        prefill, ttft = least_ttft(request, fleet)
        return Route(
            prefill.node,
            decode.node,
            estimates=Estimates(ttft_prefill_ms=ttft),
            reason="least_ttft",
        )


def least_ttft(request: Request, fleet: Fleet) -> tuple[NodeState, float | None]:
    """The prefill node with the least predicted TTFT, and that TTFT.

    Nodes without a model or a fresh state are last resort: the one with the
    fewest queued tokens, without an estimate.
    """
    best: NodeState | None = None
    best_ms = float("inf")
    for node in fleet.prefill:
        if node.model is None or not node.fresh:
            continue
        ttft = ttft_prefill_ms(
            node, request.prompt_tokens, request.cached.get(node.node, 0)
        )
        if ttft < best_ms:
            best, best_ms = node, ttft
    if best is not None:
        return best, best_ms
    fallback = min(fleet.prefill, key=lambda n: sum(w.tokens for w in n.prefills))
    return fallback, None


def least_loaded_decode(request: Request, fleet: Fleet) -> NodeState:
    """The decode node with the least predicted step time that has KV room.

    Requests whose KV is on its way, or who are still being prefilled for the
    node, count as decoding. Where no node has room
    the one with most of it is taken; where none has a model, the fewest
    decodes decide.
    """

    def load(node: NodeState) -> tuple[bool, float]:
        decodes = node.decodes + node.awaiting_kv + node.expected + 1
        kv = (
            node.decode_kv_tokens
            + node.awaiting_kv_tokens
            + node.expected_kv_tokens
            + request.prompt_tokens
        )
        full = node.free_kv_tokens < request.prompt_tokens
        if full:
            return True, -float(node.free_kv_tokens)
        return False, node.model.step_ms(decodes, kv) if node.model else float(decodes)

    return min(fleet.decode, key=load)
