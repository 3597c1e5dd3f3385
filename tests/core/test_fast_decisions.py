# SPDX-License-Identifier: Apache-2.0
"""The short cuts of a decision change no decision."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.core.exhaustive_kairos import (
    ExhaustiveKairos,
    closed_form_schedule,
    exact_ttft_ms,
)
from tests.core.strategies import nodes, step_models
from vllm_kairos.core.chunk_planner import ChunkPlanner
from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.policies.disagg import least_loaded_decode
from vllm_kairos.core.policies.kairos import Kairos
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.prefill import PrefillQueue, drain_ms, ttft_prefill_ms
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_model import StepModel

A100 = StepModel(
    prefill=Predictor({"1": 8.0, "c": 0.031, "cp": 1.9e-6, "cc": 9.5e-7}),
    decode=Predictor({"1": 49.0, "B": 0.04, "K": 2e-5}),
    mixed=Predictor({"c": 0.006, "cK": 1.2e-8, "cp": 7e-7, "cc": 2e-6}),
)
FASTER = StepModel(
    prefill=Predictor({"1": 5.0, "c": 0.02, "cp": 1e-6, "cc": 5e-7, "p": 1e-5}),
    decode=Predictor({"1": 20.0, "B": 0.3, "K": 4e-5}),
    mixed=Predictor({"1": 25.0, "c": 0.02, "cp": 7e-7, "cc": 2e-6, "p": 1e-5}),
    combine="max",
)
LINK = LinkModel(31104, 3e9)


@given(
    model=step_models(),
    decodes=st.integers(0, 64),
    kv_tokens=st.integers(0, 200_000),
    prompt=st.integers(1, 40_000),
    cached=st.sampled_from([0, 1, 700, 30_000]),
    budget=st.sampled_from([40, 512, 8192]),
    limit=st.floats(1.0, 200.0),
)
@settings(max_examples=400, deadline=None)
def test_a_planner_plans_the_largest_safe_chunks_and_is_never_below_its_floors(
    model, decodes, kv_tokens, prompt, cached, budget, limit
) -> None:
    expected = closed_form_schedule(
        model, decodes, kv_tokens, prompt, budget, limit, cached_tokens=cached
    )
    assume(expected is None or len(expected.chunks) < 3000)
    planner = ChunkPlanner(model, decodes, kv_tokens, budget, limit)
    schedule = planner.schedule(prompt, cached)
    quick = planner.quick_floor_ms(prompt, cached)
    floor = planner.floor_ms(prompt, cached)
    if expected is None:
        assert schedule is None
        return
    assert schedule is not None
    assert schedule.chunks == expected.chunks
    assert schedule.step_ms == expected.step_ms
    assert max(schedule.step_ms) <= limit
    total = planner.walk_ms(prompt, cached)
    assert total == schedule.total_ms
    assert quick <= total and floor <= total
    stopped = planner.walk_ms(prompt, cached, total / 2)
    assert stopped is None or stopped > total / 2 or total == 0.0


def test_the_floor_leaves_little_to_find_out_on_a_real_profile() -> None:
    random.seed(3)
    for prompt, least in ((2048, 0.6), (8192, 0.8), (32_768, 0.95)):
        for _ in range(50):
            decodes = random.randint(1, 64)
            planner = ChunkPlanner(A100, decodes, decodes * 1500, 8192, 63.0)
            total = planner.walk_ms(prompt)
            assert total is not None
            assert least <= planner.floor_ms(prompt) / total <= 1.0


WORKS = st.builds(PrefillWork, st.integers(0, 20_000), st.integers(0, 5_000))


@given(
    model=step_models(),
    queue=st.lists(WORKS, max_size=6),
    budget=st.sampled_from([16, 512, 8192]),
    prompt=st.integers(1, 60_000),
    cached=st.sampled_from([0, 1000]),
    worked=st.sampled_from([0.0, 50.0]),
)
@settings(max_examples=300, deadline=None)
def test_a_packed_queue_with_one_prompt_more_is_the_whole_queue_packed(
    model, queue, budget, prompt, cached, worked
) -> None:
    left = [w for w in queue if w.tokens > 0]
    packed = PrefillQueue(model, queue, budget)
    assert packed.drain_ms == pytest.approx(drain_ms(model, left, budget), rel=1e-9)
    node = NodeState("p", model, budget, prefills=queue, worked_off_ms=worked)
    node.link = LINK
    for kept in (None, packed):
        assert ttft_prefill_ms(node, prompt, cached, 7.0, kept) == pytest.approx(
            exact_ttft_ms(node, prompt, cached, 7.0), rel=1e-9
        )


def test_a_long_prompt_in_tiny_steps_is_packed_without_going_through_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = []
    step_ms = PrefillQueue._step_ms

    def counted(queue: PrefillQueue, *step: int) -> float:
        steps.append(step)
        return step_ms(queue, *step)

    monkeypatch.setattr(PrefillQueue, "_step_ms", counted)
    work = [PrefillWork(5, 7), PrefillWork(30_000), PrefillWork(9)]
    assert PrefillQueue(A100, work, 8).drain_ms == pytest.approx(
        drain_ms(A100, work, 8), rel=1e-9
    )
    assert len(steps) <= 4


def best_of(policy: ExhaustiveKairos, request: Request, fleet: Fleet) -> float:
    """TTFT of the best decode node, whatever Eq. 7 says; infinite for none."""
    found = policy._deflection(request, fleet.decode, None)
    return math.inf if found is None else found.ttft_ms


def check_same(ours: Route, theirs: Route, best_ms: float) -> None:
    """Same decision; of nodes that are equally good either will do."""
    assert ours.deflected == theirs.deflected
    mine, other = ours.estimates, theirs.estimates
    assert (mine.ttft_prefill_ms is None) == (other.ttft_prefill_ms is None)
    if mine.ttft_prefill_ms is not None:
        assert mine.ttft_prefill_ms == pytest.approx(other.ttft_prefill_ms, rel=1e-9)
    if ours.deflected:
        assert mine.ttft_decode_ms == pytest.approx(best_ms, rel=1e-9, abs=1e-9)
        if ours.decode == theirs.decode:
            assert ours.chunks == theirs.chunks
    else:
        assert ours.decode == theirs.decode


@given(
    prefill=st.lists(nodes("p"), min_size=1, max_size=3),
    decode=st.lists(nodes("d"), min_size=1, max_size=5),
    prompt=st.integers(1, 20_000),
    cached=st.sampled_from([0, 500]),
    sizes=st.sampled_from(["continuous", "candidates"]),
    transfer=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_fleet_is_routed_as_by_trying_every_node(
    prefill, decode, prompt, cached, sizes, transfer
) -> None:
    prefill = [replace(n, node=f"p{i}", link=LINK) for i, n in enumerate(prefill)]
    decode = [replace(n, node=f"d{i}") for i, n in enumerate(decode)]
    request = Request(prompt, "r", cached={"p0": cached, "d0": cached})
    fleet = Fleet(prefill, decode)
    slow = ExhaustiveKairos(Settings(), sizes=sizes, transfer=transfer)
    expected = slow.route(request, fleet)
    fast = Kairos(Settings(), sizes=sizes, transfer=transfer)
    best = best_of(slow, request, fleet)
    check_same(fast.route(request, fleet), expected, best)
    # And once more, from what it has kept.
    check_same(fast.route(request, fleet), expected, best)
    assert fast.views.least_loaded(prompt, decode) is least_loaded_decode(
        request, fleet
    )


def random_fleet(rng: random.Random, prefill: int, decode: int) -> Fleet:
    """A busy fleet, some nodes alike."""

    def prefill_node(name: str) -> NodeState:
        works = [PrefillWork(rng.randint(1, 9000)) for _ in range(rng.randint(0, 2))]
        if rng.random() < 0.3:
            works = []
        return NodeState(
            name,
            rng.choice([A100, A100, FASTER]),
            prefills=works,
            link=LINK,
            link_backlog_bytes=rng.choice([0.0, 3e8]),
            step_in_flight_ms=rng.choice([0.0, 40.0]),
            worked_off_ms=rng.choice([0.0, 30.0]),
        )

    def decode_node(name: str) -> NodeState:
        decodes = rng.choice([0, 8, rng.randint(0, 64)])
        deflected = [PrefillWork(rng.randint(1, 9000))] if rng.random() < 0.3 else []
        return NodeState(
            name,
            rng.choice([A100, A100, FASTER]),
            decodes=decodes,
            decode_kv_tokens=decodes * 1500,
            deflected=deflected,
            limit_ms=rng.choice([None, 60.0, 30.0, 0.0]),
            adaptive=rng.random() < 0.7,
            free_kv_tokens=rng.choice([3000, 10**6, 10**6]),
            fresh=rng.random() < 0.9,
        )

    return Fleet(
        [prefill_node(f"p{i}") for i in range(prefill)],
        [decode_node(f"d{i}") for i in range(decode)],
        now_ms=20_000.0,
    )


@pytest.mark.parametrize("order", ["on_time", "deadline", "arrival"])
@pytest.mark.parametrize("several", [True, False])
def test_a_queue_is_assigned_as_by_offering_every_schedule(
    order: str, several: bool
) -> None:
    rng = random.Random(5)
    routed = 0
    for case in range(60):
        fleet = random_fleet(rng, rng.randint(1, 4), rng.randint(1, 6))
        options = {"order": order, "several": several}
        fast = Kairos(Settings(), **options)
        slow = ExhaustiveKairos(Settings(), **options)
        for number in range(rng.choice([1, 5, 80])):
            tokens = int(rng.lognormvariate(7.5, 1.2)) + 1
            arrival = rng.uniform(10_000, 20_000) if case % 5 else -20_000.0
            request = Request(min(tokens, 60_000), str(number), arrival)
            fast.enqueue(request)
            slow.enqueue(request)
        expected, got = slow.assign(fleet), fast.assign(fleet)
        assert [
            (request.request_id, route.prefill, route.decode, route.chunks)
            for request, route in got
        ] == [
            (request.request_id, route.prefill, route.decode, route.chunks)
            for request, route in expected
        ]
        assert fast.waiting == slow.waiting
        routed += len(got)
    assert routed > 100


def test_a_large_fleet_is_routed_as_by_trying_every_node() -> None:
    rng = random.Random(7)
    slo = Settings(alpha=0.3)
    fast, slow = Kairos(slo), ExhaustiveKairos(slo)
    deflected = 0
    for _ in range(25):
        fleet = random_fleet(rng, 6, 40)
        if rng.random() < 0.5:
            busy = [PrefillWork(60_000)]
            fleet = Fleet(
                [replace(n, prefills=busy) for n in fleet.prefill],
                fleet.decode,
                fleet.now_ms,
            )
        request = Request(rng.choice([50, 2000, 8000, 32_768]))
        expected = slow.route(request, fleet)
        check_same(fast.route(request, fleet), expected, best_of(slow, request, fleet))
        deflected += expected.deflected
    assert 5 < deflected < 25


def test_a_request_that_leaves_the_queue_leaves_nothing_in_it() -> None:
    policy = Kairos(Settings())
    rng = random.Random(2)
    for number in range(500):
        policy.enqueue(Request(100, str(number), rng.choice([0.0, 5.0, 9.0])))
    order = list(range(500))
    rng.shuffle(order)
    for number in order:
        policy.withdraw(str(number))
        policy.withdraw(str(number))
    assert policy.waiting == 0
    assert not policy.queue._due
