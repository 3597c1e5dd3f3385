# SPDX-License-Identifier: Apache-2.0
"""What defines each policy, on fleets made by hand."""

from __future__ import annotations

import pytest

from vllm_kairos.core.fleet import Fleet, NodeState, PrefillWork, Request
from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.policies import make_policy, policies
from vllm_kairos.core.policies.base import Decoding, PlanContext
from vllm_kairos.core.policies.mixed import mixed_ttft_ms
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_model import StepModel

MODEL = StepModel(
    prefill=Predictor({"1": 8.0, "c": 0.03, "cp": 2e-6, "cc": 1e-6}),
    decode=Predictor({"1": 49.0, "B": 0.04, "K": 2e-5}),
    mixed=Predictor({"c": 0.006, "cp": 7e-7, "cc": 2e-6}),
)
LINK = LinkModel(31104, 3e9)


def node(name: str, **state: object) -> NodeState:
    return NodeState(name, MODEL, link=LINK, **state)  # type: ignore[arg-type]


def waiting(*tokens: int) -> list[PrefillWork]:
    return [PrefillWork(t) for t in tokens]


def fleet(
    p0: dict[str, object] | None = None,
    p1: dict[str, object] | None = None,
    d0: dict[str, object] | None = None,
    d1: dict[str, object] | None = None,
) -> Fleet:
    return Fleet(
        [node("p0", **(p0 or {})), node("p1", **(p1 or {}))],
        [node("d0", **(d0 or {})), node("d1", **(d1 or {}))],
    )


def policy(name: str, **options: object):  # type: ignore[no-untyped-def]
    return make_policy(name, Settings(), **options)


@pytest.mark.parametrize("name", sorted(policies()))
def test_every_policy_has_a_source_and_routes_within_the_fleet(name: str) -> None:
    made = policy(name)
    assert made.source and made.__doc__
    plans = made.plan(PlanContext(2, 2, MODEL, lengths=[(4000, 60)] * 10, rate_rps=8.0))
    nodes = Fleet(
        [node(p.name) for p in plans if p.prefills],
        [node(p.name) for p in plans if p.decodes],
    )
    names = {p.name for p in plans}
    for number in range(20):
        route = made.route(Request(100 + 700 * number, str(number)), nodes)
        assert {route.prefill, route.decode} <= names
        assert route.reason


def test_round_robin_disagg_takes_nodes_in_turn_and_least_the_shorter_queue() -> None:
    turns = policy("disagg")
    pairs = [turns.route(Request(500), fleet()) for _ in range(4)]
    assert [(r.prefill, r.decode) for r in pairs] == [("p0", "d0"), ("p1", "d1")] * 2
    busy = fleet(p0={"prefills": waiting(9000)})
    least = policy("disagg", balance="least")
    assert {least.route(Request(500), busy).prefill for _ in range(3)} == {"p1"}


@pytest.mark.parametrize(("queued", "deflected"), [(1, False), (2, True)])
def test_sq_deflects_when_every_prefill_queue_is_longer_than_theta(
    queued: int, deflected: bool
) -> None:
    queue = {"prefills": waiting(*[800] * queued)}
    route = policy("sq", theta=1).route(Request(3000), fleet(p0=queue, p1=queue))
    assert route.deflected is deflected
    short = fleet(p0={"prefills": waiting(800, 800, 800)})
    assert not policy("sq", theta=1).route(Request(3000), short).deflected


def test_sq_counts_waiting_requests_not_the_one_being_computed() -> None:
    queue = {"prefills": [PrefillWork(900, 8192), *waiting(800)]}
    assert not policy("sq", theta=1).route(Request(9), fleet(queue, queue)).deflected


def test_sl_deflects_prompts_below_its_length_with_chunk_128() -> None:
    sl = policy("sl", length=1024)
    assert not sl.route(Request(1024), fleet()).deflected
    route = sl.route(Request(1023), fleet())
    assert route.deflected and route.chunks == (128,)


