# SPDX-License-Identifier: Apache-2.0
"""The state report: what an engine tells proxies of itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import vllm.envs as envs
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kairos.core.messages import MOST_PREFILLS, DeflectedReport, StateReport
from vllm_kairos.engine.chunks import ChunkLimits
from vllm_kairos.engine.meter import StepMeter
from vllm_kairos.engine.requests import RequestPhases
from vllm_kairos.engine.settings import EngineSettings

#: Added to the NIXL side-channel port, which is unique per engine on a host.
_REPORT_PORT_OFFSET = 10_000


class Reporter:
    """Makes the state reports of one engine.

    The engine's thread freezes the state between two steps; the heartbeat's
    thread stamps what was frozen last and sends it.

    Args:
        scheduler: vLLM's scheduler, for its limits and KV blocks.
        engine_id: Name of the engine.
        settings: Settings of the engine.
        phases: Its requests.
        chunks: What bounds its prefills.
        meter: What times its steps.
        wall_clock_s: Unix time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine_id: str,
        settings: EngineSettings,
        phases: RequestPhases,
        chunks: ChunkLimits,
        meter: StepMeter,
        wall_clock_s: Callable[[], float],
    ):
        self._scheduler = scheduler
        self._settings = settings
        self._phases = phases
        self._chunks = chunks
        self._meter = meter
        self._wall_clock_s = wall_clock_s
        self._engine_id = engine_id
        self._incarnation = uuid.uuid4().hex
        self._role = _role(scheduler.vllm_config)
        self._snapshot: StateReport | None = None

    def take_snapshot(self) -> None:
        """Freeze the state for the heartbeat thread, between two steps."""
        scheduler, phases = self._scheduler, self._phases
        if scheduler.num_spec_tokens:
            phases.recount()
        waiting: Iterable[Request] = phases.waiting.values()
        if scheduler.policy == SchedulingPolicy.PRIORITY:
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
        kv_cache = scheduler.kv_cache_manager
        pool = kv_cache.block_pool
        self._snapshot = StateReport(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            seq=0,
            time_s=self._wall_clock_s(),
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
            block_size=scheduler.block_size,
            budget_tokens=scheduler.max_num_scheduled_tokens,
            max_num_seqs=scheduler.max_num_running_reqs,
            admitted=list(phases.admitted),
            steps=list(self._meter.recent),
            malformed_schedules=phases.malformed,
            guard_overrides=self._chunks.overrides,
            adaptive=bool(self._settings.profile) and self._settings.mode != "planned",
            prefix_caching=kv_cache.enable_caching,
            cached=list(phases.cached),
        )

    def limit_ms(self) -> float | None:
        """Bound on a predicted step that is safe by what this engine has seen."""
        limit_ms = self._chunks.limit_ms
        if limit_ms is not None or self._settings.profile is None:
            return limit_ms
        beta = self._meter.errors.effective_beta(self._settings.beta)
        return beta * self._settings.tau_ms

    def report(self, seq: int) -> StateReport | None:
        """The latest snapshot with the beat's own stamp. Heartbeat thread.

        Args:
            seq: Number of the report.

        Returns:
            The report, `None` before the first snapshot.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return None
        return msgspec.structs.replace(
            snapshot,
            seq=seq,
            time_s=self._wall_clock_s(),
            step_remaining_ms=self._meter.remaining_ms(),
            limit_ms=self.limit_ms(),
            errors={
                phase: (error.bias_percent, error.mape_percent)
                for phase, error in self._meter.errors.errors().items()
            },
        )


def engine_id(settings: EngineSettings, vllm_config: Any) -> str:
    """Name of the engine in its reports: as set, else its KV connector's."""
    if settings.engine_id:
        return settings.engine_id
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.engine_id:
        return str(transfer.engine_id)
    return uuid.uuid4().hex


def report_address(settings: EngineSettings, vllm_config: Any) -> str:
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


def _role(vllm_config: Any) -> str:
    transfer = vllm_config.kv_transfer_config
    return str(transfer.kv_role) if transfer is not None else "none"
