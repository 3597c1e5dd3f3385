# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1: its invariant over any fleet, and its rules by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import nodes, step_models
from vllm_kairos.core.decision import decide
from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.policies import make_policy
from vllm_kairos.core.policies.disagg import least_loaded_decode, least_ttft
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.schedule import (
    Schedule,
    closed_form_schedule,
    paper_schedule,
)
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_model import StepModel

ALGORITHM_1 = [
    ("kairos", {}),
    ("kairos-paper", {}),
    ("kairos-paper", {"literal_progress": False}),
]


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    prefill = [draw(nodes(f"p{i}")) for i in range(draw(st.integers(1, 3)))]
    decode = [draw(nodes(f"d{i}")) for i in range(draw(st.integers(1, 3)))]
    return Fleet(prefill, decode)


SLOS = st.builds(
    Settings,
    tau_ms=st.floats(1, 500),
    ttft_slo_ms=st.sampled_from([100.0, 4000.0, 1e9]),
    alpha=st.sampled_from([0.5, 1.3, 100.0]),
    beta=st.floats(0.1, 1.0),
)


@pytest.mark.parametrize(("name", "options"), ALGORITHM_1)
@given(fleet=fleets(), slo=SLOS, prompt=st.integers(1, 20_000))
@settings(max_examples=80, deadline=None)
def test_no_route_holds_a_step_that_the_model_puts_over_beta_tau(
    name, options, fleet, slo, prompt
) -> None:
    route = make_policy(name, slo, **options).route(Request(prompt), fleet)
    assert route.prefill in {n.node for n in (*fleet.prefill, *fleet.decode)}
    node = fleet.node(route.decode)
    assert node in fleet.decode
    if not route.deflected:
        assert route.chunks == ()
        assert route.prefill in {n.node for n in fleet.prefill}
        return
    assert node.model is not None and node.fresh
    # The paper's one deflection a node; ours counts those that wait there.
    extended = name == "kairos"
    assert extended or not node.deflected
    # The same steps, predicted here and not read off the estimates.
    decodes = node.decodes + (node.awaiting_kv if extended else 0)
    kv = node.decode_kv_tokens + (node.awaiting_kv_tokens if extended else 0)
    served = 0
    literal = name == "kairos-paper" and not options
    for chi in route.chunks:
        assert 1 <= chi <= node.budget_tokens
        tokens = chi - decodes
        assert tokens >= 1
        if not literal:
            tokens = min(tokens, prompt - served)
        assert node.model.step_ms(decodes, kv, tokens, served) <= slo.limit_ms
        served += chi if literal else tokens
    assert served >= prompt


@pytest.mark.parametrize(("name", "options"), ALGORITHM_1)
@given(fleet=fleets(), slo=SLOS, prompt=st.integers(1, 20_000))
@settings(max_examples=60, deadline=None)
def test_a_deflection_holds_both_conditions_of_eq_7(
    name, options, fleet, slo, prompt
) -> None:
    route = make_policy(name, slo, **options).route(Request(prompt), fleet)
    if route.deflected:
        there, here = route.estimates.ttft_decode_ms, route.estimates.ttft_prefill_ms
        assert there is not None and here is not None
        assert there <= slo.alpha * here
        assert there <= slo.ttft_slo_ms


@given(
    model=step_models(),
    decodes=st.integers(0, 32),
    kv=st.integers(0, 100_000),
    prompt=st.integers(1, 300),
    cached=st.integers(0, 300),
    budget=st.integers(1, 96),
    limit=st.floats(0.1, 300),
)
@settings(max_examples=100, deadline=None)
def test_the_closed_form_takes_what_brute_force_over_all_chunks_takes(
    model, decodes, kv, prompt, cached, budget, limit
) -> None:
    schedule = closed_form_schedule(
        *(model, decodes, kv, prompt, budget, limit),
        cached_tokens=cached,
        smallest_tokens=1,
    )
    chunks = [] if schedule is None else [chi - decodes for chi in schedule.chunks]
    served = min(cached, prompt - 1)

    def largest(limit_ms: float) -> int:
        most = min(prompt - served, budget - decodes)
        fit = (
            model.step_ms(decodes, kv, c, served) <= limit_ms
            for c in range(1, most + 1)
        )
        return sum(fit)

    for chunk in chunks:
        # Where a step meets the limit to the last bit, rounding may cost one.
        assert largest(limit * (1 - 1e-9)) <= chunk <= largest(limit)
        served += chunk
    if schedule is not None:
        assert served == prompt
        return
    # There is none: some step on the way holds not one token.
    while served < prompt and (chunk := largest(limit * (1 - 1e-9))) > 0:
        served += chunk
    assert served < prompt