def test_oracle_deflects_only_what_beats_the_prefill_node() -> None:
    oracle = policy("oracle")
    assert not oracle.route(Request(4000), fleet()).deflected
    queue = {"prefills": waiting(20000)}
    route = oracle.route(Request(4000), fleet(queue, queue))
    assert route.deflected
    assert route.estimates.ttft_decode_ms < route.estimates.ttft_prefill_ms
    assert max(route.estimates.step_ms) <= Settings().limit_ms
    assert policies()["oracle"].sees == "truth"


def test_kairos_paper_keeps_one_deflection_in_flight_a_node() -> None:
    queue = {"prefills": waiting(20000)}
    held = {"deflected": waiting(500)}
    both = fleet(queue, queue, held, held)
    assert policy("kairos-paper").route(Request(4000), both).reason == "unavailable"
    one = fleet(queue, queue, held)
    assert policy("kairos-paper").route(Request(4000), one).decode == "d1"
    assert policies()["kairos-paper"].sees == "reports"


def test_sarathi_colocates_on_the_least_loaded_node_with_its_chunk() -> None:
    sarathi = policy("sarathi", chunk=256)
    plans = sarathi.plan(PlanContext(2, 2, MODEL))
    assert [p.budget_tokens for p in plans] == [256] * 4
    assert all(p.prefills and p.decodes for p in plans)
    nodes = [node("n0", prefills=waiting(900)), node("n1", decodes=3), node("n2")]
    route = sarathi.route(Request(500), Fleet(nodes, nodes))
    assert (route.prefill, route.decode, route.chunks) == ("n2", "n2", ())


def test_taichi_sends_short_prompts_to_d_heavy_and_long_ones_to_p_heavy() -> None:
    taichi = policy("taichi", decode_chunk=512)
    plans = {p.name: p.budget_tokens for p in taichi.plan(PlanContext(1, 1, MODEL))}
    assert plans == {"p0": 8192, "d0": 512}
    busy = {"decodes": 8, "decode_kv_tokens": 30000, "budget_tokens": 512}
    nodes = fleet(d0=busy, d1=busy)
    assert taichi.route(Request(1500), nodes).deflected
    assert not taichi.route(Request(30000), nodes).deflected


def test_taichi_decodes_flow_out_when_kv_is_full_and_back_near_the_slo() -> None:
    taichi = policy("taichi", watermark=0.9)
    full = {"free_kv_tokens": 1000}
    taichi.route(Request(10), fleet(d0={"free_kv_tokens": 100_000}))
    decodes = [Decoding(1, 9000, 40, 0.0, 2000.0), Decoding(2, 9000, 90, 0.0, 4500.0)]
    moves = list(taichi.moves("d0", decodes, fleet(d0=full)))
    assert [m.request for m in moves] == [2]
    assert moves[0].node in ("p0", "p1")
    # Mean TBT 51 and 50 ms: both fine until the SLO is tighter.
    assert not list(taichi.moves("p0", decodes, fleet()))
    tight = make_policy("taichi", Settings(tau_ms=55.0))
    assert [m.request for m in tight.moves("p0", decodes, fleet())] == [1, 2]
    assert {m.node for m in tight.moves("p0", decodes, fleet())} <= {"d0", "d1"}


def test_splitwise_calls_in_a_token_machine_when_every_prompt_queue_is_long() -> None:
    split = policy("splitwise", queue_tokens=8000)
    some = {"prefills": waiting(7000)}
    assert split.route(Request(500), fleet(some, some)).reason == "split"
    long = {"prefills": waiting(9000)}
    route = split.route(Request(500), fleet(long, long))
    assert route.reason == "mixed_token" and route.prefill == route.decode
    full = {"free_kv_tokens": 100}
    route = split.route(Request(500), fleet(d0=full, d1=full))
    assert route.reason == "mixed_prompt" and route.decode.startswith("p")


def test_distserve_gives_the_bottleneck_phase_more_nodes() -> None:
    def prefills(lengths: list[tuple[int, int]]) -> int:
        plans = policy("distserve").plan(PlanContext(4, 4, MODEL, lengths=lengths))
        return sum(p.prefills for p in plans)

    long_prompts = prefills([(8000, 10)] * 50)
    long_outputs = prefills([(300, 900)] * 50)
    assert long_prompts == 7
    assert long_outputs <= 2
    kept = policy("distserve", search=False).plan(PlanContext(4, 4, MODEL))
    assert sum(p.prefills for p in kept) == 4


