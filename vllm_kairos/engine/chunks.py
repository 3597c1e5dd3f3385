# SPDX-License-Identifier: Apache-2.0
"""How many tokens each request may take of the step being scheduled."""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kairos.core.chunk_rule import (
    AdaptiveRule,
    ChunkRule,
    PlannedRule,
    share_by_slack,
    still_refused,
)
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.engine.requests import Deflected, RequestPhases
from vllm_kairos.engine.settings import EngineSettings

#: What the patched ``schedule()`` asks about a request: given that, its
#: computed tokens and those about to be scheduled, how many of them to take.
Limiter = Callable[[Request, int, int], int]


def chunk_rule(settings: EngineSettings, model: StepModel | None) -> ChunkRule:
    """The rule of ``mode``: adaptive wherever there is a profile to go by."""
    if model is None or settings.mode == "planned":
        return PlannedRule()
    feedback = Feedback(settings.tau_ms, settings.beta, late_share=settings.late_share)
    return AdaptiveRule(model, feedback, settings.smallest_chunk_tokens)


class ChunkLimits:
    """Bounds the prefills of each step by the rule, decodes never.

    Args:
        scheduler: vLLM's scheduler, for what a step can hold.
        settings: Settings of the engine.
        rule: Says how many tokens are safe.
        phases: The engine's requests.
        wall_clock_s: Unix time.

    Attributes:
        overrides: Chunks given without headroom to a prefill past its target.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: EngineSettings,
        rule: ChunkRule,
        phases: RequestPhases,
        wall_clock_s: Callable[[], float],
    ):
        self.overrides = 0
        self._scheduler = scheduler
        self._settings = settings
        self._rule = rule
        self._phases = phases
        self._wall_clock_s = wall_clock_s
        self._splits_prompts = scheduler.scheduler_config.enable_chunked_prefill
        self._load = StepLoad()
        self._shares: dict[str, int] = {}
        self._free_before = (0, 0)
        self._limiter = self._make_limiter(set())

    @property
    def limit_ms(self) -> float | None:
        """Bound on a predicted step, `None` where there is none."""
        return self._rule.limit_ms if self._splits_prompts else 0.0

    def limiter(self) -> Limiter | None:
        """What the step now begun asks about its requests, `None` for nothing."""
        phases = self._phases
        rule = self._rule
        if not phases.deflected and not (
            rule.limits_ordinary and (phases.waiting or phases.prefilling)
        ):
            return None
        if not self._splits_prompts:
            # The model or its user wants prompts whole, and a bound that is
            # below one would hold it back for as long as anybody decodes.
            return None
        scheduler = self._scheduler
        joining = scheduler.finished_recving_kv_req_ids
        decodes = len(phases.decoding) + len(joining)
        if not decodes and not phases.deflected:
            return None
        load = self._load = StepLoad(decodes, phases.decode_kv_tokens, decodes)
        limiter = self._limiter
        if joining:
            for request_id in joining:
                load.decode_kv_tokens += scheduler.requests[
                    request_id
                ].num_computed_tokens
            # A request whose KV failed to load computes its prompt like any other.
            limiter = self._make_limiter(joining - scheduler.failed_recving_kv_req_ids)
        if scheduler.num_spec_tokens:
            load.decode_tokens += sum(
                len(request.spec_token_ids) for request in phases.decoding.values()
            )
        self._shares = {}
        if rule.by_slack and len(phases.deflected) > 1:
            self._shares = self._share_by_slack(load)
        return limiter

    def note_scheduled(self, scheduled: dict[str, int]) -> None:
        """A step has been scheduled: keep no room again for whom it was in vain.

        vLLM has more reasons to pass over a waiting request than blocks and
        seats: the head of its queue, adapters, a grammar not yet compiled.

        Args:
            scheduled: Its tokens by request.
        """
        if not self._shares:
            return
        for request_id, share in self._shares.items():
            held = self._phases.deflected.get(request_id)
            if held is not None and share:
                taken = request_id in scheduled
                held.refused = None if taken else self._free_before
        self._shares = {}

    def _share_by_slack(self, load: StepLoad) -> dict[str, int]:
        """Tokens of each deflected prefill that room is kept for."""
        scheduler = self._scheduler
        groups = len(scheduler.kv_cache_config.kv_cache_groups)
        pool = scheduler.kv_cache_manager.block_pool
        blocks = pool.get_num_free_blocks() // groups
        seats = scheduler.max_num_running_reqs - len(scheduler.running)
        shares = share_by_slack(
            self._rule,
            load,
            [
                held.claim(key, scheduler.block_size)
                for key, held in self._phases.deflected.items()
                if not still_refused(held.refused, blocks, seats)
            ],
            scheduler.max_num_scheduled_tokens,
            blocks,
            seats,
        )
        self._free_before = blocks, seats
        return shares

    def _make_limiter(self, joined: set[str]) -> Limiter:
        """The function that vLLM asks about every request of a step.

        Args:
            joined: Requests that join the decodes in it.
        """
        decoding, bound = self._phases.decoding, self._bound

        # Decodes were counted when the step began. They are most of what is
        # asked about, so they are told apart first.
        def limit(request: Request, computed: int, tokens: int) -> int:
            if request.request_id in decoding:
                return tokens
            return bound(request, computed, tokens)

        def limit_joined(request: Request, computed: int, tokens: int) -> int:
            if request.request_id in joined:
                return tokens
            return limit(request, computed, tokens)

        return limit_joined if joined else limit

    def _bound(self, request: Request, computed: int, tokens: int) -> int:
        """Tokens of a prefill in the step being scheduled."""
        request_id = request.request_id
        held = self._phases.deflected.get(request_id)
        load = self._load
        rule = self._rule
        share = self._shares.get(request_id)
        if share is not None:
            granted = min(tokens, share)
        else:
            tracker = held.tracker if held is not None else None
            granted = rule.chunk(load, computed, tokens, tracker)
        if held is not None and rule.follows_schedule:
            held.other_tokens = load.tokens
        if granted == 0:
            granted = self._past_target(request, held, tokens)
            share = None
            if granted == 0 and computed and _tells_of_prompt(request):
                # vLLM's worker drops a request that a step leaves out, and with
                # it the log-probabilities of the prompt so far.
                granted = 1
        if granted and share is None:
            load.add_prefill(granted, computed)
            if held is not None:
                load.guarded = True
        return granted

    def _past_target(
        self, request: Request, held: Deflected | None, tokens: int
    ) -> int:
        """A chunk for a prefill without headroom that is past its target.

        Held back for ever it would starve; each such step is counted.
        """
        deadline_s = request.arrival_time + self._settings.ttft_slo_ms / 1e3
        if held is not None:
            deadline_s = held.deadline_s
        if self._wall_clock_s() <= deadline_s:
            return 0
        self.overrides += 1
        return min(tokens, self._settings.smallest_chunk_tokens)


def _tells_of_prompt(request: Request) -> bool:
    """Whether the answer holds log-probabilities of the prompt."""
    sampling = request.sampling_params
    return sampling is not None and sampling.prompt_logprobs is not None
