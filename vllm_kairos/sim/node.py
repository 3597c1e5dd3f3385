# SPDX-License-Identifier: Apache-2.0
"""A node that steps as vLLM 0.18.1's scheduler steps.

The order of things is that of ``Scheduler.schedule()``: running requests
first, in their order, then waiting ones; a token budget and ``max_num_seqs``;
KV blocks, and where they run out the last running request is preempted, loses
its KV and goes to the front of the waiting ones; requests that wait for remote
KV stand aside until it has arrived and then need one token to join; a held
back prefill stands aside for the step. A twin test drives the real scheduler
over the same arrivals.
"""

from __future__ import annotations

from vllm_kairos.core.chunk_rule import ChunkRule, PlannedRule
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.sim.chunks import ChunkLimits, Limiter
from vllm_kairos.sim.engine_request import EngineRequest, Leg, Phase, Remote
from vllm_kairos.sim.kv_cache import CachedBlocks, CountedBlocks
from vllm_kairos.sim.queues import NodeLimits, WaitingQueue


class Node:
    """One engine: its queues, its KV blocks and the step it runs.

    Args:
        name: Id.
        limits: Its limits.
        rule: Bounds prefills of a step, as in the engine.

    Attributes:
        running: Requests in vLLM's running list, in order.
        waiting: Requests not started or preempted.
        aside: Requests that stand aside (vLLM ``skipped_waiting``).
        decodes: Requests past their prefill, ``B``.
        decode_kv_tokens: Their KV tokens, ``K``.
        deflected: Legs with a chunk schedule still in their prefill.
        awaiting: Legs whose KV is not here yet.
        loads: ``(leg, tokens)`` whose remote KV the last `schedule` asked for.
        scheduled: ``(leg, tokens)`` of the step in flight.
        load: What that step holds.
        preempted: Legs preempted by the last `schedule`.
        joined: Legs that joined `running` in it.
        chunks: Bounds the prefills of its steps.
    """

    __slots__ = (
        "name",
        "limits",
        "rule",
        "kv",
        "running",
        "waiting",
        "aside",
        "decodes",
        "decode_kv_tokens",
        "deflected",
        "awaiting",
        "awaiting_tokens",
        "arrived",
        "loads",
        "scheduled",
        "load",
        "preempted",
        "joined",
        "chunks",
    )

    def __init__(self, name: str, limits: NodeLimits, rule: ChunkRule | None = None):
        self.name = name
        self.limits = limits
        self.rule = rule or PlannedRule()
        blocks = limits.kv_tokens // limits.block_size
        kind = CachedBlocks if limits.prefix_caching else CountedBlocks
        self.kv = kind(blocks, limits.block_size)
        self.running: list[EngineRequest] = []
        self.waiting = WaitingQueue(limits.priority)
        self.aside = WaitingQueue(limits.priority)
        self.decodes = 0
        self.decode_kv_tokens = 0
        self.deflected: dict[EngineRequest, None] = {}
        self.awaiting: dict[EngineRequest, None] = {}
        self.awaiting_tokens = 0
        self.arrived: dict[EngineRequest, None] = {}
        self.loads: list[tuple[EngineRequest, int]] = []
        self.scheduled: list[tuple[EngineRequest, int]] = []
        self.load = StepLoad()
        self.preempted: list[EngineRequest] = []
        self.joined: list[EngineRequest] = []
        self.chunks = ChunkLimits(self, self.rule)

    # ------------------------------------------------------------- requests

    def add(self, request: EngineRequest) -> None:
        """A request arrives (vLLM ``add_request``)."""
        if request.remote == Remote.WANTED:
            self.awaiting[request] = None
            self.awaiting_tokens += request.prompt
        elif request.tracker is not None:
            self.deflected[request] = None
        self.waiting.add(request)

    def kv_arrived(self, request: EngineRequest) -> None:
        """Its remote KV is in place."""
        request.remote = Remote.ARRIVED
        self.arrived[request] = None

    def release(self, request: EngineRequest) -> None:
        """Its KV has been read by another node."""
        self.kv.free(request)

    def withdraw(self, request: EngineRequest) -> None:
        """Take a running decode off this node; its KV stays until released."""
        self.running.remove(request)
        self._leave_phase(request)

    @property
    def idle(self) -> bool:
        """Nothing here that a step could serve."""
        return not (self.running or self.waiting or self.aside)

    # ----------------------------------------------------------------- step

    def schedule(self, now_ms: float) -> bool:
        """Put the next step together (vLLM ``Scheduler.schedule``).

        Fills `scheduled`, `load`, `loads` and `preempted`, and advances
        ``computed`` as vLLM does, before the step has run.

        Returns:
            Whether the step holds any token.
        """
        self.loads = []
        self.preempted = []
        self.joined = []
        running = self.running
        if (
            len(running) == self.decodes
            and not self.waiting
            and not self.aside
            and 0 < len(running) <= self.limits.budget_tokens
            and self._schedule_decodes()
        ):
            return True
        self.scheduled = []
        limit = self.chunks.prepare(now_ms)
        budget = self._schedule_running(limit, self.limits.budget_tokens)
        if not self.preempted:
            self._schedule_waiting(limit, budget)
        if not self.scheduled:
            return False
        self.chunks.note_scheduled(self.scheduled)
        self._note_step()
        return True

    def _schedule_decodes(self) -> bool:
        """The common step: every running request decodes and nobody waits."""
        kv = self.kv
        size = kv.block_size
        growing = [r for r in self.running if r.computed == r.blocks * size]
        if growing:
            if len(growing) > kv.free_blocks:
                return False
            for request in growing:
                kv.allocate(request, request.tokens)
        for request in self.running:
            request.computed += 1
        if self.limits.prefix_caching:
            for request in self.running:
                if request.computed % size == 0:
                    kv.cache(request, request.computed)
        count = len(self.running)
        self.scheduled = [(request, 1) for request in self.running]
        self.load = StepLoad(count, self.decode_kv_tokens, count)
        self.decode_kv_tokens += count
        return True

    def _schedule_running(self, limit: Limiter | None, budget: int) -> int:
        running = self.running
        kv = self.kv
        place = 0
        while place < len(running) and budget > 0:
            request = running[place]
            tokens = min(request.tokens - request.computed, budget)
            if limit is not None:
                tokens = limit(request, request.computed, tokens)
            if tokens == 0:
                place += 1
                continue
            while not kv.allocate(request, request.computed + tokens):
                victim = self._victim()
                if self.limits.priority:
                    for taken in self.scheduled:
                        if taken[0] is victim:
                            self.scheduled.remove(taken)
                            budget += taken[1]
                            place -= 1
                            break
                self._preempt(victim)
                if victim is request:
                    return budget
            self.scheduled.append((request, tokens))
            budget -= tokens
            place += 1
        return budget

    def _victim(self) -> EngineRequest:
        if not self.limits.priority:
            return self.running.pop()
        victim = max(self.running)
        self.running.remove(victim)
        return victim

    def _preempt(self, request: EngineRequest) -> None:
        self._leave_phase(request)
        self.kv.free(request)
        request.computed = 0
        request.remote = Remote.NONE
        request.user.preemptions += 1
        self.preempted.append(request)
        if request.tracker is not None:
            self.deflected[request] = None
        self.waiting.put_first(request)

    def _leave_phase(self, request: EngineRequest) -> None:
        if request.phase == Phase.DECODE:
            self.decodes -= 1
            self.decode_kv_tokens -= request.computed
        self.deflected.pop(request, None)
        request.phase = Phase.WAITING

    def _next_queue(self) -> WaitingQueue | None:
        if not self.limits.priority:
            return self.aside if self.aside else self.waiting if self.waiting else None
        if self.waiting and self.aside:
            ours = self.waiting.peek() < self.aside.peek()
            return self.waiting if ours else self.aside
        return self.waiting if self.waiting else self.aside if self.aside else None

    def _schedule_waiting(self, limit: Limiter | None, budget: int) -> None:
        skipped: list[EngineRequest] = []
        kv = self.kv
        while budget > 0 and len(self.running) < self.limits.max_num_seqs:
            queue = self._next_queue()
            if queue is None:
                break
            request = queue.peek()
            if request.remote == Remote.LOADING:
                skipped.append(queue.pop())
                continue
            if request.remote == Remote.ARRIVED:
                self._promote(request)
            computed = request.computed
            hit = 0
            if computed == 0:
                computed = hit = kv.find_prefix(request)
                if request.remote == Remote.WANTED and request.prompt > hit:
                    if not kv.allocate(
                        request, request.prompt, hit_tokens=hit, cache=False
                    ):
                        break
                    skipped.append(queue.pop())
                    request.remote = Remote.LOADING
                    request.computed = request.prompt
                    self.loads.append((request, request.prompt - hit))
                    continue
            tokens = min(request.tokens - computed, budget)
            if limit is not None:
                tokens = limit(request, computed, tokens)
                if tokens == 0:
                    skipped.append(queue.pop())
                    continue
            if not kv.allocate(request, computed + tokens, hit_tokens=hit):
                break
            queue.pop()
            self.running.append(request)
            self.joined.append(request)
            request.computed = computed
            request.phase = Phase.PREFILL
            self._stop_awaiting(request)
            self.scheduled.append((request, tokens))
            budget -= tokens
        for request in reversed(skipped):
            self.aside.put_first(request)

    def _stop_awaiting(self, request: EngineRequest) -> None:
        """The request no longer waits for remote KV."""
        if self.awaiting.pop(request, 0) is None:
            self.awaiting_tokens -= request.prompt

    def _promote(self, request: EngineRequest) -> None:
        """Remote KV is here: the last prompt token is computed again."""
        self.kv.cache(request, request.computed)
        if request.computed == request.tokens:
            request.computed -= 1
        request.remote = Remote.NONE
        request.joining = True
        del self.arrived[request]

    def _note_step(self) -> None:
        """Advance the requests and take stock of the step.

        The single token by which a request joins whose KV has arrived counts
        as a decode: it costs what a decode costs.
        """
        load = StepLoad(limit_ms=self.chunks.bound_ms)
        for request, tokens in self.scheduled:
            before = request.computed
            after = request.computed = before + tokens
            if request.phase == Phase.DECODE:
                load.decodes += 1
                load.decode_tokens += 1
                load.decode_kv_tokens += before
                self.decode_kv_tokens += 1
                continue
            done = after == request.tokens
            if request in self.deflected:
                assert request.tracker is not None
                request.tracker.granted(before, tokens, request.other_tokens)
                load.add_prefill(tokens, before)
                if done:
                    del self.deflected[request]
            elif tokens == 1 and request.joining:
                load.decodes += 1
                load.decode_tokens += 1
                load.decode_kv_tokens += before
            else:
                load.add_prefill(tokens, before)
            request.joining = False
            if done:
                request.phase = Phase.DECODE
                self.decodes += 1
                self.decode_kv_tokens += after
        self.load = load

    def finish_step(self) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """The step has run (vLLM ``update_from_output``).

        Returns:
            Legs that got a token, and of those the finished ones; a finished
            prefill leg keeps its KV until it is released.
        """
        got = []
        done = []
        for request, _ in self.scheduled:
            if request.computed == request.tokens:
                request.tokens += 1
                got.append(request)
                if request.tokens == request.end:
                    done.append(request)
        if done:
            gone = set(done)
            self.running = [r for r in self.running if r not in gone]
            for request in done:
                self._leave_phase(request)
                if request.leg != Leg.PREFILL:
                    self.kv.free(request)
        self.scheduled = []
        return got, done


__all__ = ["Node", "NodeLimits"]
