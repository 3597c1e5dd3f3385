# SPDX-License-Identifier: Apache-2.0
"""TaiChi: P-heavy and D-heavy instances, and latency shifted between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_kairos.core.fleet import Fleet, Request
from vllm_kairos.core.policies.base import (
    Decoding,
    Move,
    NodePlan,
    PlanContext,
    Policy,
    register,
)
from vllm_kairos.core.policies.disagg import least_loaded_decode, least_ttft
from vllm_kairos.core.policies.mixed import mixed_ttft_ms
from vllm_kairos.core.route import Estimates, Route
from vllm_kairos.core.settings import Settings


@register
class TaiChi(Policy):
    """Unified aggregation and disaggregation with three sliders.

    The sliders are the ratio of P-heavy to D-heavy instances (``--prefill``,
    ``--decode``) and the chunk size of each. *Length-aware prefill*: a short
    prompt that meets the TTFT SLO on a D-heavy instance goes there, which
    leaves the fast P-heavy ones to the long prompts that need them; a prompt
    that would miss it there goes to the instance where it is fastest.
    *Flowing decode*: requests decode on D-heavy instances; one whose KV is
    fuller than `watermark` passes its requests with the most outputs on to
    P-heavy ones, and a request whose mean TBT there nears the SLO flows back.

    TaiChi publishes mechanisms, not code; where a rule leaves room (which
    prompt is short, the watermark) the choice here is the one stated.

    The defaults of the sliders are the result of a search on the paper's
    Bursty workload (2P2D, shipped A100 profile, 3 GB/s, 12 requests/s, seeds
    1..4, not those of the reported results): `decode_chunk` at `share` 0.5,
    then `share`, then both again around the best, then `prefill_chunk`.
    Attainment in percent:

    ==============  =====  =====  =====  =====  =====
    decode_chunk      384    512    768   1024   1536
    share 0.5        46.1   71.0   91.6   94.7    2.6
    ==============  =====  =====  =====  =====  =====

    and with `share` 0.1, 0.15, 0.25, 0.35, 0.8 at 1024: 90.1, 98.4, 98.9,
    97.4, 85.7; with 896 and 1152 at 0.25: 98.4 and 87.1; `prefill_chunk`
    4096, 8192, 16384: 98.9, 98.9, 98.6. The cliff beyond 1024 is the TBT SLO:
    the chunk is tuned to one model, one load and one SLO, not adaptive.

    Args:
        settings: SLOs.
        prefill_chunk: Step budget of P-heavy instances.
        decode_chunk: Step budget of D-heavy instances.
        share: A D-heavy instance takes a prompt whose TTFT there is within
            this share of the SLO.
        watermark: KV use of a D-heavy instance from which requests flow away.
        backflow: Share of the TBT SLO at which they flow back.
    """

    name = "taichi"
    source = "TaiChi (Wang et al., 2025), arXiv 2508.01989"

    def __init__(
        self,
        settings: Settings,
        prefill_chunk: int = 8192,
        decode_chunk: int = 1024,
        share: float = 0.25,
        watermark: float = 0.95,
        backflow: float = 0.9,
    ):
        super().__init__(settings)
        for name, value in (
            ("prefill_chunk", prefill_chunk),
            ("decode_chunk", decode_chunk),
        ):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, expected tokens >= 1")
        for name, number in (
            ("share", share),
            ("watermark", watermark),
            ("backflow", backflow),
        ):
            if isinstance(number, (bool, str)) or not 0 <= number <= 1:
                raise ValueError(f"{name} is {number!r}, expected 0 to 1")
        self.prefill_chunk = prefill_chunk
        self.decode_chunk = decode_chunk
        self.share = share
        self.watermark = watermark
        self.backflow = backflow
        self._capacity: dict[str, int] = {}

    def plan(self, context: PlanContext) -> list[NodePlan]:
        p_heavy = [
            NodePlan(f"p{i}", True, False, True, self.prefill_chunk)
            for i in range(context.prefill_nodes)
        ]
        return p_heavy + [
            NodePlan(f"d{i}", False, True, False, self.decode_chunk)
            for i in range(context.decode_nodes)
        ]

    def route(self, request: Request, fleet: Fleet) -> Route:
        prefill, there = least_ttft(request, fleet)
        best, here = None, float("inf")
        for node in fleet.decode:
            free = node.free_kv_tokens
            self._capacity[node.node] = max(self._capacity.get(node.node, 0), free)
            if node.model is None or not node.fresh or free < request.prompt_tokens:
                continue
            cached = request.cached.get(node.node, 0)
            ttft = mixed_ttft_ms(node, request.prompt_tokens, cached)
            if ttft < here:
                best, here = node, ttft
        slo = self.settings.ttft_slo_ms
        estimates = Estimates(there, None if best is None else here)
        if best is not None and (
            here <= self.share * slo or there is None or slo < here < there
        ):
            return Route(best.node, best.node, (), estimates, "d_heavy")
        decode = least_loaded_decode(request, fleet).node
        return Route(prefill.node, decode, (), estimates, "p_heavy")

    def moves(
        self, node: str, decodes: Sequence[Decoding], fleet: Fleet
    ) -> Iterable[Move]:
        p_heavy = {n.node for n in fleet.prefill}
        if node in p_heavy:
            limit = self.backflow * self.settings.tau_ms
            to = min(fleet.decode, key=lambda n: n.decodes).node
            return [
                Move(d.request, to)
                for d in decodes
                if d.outputs > 1 and d.mean_tbt_ms > limit
            ]
        full = self._capacity.get(node, 0)
        state = fleet.node(node)
        over = (full - state.free_kv_tokens) - self.watermark * full
        if not full or over <= 0:
            return []
        out = []
        for d in sorted(decodes, key=lambda d: -d.outputs):
            roomy = max(fleet.prefill, key=lambda n: n.free_kv_tokens)
            if over <= 0 or roomy.free_kv_tokens < 2 * d.kv_tokens:
                break
            out.append(Move(d.request, roomy.node))
            over -= d.kv_tokens
        return out
