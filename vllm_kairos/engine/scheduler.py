# SPDX-License-Identifier: Apache-2.0
"""KairosScheduler: vLLM's scheduler, with per-request chunk schedules.

One mixin over vLLM 0.18.1's ``Scheduler`` and ``AsyncScheduler``. It overrides
named methods only and adds three things: the limiter that the patched
``schedule()`` asks, the step clock, and the state report.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
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

from vllm_kairos.core.chunk_rule import ChunkRule, PlannedRule, StepLoad
from vllm_kairos.core.messages import (
    MOST_PREFILLS,
    ChunkSchedule,
    DeflectedReport,
    StateReport,
    parse_schedule,
)
from vllm_kairos.engine.publisher import Heartbeat
from vllm_kairos.engine.recorder import StepLog, StepRecord
from vllm_kairos.engine.requests import Deflected, RequestPhases
from vllm_kairos.engine.settings import EngineSettings, load_settings

logger = init_logger(__name__)

#: Added to the NIXL side-channel port, which is unique per engine on a host.
_REPORT_PORT_OFFSET = 10_000

_MOST_RECENT_STEPS = 64


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
        self._model = profile.step_model() if profile else None
        self._rule: ChunkRule = PlannedRule()
        self._phases = RequestPhases()
        self._load: StepLoad | None = None
        self._in_flight: deque[tuple[SchedulerOutput, StepLoad, float]] = deque()
        self._step = 0
        self._last_end_s = float("-inf")
        self._contiguous = False
        self._step_started_s = 0.0
        self._step_predicted_ms = 0.0
        self._malformed = 0
        self._overrides = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MOST_RECENT_STEPS)
        self._records: deque[StepRecord] = deque()
        self._snapshot: StateReport | None = None
        self._snapshot_at_s = float("-inf")
        self._engine_id = _engine_id(settings, self.vllm_config)
        self._incarnation = uuid.uuid4().hex
        self._role = _role(self.vllm_config)
        self._step_log: StepLog | None = None
        if settings.step_log:
            self._step_log = StepLog(settings.step_log, self._engine_id)
        self._take_snapshot()
        self._heartbeat: Heartbeat | None = None
        address = _report_address(settings, self.vllm_config)
        if address or self._step_log is not None:
            self._heartbeat = Heartbeat(
                address, settings.heartbeat_ms, self._report, self._flush_records
            )

    # ------------------------------------------------------------ requests

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._phases.add(request, self._read_schedule(request))

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

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        computed = request.num_computed_tokens
        super()._preempt_request(request, timestamp)
        self._phases.preempt(request, computed)

    # ---------------------------------------------------------------- step

    def schedule(self) -> SchedulerOutput:
        busy = bool(self.running)
        started_s = self.step_clock_s()
        output = super().schedule()
        if output.total_num_scheduled_tokens:
            load = self._load
            assert load is not None
            if busy and self._contiguous and not self._in_flight:
                # The engine has not blocked since the last step ended: what
                # it did in between is part of what a decode feels.
                started_s = self._last_end_s
            self._in_flight.append((output, load, started_s))
            self._step_started_s = started_s
            self._step_predicted_ms = self._predict(load)
            if not busy or self._snapshot_due():
                self._take_snapshot()
        else:
            self._contiguous = False
            if self._snapshot_due():
                self._take_snapshot()
        return output

    def _get_new_tokens_limiter(
        self,
    ) -> Callable[[Request, int, int], int] | None:
        phases = self._phases
        if not phases.deflected:
            return None
        joining = self.finished_recving_kv_req_ids
        decodes = len(phases.decoding) + len(joining)
        load = StepLoad(
            decodes=decodes,
            decode_kv_tokens=phases.decode_kv_tokens,
            decode_tokens=decodes,
        )
        for request_id in joining:
            load.decode_kv_tokens += self.requests[request_id].num_computed_tokens
        if self.num_spec_tokens:
            load.decode_tokens += sum(
                len(request.spec_token_ids) for request in phases.decoding.values()
            )
        self._load = load
        return self._limit

    def _limit(self, request: Request, computed: int, tokens: int) -> int:
        """Tokens of a request in the step being scheduled."""
        request_id = request.request_id
        phases = self._phases
        held = phases.deflected.get(request_id)
        load = self._load
        assert load is not None
        if held is None:
            if request_id in phases.decoding or request_id in phases.awaiting_kv:
                return tokens  # Counted when the step began.
            if tokens <= 1:
                load.decodes += 1
                load.decode_tokens += 1
                return tokens
        granted = self._rule.chunk(
            load, computed, tokens, held.tracker if held else None
        )
        if held is not None:
            held.other_tokens = load.tokens
            if granted == 0:
                granted = self._past_target(held, tokens)
        if granted:
            load.add_prefill(granted, computed)
        return granted

    def _past_target(self, held: Deflected, tokens: int) -> int:
        """A chunk for a prefill without headroom that is past its target.

        Held back for ever it would starve; each such step is counted.
        """
        age_ms = (self.wall_clock_s() - held.request.arrival_time) * 1e3
        if age_ms <= self.kairos.ttft_slo_ms:
            return 0
        self._overrides += 1
        return min(tokens, self.kairos.smallest_chunk_tokens)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._load = self._phases.note_step(scheduler_output)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> Any:
        end_s = self.step_clock_s()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._in_flight and self._in_flight[0][0] is scheduler_output:
            _, load, started_s = self._in_flight.popleft()
            self._note_latency(load, max(started_s, self._last_end_s), end_s)
            self._last_end_s = end_s
            self._contiguous = True
        if not self.requests:
            self._step_predicted_ms = 0.0
            self._take_snapshot()
        return outputs

    def _note_latency(self, load: StepLoad, started_s: float, end_s: float) -> None:
        latency_ms = (end_s - started_s) * 1e3
        predicted = self._predict(load)
        self._recent.append((predicted or -1.0, latency_ms))
        if self._step_log is not None:
            self._records.append(
                StepRecord(
                    self._step,
                    self.wall_clock_s(),
                    load.prefill_tokens,
                    load.prefills,
                    load.prefill_kv_tokens,
                    load.decodes,
                    load.decode_kv_tokens,
                    latency_ms,
                )
            )
        self._step += 1

    def _predict(self, load: StepLoad) -> float:
        """Predicted milliseconds of a step; zero without a profile."""
        if self._model is None:
            return 0.0
        return self._model.step_ms(
            load.decodes,
            load.decode_kv_tokens,
            load.prefill_tokens,
            load.prefill_kv_tokens,
            load.prefills,
        )

    # -------------------------------------------------------------- report

    def _snapshot_due(self) -> bool:
        age_ms = (self.step_clock_s() - self._snapshot_at_s) * 1e3
        return age_ms >= self.kairos.heartbeat_ms / 2

    def _take_snapshot(self) -> None:
        """Freeze the state for the heartbeat thread, between two steps."""
        self._snapshot_at_s = self.step_clock_s()
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
            steps=list(self._recent),
            malformed_schedules=self._malformed,
            guard_overrides=self._overrides,
        )

    def _report(self, seq: int) -> StateReport | None:
        """The latest snapshot with the beat's own stamp. Heartbeat thread."""
        snapshot = self._snapshot
        if snapshot is None:
            return None
        remaining_ms = 0.0
        if self._step_predicted_ms:
            age_ms = (self.step_clock_s() - self._step_started_s) * 1e3
            remaining_ms = max(0.0, self._step_predicted_ms - age_ms)
        return _stamped(snapshot, seq, self.wall_clock_s(), remaining_ms)

    def _flush_records(self) -> None:
        """Write the step records gathered so far. Heartbeat thread."""
        if self._step_log is None or not self._records:
            return
        records = self._records
        batch = [records.popleft() for _ in range(len(records))]
        self._step_log.write(batch)

    def shutdown(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._flush_records()
        if self._step_log is not None:
            self._step_log.close()
            self._step_log = None
        super().shutdown()


class KairosScheduler(KairosMixin):
    """Kairos over vLLM's ``Scheduler``."""


class AsyncKairosScheduler(KairosMixin, AsyncScheduler):
    """Kairos over vLLM's ``AsyncScheduler``."""


def _stamped(
    snapshot: StateReport, seq: int, time_s: float, remaining_ms: float
) -> StateReport:
    return msgspec.structs.replace(
        snapshot, seq=seq, time_s=time_s, step_remaining_ms=remaining_ms
    )


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
