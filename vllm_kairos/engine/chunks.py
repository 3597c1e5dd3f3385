# SPDX-License-Identifier: Apache-2.0
"""How many tokens each request may take of the step being scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_kairos.core.chunk_rule import (
    AdaptiveRule,
    ChunkRule,
    PlannedRule,
    share_by_slack,
    still_refused,
)
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.overdue import OverdueTurns
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
    feedback = Feedback(
        settings.tau_ms,
        settings.beta,
        late_share=settings.late_share,
        learns=settings.feedback,
    )
    return AdaptiveRule(model, feedback, settings.smallest_chunk_tokens)


class ChunkLimits:
    """Bounds the prefills of each step by the rule, decodes never.

    What is known before a step is begun is worked out by `prepare`, beside the
    device's work on the step before. Whoever changes what it went by sets
    `stale`, and then it is worked out anew.

    Args:
        scheduler: vLLM's scheduler, for what a step can hold.
        settings: Settings of the engine.
        rule: Says how many tokens are safe.
        phases: The engine's requests.
        wall_clock_s: Unix time.

    Attributes:
        limiter: What the next step asks about its requests, `None` for nothing.
        stale: Requests or KV blocks have changed since it was made, or the next
            step need not follow the last: nothing runs, or that held nothing.
        nothing_to_bound: There is no prefill to bound, and there will be none
            unless `stale` says so.
        overrides: Steps that gave a prefill past its target a chunk without
            headroom.
        bound_ms: Bound that the next step is put together under.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: EngineSettings,
        rule: ChunkRule,
        phases: RequestPhases,
        wall_clock_s: Callable[[], float],
    ):
        self.limiter: Limiter | None = None
        self.stale = True
        self.nothing_to_bound = False
        self.overrides = 0
        self.bound_ms = math.inf
        self._scheduler = scheduler
        self._settings = settings
        self._rule = rule
        self._phases = phases
        self._wall_clock_s = wall_clock_s
        #: The step before held nothing.
        self._idle = True
        self._splits_prompts = scheduler.scheduler_config.enable_chunked_prefill
        self._load = StepLoad()
        self._joined: set[str] = set()
        #: Tokens of deflected prefills that room is kept for in the load.
        self._shares: dict[str, int] = {}
        #: Of those, chunks that nothing will change any more.
        self._fixed: dict[str, int] = {}
        self._free_before = (0, 0)
        self._overdue: OverdueTurns[str] = OverdueTurns()
        #: Who has the turn, its tokens, and whether they are over the bound.
        self._turn: tuple[str, int, bool] | None = None
        #: The only prefill there is, beside decodes alone, with a chunk. vLLM has
        #: a bound of its own on the tokens of any request, and where one request
        #: has more than one token that is as good as a limiter, without asking.
        self._only: Deflected | None = None
        # The scheduler's own copy: an engine's configuration is not changed.
        self._config = scheduler.scheduler_config = copy(scheduler.scheduler_config)
        self._most_tokens = self._config.long_prefill_token_threshold
        self._limit = self._make_limiter()

    @property
    def limit_ms(self) -> float | None:
        """Bound on a predicted step, `None` where there is none."""
        return self._rule.limit_ms if self._splits_prompts else 0.0

    def prepare(self) -> None:
        """Make the `limiter` of the next step."""
        scheduler = self._scheduler
        # Draft tokens come after a step's output.
        self.stale = (
            scheduler.num_spec_tokens > 0 or self._idle or not scheduler.running
        )
        self.limiter = None
        self._only = None
        self._config.long_prefill_token_threshold = self._most_tokens
        self._shares = {}
        self._fixed.clear()
        self._turn = None
        phases = self._phases
        rule = self._rule
        if scheduler.failed_recving_kv_req_ids:
            phases.note_failed_kv(scheduler.failed_recving_kv_req_ids)
        self._note_joining()
        ordinary = phases.waiting or phases.prefilling or phases.may_compute()
        self.nothing_to_bound = not phases.deflected and not (
            rule.limits_ordinary and ordinary
        )
        if self.nothing_to_bound:
            self._overdue = OverdueTurns()
            return
        if not self._splits_prompts:
            # The model or its user wants prompts whole, and a bound that is
            # below one would hold it back for as long as anybody decodes.
            return
        joining = self._joined
        decodes = len(phases.decoding) + len(joining)
        if not decodes and not phases.deflected:
            return
        load = self._load = StepLoad(decodes, phases.decode_kv_tokens, decodes)
        for request_id in joining:
            request = scheduler.requests[request_id]
            load.decode_kv_tokens += request.num_computed_tokens
        if scheduler.num_spec_tokens:
            load.decode_tokens += sum(
                len(request.spec_token_ids) for request in phases.decoding.values()
            )
        self._note_bound()
        self._overdue.start()
        if self._overdue.holder is not None:
            self._keep_turn(load, self._overdue.holder)
        if rule.by_slack:
            if len(phases.deflected) > 1:
                self._share_by_slack(load)
            elif phases.deflected and not ordinary:
                self._fix_the_only_one(load)
        if self._only is None:
            self.limiter = self._limit

    def _note_joining(self) -> None:
        """Find out whose KV has arrived: they join the decodes by one token.

        Of those that vLLM has promoted already some may not have been
        scheduled (no block was free, the adapters of a step were all taken).
        """
        scheduler = self._scheduler
        joining = scheduler.finished_recving_kv_req_ids
        if self._joined:
            joining = joining | (self._joined & self._phases.awaiting_kv.keys())
        if joining:
            self.stale = True
            # A request whose KV failed to load computes its prompt like any other.
            joining = joining - scheduler.failed_recving_kv_req_ids
        self._joined = joining

    def _note_bound(self) -> None:
        limit_ms = self._rule.limit_ms
        self.bound_ms = math.inf if limit_ms is None else limit_ms

    def as_made_ready(self, output: SchedulerOutput) -> StepLoad | None:
        """Account for a step that is what `prepare` foresaw, and make the next.

        A deflected prefill beside decodes is in this again and again, and what
        `RequestPhases.note_step` and `prepare` find out from scratch is known.

        Args:
            output: The step that has been scheduled.

        Returns:
            What the step holds; `None` where it need not be what was foreseen,
            and then nothing has been done.
        """
        held = self._only
        if held is None or self.stale:
            return None
        request, load, phases = held.request, self._load, self._phases
        scheduled = output.num_scheduled_tokens
        tokens = scheduled.get(request.request_id)
        if (
            not request.is_prefill_chunk
            or not tokens
            or output.scheduled_new_reqs
            or len(scheduled) != load.decodes + 1
            or output.total_num_scheduled_tokens != load.decode_tokens + tokens
        ):
            return None
        if tokens != load.prefill_tokens:  # vLLM's budget had no more left.
            computed = request.num_computed_tokens - tokens
            load.take_back(load.prefill_tokens, computed)
            load.add_prefill(tokens, computed)
        phases.decode_kv_tokens += load.decode_tokens
        load.limit_ms = self.bound_ms
        self._note_bound()
        self._load = StepLoad(load.decodes, phases.decode_kv_tokens, load.decodes)
        chunk = self._place(held, self._load)
        if chunk:
            self._config.long_prefill_token_threshold = chunk
        else:
            self.stale = True
        return load

    def note_scheduled(self, scheduled: dict[str, int]) -> None:
        """A step has been scheduled: keep no room again for whom it was in vain.

        vLLM has more reasons to pass over a waiting request than blocks and
        seats: the head of its queue, adapters, a grammar not yet compiled.

        Args:
            scheduled: Its tokens by request, none in a step that holds none.
        """
        self._idle = not scheduled
        if not scheduled:
            self.stale = True
        elif self.nothing_to_bound:
            return
        self._overdue.step_over()
        if not scheduled:
            return
        for request_id, share in self._shares.items():
            held = self._phases.deflected.get(request_id)
            if held is not None and share:
                taken = request_id in scheduled
                held.refused = None if taken else self._free_before

    def _keep_turn(self, load: StepLoad, key: str) -> None:
        """Keep room for the prefill whose turn it is, before any other's."""
        phases = self._phases
        held = phases.deflected.get(key)
        if held is not None:
            request = held.request
        elif key in phases.prefilling:
            request = phases.prefilling[key]
        elif key in phases.waiting:
            request = phases.waiting[key]
        elif key in phases.awaiting_kv:  # There was nothing to fetch.
            request = phases.awaiting_kv[key]
        else:  # It has ended.
            return
        computed = request.num_computed_tokens
        wanted = request.num_tokens - computed
        tracker = held.tracker if held is not None else None
        chunk = self._rule.chunk(load, computed, wanted, tracker)
        if chunk and held is not None and self._rule.by_slack:
            # There is headroom again, and it is the first to be served.
            return
        tokens = min(wanted, self._settings.smallest_chunk_tokens)
        load.add_prefill(tokens, computed)
        if held is not None:
            load.guarded = True
        self._turn = key, tokens, chunk < tokens

    def _share_by_slack(self, load: StepLoad) -> None:
        """Keep room for deflected prefills, least slack first."""
        scheduler = self._scheduler
        deflected = self._phases.deflected
        groups = len(scheduler.kv_cache_config.kv_cache_groups)
        pool = scheduler.kv_cache_manager.block_pool
        blocks = pool.get_num_free_blocks() // groups
        seats = scheduler.max_num_running_reqs - len(scheduler.running)
        self._free_before = blocks, seats
        self._shares = share_by_slack(
            self._rule,
            load,
            [
                held.claim(key, scheduler.block_size)
                for key, held in deflected.items()
                if not still_refused(held.refused, blocks, seats)
                and not self._has_turn(key)
            ],
            scheduler.max_num_scheduled_tokens,
            blocks,
            seats,
        )
        for key, share in self._shares.items():
            if share:
                self._overdue.served(deflected[key].deadline_s)
            # One that does not run may yet be found in the prefix cache.
            if share and deflected[key].request.status == RequestStatus.RUNNING:
                self._fixed[key] = share

    def _fix_the_only_one(self, load: StepLoad) -> None:
        """The chunk of a deflected prefill that runs beside decodes alone."""
        ((key, held),) = self._phases.deflected.items()
        request = held.request
        if request.status != RequestStatus.RUNNING or self._has_turn(key):
            return
        chunk = self._place(held, load)
        if not chunk:
            return
        self._overdue.served(held.deadline_s)
        scheduler = self._scheduler
        if (
            self._joined
            or self._overdue.holder is not None
            or scheduler.num_spec_tokens
            # A session that has been given more of its prompt.
            or any(r.status == RequestStatus.WAITING for r in scheduler.waiting)
            or any(r.status == RequestStatus.WAITING for r in scheduler.skipped_waiting)
        ):
            self._fixed[key] = chunk
        else:
            self._only = held
            self._config.long_prefill_token_threshold = chunk

    def _place(self, held: Deflected, load: StepLoad) -> int:
        """Place the chunk of the only deflected prefill in the step."""
        request = held.request
        computed = request.num_computed_tokens
        # vLLM takes no more of it than its budget has left.
        wanted = request.num_tokens - computed
        if 0 < self._most_tokens < wanted:
            wanted = self._most_tokens
        chunk = self._rule.chunk(load, computed, wanted, held.tracker)
        if chunk:
            load.add_prefill(chunk, computed)
            load.guarded = True
        return chunk

    def _make_limiter(self) -> Limiter:
        """The function that vLLM asks about every request of a step."""
        decoding, fixed, bound = self._phases.decoding, self._fixed, self._bound

        # Decodes are most of what is asked about, so they are told apart first.
        def limit(request: Request, computed: int, tokens: int) -> int:
            request_id = request.request_id
            if request_id in decoding:
                return tokens
            chunk = fixed.get(request_id)
            if chunk is not None:
                return chunk if chunk < tokens else tokens
            return bound(request, computed, tokens)

        return limit

    def _bound(self, request: Request, computed: int, tokens: int) -> int:
        """Tokens of a prefill in the step being scheduled."""
        request_id = request.request_id
        if request_id in self._joined:
            return tokens
        held = self._phases.deflected.get(request_id)
        if self._has_turn(request_id):
            return self._take_turn(request, held, computed, tokens)
        load = self._load
        rule = self._rule
        tracker = held.tracker if held is not None else None
        share = self._shares.get(request_id)
        # Only now is it known what of it is in the prefix cache.
        found = computed != request.num_computed_tokens and share != 0
        if share is None:
            granted = rule.chunk(load, computed, tokens, tracker)
        else:
            granted = min(tokens, share)
            if found:
                load.take_back(share, request.num_computed_tokens)
                granted = rule.chunk(load, computed, granted, tracker)
                share = None
        if found and not granted and self._overdue.holder == request_id:
            # It has not taken its turn, for without that prefix there is room.
            kept = min(tokens, self._settings.smallest_chunk_tokens)
            load.add_prefill(kept, computed)
            self._turn = request_id, kept, True
            return self._take_turn(request, held, computed, tokens)
        if held is not None and rule.follows_schedule:
            held.other_tokens = load.tokens
        due_s = self._due_s(request, held)
        if granted:
            self._overdue.served(due_s)
        else:
            if self._wall_clock_s() > due_s:
                self._overdue.held_back(request_id, due_s)
            if computed and _tells_of_prompt(request):
                # vLLM's worker drops a request that a step leaves out, and with
                # it the log-probabilities of the prompt so far.
                granted = 1
                share = None
        if granted and share is None:
            load.add_prefill(granted, computed)
            if held is not None:
                load.guarded = True
        return granted

    def _has_turn(self, key: str) -> bool:
        return self._turn is not None and self._turn[0] == key

    def _take_turn(
        self, request: Request, held: Deflected | None, computed: int, tokens: int
    ) -> int:
        """The smallest chunk, for the prefill whose turn it is.

        A step that it puts over the bound is counted.
        """
        assert self._turn is not None
        key, kept, over = self._turn
        load = self._load
        if computed != request.num_computed_tokens and not over:
            # A part of it is in the prefix cache: what its chunk costs is known
            # only now.
            load.take_back(kept, request.num_computed_tokens)
            kept = min(kept, tokens)
            tracker = held.tracker if held is not None else None
            over = self._rule.chunk(load, computed, kept, tracker) < kept
            load.add_prefill(kept, computed)
        if over:
            self.overrides += 1
        if held is not None:
            held.other_tokens = load.tokens - kept
        self._overdue.held_back(key, self._due_s(request, held))
        return min(tokens, kept)

    def _due_s(self, request: Request, held: Deflected | None) -> float:
        """Unix time at which its first token is due."""
        if held is not None:
            return held.deadline_s
        arrival_s: float = request.arrival_time
        return arrival_s + self._settings.ttft_slo_ms / 1e3


def _tells_of_prompt(request: Request) -> bool:
    """Whether the answer holds log-probabilities of the prompt."""
    sampling = request.sampling_params
    return sampling is not None and sampling.prompt_logprobs is not None
