# SPDX-License-Identifier: Apache-2.0
"""The engine's loop on the real scheduler, in virtual time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_state_report import profile_of_model
from tests.engine.virtual import MODEL, Step, VirtualEngine, make_scheduler
from vllm_kairos.core.schedule import closed_form_schedule

TAU_MS = 30.0


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return profile_of_model(tmp_path_factory.mktemp("adaptive") / "p.json")


def engine(profile: str, mode: str = "adaptive", **options: object) -> VirtualEngine:
    kairos = {"profile": profile, "mode": mode, "tau_ms": TAU_MS, "beta": 0.9}
    kairos["ttft_slo_ms"] = options.pop("ttft_slo_ms", 4000.0)  # type: ignore[assignment]
    return VirtualEngine(make_scheduler(kairos=kairos, **options))  # type: ignore[arg-type]


def test_adaptive_is_the_default_once_a_profile_is_loaded(profile: str) -> None:
    loaded = make_scheduler(kairos={"profile": profile})
    assert loaded._rule.limit_ms is not None
    assert make_scheduler()._rule.limit_ms is None


def test_chunks_grow_past_the_plan_when_decodes_leave(profile: str) -> None:
    e = engine(profile)
    e.add(64, 200)
    e.step()
    e.step()
    # Planned in a full house: far smaller than what is safe now.
    r = e.add(1500, 4, chunks=[64] * 30)
    step = e.step()
    assert step.tokens[r] > 200
    assert step.latency_ms <= e.scheduler._reporter.limit_ms() <= TAU_MS


def test_chunks_shrink_below_the_plan_when_decodes_have_joined(profile: str) -> None:
    e = engine(profile)
    for _ in range(40):
        e.add(64, 200)
    e.step()
    e.step()
    r = e.add(1500, 4, chunks=[1500])
    step = e.step()
    assert 0 < step.tokens[r] < 1000
    assert step.latency_ms <= TAU_MS
    planned = engine(profile, mode="planned")
    for _ in range(40):
        planned.add(64, 200)
    planned.step()
    planned.step()
    planned.add(1500, 4, chunks=[1500])
    assert planned.step().latency_ms > TAU_MS


def test_an_ordinary_prefill_on_a_decoding_node_obeys_the_bound(profile: str) -> None:
    e = engine(profile)
    for _ in range(8):
        e.add(64, 100)
    e.step()
    e.step()
    r = e.add(2000, 4)
    while r not in e.first_token_ms:
        step = e.step()
        assert step.latency_ms <= TAU_MS
    e.drain()


def test_an_idle_node_computes_an_ordinary_prompt_in_full_steps(profile: str) -> None:
    e = engine(profile, budget_tokens=2048)
    e.add(4000, 4)
    assert e.step().total == 2048


def test_the_loop_does_not_bound_a_deflected_prompt_that_nobody_waits_beside(
    profile: str,
) -> None:
    """Only what `beta` gives does: with no decode there is none to be late."""
    e = engine(profile, budget_tokens=2048)
    e.truth = lambda ms: 1.3 * ms
    for _ in range(4):
        e.add(64, 60)
    e.step()
    e.step()
    e.add(4000, 2, chunks=[200] * 20)
    for _ in range(30):
        e.step()
    e.drain()
    limit_ms = e.scheduler._rule.limit_ms
    assert limit_ms is not None and limit_ms < 0.75 * TAU_MS
    e.truth = lambda ms: ms
    r = e.add(4000, 2, chunks=[200] * 20)
    step = e.step()
    assert step.tokens[r] == step.total
    assert 0.85 * TAU_MS < step.latency_ms <= 0.9 * TAU_MS
    # As soon as somebody decodes, it is what the loop says again.
    e.kv_arrives(e.add(64, 60, remote=True))
    e.step()
    step = e.step()
    assert step.decodes == 1 and step.tokens[r] > 0
    assert step.latency_ms <= limit_ms


def test_recomputation_after_preemption_obeys_the_bound(profile: str) -> None:
    e = engine(profile)
    for _ in range(6):
        e.add(64, 300)
    e.step()
    e.step()
    r = e.add(1200, 4, chunks=[400] * 4)
    e.step()
    e.scheduler.reset_prefix_cache(reset_running_requests=True)
    e.step()
    while r in e.scheduler._phases.deflected:
        step = e.step()
        if step.decodes:
            assert step.latency_ms <= TAU_MS
    e.drain()


def test_least_slack_is_served_first(profile: str) -> None:
    e = engine(profile)
    for _ in range(4):
        e.add(64, 300)
    e.step()
    e.step()
    relaxed = e.add(
        1500, 4, params={"kairos": {"v": 1, "ticket": "a", "chunks": [512] * 4}}
    )
    urgent = e.add(
        1500,
        4,
        params={
            "kairos": {"v": 1, "ticket": "b", "chunks": [512] * 4, "slack_ms": 50.0}
        },
    )
    step = e.step()
    assert step.tokens.get(urgent, 0) > step.tokens.get(relaxed, 0)
    e.drain()
    assert e.first_token_ms[urgent] < e.first_token_ms[relaxed]


def late_share(
    profile: str, mode: str, seed: int, sigma: float, bias: float
) -> tuple[float, int]:
    """Share of late steps among those that decode, after a warm-up."""
    rng = random.Random(seed)
    e = engine(profile, mode)
    e.truth = lambda ms: ms * (1.0 + bias) * rng.lognormvariate(0.0, sigma)
    steps: list[Step] = []
    while len(steps) < 6000:
        while len(e.scheduler._phases.decoding) < 8:
            e.add(64, 150)
            e.step()
        if not e.scheduler._phases.deflected:
            schedule = closed_form_schedule(MODEL, 8, 1200, 4000, 2048, 0.9 * TAU_MS)
            assert schedule is not None
            e.add(4000, 2, chunks=schedule.chunks)
        steps.append(e.step())
    judged = [s for s in steps[600:] if s.decodes]
    return sum(s.latency_ms > TAU_MS for s in judged) / len(judged), len(judged)


@pytest.mark.parametrize(
    ("sigma", "bias", "most"),
    [(0.05, 0.0, 0.007), (0.1, 0.0, 0.01), (0.0, 0.15, 0.005)],
)
def test_feedback_holds_the_share_of_late_steps(
    profile: str, sigma: float, bias: float, most: float
) -> None:
    adaptive, count = late_share(profile, "adaptive", 5, sigma, bias)
    planned, _ = late_share(profile, "planned", 5, sigma, bias)
    print(f"sigma {sigma} bias {bias}: adaptive {adaptive:.4f}, planned {planned:.4f}")
    assert count > 3000
    assert adaptive <= most
    assert planned > adaptive


@pytest.mark.parametrize("feedback", [True, False])
def test_without_feedback_the_bound_stays_where_beta_puts_it(
    profile: str, feedback: bool
) -> None:
    kairos = {"profile": profile, "tau_ms": TAU_MS, "beta": 0.9, "feedback": feedback}
    e = VirtualEngine(make_scheduler(kairos=kairos))
    e.truth = lambda ms: 1.3 * ms
    for _ in range(8):
        e.add(64, 150)
    e.step()
    e.add(4000, 2, chunks=[200] * 20)
    e.drain()
    limit_ms = e.scheduler._rule.limit_ms
    assert limit_ms is not None
    if feedback:
        assert limit_ms < 0.85 * TAU_MS
    else:
        assert limit_ms == pytest.approx(0.9 * TAU_MS)


WORK = st.lists(
    st.tuples(
        st.integers(0, 8),  # Steps to wait.
        st.sampled_from(["deflected", "burst", "ordinary", "remote", "decode"]),
        st.integers(2, 3000),  # Prompt tokens.
        st.integers(0, 40),  # B by a report up to two seconds old.
        st.integers(1, 40),  # Output tokens, and joiners of a burst.
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=120, deadline=None)
@given(
    work=WORK,
    async_scheduling=st.booleans(),
    slo=st.sampled_from([150.0, 4000.0]),
    asks=st.sampled_from(["launched", "late", "never"]),
)
def test_with_an_exact_model_no_step_with_deflected_tokens_is_over_the_bound(
    profile: str,
    work: list[tuple[int, str, int, int, int]],
    async_scheduling: bool,
    slo: float,
    asks: str,
) -> None:
    """Whatever the proxies knew when they made their schedules.

    Several proxies look like one here: schedules made on reports that are
    stale, lost, or blind to one another's dispatches.
    """
    e = engine(
        profile,
        async_scheduling=async_scheduling,
        budget_tokens=1024,
        ttft_slo_ms=slo,
        num_blocks=2500,
    )
    e.asks_for_bitmask = asks
    arriving: list[str] = []

    def step() -> None:
        phases = e.scheduler._phases
        deflected = set(phases.deflected)
        overrides = e.scheduler._chunks.overrides
        before = e.scheduler._rule.limit_ms
        s = e.step()
        # Where the bitmask is not asked for, the step before is judged first.
        limit = max(before, e.scheduler._rule.limit_ms)
        for r in arriving:
            e.kv_arrives(r)
        carries = any(s.tokens.get(r, 0) for r in deflected)
        if carries and e.scheduler._chunks.overrides == overrides:
            assert s.latency_ms <= max(limit, s.decodes_alone_ms) + 1e-9

    for wait, kind, prompt, stale_decodes, output in work:
        for _ in range(wait):
            step()
        if kind == "deflected":
            schedule = closed_form_schedule(
                MODEL, stale_decodes, 200 * stale_decodes, prompt, 1024, 0.9 * TAU_MS
            )
            chunks = schedule.chunks if schedule else (prompt,)
            e.add(prompt, output, chunks=chunks)
        elif kind == "burst":
            arriving += [e.add(90, output, remote=True) for _ in range(output)]
        elif kind == "remote":
            arriving.append(e.add(prompt, output, remote=True))
        else:
            e.add(prompt if kind == "ordinary" else 33, output)
    for _ in range(20_000):
        if not e.scheduler.requests and not e._in_flight:
            break
        step()
    else:
        raise AssertionError("did not drain")
