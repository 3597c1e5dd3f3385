# SPDX-License-Identifier: Apache-2.0
"""Nexus: prefill and decode side by side on one GPU's SMs."""

from __future__ import annotations

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import NodePlan, PlanContext, Policy, register
from vllm_kairos.core.policies.mixed import pending_tokens
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings

#: Requests that no node holds at once.
_MOST_HELD = 65_536


@register
class Nexus(Policy):
    """Intra-GPU disaggregation by partition of SMs.

    Every GPU runs a prefill and a decode stream. While both are busy, prefill
    has a share of the SMs and decode the rest; whoever is alone has all. KV
    never leaves the GPU. Prefill is compute-bound and slows down as its share
    shrinks; decode is memory-bound and does so only below its saturation
    point, beside a loss to the bandwidth both use. The share is the largest
    that keeps a decode step within ``beta * tau`` by the step model (Nexus
    searches greedily over such a cost model at run time; here it is set once
    for the workload's mean batch).

    Args:
        settings: TBT SLO and beta.
        prefill_share: Share of SMs for prefill; 0 lets the cost model choose.
        saturation: Share of SMs from which decode gains nothing (Kairos,
            Table 2: decode nodes use 8 to 27 % of their SMs).
        contention: Slow-down of both by the shared memory bandwidth.
    """

    name = "nexus"
    source = "Nexus (Shi et al., 2025), arXiv 2507.06608"
    margins = ("beta",)

    def __init__(
        self,
        settings: Settings,
        prefill_share: float = 0.0,
        saturation: float = 0.3,
        contention: float = 0.1,
    ):
        super().__init__(settings)
        for name, value in (
            ("prefill_share", prefill_share),
            ("saturation", saturation),
            ("contention", contention),
        ):
            if isinstance(value, (bool, str)) or not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}, expected 0 to below 1")
        self.prefill_share = prefill_share
        self.saturation = saturation
        self.contention = contention

    def scales(self, share: float) -> tuple[float, float]:
        """Slow-down of prefill and of decode at a prefill share of the SMs."""
        shared = 1.0 + self.contention
        return shared / share, shared * max(1.0, self.saturation / (1.0 - share))

    def choose_share(self, context: PlanContext) -> float:
        """The largest share that keeps a decode step within its limit."""
        if self.prefill_share > 0:
            return self.prefill_share
        lengths = context.lengths or [(4096, 128)]
        kv = sum(prompt for prompt, _ in lengths) / len(lengths)
        outputs = sum(output for _, output in lengths) / len(lengths)
        nodes = context.prefill_nodes + context.decode_nodes
        step = context.model.step_ms(1, kv)
        # Little's law: the batch a node holds at this rate.
        rate = context.rate_rps or 1.0
        held = rate * outputs * step / 1e3 / nodes
        # A trace may have all its arrivals at once, which is no rate.
        batch = max(1, round(min(held, _MOST_HELD)))
        step = context.model.step_ms(batch, batch * kv)
        best = 0.1
        for percent in range(10, 95, 5):
            if step * self.scales(percent / 100)[1] <= self.settings.limit_ms:
                best = percent / 100
        return best

    def plan(self, context: PlanContext) -> list[NodePlan]:
        prefill_scale, decode_scale = self.scales(self.choose_share(context))
        out = []
        for i in range(context.prefill_nodes + context.decode_nodes):
            group = f"g{i}"
            for name, prefills in ((f"g{i}p", True), (f"g{i}d", False)):
                out.append(
                    NodePlan(
                        name,
                        prefills,
                        not prefills,
                        prefills,
                        None,
                        group,
                        prefill_scale,
                        decode_scale,
                    )
                )
        return out

    def route(self, request: Request, fleet: Fleet) -> Route:
        def work(pair: tuple[NodeState, NodeState]) -> tuple[int, int]:
            return pending_tokens(pair[0]), pair[1].decodes

        pairs = list(zip(fleet.prefill, fleet.decode, strict=True))
        prefill, decode = min(pairs, key=work)
        return Route(prefill.node, decode.node, reason="same_gpu")
