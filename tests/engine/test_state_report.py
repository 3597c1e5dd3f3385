# SPDX-License-Identifier: Apache-2.0
"""State reports and step records of a scheduler."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest
import zmq

from tests.engine.virtual import MODEL, VirtualEngine, make_scheduler
from vllm_kairos.core.messages import (
    MOST_PREFILLS,
    REPORT_TOPIC,
    StateReport,
    decode_report,
)
from vllm_kairos.core.profile import FittedPredictor, Profile
from vllm_kairos.engine.recorder import COLUMNS
from vllm_kairos.files import save_profile


def snapshot(e: VirtualEngine) -> StateReport:
    e.scheduler._take_snapshot()
    report = e.scheduler._reporter.report(7)
    assert report is not None
    return report


def profile_of_model(path: Path) -> str:
    """A file with the profile of the pretended model."""
    save_profile(
        path,
        Profile(
            name="virtual",
            model="virtual",
            hardware="none",
            engine_version="0.18.1",
            kind="measured",
            created="2026-01-01",
            prefill=FittedPredictor(dict(MODEL.prefill.terms)),
            decode=FittedPredictor(dict(MODEL.decode.terms)),
            mixed=FittedPredictor(dict(MODEL.mixed.terms)),
        ),
    )
    return str(path)


def test_report_counts_every_phase_as_the_scheduler_has_it() -> None:
    e = VirtualEngine(make_scheduler(budget_tokens=512, max_num_seqs=6))
    for _ in range(3):
        e.add(100, 200)
    e.step()
    remote = e.add(400, 5, remote=True)
    deflected = e.add(900, 5, chunks=[128] * 9)
    plain = e.add(700, 5)
    queued = e.add(50, 5)
    e.step()
    report = snapshot(e)
    requests = e.scheduler.requests
    assert report.decodes == 3
    assert report.decode_kv_tokens == 3 * 101
    assert (report.awaiting_kv, report.awaiting_kv_tokens) == (1, 400)
    assert [(d.ticket, d.tokens, d.computed) for d in report.deflected] == [
        (f"ticket-{deflected}", 900 - 125, 125)
    ]
    computed = requests[plain].num_computed_tokens
    assert computed == 512 - 128
    assert report.prefills == [(700 - computed, computed), (50, 0)]
    assert report.admitted == [f"ticket-{deflected}"]
    assert report.free_kv_blocks == (
        e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    )
    assert (report.budget_tokens, report.max_num_seqs) == (512, 6)
    assert report.block_size == 16 and report.role == "kv_both"
    assert queued in requests and remote in requests


def test_report_of_a_drained_engine_is_empty() -> None:
    e = VirtualEngine(make_scheduler())
    e.add(300, 5, chunks=[128] * 5)
    e.add(300, 5)
    e.drain()
    report = e.scheduler._reporter.report(0)
    assert report is not None
    assert (report.decodes, report.decode_kv_tokens) == (0, 0)
    assert not report.deflected and not report.prefills
    assert report.free_kv_blocks == report.total_kv_blocks - 1
    assert report.step_remaining_ms == 0.0


def test_report_tells_whether_chunks_adapt(tmp_path: Path) -> None:
    profile = profile_of_model(tmp_path / "p.json")
    for kairos, adaptive in (
        ({}, False),
        ({"profile": profile}, True),
        ({"profile": profile, "mode": "adaptive"}, True),
        ({"profile": profile, "mode": "planned"}, False),
    ):
        e = VirtualEngine(make_scheduler(kairos=kairos))
        assert snapshot(e).adaptive == adaptive


@pytest.mark.parametrize("timed", [True, False])
def test_a_session_that_is_given_more_of_its_prompt_is_no_decode_meanwhile(
    timed: bool, tmp_path: Path
) -> None:
    kairos = {"profile": profile_of_model(tmp_path / "p.json"), "mode": "planned"}
    e = VirtualEngine(make_scheduler(budget_tokens=512, kairos=kairos if timed else {}))
    other = e.add(100, 200)

    e.say("session", 80)
    for _ in range(6):
        e.step()
    assert snapshot(e).decodes == 2
    e.say("session", 900)
    requests = e.scheduler.requests
    e.step()
    report = snapshot(e)
    assert report.decodes == 1
    assert report.decode_kv_tokens == requests[other].num_computed_tokens
    e.step()
    report = snapshot(e)
    assert report.decodes == 2
    assert report.decode_kv_tokens == sum(
        r.num_computed_tokens for r in requests.values()
    )


def test_report_under_priority_lists_prefills_in_the_order_served() -> None:
    e = VirtualEngine(make_scheduler(policy="priority", max_num_seqs=1))
    e.add(64, 50)
    e.step()
    e.add(30, 5, priority=3)
    e.add(20, 5, priority=1)
    e.add(10, 5, priority=2)
    assert [tokens for tokens, _ in snapshot(e).prefills] == [20, 10, 30]


def test_report_of_a_long_queue_is_cut_and_its_rest_counted() -> None:
    e = VirtualEngine(make_scheduler(max_num_seqs=1))
    for _ in range(MOST_PREFILLS + 10):
        e.add(3, 2)
    report = snapshot(e)
    assert len(report.prefills) == MOST_PREFILLS
    assert report.more_prefill_tokens == 30


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_measured_step_times_are_those_of_the_clock(
    async_scheduling: bool, tmp_path: Path
) -> None:
    profile = profile_of_model(tmp_path / "p.json")
    e = VirtualEngine(
        make_scheduler(
            async_scheduling=async_scheduling,
            kairos={"profile": profile, "mode": "planned"},
        )
    )
    for _ in range(4):
        e.add(200, 40)
    e.step()
    e.step()
    e.add(2000, 5, chunks=[256] * 10)
    e.drain()
    report = snapshot(e)
    assert len(report.steps) > 20
    # Scheduled ahead, the step beside a request's last counts its KV once more.
    rel = 3e-3 if async_scheduling else 1e-6
    for predicted, measured in report.steps[2:]:
        assert predicted == pytest.approx(measured, rel=rel)


def test_step_records_hold_what_each_step_computed(tmp_path: Path) -> None:
    path = tmp_path / "log" / "steps.csv"
    e = VirtualEngine(make_scheduler(kairos={"step_log": str(path)}))
    for _ in range(3):
        e.add(100, 30)
    e.step()
    e.add(500, 4, chunks=[256, 128, 256])
    e.drain()
    e.scheduler.shutdown()
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == sum(1 for s in e.steps if s.total)
    shapes = [
        tuple(
            int(row[c])
            for c in (
                "sum_prefill_tokens",
                "num_prefill_requests",
                "sum_prefill_kv_tokens",
                "num_decode_requests",
                "sum_decode_kv_tokens",
            )
        )
        for row in rows[:4]
    ]
    assert shapes == [
        (300, 3, 0, 0, 0),
        (253, 1, 0, 3, 300),
        (125, 1, 253, 3, 303),
        (122, 1, 378, 3, 306),
    ]
    assert float(rows[1]["latency_ms"]) == pytest.approx(
        MODEL.step_ms(3, 300, 253, 0), rel=1e-4
    )


def receive(socket: zmq.Socket[bytes], count: int) -> list[StateReport]:
    reports = []
    deadline = time.monotonic() + 10.0
    while len(reports) < count and time.monotonic() < deadline:
        if socket.poll(200):
            topic, payload = socket.recv_multipart()
            assert topic == REPORT_TOPIC
            reports.append(decode_report(payload))
    return reports


def test_heartbeat_goes_on_while_the_engine_idles() -> None:
    probe = zmq.Context.instance().socket(zmq.PUB)
    port = probe.bind_to_random_port("tcp://127.0.0.1")
    probe.close(linger=0)
    address = f"tcp://127.0.0.1:{port}"
    e = VirtualEngine(
        make_scheduler(kairos={"report_address": address, "heartbeat_ms": 20.0})
    )
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.subscribe(REPORT_TOPIC)
    subscriber.connect(address)
    try:
        e.add(64, 30)
        e.step()
        e.step()
        e.scheduler._take_snapshot()
        reports = receive(subscriber, 5)
        assert [r.seq for r in reports] == list(
            range(reports[0].seq, reports[0].seq + 5)
        )
        assert len({r.incarnation for r in reports}) == 1
        assert reports[-1].decodes == 1
        e.drain()
        assert receive(subscriber, 3)[-1].decodes == 0
    finally:
        e.scheduler.shutdown()
        e.scheduler.shutdown()
        subscriber.close(linger=0)


def test_an_address_in_use_turns_reports_off_and_the_engine_serves() -> None:
    taken = zmq.Context.instance().socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    try:
        e = VirtualEngine(
            make_scheduler(kairos={"report_address": f"tcp://127.0.0.1:{port}"})
        )
        r = e.add(64, 4)
        e.drain()
        assert r in e.finished
        e.scheduler.shutdown()
    finally:
        taken.close(linger=0)
