# SPDX-License-Identifier: Apache-2.0
"""One look at the queue of a policy that binds late."""

from __future__ import annotations

import random

import pytest

from tests.core.test_fast_decisions import A100, LINK, random_fleet
from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.policies.kairos import PARTS, Kairos
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_model import Predictor, StepModel

#: A decode node whose chunks cost a fifth of a prefill node's.
FAST_CHUNKS = StepModel(
    prefill=Predictor({"1": 8.0, "c": 0.1}),
    decode=Predictor({"1": 10.0}),
    mixed=Predictor({"c": 0.02}),
)
#: And one whose chunks are the dearer ones.
SLOW_CHUNKS = StepModel(
    prefill=Predictor({"1": 8.0, "c": 0.02}),
    decode=Predictor({"1": 10.0}),
    mixed=Predictor({"c": 0.1}),
)


def look(policy: Kairos, fleet: Fleet, *requests: Request) -> list[Route]:
    for request in requests:
        policy.enqueue(request)
    return [route for _, route in policy.assign(fleet)]


def test_on_an_idle_fleet_a_request_goes_where_its_first_token_comes_first() -> None:
    for model, deflected in ((FAST_CHUNKS, True), (SLOW_CHUNKS, False)):
        nodes = NodeState("p", model), NodeState("d", model, decodes=4)
        (route,) = look(
            Kairos(Settings()), Fleet([nodes[0]], [nodes[1]]), Request(2000, "r")
        )
        assert route.deflected == deflected
        if deflected:
            assert route.estimates.ttft_decode_ms < route.estimates.ttft_prefill_ms


def test_a_big_cached_prefix_on_a_decode_node_is_worth_going_there() -> None:
    fleet = Fleet(
        [NodeState("p", SLOW_CHUNKS)],
        [NodeState("d0", SLOW_CHUNKS), NodeState("d1", SLOW_CHUNKS)],
    )
    cached = Request(8000, "r", cached={"d1": 7600})
    routes = look(Kairos(Settings()), fleet, cached, Request(8000, "s"))
    assert [(r.prefill, r.deflected) for r in routes] == [("d1", True), ("p", False)]


def test_a_request_that_waits_goes_to_the_decode_node_that_holds_its_prefix() -> None:
    busy = NodeState("p", A100, prefills=[PrefillWork(60_000)])
    decode = [NodeState("d0", A100), NodeState("d1", A100, decodes=9)]
    held = Request(8000, "r", cached={"d1": 7600})
    (route,) = look(Kairos(Settings()), Fleet([busy], decode), held)
    assert route.decode == "d1"
    # What stands before it there may take longer than what the cache saves.
    decode[1] = NodeState("d1", A100, decodes=9, deflected=[PrefillWork(2000)])
    little = Request(8000, "r", cached={"d1": 64})
    (route,) = look(Kairos(Settings()), Fleet([busy], decode), little)
    assert route.decode == "d0"


def test_a_prefix_on_a_busy_prefill_node_may_be_worth_the_wait_there() -> None:
    idle = NodeState("p0", A100)
    busy = NodeState("p1", A100, prefills=[PrefillWork(1000)])
    full = NodeState("d", A100, free_kv_tokens=10)
    for held, chosen in ((7900, "p1"), (640, "p0")):
        request = Request(8000, "r", cached={"p1": held})
        (route,) = look(Kairos(Settings()), Fleet([idle, busy], [full]), request)
        assert route.prefill == chosen


def test_of_decode_nodes_that_could_start_at_once_the_least_loaded_is_first() -> None:
    busy = NodeState("p", A100, prefills=[PrefillWork(60_000)])
    decode = [
        NodeState(f"d{i}", A100, decodes=n, decode_kv_tokens=1500 * n, limit_ms=63.0)
        for i, n in enumerate((40, 3, 20))
    ]
    (route,) = look(Kairos(Settings()), Fleet([busy], decode), Request(500, "r"))
    assert route.decode == "d1"


