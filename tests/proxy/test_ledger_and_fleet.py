# SPDX-License-Identifier: Apache-2.0
"""Reports and dispatches reconciled: no dispatch counted twice, no ghost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proxy.stubs import MODEL, profile, report
from vllm_kairos.core.messages import MOST_ADMITTED, DeflectedReport
from vllm_kairos.core.profile import KvLink
from vllm_kairos.proxy.flags import ProxySettings
from vllm_kairos.proxy.fleet import Node, ProxyFleet
from vllm_kairos.proxy.ledger import UNNAMED_AFTER_S, Kind, LinkLedger
from vllm_kairos.proxy.metrics import ProxyMetrics


def state(node: Node, now_s: float = 100.0):
    return node.state(now_s, 1.0)


def test_a_dispatch_counts_until_a_report_names_it() -> None:
    node = Node("n:1")
    node.ledger.open("t", Kind.DEFLECTED, 400, 100.0)
    assert [w.tokens for w in state(node).deflected] == [400]
    node.observe(report(seq=1), 100.1)
    assert [w.tokens for w in state(node).deflected] == [400]
    partly = [DeflectedReport("t", 150, 250)]
    node.observe(report(seq=2, deflected=partly, admitted=["t"]), 100.2)
    assert [(w.tokens, w.computed) for w in state(node).deflected] == [(150, 250)]
    node.observe(report(seq=3, admitted=["t"], decodes=1), 100.3)
    assert not state(node).deflected
    assert state(node).decodes == 1
    # It stays named for a while, but not for ever: still not counted again.
    node.observe(report(seq=4), 100.4)
    assert not state(node).deflected


def test_a_finished_dispatch_is_gone_whether_it_was_reported_or_not() -> None:
    node = Node("n:1")
    for kind in Kind:
        node.ledger.open("t", kind, 400, 100.0)
        node.ledger.close("t")
        node.ledger.close("t")
    s = state(node)
    assert (s.prefills, s.deflected, s.awaiting_kv, s.expected) == ([], [], 0, 0)
    assert len(node.ledger) == 0


def test_each_kind_counts_where_it_weighs() -> None:
    node = Node("n:1")
    node.observe(report(free_kv_blocks=100, block_size=10), 100.0)
    for i, kind in enumerate(Kind):
        node.ledger.open(f"t{i}", kind, 100 + i, 100.0)
    s = state(node)
    assert [w.tokens for w in s.prefills] == [100]
    assert [w.tokens for w in s.deflected] == [101]
    assert (s.awaiting_kv, s.awaiting_kv_tokens) == (1, 102)
    assert (s.expected, s.expected_kv_tokens) == (1, 103)
    assert s.free_kv_tokens == 1000 - 100 - 101 - 102


def test_a_node_plans_for_the_mode_that_its_engine_reports() -> None:
    node = Node("n:1")
    for adaptive in (True, False):
        node.observe(report(seq=2 - adaptive, adaptive=adaptive), 100.0)
        assert state(node).adaptive == adaptive


def test_a_dispatch_after_its_first_byte_weighs_as_a_decode() -> None:
    node = Node("n:1")
    node.ledger.open("t", Kind.DEFLECTED, 400, 100.0)
    node.ledger.decoding("t", 100.1)
    assert not state(node).deflected
    assert state(node).awaiting_kv == 1


def test_ordinary_dispatches_of_an_engine_that_names_none_are_dropped_in_time() -> None:
    node = Node("n:1")
    node.ledger.open("t", Kind.PREFILL, 400, 100.0)
    node.observe(report(seq=1), 100.1)
    assert len(state(node).prefills) == 1
    node.observe(report(seq=2), 100.1 + UNNAMED_AFTER_S)
    assert not state(node).prefills


def test_an_engine_that_names_them_is_waited_for_through_a_long_step() -> None:
    node = Node("n:1")
    node.ledger.open("first", Kind.PREFILL, 400, 100.0)
    node.observe(report(seq=1, admitted=["first"]), 100.1)
    node.ledger.open("second", Kind.PREFILL, 500, 100.2)
    for seq in range(2, 40):
        node.observe(report(seq=seq, admitted=["first"]), 100.0 + seq / 10)
    assert [w.tokens for w in state(node).prefills] == [500]


def test_late_and_repeated_reports_change_nothing() -> None:
    node = Node("n:1")
    assert node.observe(report(seq=5, decodes=5), 100.0)
    for seq in (5, 4, 0):
        assert not node.observe(report(seq=seq, decodes=9), 101.0)
    assert state(node).decodes == 5
    assert node.received_s == 100.0


def test_a_restarted_engine_starts_anew_and_its_old_reports_are_dead() -> None:
    node = Node("n:1")
    node.observe(report(seq=900, decodes=7), 100.0)
    node.ledger.open("died with it", Kind.DEFLECTED, 400, 99.0)
    node.ledger.open("sent to the new one", Kind.DEFLECTED, 300, 100.5)
    assert node.observe(report(incarnation="two", seq=0), 101.0)
    assert not node.observe(report(seq=901, decodes=7), 101.1)
    s = state(node, 101.2)
    assert s.decodes == 0
    assert [w.tokens for w in s.deflected] == [300]
    assert node.observe(report(incarnation="two", seq=1), 101.3)


def test_state_is_stale_by_when_it_was_received() -> None:
    node = Node("n:1")
    assert not state(node, 100.0).fresh
    node.observe(report(time_s=-1e9), 100.0)
    assert state(node, 100.9).fresh
    assert not state(node, 101.1).fresh
    node.observe(report(seq=2, time_s=1e12), 102.0)
    assert state(node, 102.1).fresh


def test_counts_below_zero_are_read_as_none() -> None:
    node = Node("n:1")
    odd = report(
        decodes=-1,
        awaiting_kv=-2,
        prefills=[(-5, -1), (7, -3)],
        deflected=[DeflectedReport("t", -1, 5), DeflectedReport("u", 4, -2)],
    )
    node.observe(odd, 100.0)
    s = state(node)
    assert (s.decodes, s.awaiting_kv) == (0, 0)
    assert [(w.tokens, w.computed) for w in s.prefills] == [(7, 0)]
    assert [(w.tokens, w.computed) for w in s.deflected] == [(4, 0)]


def test_prefills_cut_off_the_report_count_as_one_more() -> None:
    node = Node("n:1")
    node.observe(report(prefills=[(5, 1)], more_prefill_tokens=900), 100.0)
    assert [w.tokens for w in state(node).prefills] == [5, 900]


def test_a_profile_gives_the_limits_until_a_report_does() -> None:
    node = Node("n:1", profile())
    assert state(node).budget_tokens == 8192
    assert state(node).max_num_seqs == 64
    node.observe(report(budget_tokens=77), 100.0)
    assert state(node).budget_tokens == 77


def test_a_step_in_flight_runs_out_and_then_work_is_done() -> None:
    node = Node("n:1", profile())
    busy = report(prefills=[(400, 0), (300, 0)], step_remaining_ms=50.0, limit_ms=41.0)
    node.observe(busy, 100.0)
    s = state(node, 100.02)
    assert s.step_in_flight_ms == pytest.approx(30.0)
    assert s.worked_off_ms == 0.0
    assert s.limit_ms == 41.0
    s = state(node, 100.15)
    assert s.step_in_flight_ms == 0.0
    assert s.worked_off_ms == pytest.approx(100.0)


def test_an_idle_node_works_only_since_it_was_sent_something() -> None:
    node = Node("n:1", profile())
    node.observe(report(), 100.0)
    assert state(node, 100.4).worked_off_ms == 0.0
    node.ledger.open("t", Kind.PREFILL, 400, 100.5)
    assert state(node, 100.5).worked_off_ms == 0.0
    assert state(node, 100.6).worked_off_ms == pytest.approx(100.0)
    # One step of 200 tokens takes 201 ms; then it idled until 0.5 s.
    node.ledger.close("t")
    node.observe(report(seq=2, prefills=[(200, 0)]), 101.0)
    assert state(node, 101.1).worked_off_ms == pytest.approx(100.0)
    assert state(node, 101.4).worked_off_ms == pytest.approx(201.0)
    node.ledger.open("u", Kind.PREFILL, 400, 101.5)
    assert state(node, 101.6).worked_off_ms == pytest.approx(301.0)


def test_kv_on_a_link_drains_at_its_rate_and_is_gone_with_its_first_bytes() -> None:
    link = LinkLedger(1000.0)
    assert link.backlog_bytes(100.0) == 0.0
    link.open("a", 500.0, 100.0)
    link.open("b", 300.0, 100.1)
    assert link.backlog_bytes(100.1) == pytest.approx(700.0)
    assert link.backlog_bytes(100.4) == pytest.approx(400.0)
    # What is left can be no more than what has not been answered.
    link.close("a", 100.4)
    assert link.backlog_bytes(100.4) == pytest.approx(300.0)
    assert link.backlog_bytes(109.0) == 0.0
    link.close("b", 109.0)
    link.close("b", 109.0)
    link.open("c", 100.0, 110.0)
    assert link.backlog_bytes(110.0) == pytest.approx(100.0)


def test_a_batch_outside_the_profile_is_seen_in_the_metrics() -> None:
    seen = profile()
    decode = msgspec.structs.replace(seen.decode, ranges={"B": (1.0, 8.0)})
    seen = msgspec.structs.replace(seen, decode=decode)
    inside, outside, silent = (Node(f"n:{i}", seen) for i in range(3))
    inside.observe(report(decodes=8), 100.0)
    outside.observe(report(decodes=9), 100.0)
    unknown = Node("n:3")
    unknown.observe(report(decodes=9), 100.0)
    metrics = ProxyMetrics()
    metrics.watch([inside, outside, silent, unknown])
    name = "kairos_proxy_profile_extrapolated"
    told = [
        line
        for line in metrics.text().decode().splitlines()
        if line.startswith(name + "{")
    ]
    assert told == [f'{name}{{node="n:0"}} 0.0', f'{name}{{node="n:1"}} 1.0']


def test_a_transfer_counts_on_the_node_it_is_fetched_from() -> None:
    linked = msgspec.structs.replace(profile(), kv=KvLink(10.0, 1e6))
    node = Node("n:1", linked)
    node.observe(report(), 100.0)
    node.fetching("t", 400, 100.0)
    assert state(node, 100.001).link_backlog_bytes == pytest.approx(3000.0)
    node.fetched("t", 100.002)
    assert state(node, 100.002).link_backlog_bytes == 0.0


def test_nodes_with_one_profile_share_its_models_and_others_have_their_own() -> None:
    slow, fast = profile(prefill_ms_per_token=9.0), profile()
    fleet = ProxyFleet(
        ProxySettings(
            MODEL,
            ["p:1", "p:2"],
            ["d:1"],
            profiles={"p:1": slow, "p:2": fast, "d:1": fast},
        )
    )
    p1, p2, d1 = (fleet[a].state(0.0, 1.0).model for a in ("p:1", "p:2", "d:1"))
    assert p2 is d1
    assert p1 is not p2 and p1.step_ms(0, 0, 100) > 5 * p2.step_ms(0, 0, 100)


def test_without_the_ledger_a_node_is_its_report_and_the_deflections_in_flight() -> (
    None
):
    linked = msgspec.structs.replace(profile(), kv=KvLink(10.0, 1e6))
    node = Node("n:1", linked, counts_sent=False)
    told = report(
        free_kv_blocks=100, block_size=10, prefills=[(70, 0)], step_remaining_ms=50.0
    )
    node.observe(told, 100.0)
    for i, kind in enumerate(Kind):
        node.ledger.open(f"t{i}", kind, 100 + i, 100.0)
    node.fetching("t0", 400, 100.0)
    s = state(node, 100.4)
    assert [w.tokens for w in s.prefills] == [70]
    assert (s.awaiting_kv, s.expected, s.free_kv_tokens) == (0, 0, 1000)
    # As old as the report is, it is not read as of now.
    assert (s.step_in_flight_ms, s.worked_off_ms) == (50.0, 0.0)
    assert s.link_backlog_bytes == 0.0
    assert [w.tokens for w in s.deflected] == [101]
    node.ledger.decoding("t1", 100.4)
    assert not state(node, 100.4).deflected
    assert not state(node, 109.0).fresh


@pytest.mark.parametrize(
    ("policy", "options", "counted"),
    [
        ("kairos-paper", {}, 0),
        ("kairos", {"ledger": False}, 0),
        ("kairos", {}, 1),
        ("disagg", {"balance": "least"}, 1),
    ],
)
def test_the_fleet_counts_what_was_sent_where_the_policy_does(
    policy: str, options: dict[str, object], counted: int
) -> None:
    settings = ProxySettings(MODEL, ["p:1"], ["d:1"], policy, options)
    fleet = ProxyFleet(settings)
    fleet["p:1"].ledger.open("t", Kind.PREFILL, 400, 100.0)
    assert len(fleet.view(100.0).prefill[0].prefills) == counted


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 9), st.sampled_from(list(Kind))),
        st.tuples(st.just("close"), st.integers(0, 9), st.none()),
        st.tuples(st.just("report"), st.sets(st.integers(0, 9)), st.booleans()),
        st.tuples(st.just("old report"), st.sets(st.integers(0, 9)), st.none()),
    ),
    max_size=40,
)


@given(events=EVENTS)
def test_whatever_the_order_of_events_nothing_outlives_its_request(events) -> None:
    node = Node("n:1")
    now, seq, incarnation = 100.0, 10, 0
    live: set[str] = set()
    for what, value, more in events:
        now += 0.05
        if what == "open":
            node.ledger.open(f"t{value}", more, 10, now)
            live.add(f"t{value}")
        elif what == "close":
            node.ledger.close(f"t{value}")
            live.discard(f"t{value}")
        else:
            fresh = what == "report"
            seq += 1 if fresh else 0
            incarnation += bool(more)
            node.observe(
                report(
                    seq=seq if fresh else seq - 5,
                    incarnation=str(incarnation),
                    admitted=[f"t{i}" for i in value],
                ),
                now,
            )
        s = state(node, now)
        counted = len(s.prefills) + len(s.deflected) + s.awaiting_kv + s.expected
        assert counted <= len(live)
        assert {e.ticket for e in node.ledger.unshown()} <= live
    for ticket in list(live):
        node.ledger.close(ticket)
    s = state(node, now)
    assert (s.prefills, s.deflected, s.awaiting_kv, s.expected) == ([], [], 0, 0)


def test_nodes_believed_dead_are_left_out_until_there_is_no_other() -> None:
    fleet = ProxyFleet(ProxySettings(MODEL, ["p:1", "p:2"], ["d:1", "d:2"]))
    fleet["p:1"].up = fleet["d:1"].up = False
    view = fleet.view(100.0)
    assert [n.node for n in view.prefill] == ["p:2"]
    assert [n.node for n in view.decode] == ["d:2"]
    fleet["p:2"].up = fleet["d:2"].up = False
    view = fleet.view(100.0, frozenset({"d:2"}))
    assert [n.node for n in view.prefill] == []
    assert [n.node for n in view.decode] == ["d:1"]


def test_a_node_of_both_roles_is_one_node() -> None:
    fleet = ProxyFleet(ProxySettings(MODEL, ["a:1"], ["a:1", "b:1"]))
    view = fleet.view(100.0)
    assert view.prefill[0] is view.decode[0]
    assert len(fleet.nodes()) == 2


def test_the_report_keeps_more_tickets_than_arrive_between_two_heartbeats() -> None:
    assert MOST_ADMITTED >= 256
