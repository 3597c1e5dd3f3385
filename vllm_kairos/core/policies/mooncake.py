# SPDX-License-Identifier: Apache-2.0
"""Mooncake's Conductor: prefix-aware prefill choice, early rejection."""

from __future__ import annotations

from vllm_kairos.core.fleet import Fleet, Request
from vllm_kairos.core.policies.base import Policy, register
from vllm_kairos.core.policies.disagg import least_loaded_decode, least_ttft
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.settings import Settings


@register
class Mooncake(Policy):
    """KVCache-centric scheduling (its Algorithm 1) with early rejection.

    The prefill instance is the one with the least predicted TTFT: queue, and
    prefill of what its prefix cache does not hold. The decode instance is the
    one with the least predicted step time. A request whose predicted TTFT or
    TBT misses its SLO is rejected on arrival, before it costs a prefill. The
    cache here is each node's own: Mooncake's pool in host memory and its
    migration of hot blocks are not modelled.

    Args:
        settings: SLOs.
        reject: Off, hopeless requests are served all the same.
        slack: Factor on the SLOs above which a request is rejected.
    """

    name = "mooncake"
    source = "Mooncake (Qin et al., FAST 2025), arXiv 2407.00079, §6 and §7"

    def __init__(self, settings: Settings, reject: bool = True, slack: float = 1.0):
        super().__init__(settings)
        if not isinstance(reject, bool):
            raise ValueError(f"reject is {reject!r}, expected true or false")
        if isinstance(slack, (bool, str)) or not slack > 0:
            raise ValueError(f"slack is {slack!r}, expected a number > 0")
        self.reject = reject
        self.slack = slack

    def route(self, request: Request, fleet: Fleet) -> Route:
        prefill, ttft = least_ttft(request, fleet)
        decode = least_loaded_decode(request, fleet)
        tbt = 0.0
        if decode.model is not None:
            tbt = decode.model.step_ms(
                decode.decodes + decode.awaiting_kv + decode.expected + 1,
                decode.decode_kv_tokens
                + decode.awaiting_kv_tokens
                + decode.expected_kv_tokens
                + request.prompt_tokens,
            )
        estimates = Estimates(ttft_prefill_ms=ttft)
        s = self.settings
        late = ttft is not None and ttft + tbt > self.slack * s.ttft_slo_ms
        slow = tbt > self.slack * s.tau_ms
        if self.reject and (late or slow):
            reason = "rejected_ttft" if late else "rejected_tbt"
            return Route(
                prefill.node, decode.node, (), estimates, reason, rejected=True
            )
        return Route(prefill.node, decode.node, (), estimates, "least_ttft")
