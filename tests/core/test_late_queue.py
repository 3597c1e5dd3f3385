# SPDX-License-Identifier: Apache-2.0
"""Which requests of a long queue are looked at."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_fast_decisions import A100
from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.late_queue import LateQueue
from vllm_kairos.core.policies.kairos import Kairos
from vllm_kairos.core.settings import Settings

NOW_MS = 1000.0


def filled(due_ms: list[float], hopeless: list[bool]) -> LateQueue:
    queue = LateQueue()
    for number, due in enumerate(due_ms):
        queue.add(Request(100, str(number)), due)
    for waiting in queue.front(len(due_ms), NOW_MS):
        waiting.hopeless = hopeless[int(waiting.request.request_id)]
    return queue


@given(
    due_ms=st.lists(st.integers(900, 1100), max_size=120),
    hopeless=st.lists(st.booleans(), min_size=120, max_size=120),
    most=st.sampled_from([8, 16, 40]),
)
@settings(max_examples=300, deadline=None)
def test_a_look_is_full_and_three_quarters_are_for_those_in_time(
    due_ms, hopeless, most
) -> None:
    queue = filled(due_ms, hopeless)
    looked = queue.front(most, NOW_MS)
    assert len({w.request.request_id for w in looked}) == len(looked)
    assert len(looked) == min(most, len(due_ms))
    assert looked == sorted(looked, key=lambda w: w.due_ms)

    past = [due < NOW_MS or flag for due, flag in zip(due_ms, hopeless, strict=False)]
    late = [w for w in looked if past[int(w.request.request_id)]]
    in_time = past.count(False)
    assert len(looked) - len(late) >= min(in_time, most - most // 4)
    # Bounded in age: those due longest ago are in every look.
    overdue = sorted(due for due in due_ms if due < NOW_MS)[: most // 4]
    assert [w.due_ms for w in looked[: len(overdue)]] == overdue

    queue.take(w.request.request_id for w in looked[::2])
    left = {r.request_id for r in queue.drain()}
    gone = {w.request.request_id for w in looked[::2]}
    assert left == {str(n) for n in range(len(due_ms))} - gone
    assert not queue._due


def test_past_a_look_full_of_hopeless_requests_one_in_time_is_still_seen() -> None:
    policy = Kairos(Settings(ttft_slo_ms=1000.0))
    for number in range(400):
        policy.enqueue(Request(2000, f"old{number}", float(number)))
    policy.enqueue(Request(2000, "young", 2900.0))
    fleet = Fleet([NodeState("p", A100)], [NodeState("d", A100, free_kv_tokens=9)])
    fleet.now_ms = 3000.0
    assert policy.assign(fleet)[0][0].request_id == "young"


def test_of_hopeless_requests_the_oldest_goes_first_once_it_is_too_old() -> None:
    policy = Kairos(Settings(ttft_slo_ms=1000.0), oldest_slos=3)
    for number in range(400):
        policy.enqueue(Request(2000, f"old{number}", float(number)))
        policy.enqueue(Request(2000, f"young{number}", 2500.0 + number))
    sent: list[tuple[float, str]] = []
    for now_ms in range(2900, 3600, 10):
        idle = Fleet([NodeState("p", A100)], [NodeState("d", A100, free_kv_tokens=9)])
        idle.now_ms = float(now_ms)
        sent += [(idle.now_ms, r.request_id) for r, _ in policy.assign(idle)]
    before = [name for now_ms, name in sent if now_ms <= 3000.0]
    after = [name for now_ms, name in sent if now_ms > 3000.0]
    assert len(before) > 10 and all(name.startswith("young") for name in before)
    assert len(after) > 64 and after == [f"old{n}" for n in range(len(after))]
    assert policy.waiting == 800 - len(sent)