@pytest.mark.parametrize("adaptive", [True, False])
def test_on_an_idle_node_the_loops_bound_gives_way_only_where_chunks_adapt(
    adaptive: bool,
) -> None:
    busy = NodeState("p", A100, prefills=[PrefillWork(60_000)])
    decode = NodeState("d", A100, limit_ms=40.0, adaptive=adaptive)
    request = Request(6_000, "r")
    (route,) = look(Kairos(Settings()), Fleet([busy], [decode]), request)
    assert len(route.chunks) > 1
    limit_ms = Settings().limit_ms if adaptive else 40.0
    assert 0.99 * limit_ms < max(route.estimates.step_ms) <= limit_ms


def test_a_long_prompt_that_waits_keeps_no_decode_node_from_short_ones() -> None:
    busy = NodeState("p", A100, prefills=[PrefillWork(60_000)])
    decode = NodeState("d", A100, decodes=6, decode_kv_tokens=9000, limit_ms=63.0)
    fleet = Fleet([busy], [decode])
    short, long = Request(2_000, "short"), Request(24_000, "long")
    needs_ms = Kairos(Settings()).views.of(decode).planner.walk_ms(24_000)
    assert needs_ms is not None and 1000.0 < needs_ms < 3800.0
    share = needs_ms / Settings().ttft_slo_ms
    for longest_slos, expected in ((0.99 * share, 0), (1.01 * share, 1)):
        routes = look(Kairos(Settings(), longest_slos=longest_slos), fleet, long)
        assert len(routes) == expected
        routes = look(Kairos(Settings(), longest_slos=longest_slos), fleet, short)
        assert len(routes) == 1


def test_without_that_part_a_late_prompt_may_take_longer_than_an_slo_too() -> None:
    busy = NodeState("p", A100, prefills=[PrefillWork(2_000_000)])
    decode = NodeState("d", A100, decodes=6, decode_kv_tokens=9000, limit_ms=63.0)
    slos = Settings()
    late = Request(90_000, "late", -1.5 * slos.ttft_slo_ms)
    needs_ms = Kairos(slos).views.of(decode).planner.walk_ms(late.prompt_tokens)
    assert needs_ms is not None and needs_ms > 1.5 * slos.ttft_slo_ms
    without = float(PARTS["longest_slos"])
    for longest_slos, expected in ((1.0, 0), (without, 1)):
        policy = Kairos(slos, longest_slos=longest_slos)
        assert len(look(policy, Fleet([busy], [decode]), late)) == expected


@pytest.mark.parametrize("most", [1, 3, 32])
def test_a_look_sends_no_more_than_it_is_asked_to_and_the_next_goes_on(
    most: int,
) -> None:
    rng = random.Random(3)
    fleet = random_fleet(rng, 40, 40)
    whole, parts = Kairos(Settings()), Kairos(Settings())
    for policy in (whole, parts):
        for number in range(200):
            policy.enqueue(Request(100 + number, str(number), 19_000.0))
    expected = [r.request_id for r, _ in whole.assign(fleet)]
    assert len(expected) > 32
    got = [r.request_id for r, _ in parts.assign(fleet, most)]
    assert got == expected[:most]
    assert parts.waiting == 200 - most


def test_without_state_too_a_look_sends_no_more_than_it_is_asked_to() -> None:
    policy = Kairos(Settings())
    for number in range(10):
        policy.enqueue(Request(100, str(number), float(number)))
    unknown = Fleet([NodeState("p", fresh=False)], [NodeState("d", fresh=False)])
    assert [r.request_id for r, _ in policy.assign(unknown, 4)] == list("0123")
    assert policy.waiting == 6
    assert len(policy.assign(unknown)) == 6


def test_the_age_at_which_a_request_is_sent_regardless_is_the_policys_own() -> None:
    slo = Settings(ttft_slo_ms=1000.0)
    assert Kairos(slo).oldest_ms == 8000.0
    assert Kairos(slo, oldest_slos=3).oldest_ms == 3000.0


#: A prefill node a fourth as fast as an A100.
SLOW = StepModel(
    Predictor({name: 4 * value for name, value in A100.prefill.terms.items()}),
    A100.decode,
    A100.mixed,
)
#: A decode node nothing can be deflected to.
FULL = NodeState("d", A100, free_kv_tokens=10)


