# SPDX-License-Identifier: Apache-2.0
"""KairosScheduler: vLLM's scheduler, with per-request chunk schedules.

One mixin over vLLM 0.18.1's ``Scheduler`` and ``AsyncScheduler``. It overrides
named methods only and adds three things: the limiter that the patched
``schedule()`` asks, the step clock, and the state report.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_kairos.core.chunk_rule import (
    AdaptiveRule,
    ChunkRule,
    PlannedRule,
    share_by_slack,
    still_refused,
)
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.messages import (
    MOST_PREFILLS,
    ChunkSchedule,
    DeflectedReport,
    StateReport,
    parse_schedule,
)
from vllm_kairos.core.online_error import OnlineError
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.engine.meter import StepMeter
from vllm_kairos.engine.publisher import Heartbeat
from vllm_kairos.engine.recorder import StepLog
from vllm_kairos.engine.requests import Deflected, RequestPhases
from vllm_kairos.engine.settings import EngineSettings, load_settings

logger = init_logger(__name__)

#: Added to the NIXL side-channel port, which is unique per engine on a host.
_REPORT_PORT_OFFSET = 10_000


class KairosMixin(Scheduler):
    """What Kairos adds to a vLLM scheduler. Not used by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(Scheduler, "_get_new_tokens_limiter"):
            raise RuntimeError(
                "this vLLM lacks the Kairos patch set; run `vllm-kairos patch apply`"
            )
        # Clocks are attributes so that virtual time can drive the scheduler.
        self.step_clock_s: Callable[[], float] = time.perf_counter
        self.wall_clock_s: Callable[[], float] = time.time
        settings, profile = load_settings(self.vllm_config.additional_config)
        self.kairos = settings
        model = profile.step_model() if profile else None
        self._rule = _chunk_rule(settings, model)
        self._phases = RequestPhases(self._rule.follows_schedule)
        self._load = StepLoad()
        self._shares: dict[str, int] = {}
        self._free_before = (0, 0)
        self._malformed = 0
        self._overrides = 0
        self._snapshot: StateReport | None = None
        self._snapshot_due_s = float("-inf")
        self._engine_id = _engine_id(settings, self.vllm_config)
        self._incarnation = uuid.uuid4().hex
        self._role = _role(self.vllm_config)
        log = None
        if settings.step_log:
            log = StepLog(settings.step_log, self._engine_id)
        self._meter = StepMeter(
            lambda: self.step_clock_s(),
            lambda: self.wall_clock_s(),
            model,
            self._rule,
            log,
            OnlineError(warn_percent=settings.error_warning_percent),
            _refit_command(self.vllm_config, settings),
        )
        self._splits_prompts = self.scheduler_config.enable_chunked_prefill
        if not self._splits_prompts:
            logger.warning(
                "Kairos: chunked prefill is off, so prompts are computed whole: "
                "chunk schedules are not followed and decodes wait for them. "
                "State reports tell proxies to deflect nothing to this engine."
            )
        self._timed = self._meter.on
        self._limiter = self._make_limiter(set())
        # Looked up once: a step of a small batch takes vLLM microseconds.
        self._stock_schedule = super().schedule
        self._stock_update_from_output = super().update_from_output
        if not self._timed:  # Nothing of ours to do there.
            self.update_from_output = (  # type: ignore[method-assign]
                self._stock_update_from_output
            )
        self._take_snapshot()
        self._heartbeat: Heartbeat | None = None
        address = _report_address(settings, self.vllm_config)
        if address or log is not None:
            self._heartbeat = Heartbeat(
                address, settings.heartbeat_ms, self._report, self._meter.digest
            )

    # ------------------------------------------------------------ requests

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._phases.add(
                request, self._read_schedule(request), self.kairos.ttft_slo_ms
            )

    def _read_schedule(self, request: Request) -> ChunkSchedule | None:
        """The request's schedule; one that cannot be read is no schedule.

        Never raises: an exception in the scheduler kills the engine.
        """
        try:
            return parse_schedule(request.kv_transfer_params)
        except ValueError as error:
            self._malformed += 1
            logger.warning(
                "Request %s: chunk schedule ignored: %s", request.request_id, error
            )
            return None

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> dict[str, Any] | None:
        self._phases.remove(request)
        params: dict[str, Any] | None = super()._free_request(
            request, delay_free_blocks
        )
        return params

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        if not self.requests:
            # No step may come that would tell of it.
            self._take_snapshot()

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        computed = request.num_computed_tokens
        super()._preempt_request(request, timestamp)
        self._phases.preempt(request, computed)

    # ---------------------------------------------------------------- step

    def schedule(self) -> SchedulerOutput:
        idle = not self.running
        started_s = self.step_clock_s()
        output = self._stock_schedule()
        tokens = output.total_num_scheduled_tokens
        phases = self._phases
        if self._timed:
            if tokens:
                if self._shares:
                    self._note_refused(output.num_scheduled_tokens)
                load = phases.note_step(output)
                self._meter.scheduled(output, load, started_s, not idle)
            else:
                self._meter.scheduled_nothing()
        elif (
            phases.prefilling
            or phases.deflected
            or output.scheduled_new_reqs
            or output.scheduled_cached_reqs.resumed_req_ids
        ):
            if tokens:
                phases.note_step(output)
        else:
            # Decodes alone, and nobody asks what such a step holds.
            phases.decode_kv_tokens += tokens
        # A node that has just got work says so at once, also in a long step.
        if idle or started_s >= self._snapshot_due_s:
            self._take_snapshot()
        return output

    def _get_new_tokens_limiter(
        self,
    ) -> Callable[[Request, int, int], int] | None:
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
        joining = self.finished_recving_kv_req_ids
        decodes = len(phases.decoding) + len(joining)
        if not decodes and not phases.deflected:
            return None
        load = self._load = StepLoad(decodes, phases.decode_kv_tokens, decodes)
        limiter = self._limiter
        if joining:
            for request_id in joining:
                load.decode_kv_tokens += self.requests[request_id].num_computed_tokens
            # A request whose KV failed to load computes its prompt like any other.
            limiter = self._make_limiter(joining - self.failed_recving_kv_req_ids)
        if self.num_spec_tokens:
            load.decode_tokens += sum(
                len(request.spec_token_ids) for request in phases.decoding.values()
            )
        self._shares = {}
        if rule.by_slack and len(phases.deflected) > 1:
            self._shares = self._share_by_slack(load)
        return limiter

    def _share_by_slack(self, load: StepLoad) -> dict[str, int]:
        """Tokens of each deflected prefill that room is kept for."""
        groups = len(self.kv_cache_config.kv_cache_groups)
        blocks = self.kv_cache_manager.block_pool.get_num_free_blocks() // groups
        seats = self.max_num_running_reqs - len(self.running)
        shares = share_by_slack(
            self._rule,
            load,
            [
                held.claim(key, self.block_size)
                for key, held in self._phases.deflected.items()
                if not still_refused(held.refused, blocks, seats)
            ],
            self.max_num_scheduled_tokens,
            blocks,
            seats,
        )
        self._free_before = blocks, seats
        return shares

    def _note_refused(self, scheduled: dict[str, int]) -> None:
        """Keep no room again for whom it was kept in vain.

        vLLM has more reasons to pass over a waiting request than blocks and
        seats: the head of its queue, adapters, a grammar not yet compiled.
        """
        for request_id, share in self._shares.items():
            held = self._phases.deflected.get(request_id)
            if held is not None and share:
                taken = request_id in scheduled
                held.refused = None if taken else self._free_before
        self._shares = {}

    def _make_limiter(self, joined: set[str]) -> Callable[[Request, int, int], int]:
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
        deadline_s = request.arrival_time + self.kairos.ttft_slo_ms / 1e3
        if held is not None:
            deadline_s = held.deadline_s
        if self.wall_clock_s() <= deadline_s:
            return 0
        self._overrides += 1
        return min(tokens, self.kairos.smallest_chunk_tokens)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> Any:
        self._meter.ended(scheduler_output, self.step_clock_s())
        return self._stock_update_from_output(scheduler_output, model_runner_output)

    # -------------------------------------------------------------- report

    def _take_snapshot(self) -> None:
        """Freeze the state for the heartbeat thread, between two steps."""
        # Twice a heartbeat: what is sent is then never much older than one.
        self._snapshot_due_s = self.step_clock_s() + self.kairos.heartbeat_ms / 2e3
        phases = self._phases
        if self.num_spec_tokens:
            phases.recount()
        waiting: Iterable[Request] = phases.waiting.values()
        if self.policy == SchedulingPolicy.PRIORITY:
            waiting = sorted(waiting)
        prefills = [
            (r.num_tokens - r.num_computed_tokens, r.num_computed_tokens)
            for r in phases.prefilling.values()
        ]
        more = 0
        for request in waiting:
            if len(prefills) < MOST_PREFILLS:
                prefills.append((request.num_tokens, 0))
            else:
                more += request.num_tokens
        pool = self.kv_cache_manager.block_pool
        self._snapshot = StateReport(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            seq=0,
            time_s=self.wall_clock_s(),
            role=self._role,
            decodes=len(phases.decoding),
            decode_kv_tokens=phases.decode_kv_tokens,
            deflected=[
                DeflectedReport(
                    held.ticket,
                    held.request.num_tokens - held.request.num_computed_tokens,
                    held.request.num_computed_tokens,
                )
                for held in phases.deflected.values()
            ],
            prefills=prefills,
            more_prefill_tokens=more,
            awaiting_kv=len(phases.awaiting_kv),
            awaiting_kv_tokens=sum(r.num_tokens for r in phases.awaiting_kv.values()),
            free_kv_blocks=pool.get_num_free_blocks(),
            total_kv_blocks=pool.num_gpu_blocks,
            block_size=self.block_size,
            budget_tokens=self.max_num_scheduled_tokens,
            max_num_seqs=self.max_num_running_reqs,
            admitted=list(phases.admitted),
            steps=list(self._meter.recent),
            malformed_schedules=self._malformed,
            guard_overrides=self._overrides,
            prefix_caching=self.kv_cache_manager.enable_caching,
            cached=list(phases.cached),
        )

    def _limit_ms(self) -> float | None:
        """Bound on a predicted step that is safe by what this engine has seen."""
        if not self._splits_prompts:
            return 0.0  # No chunk is.
        if self._rule.limit_ms is not None or self.kairos.profile is None:
            return self._rule.limit_ms
        beta = self._meter.errors.effective_beta(self.kairos.beta)
        return beta * self.kairos.tau_ms

    def _report(self, seq: int) -> StateReport | None:
        """The latest snapshot with the beat's own stamp. Heartbeat thread."""
        snapshot = self._snapshot
        if snapshot is None:
            return None
        return msgspec.structs.replace(
            snapshot,
            seq=seq,
            time_s=self.wall_clock_s(),
            step_remaining_ms=self._meter.remaining_ms(),
            limit_ms=self._limit_ms(),
            errors={
                phase: (error.bias_percent, error.mape_percent)
                for phase, error in self._meter.errors.errors().items()
            },
        )

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        try:
            self._meter.close()
        except OSError as error:  # A full disk must not keep the engine up.
            logger.error("Kairos step log: %s", error)
        super().shutdown()


