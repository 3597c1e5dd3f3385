# SPDX-License-Identifier: Apache-2.0
"""One look at the queue of a policy that binds late."""

from __future__ import annotations

import random

import pytest

from tests.core.test_fast_decisions import A100, random_fleet
from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.policies.kairos import Kairos
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
