# SPDX-License-Identifier: Apache-2.0
"""KairosScheduler: vLLM's scheduler, with per-request chunk schedules.

One mixin over vLLM 0.18.1's ``Scheduler`` and ``AsyncScheduler``. It overrides
named methods only and tells four parts of what happens: `RequestPhases` which
request is in which phase, `ChunkLimits` how many tokens a prefill may take,
`StepMeter` how long steps take, `Reporter` what proxies are told.

What is not needed to put a step together is done while the device computes it:
see `KairosMixin._settle`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_kairos.core.online_error import OnlineError
from vllm_kairos.engine.chunks import ChunkLimits, Limiter, chunk_rule
from vllm_kairos.engine.meter import StepMeter
from vllm_kairos.engine.publisher import Heartbeat
from vllm_kairos.engine.recorder import StepLog
from vllm_kairos.engine.report import Reporter, engine_id, report_address
from vllm_kairos.engine.requests import RequestPhases
from vllm_kairos.engine.settings import EngineSettings, load_settings

logger = init_logger(__name__)


class KairosMixin(Scheduler):
    """What Kairos adds to a vLLM scheduler. Not used by itself.

    ``schedule``, ``update_from_output`` and ``get_grammar_bitmask`` are bound to
    the instance (`_make_step`), so a subclass that defines them is not asked.
    """

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
        rule = self._rule = chunk_rule(settings, model)
        self._phases = RequestPhases(rule.follows_schedule)
        self._snapshot_due_s = float("-inf")
        #: The step scheduled last, until it is accounted for.
        self._unsettled: list[SchedulerOutput] = []
        #: When that began, where it did not just follow the step before.
        self._began_s: float | None = None
        name = engine_id(settings, self.vllm_config)
        log = StepLog(settings.step_log, name) if settings.step_log else None
        self._meter = StepMeter(
            lambda: self.step_clock_s(),
            lambda: self.wall_clock_s(),
            model,
            rule,
            log,
            OnlineError(warn_percent=settings.error_warning_percent),
            _refit_command(self.vllm_config, settings),
        )
        self._chunks = ChunkLimits(
            self, settings, rule, self._phases, lambda: self.wall_clock_s()
        )
        self._reporter = Reporter(
            self,
            name,
            settings,
            self._phases,
            self._chunks,
            self._meter,
            lambda: self.wall_clock_s(),
        )
        if not self.scheduler_config.enable_chunked_prefill:
            logger.warning(
                "Kairos: chunked prefill is off, so prompts are computed whole: "
                "chunk schedules are not followed and decodes wait for them. "
                "State reports tell proxies to deflect nothing to this engine."
            )
        self._stock_schedule = super().schedule
        self._make_step(super().update_from_output, super().get_grammar_bitmask)
        self._take_snapshot()
        self._heartbeat: Heartbeat | None = None
        address = report_address(settings, self.vllm_config)
        if address or log is not None:
            self._heartbeat = Heartbeat(
                address,
                settings.heartbeat_ms,
                self._reporter.report,
                self._meter.digest,
            )

    # ------------------------------------------------------------ requests

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._phases.add(request, self.kairos.ttft_slo_ms)
        self._changed()

    def _enqueue_waiting_request(self, request: Request) -> None:
        super()._enqueue_waiting_request(request)
        self._changed()

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> dict[str, Any] | None:
        if self._unsettled:
            self._settle()
        self._phases.remove(request)
        self._changed()
        params: dict[str, Any] | None = super()._free_request(
            request, delay_free_blocks
        )
        return params

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._changed()
        if not self.requests:
            # No step may come that would tell of it.
            self._take_snapshot()

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        if self._unsettled:
            self._settle()
        computed = request.num_computed_tokens
        super()._preempt_request(request, timestamp)
        self._phases.preempt(request, computed)
        self._changed()

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if self._unsettled:
            self._settle()
        # The next step does not follow the last.
        self._meter.contiguous = False
        self._changed()

    def _handle_invalid_blocks(self, invalid_block_ids: set[int]) -> set[str]:
        if self._unsettled:
            self._settle()
        failed: set[str] = super()._handle_invalid_blocks(invalid_block_ids)
        if failed and self.recompute_kv_load_failures:
            self._phases.recompute(failed)
        self._phases.behind = True
        self._changed()
        return failed

    def _changed(self) -> None:
        """Requests or KV blocks are no longer what was gone by."""
        self._chunks.stale = True
        if self._quiet:
            self._bind(quiet=False)

    # ---------------------------------------------------------------- step

    def _make_step(
        self, stock_update: Callable[..., Any], stock_bitmask: Callable[..., Any]
    ) -> None:
        """Put what every step calls into functions that have all at hand.

        A step of a small batch takes vLLM microseconds, and looking things up
        would be most of what Kairos adds to it.
        """
        stock_schedule, settle = self._stock_schedule, self._settle
        unsettled, chunks, ended = self._unsettled, self._chunks, self._meter.ended
        arrived = self.finished_recving_kv_req_ids

        def schedule() -> SchedulerOutput:
            # KV that has arrived comes with a step's output and tells nobody.
            if chunks.stale or unsettled or arrived:
                return self._schedule_anew()
            output = stock_schedule()
            unsettled.append(output)
            return output

        def update_from_output(
            scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
        ) -> Any:
            if unsettled:
                settle()
            # Judged when the next step is settled; its chunks are not yet
            # bounded by what this one tells.
            ended.append((scheduler_output.num_scheduled_tokens, self.step_clock_s()))
            return stock_update(scheduler_output, model_runner_output)

        def get_grammar_bitmask(scheduler_output: SchedulerOutput) -> Any:
            # EngineCore asks when it has launched the step and before it waits
            # for the result: what is done here costs nobody anything where a
            # device computes.
            settle()
            return quiet_bitmask(scheduler_output)

        def quiet_bitmask(scheduler_output: SchedulerOutput) -> Any:
            if self.step_clock_s() >= self._snapshot_due_s:
                self._take_snapshot()
            return stock_bitmask(scheduler_output)

        self._step = {
            False: (schedule, get_grammar_bitmask),
            True: (stock_schedule, quiet_bitmask),
        }
        self._bind(quiet=False)
        # Where nobody wants to know how long steps take there is nothing to do.
        self.update_from_output = update_from_output if self._meter.on else stock_update

    def _bind(self, quiet: bool) -> None:
        """Choose what EngineCore calls.

        Args:
            quiet: Requests that decode are all there is, and nobody wants to
                know how long steps take: until something changes a step tells
                nothing but how much KV they have by then, and that can be
                counted when it is asked for.
        """
        self._quiet = quiet
        self._phases.behind = True
        schedule, bitmask = self._step[quiet]
        self.schedule = schedule
        self.get_grammar_bitmask = bitmask

    def _get_new_tokens_limiter(self) -> Limiter | None:
        return self._chunks.limiter

    def _schedule_anew(self) -> SchedulerOutput:
        """Schedule a step that was not, or not rightly, made ready for.

        `ChunkLimits.stale` sees to it that every step is that may come after an
        idle time.
        """
        unsettled, chunks = self._unsettled, self._chunks
        if unsettled:  # EngineCore has not asked for the bitmask.
            self._settle()
            if self.step_clock_s() >= self._snapshot_due_s:
                self._take_snapshot()
        if chunks.stale or self.finished_recving_kv_req_ids:
            self._phases.catch_up()
            chunks.prepare()
        busy = bool(self.running)
        began_s = None
        if not busy or not self._meter.contiguous:
            began_s = self.step_clock_s()
        output = self._stock_schedule()
        unsettled.append(output)
        self._began_s = began_s
        if not busy:
            # A node that has just got work says so at once, also in a long step.
            self._take_snapshot()
        return output

    def _settle(self) -> None:
        """Account for the step scheduled last, and make ready for the next.

        It changes nothing that EngineCore sees, so it may be done at any time
        after a step has been scheduled and before what it goes by changes: the
        next step, the step's output, a request that ends or is preempted.
        Whatever comes first calls it, for EngineCore does not always ask for
        the bitmask (a pooling model), or asks late (one that has to wait for
        the tokens of the step before).
        """
        meter, chunks, phases = self._meter, self._chunks, self._phases
        if meter.ended:
            # Their ends came before the step that is still to be told of.
            meter.settle()
        if self._unsettled:
            output = self._unsettled.pop()
            scheduled = output.num_scheduled_tokens
            load = chunks.as_made_ready(output)
            if load is not None:
                meter.scheduled(scheduled, load, self._began_s)
                self._began_s = None
                if chunks.stale:
                    chunks.prepare()
                return
            chunks.note_scheduled(scheduled)
            if scheduled:
                load = phases.note_step(output, meter.on)
                if load is not None:
                    load.limit_ms = chunks.bound_ms
                    meter.scheduled(scheduled, load, self._began_s)
            else:
                meter.scheduled_nothing()
            self._began_s = None
        phases.catch_up()
        if chunks.stale or not chunks.nothing_to_bound:
            chunks.prepare()
        if phases.only_decodes and not chunks.stale and not meter.on:
            self._bind(quiet=True)

    # -------------------------------------------------------------- report

    def _take_snapshot(self) -> None:
        self._settle()
        # Twice a heartbeat: what is sent is then never much older than one.
        self._snapshot_due_s = self.step_clock_s() + self.kairos.heartbeat_ms / 2e3
        self._reporter.take_snapshot()

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


def _refit_command(vllm_config: Any, settings: EngineSettings) -> str:
    model = vllm_config.model_config.model
    return f"vllm-kairos profile --model {model} --output {settings.profile}"
