# SPDX-License-Identifier: Apache-2.0
"""Deflected prefills on the real scheduler, in virtual time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.virtual import VirtualEngine, make_scheduler
from vllm_kairos.core.messages import schedule_params
from vllm_kairos.engine.requests import RequestPhases


def engine(**options: object) -> VirtualEngine:
    return VirtualEngine(make_scheduler(**options))  # type: ignore[arg-type]


def with_decodes(count: int, **options: object) -> VirtualEngine:
    """An engine with `count` requests that decode for long."""
    e = engine(**options)
    for _ in range(count):
        e.add(64, 400)
    e.step()
    e.step()
    assert e.steps[-1].decodes == count
    return e


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_each_step_of_a_deflected_prefill_holds_exactly_chi(
    async_scheduling: bool,
) -> None:
    e = with_decodes(4, async_scheduling=async_scheduling)
    r = e.add(900, 4, chunks=[256, 128, 512, 256])
    steps = [e.step() for _ in range(4)]
    assert [s.total for s in steps] == [256, 128, 512, 4 + 900 - 252 - 124 - 508]
    assert [s.tokens[r] for s in steps] == [252, 124, 508, 16]
    e.drain()
    assert r in e.finished


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_late_joiner_is_not_starved_by_a_deflected_prefill(
    async_scheduling: bool,
) -> None:
    e = with_decodes(3, async_scheduling=async_scheduling)
    joiner = e.add(500, 50, remote=True)
    e.add(4000, 4, chunks=[128] * 40)
    e.step()
    e.kv_arrives(joiner)
    e.step()
    if async_scheduling:  # The output that brings the KV is one step behind.
        e.step()
    step = e.step()
    assert step.tokens[joiner] == 1
    assert step.total == 128


def test_deflected_requests_share_the_step_in_arrival_order() -> None:
    e = with_decodes(4)
    first = e.add(300, 4, chunks=[256] * 3)
    second = e.add(300, 4, chunks=[384] * 3)
    step = e.step()
    assert step.tokens[first] == 252
    assert step.tokens[second] == 384 - 256
    step = e.step()
    assert step.tokens[first] == 48
    assert step.tokens[second] == 300 - 128
    e.drain()


def test_a_deflected_request_without_room_lets_those_behind_it_run() -> None:
    e = with_decodes(8)
    held = e.add(300, 4, chunks=[8, 256, 256])
    joiner = e.add(200, 20, remote=True)
    e.step()
    e.kv_arrives(joiner)
    e.step()
    step = e.step()
    assert held not in step.tokens
    assert step.tokens[joiner] == 1


def test_schedule_too_short_repeats_its_last_chunk() -> None:
    e = with_decodes(2)
    r = e.add(700, 4, chunks=[512, 64])
    totals = []
    while r in e.scheduler._phases.deflected:
        totals.append(e.step().total)
    assert totals == [512, 64, 64, 64, 2 + 700 - 510 - 3 * 62]


def test_schedule_too_long_and_oversized_is_cut_by_prompt_and_budget() -> None:
    e = with_decodes(2, budget_tokens=256)
    r = e.add(400, 4, chunks=[1_000_000, 10_000, 64, 64])
    assert [e.step().total for _ in range(3)] == [256, 2 + 400 - 254, 3]
    e.drain()
    assert r in e.finished


def test_prefix_hit_starts_at_the_chunk_planned_for_that_position() -> None:
    e = engine(prefix_caching=True)
    prompt = [11 + i for i in range(1024)]
    e.add(prompt, 2)
    e.drain()
    r = e.add([*prompt[:512], *([7] * 512)], 4, chunks=[512, 300, 200, 100])
    steps = [e.step() for _ in range(3)]
    # 512 tokens are cached: the first chunk has been served by the cache.
    assert [s.tokens.get(r) for s in steps] == [300, 200, 12]


def test_preempted_deflected_prefill_starts_its_schedule_again() -> None:
    e = with_decodes(2)
    r = e.add(600, 4, chunks=[256, 128, 64, 64, 64, 64, 64])
    e.step()
    e.step()
    assert e.scheduler.requests[r].num_computed_tokens == 254 + 126
    e.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert e.scheduler.requests[r].num_computed_tokens == 0
    e.step()  # The decodes are computed anew in this step.
    while r in e.scheduler._phases.deflected:
        tokens = e.step().tokens.get(r, 0)
        assert tokens <= 256
    totals = [s.total for s in e.steps if r in s.tokens][2:]
    assert totals[:3] == [256, 128, 64]
    e.drain()
    assert r in e.finished


def test_aborted_deflected_prefill_leaves_no_trace() -> None:
    e = with_decodes(2)
    r = e.add(2000, 4, chunks=[256] * 10)
    e.step()
    e.abort(r)
    step = e.step()
    assert r not in step.tokens
    phases = e.scheduler._phases
    assert not phases.deflected and not phases._schedules
    assert phases.decode_kv_tokens == sum(
        q.num_computed_tokens for q in e.scheduler.running
    )


def test_siblings_of_one_prompt_obey_the_same_schedule_each() -> None:
    e = with_decodes(2)
    params = schedule_params("one-ticket", [128] * 8)
    siblings = [e.add(300, 4, params=dict(params)) for _ in range(3)]
    while e.scheduler._phases.deflected:
        assert e.step().total <= 128
    e.drain()
    assert set(siblings) <= set(e.finished)


def test_priority_policy_keeps_its_order_among_deflected_prefills() -> None:
    e = with_decodes(2, policy="priority")
    late = e.add(200, 4, chunks=[128] * 4, priority=5)
    urgent = e.add(200, 4, chunks=[128] * 4, priority=0)
    step = e.step()
    assert step.tokens.get(urgent) == 126
    assert late not in step.tokens
    e.drain()
    assert {late, urgent} <= set(e.finished)


def test_speculative_tokens_of_the_decodes_count_as_others() -> None:
    e = engine(speculative_tokens=3)
    e.drafts = lambda _: [5, 5, 5]
    for _ in range(4):
        e.add(64, 400)
    e.step()
    e.step()
    r = e.add(600, 4, chunks=[256] * 4)
    step = e.step()
    assert step.total == 256
    assert step.tokens[r] == 256 - 4 * 4


def test_pausing_holds_deflected_prefills_and_resuming_goes_on() -> None:
    e = with_decodes(2)
    r = e.add(500, 4, chunks=[256] * 3)
    e.step()
    e.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert e.step().total == 0
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert e.step().tokens[r] == 500 - 254
    assert e.scheduler._chunks.overrides == 0
    e.drain()


def test_prefill_held_past_its_target_gets_a_smallest_chunk_and_is_counted() -> None:
    e = with_decodes(8, kairos={"ttft_slo_ms": 100.0, "smallest_chunk_tokens": 32})
    r = e.add(96, 2, chunks=[4])
    e.step()
    assert r not in e.steps[-1].tokens
    while e.now_ms < 150.0:
        e.step()
    step = e.step()
    assert step.tokens[r] == 32
    assert e.scheduler._chunks.overrides >= 1
    e.drain()
    assert r in e.finished


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
BROKEN = st.fixed_dictionaries(
    {},
    optional={
        "v": st.just(1) | JSON,
        "ticket": st.text(max_size=200) | JSON,
        "chunks": st.lists(st.integers() | SCALARS, max_size=6) | JSON,
        "more": JSON,
    },
)


@settings(max_examples=100, deadline=None)
@given(kairos=BROKEN | JSON)
def test_no_schedule_whatever_it_holds_raises_in_the_engine(kairos: object) -> None:
    e = with_decodes(2, budget_tokens=512)
    r = e.add(300, 2, params={"kairos": kairos})
    e.drain()
    assert r in e.finished
    assert all(s.total <= 512 for s in e.steps)
    phases = e.scheduler._phases
    assert not phases._schedules and phases.decode_kv_tokens == 0


@pytest.mark.parametrize("params", ["x", ["a"], 3, {"kairos": {"ticket": "\ud800"}}])
def test_params_that_are_no_object_reach_no_raise_of_ours(params: object) -> None:
    phases = RequestPhases()
    request = SimpleNamespace(
        request_id="r", kv_transfer_params=params, arrival_time=0.0
    )
    phases.add(request, 4000.0)
    assert list(phases.waiting) == ["r"] and not phases.admitted


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 6),  # Steps to wait before it arrives.
        st.integers(1, 900),  # Prompt tokens.
        st.integers(1, 30),  # Output tokens.
        st.sampled_from(["plain", "deflected", "remote"]),
        st.lists(st.integers(1, 600), min_size=1, max_size=6),
        st.booleans(),  # Aborted on the way.
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(
    arrivals=ARRIVALS,
    async_scheduling=st.booleans(),
    num_blocks=st.sampled_from([150, 400, 4000]),
    prefix_caching=st.booleans(),
)
def test_any_workload_drains_and_no_chunk_exceeds_its_schedule(
    arrivals: list[tuple[int, int, int, str, list[int], bool]],
    async_scheduling: bool,
    num_blocks: int,
    prefix_caching: bool,
) -> None:
    e = engine(
        async_scheduling=async_scheduling,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        max_num_seqs=12,
        budget_tokens=700,
        kairos={"ttft_slo_ms": 200.0, "smallest_chunk_tokens": 16},
    )
    most = {}
    to_abort = []
    remote = []

    def step() -> None:
        s = e.step()
        phases = e.scheduler._phases
        e.scheduler._settle()  # As whoever reads it does.
        assert phases.decode_kv_tokens == sum(
            q.num_computed_tokens for q in phases.decoding.values()
        )
        before = 0
        for r, tokens in s.tokens.items():
            # In the order scheduled: those behind a deflected prefill are not
            # its to hold back.
            before += tokens
            if r in most and tokens > 16:
                assert before <= most[r]
        for r in remote:
            e.kv_arrives(r)

    for wait, prompt, output, kind, chunks, aborted in arrivals:
        for _ in range(wait):
            step()
        r = e.add(
            prompt,
            output,
            chunks=chunks if kind == "deflected" else None,
            remote=kind == "remote",
        )
        if kind == "deflected":
            most[r] = max(chunks)
        if kind == "remote":
            remote.append(r)
        if aborted:
            to_abort.append(r)
        if len(to_abort) > 1:
            e.abort(to_abort.pop(0))
    for _ in range(20_000):
        if not e.scheduler.requests and not e._in_flight:
            break
        step()
    else:
        raise AssertionError("did not drain")
    phases = e.scheduler._phases
    assert not (
        phases.waiting
        or phases.awaiting_kv
        or phases.prefilling
        or phases.deflected
        or phases.decoding
        or phases._schedules
    )
    pool = e.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@settings(max_examples=150, deadline=None)
@given(arrivals=ARRIVALS, async_scheduling=st.booleans())
def test_with_nothing_deflected_every_step_is_that_of_the_stock_scheduler(
    arrivals: list[tuple[int, int, int, str, list[int], bool]],
    async_scheduling: bool,
) -> None:
    stock = AsyncScheduler if async_scheduling else Scheduler
    runs = []
    for scheduler_class in (stock, None):
        e = VirtualEngine(
            make_scheduler(
                scheduler_class,
                async_scheduling=async_scheduling,
                num_blocks=200,
                max_num_seqs=6,
                budget_tokens=512,
            )
        )
        for wait, prompt, output, _, _, _ in arrivals:
            for _ in range(wait):
                e.step()
            e.add(prompt, output)
        e.drain()
        runs.append([s.tokens for s in e.steps])
    assert runs[0] == runs[1]
