# SPDX-License-Identifier: Apache-2.0
"""Prefills past their target, and prefills whose KV failed to load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_state_report import profile_of_model
from tests.engine.virtual import VirtualEngine, make_scheduler
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.overdue import OverdueTurns

TAU_MS = 30.0
SMALLEST = 16


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return profile_of_model(tmp_path_factory.mktemp("overrides") / "p.json")


def engine(profile: str, decodes: int, **options: object) -> VirtualEngine:
    """An engine in which so many requests decode."""
    kairos = {"profile": profile, "tau_ms": TAU_MS, "beta": 0.9}
    kairos["ttft_slo_ms"] = options.pop("ttft_slo_ms", 4000.0)
    options = {"max_num_seqs": 512, **options}
    e = VirtualEngine(make_scheduler(kairos=kairos, **options))  # type: ignore[arg-type]
    for _ in range(decodes):
        e.add(2, 5000)
    while len(e.scheduler._phases.decoding) < decodes:
        e.step()
    return e


def deflect(e: VirtualEngine, tokens: int, slack_ms: float = 100.0) -> str:
    message = {"v": 1, "ticket": "t", "chunks": [256] * 20, "slack_ms": slack_ms}
    return e.add(tokens, 4, params={"kairos": message})


def late_prefills(e: VirtualEngine, count: int, tokens: int) -> list[str]:
    """Deflected prefills that are past their target by now."""
    ids = [deflect(e, tokens) for _ in range(count)]
    until_ms = e.now_ms + 150.0
    while e.now_ms < until_ms:
        e.step()
    return ids


def overrides(e: VirtualEngine) -> int:
    e.scheduler._settle()
    count: int = e.scheduler._chunks.overrides
    return count


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("late", [1, 10, 40])
def test_late_prefills_make_no_step_late_where_there_is_headroom(
    profile: str, late: int, async_scheduling: bool
) -> None:
    e = engine(profile, 8, async_scheduling=async_scheduling)
    late_prefills(e, late, 3000)
    limit_ms = e.scheduler._rule.limit_ms
    taken = 0
    while e.scheduler._phases.deflected:
        assert e.step().latency_ms <= TAU_MS
        taken += 1
        assert taken < 8 * late
    assert overrides(e) == 0
    assert e.scheduler._rule.limit_ms >= limit_ms


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_without_headroom_one_late_prefill_at_a_time_gets_the_smallest_chunk(
    profile: str, async_scheduling: bool
) -> None:
    # The decodes alone take 29 ms, and the bound is at most 29.4.
    e = engine(profile, 190, async_scheduling=async_scheduling)
    ids = late_prefills(e, 6, 160)
    before = overrides(e)
    limit_ms = e.scheduler._rule.limit_ms
    taken = 0
    while e.scheduler._phases.deflected:
        step = e.step()
        of_late = [step.tokens[r] for r in ids if step.tokens.get(r, 0) > 1]
        assert sum(of_late) <= SMALLEST
        assert step.latency_ms <= TAU_MS
        taken += 1
        assert taken <= 6 * (160 // SMALLEST + 2)
    assert overrides(e) - before >= 40
    # None of those steps says that the bound is too high.
    assert e.scheduler._rule.limit_ms >= limit_ms


def test_overrides_that_are_late_do_not_lower_the_bound(profile: str) -> None:
    # Over tau by the decodes alone, in every step.
    e = engine(profile, 210)
    limit_ms = e.scheduler._rule.limit_ms
    late_prefills(e, 4, 160)
    late = 0
    while e.scheduler._phases.deflected:
        late += e.step().latency_ms > TAU_MS
    assert late >= 30 and e.scheduler._rule.limit_ms >= limit_ms


@pytest.mark.parametrize("tokens", [320, 325])
def test_a_late_ordinary_prefill_gets_its_turn_beside_a_stream_of_deflected_ones(
    profile: str, tokens: int
) -> None:
    """What comes with less slack has the headroom, until the target is past.

    A last turn for the few tokens that are left is within the bound, too.
    """
    e = engine(profile, 8, ttft_slo_ms=300.0)
    for _ in range(4):
        deflect(e, 4000, slack_ms=0.0)
    ordinary = e.add(tokens, 4)
    taken = 0
    while ordinary not in e.first_token_ms:
        while len(e.scheduler._phases.deflected) < 4:
            deflect(e, 4000, slack_ms=0.0)
        assert e.step().latency_ms <= TAU_MS
        taken += 1
        assert taken < 200
    assert overrides(e) == 0


@settings(max_examples=25, deadline=None)
@given(
    decodes=st.sampled_from([0, 8, 150, 171, 180]),
    work=st.lists(
        st.tuples(
            st.integers(0, 5),  # Steps to wait.
            st.booleans(),  # Deflected, or ordinary.
            st.integers(2, 400),  # Prompt tokens.
            st.sampled_from([0.0, 50.0, 4000.0]),  # Slack.
        ),
        min_size=1,
        max_size=12,
    ),
    async_scheduling=st.booleans(),
    seats=st.sampled_from([0, 2, 100]),
)
def test_every_prefill_is_done_in_bounded_time_and_no_step_has_two_overrides(
    profile: str,
    decodes: int,
    work: list[tuple[int, bool, int, float]],
    async_scheduling: bool,
    seats: int,
) -> None:
    e = engine(
        profile,
        decodes,
        async_scheduling=async_scheduling,
        ttft_slo_ms=100.0,
        max_num_seqs=decodes + 1 + seats,
    )
    ids = []
    before = overrides(e)

    def step() -> None:
        nonlocal before
        s = e.step()
        count = overrides(e)
        assert count - before <= 1
        if count == before:
            assert s.latency_ms <= max(TAU_MS, s.decodes_alone_ms) or not s.decodes
        before = count

    for wait, deflected, tokens, slack_ms in work:
        for _ in range(wait):
            step()
        ids.append(deflect(e, tokens, slack_ms) if deflected else e.add(tokens, 4))
    # Held until the target, at most four seconds of steps, then a chunk a step.
    most = 500 + sum(-(-tokens // SMALLEST) + 8 for _, _, tokens, _ in work)
    for _ in range(most):
        if all(r in e.first_token_ms for r in ids):
            return
        step()
    raise AssertionError("a prefill was starved")


def test_turns_go_to_the_one_due_first_and_pass_on() -> None:
    turns: OverdueTurns[str] = OverdueTurns()
    turns.start()
    turns.held_back("b", 2.0)
    turns.held_back("a", 1.0)
    turns.held_back("c", 3.0)
    assert turns.holder is None
    turns.step_over()
    assert turns.holder == "a"
    turns.start()
    turns.held_back("b", 2.0)
    turns.step_over()
    assert turns.holder == "b"
    # Behind one that is due before it and is served, it waits for that.
    turns.start()
    turns.served(1.5)
    turns.held_back("b", 2.0)
    turns.step_over()
    assert turns.holder is None


def test_a_step_known_to_be_over_its_bound_teaches_the_trim_nothing() -> None:
    feedback = Feedback(TAU_MS, 0.9)
    for _ in range(200):
        feedback.observe(31.0, 31.0, limit_ms=27.0)
    assert feedback.late == 200
    assert feedback.limit_ms >= 27.0
    for _ in range(20):
        # Late although the prediction was within the bound.
        bound_ms = feedback.limit_ms
        feedback.observe(bound_ms, 1.01 * TAU_MS, limit_ms=bound_ms)
    assert feedback.limit_ms < 20.0


def failed_load(
    e: VirtualEngine, tokens: int, *, bystander: bool = False
) -> tuple[str, list[int]]:
    """A request whose KV failed to load, and its tokens in the steps since."""
    scheduler = e.scheduler
    scheduler.recompute_kv_load_failures = True
    r = e.add(tokens, 4, remote=True)
    for _ in range(3):
        e.step()
    (blocks,) = scheduler.kv_cache_manager.get_block_ids(r)
    # What vLLM does when the worker reports blocks that could not be loaded.
    scheduler._handle_invalid_blocks(set(blocks))
    e.kv_arrives(r)
    # It computes its prompt: the pretended model must not take it for a decode.
    e._remote.discard(r)
    if bystander:
        e.add(500, 4)
    taken = []
    for _ in range(3000):
        if r in e.first_token_ms:
            break
        step = e.step()
        assert step.latency_ms <= max(TAU_MS, step.decodes_alone_ms + 1.0)
        taken.append(step.tokens.get(r, 0))
    return r, taken


@pytest.mark.parametrize("bystander", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_recomputing_what_failed_to_load_obeys_the_bound(
    profile: str, async_scheduling: bool, bystander: bool
) -> None:
    e = engine(profile, 8, async_scheduling=async_scheduling, budget_tokens=8192)
    r, taken = failed_load(e, 6000, bystander=bystander)
    assert r in e.first_token_ms and max(taken) < 700
    assert overrides(e) == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failed_load_without_headroom_neither_escapes_nor_starves(
    profile: str, async_scheduling: bool
) -> None:
    e = engine(
        profile,
        180,
        async_scheduling=async_scheduling,
        ttft_slo_ms=400.0,
        budget_tokens=8192,
    )
    r, taken = failed_load(e, 480)
    assert r in e.first_token_ms
    # Held back until its target, and then by smallest chunks.
    assert taken[:5] == [0] * 5
    assert max(taken) <= SMALLEST and taken.count(SMALLEST) >= 480 // SMALLEST - 1
    assert overrides(e) >= 480 // SMALLEST - 1


def test_a_failed_load_is_reported_as_a_prefill_that_waits(profile: str) -> None:
    e = engine(profile, 180)
    e.scheduler.recompute_kv_load_failures = True
    r = e.add(480, 4, remote=True)
    e.step()
    (blocks,) = e.scheduler.kv_cache_manager.get_block_ids(r)
    e.scheduler._handle_invalid_blocks(set(blocks))
    e.step()
    e.scheduler._take_snapshot()
    report = e.scheduler._reporter.report(0)
    assert report is not None
    assert report.awaiting_kv == 0 and report.prefills == [(480, 0)]


def test_a_failed_load_is_no_decode_of_the_step(profile: str) -> None:
    """Its prompt is not in the KV of the decodes, nor it among them."""
    e = engine(profile, 8)
    e.scheduler.recompute_kv_load_failures = True
    r = e.add(6000, 4, remote=True)
    e.step()
    (blocks,) = e.scheduler.kv_cache_manager.get_block_ids(r)
    e.scheduler._handle_invalid_blocks(set(blocks))
    e.kv_arrives(r)
    e.step()
    assert e.scheduler.finished_recving_kv_req_ids == {r}
    e.scheduler._chunks.prepare()
    load = e.scheduler._chunks._load
    assert load.decodes == 8 and load.decode_kv_tokens < 6000


def test_decodes_alone_bring_back_a_bound_that_admits_nothing(profile: str) -> None:
    e = engine(profile, 8, ttft_slo_ms=1e9)
    e.truth = lambda ms: 30.0 * ms
    e.add(400, 4)
    for _ in range(30):
        e.step()
    e.truth = lambda ms: ms
    shut_ms = e.scheduler._rule.limit_ms
    assert shut_ms < 10.0
    for _ in range(1500):
        e.step()
    assert e.scheduler._rule.limit_ms > 1.3 * shut_ms


def test_a_report_tells_what_is_left_of_the_step_and_the_bound(profile: str) -> None:
    e = engine(profile, 8)
    e.add(400, 4)
    e.step()
    e.scheduler._take_snapshot()
    output = e.scheduler.schedule()
    e.scheduler._settle()
    report = e.scheduler._reporter.report(0)
    assert report is not None and output.total_num_scheduled_tokens
    assert report.step_remaining_ms > 5.0
    assert report.limit_ms == e.scheduler._rule.limit_ms
    assert 20.0 < report.limit_ms < TAU_MS
    e.now_ms += 4.0
    later = e.scheduler._reporter.report(1)
    assert later is not None
    left_ms = report.step_remaining_ms - later.step_remaining_ms
    assert left_ms == pytest.approx(4.0, abs=1e-6)
