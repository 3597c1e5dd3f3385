# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's conditional disaggregation."""

from __future__ import annotations

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import Policy, register
from vllm_kairos.core.policies.mixed import pending_tokens
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings

_BLOCK_TOKENS = 16
_RULES = ("isl_bounding", "prefill_load", "isl_or_load")


@register
class Dynamo(Policy):
    """Some requests are prefilled where they decode.

    The decode worker is the one with the least cost of blocks to prefill plus
    blocks in use, the prefill worker likewise (Dynamo's KV router). The
    effective input is the prompt less what the decode worker has cached of
    it. Dynamo's three rules for prefilling on the decode worker:

    - ``isl_bounding``: the effective input is below `eff_isl_threshold` and
      below `eff_isl_ratio_threshold` of the prompt;
    - ``prefill_load``: the prefill worker is busier than
      `prefill_busy_threshold`: pending prompt tokens over its step budget;
    - ``isl_or_load``: either.

    Names and defaults are Dynamo's; it leaves `prefill_busy_threshold` unset,
    here it is 1, a full step. Without repeated prefixes the ratio of every
    prompt is 1, and ``isl_bounding`` keeps every request.

    Args:
        settings: Unused.
        rule: One of the three (Dynamo's ``policy``).
        eff_isl_threshold: Tokens.
        eff_isl_ratio_threshold: 0 to 1.
        prefill_busy_threshold: Step budgets pending on the prefill worker.
        decode_busy_threshold: Share of KV in use from which the decode worker
            takes no prefill; 1 turns the guard off.
    """

    name = "dynamo"
    source = "NVIDIA Dynamo 1.6, docs, Conditional Disaggregation"

    def __init__(
        self,
        settings: Settings,
        rule: str = "isl_bounding",
        eff_isl_threshold: int = 2048,
        eff_isl_ratio_threshold: float = 0.7,
        prefill_busy_threshold: float = 1.0,
        decode_busy_threshold: float = 1.0,
    ):
        super().__init__(settings)
        if rule not in _RULES:
            raise ValueError(f"rule is {rule!r}, expected one of {', '.join(_RULES)}")
        if type(eff_isl_threshold) is not int or eff_isl_threshold < 0:
            raise ValueError(
                f"eff_isl_threshold is {eff_isl_threshold!r}, expected tokens >= 0"
            )
        for name, value in (
            ("eff_isl_ratio_threshold", eff_isl_ratio_threshold),
            ("decode_busy_threshold", decode_busy_threshold),
        ):
            if isinstance(value, (bool, str)) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}, expected 0 to 1")
        busy = prefill_busy_threshold
        if isinstance(busy, (bool, str)) or not busy >= 0:
            raise ValueError(
                f"prefill_busy_threshold is {busy!r}, expected a number >= 0"
            )
        self.rule = rule
        self.eff_isl_threshold = eff_isl_threshold
        self.eff_isl_ratio_threshold = eff_isl_ratio_threshold
        self.prefill_busy_threshold = prefill_busy_threshold
        self.decode_busy_threshold = decode_busy_threshold

    def route(self, request: Request, fleet: Fleet) -> Route:
        def cost(node: NodeState) -> float:
            fresh = request.prompt_tokens - request.cached.get(node.node, 0)
            used = (
                node.decode_kv_tokens
                + node.awaiting_kv_tokens
                + node.expected_kv_tokens
            )
            return (fresh + pending_tokens(node) + used) / _BLOCK_TOKENS

        prefill = min(fleet.prefill, key=cost)
        decode = min(fleet.decode, key=cost)
        isl = request.prompt_tokens
        effective = isl - request.cached.get(decode.node, 0)
        short = (
            effective < self.eff_isl_threshold
            and effective / isl < self.eff_isl_ratio_threshold
        )
        busy = (
            pending_tokens(prefill) / prefill.budget_tokens
            > self.prefill_busy_threshold
        )
        local = {
            "isl_bounding": short,
            "prefill_load": busy,
            "isl_or_load": short or busy,
        }[self.rule]
        if local and not self._decode_busy(decode, request):
            return Route(decode.node, decode.node, reason=self.rule)
        return Route(prefill.node, decode.node, reason="remote")

    def _decode_busy(self, node: NodeState, request: Request) -> bool:
        used = node.decode_kv_tokens + node.awaiting_kv_tokens
        total = used + node.free_kv_tokens
        return (used + request.prompt_tokens) / total > self.decode_busy_threshold