def test_distserve_search_is_the_best_of_all_splits() -> None:
    distserve = policy("distserve")
    context = PlanContext(3, 3, MODEL, lengths=[(3000, 400)] * 30)
    chosen = sum(p.prefills for p in distserve.plan(context))
    rates = {n: distserve.goodput_rps(context, n, 6) for n in range(1, 6)}
    assert rates[chosen] == max(rates.values())


def test_mooncake_weighs_the_cached_prefix_against_the_queue() -> None:
    mooncake = policy("mooncake")
    queue = {"prefills": waiting(2000)}
    request = Request(9000, cached={"p0": 8000})
    assert mooncake.route(request, fleet(p0=queue)).prefill == "p0"
    longer = {"prefills": waiting(20000)}
    assert mooncake.route(request, fleet(p0=longer)).prefill == "p1"


def test_mooncake_rejects_early_what_would_miss_an_slo() -> None:
    hopeless = {"prefills": waiting(200_000)}
    late = fleet(hopeless, hopeless)
    route = policy("mooncake").route(Request(500), late)
    assert route.rejected and route.reason == "rejected_ttft"
    assert not policy("mooncake", reject=False).route(Request(500), late).rejected
    slow = {"decodes": 200, "decode_kv_tokens": 900_000}
    route = policy("mooncake").route(Request(500), fleet(d0=slow, d1=slow))
    assert route.rejected and route.reason == "rejected_tbt"


def test_tetriinfer_spreads_heavy_decodes_and_fixes_the_prefill_chunk() -> None:
    tetri = policy("tetriinfer", accuracy=1.0, chunk=512)
    plans = tetri.plan(PlanContext(2, 2, MODEL))
    assert {p.budget_tokens for p in plans if p.prefills} == {512}
    routes = [
        (request, tetri.route(request, fleet()))
        for i in range(8)
        for request in [Request(100, str(i), output_tokens=400 if i % 2 else 5)]
    ]
    heavy = [r.decode for q, r in routes if q.output_tokens == 400]
    assert sorted(heavy) == ["d0", "d0", "d1", "d1"]
    for request, route in routes:
        tetri.finished(request, route)
    assert set(tetri._heavy.values()) == {0}


def test_tetriinfer_predicts_as_often_right_as_its_accuracy() -> None:
    tetri = policy("tetriinfer", accuracy=0.749)
    right = sum(
        tetri.predict_heavy(Request(1, output_tokens=400 * (i % 2))) == bool(i % 2)
        for i in range(4000)
    )
    assert right / 4000 == pytest.approx(0.749, abs=0.02)


def test_ppd_prefills_later_turns_where_their_prefix_lies() -> None:
    ppd = policy("ppd")
    later = Request(8000, cached={"d1": 7500}, turn=2)
    route = ppd.route(later, fleet())
    assert (route.prefill, route.decode, route.reason) == ("d1", "d1", "append")
    first = Request(8000, cached={"d1": 7500}, turn=1)
    assert not ppd.route(first, fleet()).deflected
    assert not ppd.route(Request(8000, turn=3), fleet()).deflected
    # A long append onto a busy node would cost its decodes more than it gains.
    busy = {"decodes": 30, "decode_kv_tokens": 90_000}
    long = Request(16000, cached={"d1": 512}, turn=2)
    assert (
        not make_policy("ppd", Settings(), tbt_weight=5.0)
        .route(long, fleet(d1=busy))
        .deflected
    )


def test_nexus_shares_each_gpu_and_slows_prefill_by_its_share() -> None:
    nexus = policy("nexus", prefill_share=0.5, contention=0.0, saturation=0.25)
    assert nexus.scales(0.5) == (2.0, 1.0)
    assert nexus.scales(0.9)[1] == pytest.approx(2.5)
    plans = nexus.plan(PlanContext(2, 2, MODEL))
    assert len(plans) == 8
    assert {p.group for p in plans} == {"g0", "g1", "g2", "g3"}
    nodes = Fleet(
        [node("g0p", prefills=waiting(500)), node("g1p")], [node("g0d"), node("g1d")]
    )
    route = nexus.route(Request(100), nodes)
    assert (route.prefill, route.decode) == ("g1p", "g1d")