class KairosScheduler(KairosMixin):
    """Kairos over vLLM's ``Scheduler``."""


class AsyncKairosScheduler(KairosMixin, AsyncScheduler):
    """Kairos over vLLM's ``AsyncScheduler``."""


def _chunk_rule(settings: EngineSettings, model: StepModel | None) -> ChunkRule:
    """The rule of ``mode``: adaptive wherever there is a profile to go by."""
    if model is None or settings.mode == "planned":
        return PlannedRule()
    feedback = Feedback(settings.tau_ms, settings.beta, late_share=settings.late_share)
    return AdaptiveRule(model, feedback, settings.smallest_chunk_tokens)


def _tells_of_prompt(request: Request) -> bool:
    """Whether the answer holds log-probabilities of the prompt."""
    sampling = request.sampling_params
    return sampling is not None and sampling.prompt_logprobs is not None


def _refit_command(vllm_config: Any, settings: EngineSettings) -> str:
    model = vllm_config.model_config.model
    return f"vllm-kairos profile --model {model} --output {settings.profile}"


def _engine_id(settings: EngineSettings, vllm_config: Any) -> str:
    if settings.engine_id:
        return settings.engine_id
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.engine_id:
        return str(transfer.engine_id)
    return uuid.uuid4().hex


def _role(vllm_config: Any) -> str:
    transfer = vllm_config.kv_transfer_config
    return str(transfer.kv_role) if transfer is not None else "none"


def _report_address(settings: EngineSettings, vllm_config: Any) -> str:
    """Where reports are bound; the port grows by the data-parallel rank."""
    rank = vllm_config.parallel_config.data_parallel_index
    address = settings.report_address
    if address is None:
        port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + _REPORT_PORT_OFFSET
        address = f"tcp://127.0.0.1:{port}"
    scheme, _, port_text = address.rpartition(":")
    if rank and scheme and port_text.isdigit():
        return f"{scheme}:{int(port_text) + rank}"
    return address