@given(
    model=step_models(),
    decodes=st.integers(0, 32),
    prompt=st.integers(1, 5_000),
    limit=st.floats(0.1, 300),
    literal=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_the_greedy_schedule_takes_the_largest_safe_candidate_at_every_step(
    model, decodes, prompt, limit, literal
) -> None:
    candidates = (512, 64, 256, 16)
    schedule = paper_schedule(
        *(model, decodes, 1000, prompt, candidates, limit), literal_progress=literal
    )
    if schedule is None:
        return
    served = 0
    for chi in schedule.chunks:
        for larger in (c for c in candidates if c > chi):
            tokens = larger - decodes
            if not literal:
                tokens = min(tokens, prompt - served)
            assert model.step_ms(decodes, 1000, tokens, served) > limit
        served += chi if literal else min(chi - decodes, prompt - served)


def hand_model() -> StepModel:
    """Decode 10 ms + 1 ms a request; a chunk adds 0.1 ms a token."""
    return StepModel(
        Predictor({"1": 2.0, "c": 0.5}),
        Predictor({"1": 10.0, "B": 1.0}),
        Predictor({"c": 0.1, "cp": 0.001}),
    )


def test_a_schedule_and_eq_6_by_hand() -> None:
    # c1: 14 + 0.1c <= 34 -> 200; c2: 14 + c(0.1 + 0.2) <= 34 -> 66;
    # c3: 14 + c(0.1 + 0.266) <= 34 -> 54, of which 34 are left.
    schedule = closed_form_schedule(hand_model(), 4, 0, 300, 8192, 34.0)
    assert schedule is not None
    assert schedule.chunks == (204, 70, 38)
    assert schedule.step_ms == pytest.approx((34.0, 33.8, 26.444))
    assert schedule.total_ms == pytest.approx(94.244)


def test_the_greedy_schedule_shrinks_as_the_prefix_grows() -> None:
    # 124 tokens at 0; at 124 a token costs 0.224 ms: 60 fit; the 16 that are
    # left fit under any candidate.
    schedule = paper_schedule(hand_model(), 4, 0, 200, (128, 64, 32), 28.0)
    assert schedule is not None
    assert schedule.chunks == (128, 64, 128)
    assert schedule.step_ms == pytest.approx((26.4, 27.44, 18.544))
    literal = paper_schedule(
        hand_model(), 4, 0, 200, (128, 64, 32), 28.0, literal_progress=True
    )
    assert literal is not None
    assert literal.chunks == (128, 64, 32)
    assert sum(literal.chunks) >= 200


def test_candidates_no_larger_than_the_batch_are_none() -> None:
    assert paper_schedule(hand_model(), 64, 0, 10, (64, 32), 1e9) is None


def node(name: str, **changes: object) -> NodeState:
    return NodeState(name, model=hand_model(), **changes)  # type: ignore[arg-type]


def test_the_fastest_feasible_node_is_taken_and_the_margin_decides() -> None:
    slo = Settings(alpha=1.3, ttft_slo_ms=100.0)
    plans = {"a": None, "b": Schedule((1,), (60.0,)), "c": Schedule((1,), (50.0,))}
    states = [node(name) for name in plans]

    def ask(ttft: float | None, slo: Settings = slo):
        return decide(states, ttft, slo, lambda n: plans[n.node])

    found = ask(50.0 / 1.3)
    assert found is not None and found.node.node == "c" and found.accepted
    assert not ask(50.0 / 1.3 - 0.01).accepted
    # Late here too, but nothing may be deflected past the TTFT SLO.
    assert not ask(1e9, Settings(ttft_slo_ms=49.0)).accepted
    assert ask(None).accepted
    assert decide(states[:1], 1.0, slo, lambda n: None) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "deflected"),
        ({"deflected": (PrefillWork(1),)}, "unavailable"),
        ({"fresh": False}, "unavailable"),
        ({"free_kv_tokens": 100}, "unavailable"),
        ({"decodes": 256}, "unavailable"),
        ({"decodes": 200}, "infeasible"),
    ],
)
def test_a_decode_node_takes_one_deflection_and_only_with_room(
    changes: dict[str, object], reason: str
) -> None:
    slo = Settings(tau_ms=100.0)
    fleet = Fleet([node("p", prefills=[PrefillWork(10_000)])], [node("d", decodes=4)])
    for name, value in changes.items():
        setattr(fleet.decode[0], name, value)
    route = make_policy("kairos", slo, several=False).route(Request(100), fleet)
    assert route.reason == reason
    assert route.deflected == (reason == "deflected")


def test_without_state_of_a_prefill_node_nothing_is_deflected() -> None:
    for stale in ({"fresh": False}, {"model": None}):
        fleet = Fleet([node("p")], [node("d")])
        for name, value in stale.items():
            setattr(fleet.prefill[0], name, value)
        for policy in ("kairos", "kairos-paper"):
            route = make_policy(policy, Settings()).route(Request(10), fleet)
            assert (route.prefill, route.reason) == ("p", "no_state")


def test_a_kept_request_goes_to_the_prefill_node_with_the_least_ttft() -> None:
    fleet = Fleet(
        [
            node("busy", prefills=[PrefillWork(4000)]),
            node("stale", fresh=False),
            node("idle", prefills=[PrefillWork(10)]),
        ],
        [node("d")],
    )
    chosen, ttft = least_ttft(Request(100), fleet)
    assert chosen.node == "idle"
    # One step of 110 tokens.
    assert ttft == pytest.approx(2.0 + 110 * 0.5)
    # 1,000 cached tokens of 1,100 make up for a queue of 300.
    cached = Request(1100, cached={"busy": 0, "idle": 0, "warm": 1000})
    warm = node("warm", prefills=[PrefillWork(300)])
    assert least_ttft(cached, Fleet([*fleet.prefill, warm], fleet.decode))[0] is warm


def test_what_is_on_its_way_to_a_decode_node_counts_when_one_is_chosen() -> None:
    decode = [
        node("decoding", decodes=3),
        node("awaiting", decodes=1, awaiting_kv=3),
        node("expecting", decodes=1, expected=3),
        node("free", decodes=2),
        node("full", free_kv_tokens=5),
    ]
    assert least_loaded_decode(Request(10), Fleet([], decode)).node == "free"
    # Without room anywhere, the one with the most of it.
    for n in decode:
        n.free_kv_tokens = 4 if n.node != "awaiting" else 9
    assert least_loaded_decode(Request(10), Fleet([], decode)).node == "awaiting"