@pytest.mark.parametrize("names", [("slow", "fast"), ("fast", "slow")])
@pytest.mark.parametrize("work_tokens", [0, 500, 2000])
def test_a_request_goes_to_the_node_that_is_done_first_not_to_the_idle_one(
    names: tuple[str, str], work_tokens: int
) -> None:
    works = [PrefillWork(work_tokens)] if work_tokens else []
    pool = {
        "slow": NodeState("slow", SLOW, link=LINK),
        "fast": NodeState("fast", A100, link=LINK, prefills=works),
    }
    fleet = Fleet([pool[name] for name in names], [FULL])
    (late,) = look(Kairos(Settings()), fleet, Request(8000, "r"))
    eager = Kairos(Settings(), dispatch="eager").route(Request(8000, "r"), fleet)
    assert late.prefill == eager.prefill == "fast"
    assert late.estimates.ttft_prefill_ms == pytest.approx(
        eager.estimates.ttft_prefill_ms, rel=0.06
    )


def test_what_is_sent_to_a_slow_node_is_predicted_at_its_speed() -> None:
    fleet = Fleet([NodeState("slow", SLOW)], [FULL])
    (route,) = look(Kairos(Settings()), fleet, Request(8000, "r"))
    expected = Kairos(Settings(), dispatch="eager").route(Request(8000, "r"), fleet)
    assert route.estimates.ttft_prefill_ms == pytest.approx(
        expected.estimates.ttft_prefill_ms, rel=0.01
    )


def test_a_request_waits_for_a_busy_fast_node_and_a_slow_one_gets_what_is_behind() -> (
    None
):
    busy = [PrefillWork(8000)]
    fleet = Fleet(
        [NodeState("slow", SLOW), NodeState("fast", A100, prefills=busy)], [FULL]
    )
    policy = Kairos(Settings())
    assert look(policy, fleet, Request(8000, "first")) == []
    # Behind the first, the slow node is done with a second no later.
    (route,) = look(policy, fleet, Request(2000, "second"))
    assert route.prefill == "slow" and policy.waiting == 1
    fleet = Fleet([fleet.prefill[0], NodeState("fast", A100)], [FULL])
    ((request, route),) = policy.assign(fleet)
    assert (request.request_id, route.prefill) == ("first", "fast")


@pytest.mark.parametrize("dispatch", ["late", "eager"])
@pytest.mark.parametrize("ttft", ["exact", "paper"])
def test_the_links_backlog_is_part_of_the_predicted_ttft_and_of_the_choice(
    dispatch: str, ttft: str
) -> None:
    def routed(*backlog_bytes: float) -> Route:
        prefill = [
            NodeState(f"p{i}", A100, link=LINK, link_backlog_bytes=size)
            for i, size in enumerate(backlog_bytes)
        ]
        policy = Kairos(Settings(), dispatch=dispatch, ttft=ttft)
        fleet = Fleet(prefill, [FULL])
        request = Request(2000, "r")
        if dispatch == "eager":
            return policy.route(request, fleet)
        (route,) = look(policy, fleet, request)
        return route

    free, taken = routed(0.0), routed(600e6)
    assert free.estimates.ttft_prefill_ms is not None
    assert taken.estimates.ttft_prefill_ms == pytest.approx(
        free.estimates.ttft_prefill_ms + 1e3 * 600e6 / LINK.bytes_per_s
    )
    assert routed(600e6, 0.0).prefill == "p1"
    assert routed(0.0, 600e6).prefill == "p0"


def test_work_is_counted_anew_when_the_fastest_node_has_gone() -> None:
    busy = [PrefillWork(60_000)]
    policy = Kairos(Settings())
    fast = NodeState("fast", A100, prefills=busy)
    slow = NodeState("slow", SLOW, prefills=busy)
    ready = NodeState("d", A100, decodes=4, free_kv_tokens=1000)
    assert look(policy, Fleet([fast, slow], [ready]), Request(2000, "r")) == []
    (waiting,) = policy.queue.front(1, 0.0)
    before = waiting.job.work_ms
    assert policy.assign(Fleet([slow], [ready])) == []
    assert waiting.job.work_ms == pytest.approx(4 * before)
