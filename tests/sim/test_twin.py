# SPDX-License-Identifier: Apache-2.0
"""The simulator's node and the real KairosScheduler take the same steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the twin drives vLLM's own scheduler")

from vllm.v1.core.sched.scheduler import Scheduler

if not hasattr(Scheduler, "_get_new_tokens_limiter"):
    pytest.skip("vLLM lacks the Kairos patch set", allow_module_level=True)

from tests.engine.test_state_report import profile_of_model
from tests.engine.virtual import BLOCK_SIZE, MODEL, VirtualEngine, make_scheduler
from vllm_kairos.core.chunk_rule import AdaptiveRule, ChunkRule, PlannedRule
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.sim.engine_request import (
    EngineRequest,
    Leg,
    Remote,
    UserRequest,
)
from vllm_kairos.sim.node import Node, NodeLimits
from vllm_kairos.sim.traces import TraceRow

WIDE = 64
HELD_MS = 400.0
TAU_MS = 20.0


@dataclass
class Job:
    """A request of the random workload.

    Attributes:
        at_ms: Arrival.
        row: Lengths and prefix.
        prompt: Token ids.
        chunks: Schedule of a deflected one.
        remote_steps: Steps its KV takes to arrive, `None` for a local one.
        priority: Lower first.
    """

    at_ms: float
    row: TraceRow
    prompt: list[int]
    chunks: tuple[int, ...]
    remote_steps: int | None
    priority: int


def random_jobs(rng: random.Random, caching: bool) -> list[Job]:
    jobs = []
    at = 0.0
    for number in range(rng.randint(25, 45)):
        at += rng.expovariate(1 / 25.0)
        prompt_tokens = int(rng.lognormvariate(5.2, 0.9)) + 2
        output_tokens = rng.randint(1, 60)
        wide = -(-prompt_tokens // WIDE)
        # Prefixes come from a few conversations; the last block is its own.
        shared = rng.randint(0, wide - 1) if caching else 0
        story = rng.randint(1, 3)
        ids = [story * 1000 + place for place in range(shared)]
        ids += [100_000 + number * 1000 + place for place in range(wide - shared)]
        prompt = [
            token
            for block in ids
            for token in random.Random(block).choices(range(10, 50_000), k=WIDE)
        ]
        kind = rng.choice(("plain", "deflected", "deflected", "remote"))
        chunks: tuple[int, ...] = ()
        if kind == "deflected":
            chunks = tuple(
                rng.choice((16, 32, 64, 128, 256)) for _ in range(rng.randint(1, 6))
            )
        row = TraceRow(0.0, prompt_tokens, output_tokens, tuple(ids), WIDE)
        jobs.append(
            Job(
                at,
                row,
                prompt[:prompt_tokens],
                chunks,
                rng.randint(0, 4) if kind == "remote" else None,
                rng.randint(0, 3),
            )
        )
    return jobs


class Twins:
    """The real scheduler and the simulated node, fed alike."""

    def __init__(
        self,
        blocks: int,
        seqs: int,
        budget: int,
        caching: bool,
        policy: str,
        profile: str | None,
    ):
        kairos: dict[str, Any] = {"ttft_slo_ms": HELD_MS, "mode": "planned"}
        rule: ChunkRule = PlannedRule()
        if profile is not None:
            kairos |= {"mode": "adaptive", "profile": profile, "tau_ms": TAU_MS}
            rule = AdaptiveRule(MODEL, Feedback(TAU_MS, 0.9))
        # One of vLLM's blocks is the null block.
        self.engine = VirtualEngine(
            make_scheduler(
                kairos=kairos,
                max_num_seqs=seqs,
                budget_tokens=budget,
                num_blocks=blocks + 1,
                prefix_caching=caching,
                policy=policy,
            )
        )
        limits = NodeLimits(
            budget_tokens=budget,
            max_num_seqs=seqs,
            kv_tokens=blocks * BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            prefix_caching=caching,
            priority=policy == "priority",
            held_ms=HELD_MS,
        )
        self.node = Node("n", limits, rule)
        self.loading: dict[EngineRequest, int] = {}
        self.delay: dict[EngineRequest, int] = {}
        self.ended: tuple[StepLoad, float, float] | None = None
        self.preemptions = 0
        self.finished = 0

    def add(self, number: int, job: Job) -> None:
        self.engine.add(
            job.prompt,
            job.row.output_tokens,
            chunks=job.chunks or None,
            remote=job.remote_steps is not None,
            priority=job.priority,
            request_id=str(number),
        )
        leg = Leg.WHOLE if job.remote_steps is None else Leg.DECODE
        request = EngineRequest(
            UserRequest(number, job.row),
            leg,
            chunks=job.chunks,
            block_size=BLOCK_SIZE,
            priority=job.priority,
        )
        request.due_ms = self.engine.now_ms + HELD_MS
        if job.remote_steps is not None:
            self.delay[request] = job.remote_steps
        self.node.add(request)

    def step(self) -> None:
        """One step of both, compared."""
        now = self.engine.now_ms
        due = [r for r, left in self.loading.items() if left <= 0]
        for request in due:
            self.engine.kv_arrives(str(request.user.index))
        some = self.node.schedule(now)
        # The engine judges a step when the next one has been launched.
        self._judge()
        real = self.engine.step()
        ours = {str(r.user.index): n for r, n in self.node.scheduled}
        assert list(real.tokens.items()) == list(ours.items())
        assert some == bool(real.total)
        if some:
            load = self.node.load
            latency = MODEL.load_ms(load)
            assert latency == pytest.approx(real.latency_ms, abs=1e-9)
            # The engine is told of a step's time by its own clock.
            self.ended = load, latency, real.latency_ms
            _, done = self.node.finish_step()
            self.finished += len(done)
            if not self.engine.scheduler.requests:
                self._judge()
        self.preemptions += len(self.node.preempted)
        for request in due:
            del self.loading[request]
            self.node.kv_arrived(request)
        for request in self.loading:
            self.loading[request] -= 1
        for request, _ in self.node.loads:
            self.loading[request] = self.delay[request]
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        assert self.node.kv.free_blocks == pool.get_num_free_blocks()

    def _judge(self) -> None:
        if self.ended is not None:
            self.node.rule.observe(*self.ended)
            self.ended = None


def run_twins(
    seed: int,
    policy: str = "fcfs",
    caching: bool = False,
    profile: str | None = None,
) -> Twins:
    rng = random.Random(seed)
    jobs = random_jobs(rng, caching)
    longest = max(j.row.prompt_tokens + j.row.output_tokens for j in jobs)
    # From barely enough KV for the longest request to plenty.
    blocks = -(-longest // BLOCK_SIZE) + rng.choice((1, 10, 40, 400))
    seqs, budget = rng.choice((6, 64)), rng.choice((128, 512))
    twins = Twins(blocks, seqs, budget, caching, policy, profile)
    coming = list(enumerate(jobs))
    for _ in range(20_000):
        while coming and coming[0][1].at_ms <= twins.engine.now_ms:
            twins.add(*coming.pop(0))
            if policy == "priority":
                break  # vLLM breaks ties of arrival time by request id.
        if not coming and not twins.engine.scheduler.has_requests():
            break
        twins.step()
    assert twins.finished == len(jobs) == len(twins.engine.finished)
    assert twins.node.kv.free_blocks == twins.node.kv.total
    assert twins.node.chunks.overrides == twins.engine.scheduler._chunks.overrides
    return twins


@pytest.mark.parametrize("seed", range(20))
def test_node_takes_the_real_schedulers_steps_token_for_token(seed: int) -> None:
    run_twins(seed)


@pytest.mark.parametrize("seed", range(100, 112))
def test_with_prefix_caching_too(seed: int) -> None:
    run_twins(seed, caching=True)


@pytest.mark.parametrize("seed", range(200, 210))
def test_by_priority_too(seed: int) -> None:
    run_twins(seed, policy="priority", caching=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(300, 320))
def test_with_adaptive_chunks_too(seed: int, tmp_path: Path) -> None:
    run_twins(seed, profile=profile_of_model(tmp_path / "p.json"))


def test_the_random_workloads_preempt_hold_back_and_deflect() -> None:
    """Otherwise the tests above would show little."""
    twins = [run_twins(seed) for seed in range(20)]
    assert sum(t.preemptions > 0 for t in twins) >= 5
    assert sum(t.node.chunks.overrides > 0 for t in twins) >= 3
    assert all(r.remote == Remote.NONE for t in twins for r in t.node.running)
