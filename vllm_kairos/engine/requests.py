# SPDX-License-Identifier: Apache-2.0
"""Which request is in which phase, kept as requests come and go.

Looping over all waiting requests in every step is a known performance trap of
a scheduler; here every request moves between a few dictionaries when
something happens to it, and a step touches only those that prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kairos.core.chunk_rule import Claim
from vllm_kairos.core.chunk_tracker import ChunkTracker
from vllm_kairos.core.messages import (
    MOST_ADMITTED,
    ChunkSchedule,
    parse_schedule,
    ticket_of,
)
from vllm_kairos.core.step_load import StepLoad

logger = init_logger(__name__)


@dataclass(slots=True)
class Deflected:
    """A deflected request.

    Attributes:
        request: vLLM's request.
        ticket: Its dispatch.
        tracker: Its position in its schedule.
        deadline_s: Unix time at which its first token is due.
        other_tokens: Tokens of the others when its chunk was last bounded.
        refused: Free blocks and seats beside which the engine did not admit it
            although room had been kept for it.
    """

    request: Request
    ticket: str
    tracker: ChunkTracker
    deadline_s: float
    other_tokens: int = 0
    refused: tuple[int, int] | None = None

    def claim(self, key: str, block_size: int) -> Claim:
        """What it wants of the step being scheduled."""
        request = self.request
        computed, tokens = request.num_computed_tokens, request.num_tokens
        return Claim(
            key,
            computed,
            tokens - computed,
            self.tracker,
            self.deadline_s,
            -(-tokens // block_size) + -computed // block_size,
            request.status == RequestStatus.RUNNING,
        )


class RequestPhases:
    """Requests of one engine by phase.

    Args:
        follows_schedule: Trackers are told of every chunk granted.

    Attributes:
        waiting: Ordinary prefills not started, in arrival order.
        awaiting_kv: Requests whose KV comes from another node.
        prefilling: Ordinary prefills partly computed, in the order started.
        deflected: Deflected requests in their prefill phase, in arrival order.
        decoding: Requests past their prefill.
        decode_kv_tokens: KV tokens of `decoding`, ``K``. Kept incrementally;
            rejected speculative tokens make it drift until `recount`.
        admitted: Tickets taken, newest last.
        cached: Tickets of prompts begun here, with what was found of them in
            the prefix cache.
        behind: `decode_kv_tokens` has not been kept for a while.
        malformed: Requests whose schedule could not be read.
    """

    def __init__(self, follows_schedule: bool = True) -> None:
        self._follows_schedule = follows_schedule
        self.waiting: dict[str, Request] = {}
        self.awaiting_kv: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.deflected: dict[str, Deflected] = {}
        self.decoding: dict[str, Request] = {}
        self.decode_kv_tokens = 0
        self.behind = False
        self.admitted: deque[str] = deque(maxlen=MOST_ADMITTED)
        self.cached: deque[tuple[str, int]] = deque(maxlen=MOST_ADMITTED)
        self.malformed = 0
        self._schedules: dict[str, Deflected] = {}
        self._joining: set[str] = set()

    def add(self, request: Request, ttft_slo_ms: float) -> None:
        """A request has been added to the scheduler.

        Args:
            request: The request, with its chunk schedule if it came with one.
            ttft_slo_ms: Time it has to its first token unless it says so.
        """
        schedule = self._read_schedule(request)
        request_id = request.request_id
        params = request.kv_transfer_params
        if isinstance(params, Mapping) and params.get("do_remote_prefill"):
            self.awaiting_kv[request_id] = request
        elif schedule is not None:
            slack_ms = ttft_slo_ms if schedule.slack_ms is None else schedule.slack_ms
            held = Deflected(
                request,
                schedule.ticket,
                ChunkTracker(schedule.chunks),
                request.arrival_time + slack_ms / 1e3,
            )
            self.deflected[request_id] = self._schedules[request_id] = held
        else:
            self.waiting[request_id] = request
        ticket = ticket_of(params)
        if ticket is not None:
            self.admitted.append(ticket)

    def _read_schedule(self, request: Request) -> ChunkSchedule | None:
        """The request's schedule; one that cannot be read is no schedule.

        Never raises: an exception in the scheduler kills the engine.
        """
        try:
            return parse_schedule(request.kv_transfer_params)
        except ValueError as error:
            self.malformed += 1
            logger.warning(
                "Request %s: chunk schedule ignored: %s", request.request_id, error
            )
            return None

    def note_failed_kv(self, request_ids: Iterable[str]) -> None:
        """Requests whose KV failed to load, to be computed here instead.

        They wait like any ordinary prefill from now on: later nothing tells
        them from requests whose KV has arrived.
        """
        for request_id in request_ids:
            request = self.awaiting_kv.pop(request_id, None)
            if request is not None:
                self.waiting[request_id] = request

    def recompute(self, request_ids: Iterable[str]) -> None:
        """Running requests have lost KV that had been loaded for them."""
        for request_id in request_ids:
            request = self.decoding.pop(request_id, None)
            if request is None:
                continue
            held = self._schedules.get(request_id)
            if held is not None:
                self.deflected[request_id] = held
            else:
                self.prefilling[request_id] = request

    def remove(self, request: Request) -> None:
        """A request has finished, by whatever cause."""
        request_id = request.request_id
        self._schedules.pop(request_id, None)
        if self.decoding.pop(request_id, None) is not None:
            self.decode_kv_tokens -= request.num_computed_tokens
            return
        self.prefilling.pop(request_id, None)
        self.waiting.pop(request_id, None)
        self.awaiting_kv.pop(request_id, None)
        self.deflected.pop(request_id, None)

    def preempt(self, request: Request, computed_tokens: int) -> None:
        """A running request goes back to the front of the queue.

        Args:
            request: The request.
            computed_tokens: Tokens it had computed and now has lost.
        """
        request_id = request.request_id
        if self.decoding.pop(request_id, None) is not None:
            self.decode_kv_tokens -= computed_tokens
        self.prefilling.pop(request_id, None)
        held = self._schedules.get(request_id)
        if held is not None:
            self.deflected[request_id] = held
        else:
            self.waiting = {request_id: request, **self.waiting}

    def note_step(
        self, output: SchedulerOutput, wanted: bool = True
    ) -> StepLoad | None:
        """Account for a step that has just been scheduled.

        Called when the requests' ``num_computed_tokens`` have been advanced.

        Args:
            output: The step; it holds tokens.
            wanted: What it holds is asked for.

        Returns:
            What the step holds, `None` where that is not asked for. The single
            token by which a request joins whose KV has arrived is a decode: it
            costs what a decode costs.
        """
        for new in output.scheduled_new_reqs:
            self._note_cached(new.req_id)
            self._start(new.req_id)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._start(request_id)

        scheduled = output.num_scheduled_tokens
        total = output.total_num_scheduled_tokens
        kv_tokens = self.decode_kv_tokens
        prefilling = self.prefilling
        if not prefilling and not self.deflected:
            self.decode_kv_tokens = kv_tokens + total
            return StepLoad(len(scheduled), kv_tokens, total) if wanted else None
        load = StepLoad()
        finished: list[Request] = []
        for request_id, held in self.deflected.items():
            tokens = scheduled.get(request_id)
            if tokens:
                request = held.request
                computed = request.num_computed_tokens - tokens
                if self._follows_schedule:
                    held.tracker.granted(computed, tokens, held.other_tokens)
                load.add_prefill(tokens, computed)
                if not request.is_prefill_chunk:
                    finished.append(request)
        joined = self._place_prefilling(scheduled, load, finished) if prefilling else ()
        for request in joined:
            # With the token of this step, which is counted below.
            kv_tokens += request.num_computed_tokens - 1
        load.decodes = len(scheduled) - load.prefills
        load.decode_tokens = total - load.prefill_tokens
        load.decode_kv_tokens = kv_tokens
        self.decode_kv_tokens = kv_tokens + load.decode_tokens
        for request in finished:
            request_id = request.request_id
            prefilling.pop(request_id, None)
            self.deflected.pop(request_id, None)
            if request not in joined:
                self.decode_kv_tokens += request.num_computed_tokens
            self.decoding[request_id] = request
        return load if wanted else None

    def _place_prefilling(
        self, scheduled: dict[str, int], load: StepLoad, finished: list[Request]
    ) -> list[Request]:
        """Place the ordinary prefills of a step in its load.

        Args:
            scheduled: Tokens by request.
            load: Takes those that are prefills.
            finished: Takes those whose prompt is done.

        Returns:
            Those that join the decodes instead, by a single token.
        """
        joined: list[Request] = []
        for request_id, request in self.prefilling.items():
            tokens = scheduled.get(request_id)
            if not tokens:
                continue
            if tokens == 1 and request_id in self._joining:
                joined.append(request)
            else:
                load.add_prefill(tokens, request.num_computed_tokens - tokens)
            if not request.is_prefill_chunk:
                finished.append(request)
        self._joining.clear()
        return joined

    def _note_cached(self, request_id: str) -> None:
        """A request is begun; what it had then was in the prefix cache."""
        held = self.deflected.get(request_id)
        request = held.request if held else self.waiting.get(request_id)
        if request is not None:
            ticket = ticket_of(request.kv_transfer_params)
            if ticket is not None:
                self.cached.append((ticket, max(0, request.num_cached_tokens)))

    def _start(self, request_id: str) -> None:
        """A request is scheduled for the first time, or again."""
        if request_id in self.deflected:
            return
        request = self.awaiting_kv.pop(request_id, None)
        if request is not None:
            self._joining.add(request_id)
        else:
            request = self.waiting.pop(request_id, None)
            if request is None:
                # A session that has been given more of its prompt.
                request = self.decoding.pop(request_id, None)
                self.behind = True
        if request is not None:
            self.prefilling[request_id] = request

    def recount(self) -> None:
        """Count `decode_kv_tokens` anew."""
        self.behind = False
        self.decode_kv_tokens = sum(
            request.num_computed_tokens for request in self.decoding.values()
        )

    def catch_up(self) -> None:
        """Count `decode_kv_tokens` anew where it has not been kept."""
        if self.behind:
            self.recount()

    def may_compute(self) -> bool:
        """Whether one that is to fetch its KV may yet have to compute its prompt.

        That is told when vLLM first schedules it: the connector finds nothing
        to fetch, or not all, or fetches within the step.
        """
        waiting = RequestStatus.WAITING
        return any(r.status == waiting for r in self.awaiting_kv.values())

    @property
    def only_decodes(self) -> bool:
        """Requests are past their prefill, all that there are."""
        return not (
            self.prefilling or self.deflected or self.waiting or self.awaiting_kv
        )