def test_nexus_cost_model_keeps_decode_steps_within_their_limit() -> None:
    nexus = policy("nexus")
    context = PlanContext(2, 2, MODEL, lengths=[(4000, 80)] * 10, rate_rps=8.0)
    share = nexus.choose_share(context)
    assert 0.1 < share < 0.95
    step = MODEL.step_ms(8, 32000)
    assert step * nexus.scales(share)[1] <= 63.0
    assert step * nexus.scales(share + 0.1)[1] > 63.0


def test_dynamo_rules_bypass_on_short_effective_input_or_prefill_load() -> None:
    busy = {"prefills": waiting(20_000)}
    loaded = fleet(busy, busy)
    cached = Request(4000, cached={"d0": 3000})
    fresh = Request(1000)
    by_rule = {
        rule: policy("dynamo", rule=rule)
        for rule in ("isl_bounding", "prefill_load", "isl_or_load")
    }
    told = {
        rule: [
            made.route(cached, fleet()).deflected,
            made.route(fresh, fleet()).deflected,
            made.route(fresh, loaded).deflected,
        ]
        for rule, made in by_rule.items()
    }
    assert told == {
        "isl_bounding": [True, False, False],
        "prefill_load": [False, False, True],
        "isl_or_load": [True, False, True],
    }


def test_dynamo_guard_spares_a_decode_worker_short_of_kv() -> None:
    guarded = policy("dynamo", decode_busy_threshold=0.5)
    tight = {"decode_kv_tokens": 9000, "free_kv_tokens": 5000}
    request = Request(2000, cached={"d0": 1500, "d1": 1500})
    assert not guarded.route(request, fleet(d0=tight, d1=tight)).deflected
    assert policy("dynamo").route(request, fleet(d0=tight, d1=tight)).deflected


def test_mixed_ttft_counts_the_queue_ahead_and_the_batch() -> None:
    idle = node("d", budget_tokens=512)
    alone = mixed_ttft_ms(idle, 1000)
    assert alone == pytest.approx(
        MODEL.step_ms(0, 0, 512) + MODEL.step_ms(0, 0, 488, 512)
    )
    behind = node("d", budget_tokens=512, deflected=waiting(1024))
    assert mixed_ttft_ms(behind, 1000) > alone + 2 * MODEL.step_ms(0, 0, 512) - 1e-6
    decoding = node("d", budget_tokens=512, decodes=40, decode_kv_tokens=50_000)
    assert mixed_ttft_ms(decoding, 1000) > alone


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("disagg", "balance", "best"),
        ("sq", "theta", -1),
        ("sl", "length", 0),
        ("taichi", "decode_chunk", 0),
        ("taichi", "share", 2),
        ("sarathi", "chunk", "big"),
        ("splitwise", "queue_tokens", -5),
        ("distserve", "ttft_share", 0),
        ("mooncake", "reject", 1),
        ("mooncake", "slack", 0),
        ("tetriinfer", "accuracy", 1.5),
        ("ppd", "ttft_weight", -1),
        ("nexus", "prefill_share", 1),
        ("dynamo", "rule", "always"),
        ("dynamo", "eff_isl_ratio_threshold", 7),
    ],
)
def test_a_bad_setting_is_refused_by_name(
    name: str, option: str, value: object
) -> None:
    with pytest.raises(ValueError, match=option):
        policy(name, **{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lead_ms", -1.0),
        ("lead_ms", "abc"),
        ("lead_ms", float("nan")),
        ("oldest_slos", -1),
        ("oldest_slos", "x"),
        ("longest_slos", -0.5),
        ("several", "maybe"),
        ("ledger", 1),
    ],
)
def test_a_setting_of_kairos_out_of_range_is_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        make_policy("kairos", Settings(), **{option: value})
