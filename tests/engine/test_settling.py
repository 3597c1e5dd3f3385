# SPDX-License-Identifier: Apache-2.0
"""Steps are accounted for beside the device's work, or when it is needed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_state_report import profile_of_model, snapshot
from tests.engine.virtual import MODEL, VirtualEngine, make_scheduler
from vllm_kairos.core.messages import StateReport
from vllm_kairos.core.step_load import StepLoad

BUDGET_TOKENS = 512


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return profile_of_model(tmp_path_factory.mktemp("settling") / "p.json")


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 5),  # Steps to wait.
        st.sampled_from(["deflected", "ordinary", "remote", "abort"]),
        st.integers(2, 900),  # Prompt tokens.
        st.integers(1, 20),  # Output tokens.
    ),
    min_size=1,
    max_size=14,
)


def run(
    asks: str,
    events: list[tuple[int, str, int, int]],
    kairos: dict[str, Any],
    **more: Any,
) -> tuple[list[dict[str, int]], list[StateReport]]:
    """Steps, and a report after every event."""
    e = VirtualEngine(
        make_scheduler(
            kairos=kairos, budget_tokens=BUDGET_TOKENS, num_blocks=90, **more
        )
    )
    e.asks_for_bitmask = asks
    reports = []
    live: list[str] = []
    for wait, kind, prompt, output in events:
        for _ in range(wait):
            e.step()
        if kind == "abort" and live:
            e.abort(live.pop(0))
        else:
            chunks = [100] * 9 if kind == "deflected" else None
            live.append(e.add(prompt, output, chunks=chunks, remote=kind == "remote"))
            if kind == "remote":
                e.kv_arrives(live[-1])
        reports.append(
            msgspec.structs.replace(snapshot(e), engine_id="", incarnation="")
        )
    e.drain()
    return [s.tokens for s in e.steps], reports


@settings(max_examples=40, deadline=None)
@given(events=EVENTS, async_scheduling=st.booleans(), timed=st.booleans())
def test_no_step_is_lost_whenever_the_bitmask_is_asked_for(
    profile: str,
    events: list[tuple[int, str, int, int]],
    async_scheduling: bool,
    timed: bool,
) -> None:
    kairos = {"mode": "planned", "profile": profile} if timed else {}
    launched, late, never = (
        run(asks, events, kairos, async_scheduling=async_scheduling)
        for asks in ("launched", "late", "never")
    )
    for steps, reports in (late, never):
        assert steps == launched[0]
        for report, other in zip(reports, launched[1], strict=True):
            # Scheduled ahead, a step beside a request's last one may be taken to
            # hold that request's KV still.
            off = 3e-3 if async_scheduling else 1e-9
            assert report.step_remaining_ms == pytest.approx(
                other.step_remaining_ms, rel=off
            )
            assert len(report.steps) == len(other.steps)
            for step, same in zip(report.steps, other.steps, strict=True):
                assert step == pytest.approx(same, rel=off)
            assert msgspec.structs.replace(
                report, steps=[], step_remaining_ms=0.0
            ) == msgspec.structs.replace(other, steps=[], step_remaining_ms=0.0)


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS,
    asks=st.sampled_from(["launched", "late", "never"]),
    mode=st.sampled_from(["planned", "adaptive"]),
)
def test_every_step_is_judged_for_what_it_held(
    profile: str, events: list[tuple[int, str, int, int]], asks: str, mode: str
) -> None:
    e = VirtualEngine(
        make_scheduler(
            kairos={"mode": mode, "profile": profile},
            budget_tokens=BUDGET_TOKENS,
            num_blocks=90,
        )
    )
    e.asks_for_bitmask = asks
    judged = []

    def observe(load: StepLoad, predicted_ms: float, measured_ms: float) -> None:
        alone_ms = MODEL.step_ms(load.decodes, load.decode_kv_tokens)
        judged.append((load.decodes, load.prefill_tokens, alone_ms, measured_ms))
        assert predicted_ms == pytest.approx(measured_ms)

    e.scheduler._rule.observe = observe
    live: list[str] = []
    for wait, kind, prompt, output in events:
        for _ in range(4 * wait):
            e.step()
        if kind == "abort" and live:
            e.abort(live.pop(0))
            continue
        chunks = [100] * 9 if kind == "deflected" else None
        live.append(e.add(prompt, output, chunks=chunks, remote=kind == "remote"))
        if kind == "remote":
            e.kv_arrives(live[-1])
    e.drain()
    e.scheduler._settle()
    held = [
        (s.decodes, s.total - s.decodes, s.decodes_alone_ms, s.latency_ms)
        for s in e.steps
        if s.total
    ]
    assert len(judged) == len(held)
    for was, step in zip(judged, held, strict=True):
        assert was == pytest.approx(step)


def test_the_only_prefill_is_bounded_without_asking_about_each_request(
    profile: str,
) -> None:
    e = VirtualEngine(make_scheduler(kairos={"profile": profile, "tau_ms": 30.0}))
    config = e.scheduler.vllm_config.scheduler_config
    for _ in range(8):
        e.add(64, 300)
    e.step()
    r = e.add(6000, 4, chunks=[64] * 100)
    e.step()
    for _ in range(3):
        assert e.scheduler._get_new_tokens_limiter() is None
        assert config.long_prefill_token_threshold == 0
        assert 0 < e.step().tokens[r] < 2040
    # A prompt that comes beside it has a bound of its own.
    other = e.add(400, 4)
    assert e.step().tokens.get(other, 0) not in (1, e.steps[-2].tokens[r])
    e.abort(r)
    e.abort(other)
    for name in [*e.scheduler.requests]:
        e.abort(name)
    # Nobody decodes now, and nothing bounds what follows.
    last = e.add(6000, 4)
    assert e.step().tokens[last] == 2048


def test_what_a_session_is_given_is_not_cut_to_the_chunk_of_the_only_prefill(
    profile: str,
) -> None:
    e = VirtualEngine(make_scheduler(kairos={"profile": profile, "tau_ms": 20.0}))
    e.add(64, 300)

    e.say("session", 80)
    for _ in range(6):
        e.step()
    r = e.add(6000, 4, chunks=[64] * 100)
    for _ in range(3):
        e.step()
    assert e.scheduler._chunks._only is not None
    chunk = e.steps[-1].tokens[r]
    e.say("session", chunk + 100)
    step = e.step()
    assert step.tokens["session"] > chunk and 0 < step.tokens[r] <= chunk


def test_vllms_own_bound_on_a_prompt_holds_for_the_only_prefill(profile: str) -> None:
    scheduler = make_scheduler(kairos={"profile": profile, "tau_ms": 1000.0})
    scheduler.scheduler_config.long_prefill_token_threshold = 100
    scheduler._chunks._most_tokens = 100
    e = VirtualEngine(scheduler)
    e.add(64, 300)
    e.step()
    r = e.add(2000, 4, chunks=[64] * 40)
    assert [e.step().tokens[r] for _ in range(4)] == [100] * 4
    assert scheduler._meter._in_flight[-1][1].prefill_tokens == 100


def test_drafts_are_not_cut_to_the_last_chunk_of_the_only_prefill(profile: str) -> None:
    e = VirtualEngine(make_scheduler(kairos={"profile": profile}, speculative_tokens=4))
    e.drafts = lambda _: [1, 2, 3, 4]
    decode = e.add(64, 4000)
    for _ in range(3):
        e.step()
    e.add(402, 4, chunks=[400, 2])
    e.scheduler.max_num_scheduled_tokens = 405
    chunks = [e.step().tokens for _ in range(3)]
    assert chunks[1] == {decode: 5, "r1": 2}


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    aborts=st.sets(st.integers(0, 12)),
    arrivals=st.sets(st.integers(0, 12)),
    asks=st.sampled_from(["launched", "never"]),
)
def test_a_chunk_made_ready_beforehand_is_the_largest_of_the_step_it_is_in(
    profile: str, outputs: list[int], aborts: set[int], arrivals: set[int], asks: str
) -> None:
    kairos = {"profile": profile, "tau_ms": 30.0}
    e = VirtualEngine(make_scheduler(kairos=kairos, budget_tokens=2048))
    e.asks_for_bitmask = asks
    decodes = [e.add(64, output) for output in outputs]
    e.step()
    r = e.add(4000, 4, chunks=[64] * 63)
    remote = None
    for turn in range(13):
        if turn in aborts and decodes:
            e.abort(decodes.pop())
        if turn in arrivals and remote is None:
            remote = e.add(300, 30, remote=True)
            e.kv_arrives(remote)
        scheduler, phases = e.scheduler, e.scheduler._phases
        if r not in phases.deflected:
            break
        if asks == "never":
            scheduler._settle()
        joining = scheduler.finished_recving_kv_req_ids
        b = len(phases.decoding) + len(joining)
        kv_tokens = phases.decode_kv_tokens + 299 * len(joining)
        computed = scheduler.requests[r].num_computed_tokens
        largest = MODEL.largest_chunk(
            b, kv_tokens, computed, scheduler._rule.limit_ms, 4000 - computed
        )
        step = e.step()
        assert step.decodes == b
        assert step.tokens[r] == min(largest, 2048 - b)


def test_the_report_of_a_node_that_gets_work_does_not_wait_for_the_device() -> None:
    e = VirtualEngine(make_scheduler(budget_tokens=256))
    e.add(1000, 5)
    e.scheduler.schedule()
    report = e.scheduler._reporter.report(0)
    assert report is not None and report.prefills == [(744, 256)]


def test_what_is_left_of_the_step_that_ends_a_prefill_is_told(profile: str) -> None:
    e = VirtualEngine(make_scheduler(kairos={"profile": profile}))
    e.add(2000, 4)
    e.scheduler.get_grammar_bitmask(e.scheduler.schedule())
    report = snapshot(e)
    assert report.step_remaining_ms == pytest.approx(MODEL.step_ms(0, 0, 2000, 0))


def test_the_last_step_is_in_the_report_of_a_drained_engine(profile: str) -> None:
    e = VirtualEngine(make_scheduler(kairos={"profile": profile}))
    e.add(64, 3)
    e.drain()
    report = e.scheduler._reporter.report(0)
    assert report is not None
    assert len(report.steps) == 3 and report.step_remaining_ms == 0.0


def test_a_step_behind_one_that_ends_an_idle_time_begins_no_earlier_than_that(
    profile: str,
) -> None:
    kairos = {"profile": profile, "mode": "planned"}
    e = VirtualEngine(make_scheduler(kairos=kairos, async_scheduling=True))
    left = e.add(64, 50)
    e.step()
    e.step()
    e.abort(left)
    e._finish(*e._in_flight.pop())
    e.now_ms += 5000.0
    e.add(64, 50)
    for _ in range(2):
        output = e.scheduler.schedule()
        e.scheduler.get_grammar_bitmask(output)
    report = e.scheduler._reporter.report(0)
    assert report is not None
    assert report.step_remaining_ms == pytest.approx(MODEL.step_ms(1, 64))
