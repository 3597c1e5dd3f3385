# SPDX-License-Identifier: Apache-2.0
"""What engine and proxy say to each other, and what a stranger may send."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kairos.core.messages import (
    TICKET_KEY,
    DeflectedReport,
    StateReport,
    decode_report,
    encode_report,
    parse_schedule,
    schedule_params,
    ticket_of,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
    ),
    max_leaves=12,
)
#: Objects close to a schedule, so that every check is reached.
NEAR = st.fixed_dictionaries(
    {},
    optional={
        "v": st.just(1) | JSON,
        "ticket": st.text(max_size=200) | JSON,
        "chunks": st.lists(st.integers(-2, 9000), max_size=5) | JSON,
    },
)


@given(params=JSON | st.fixed_dictionaries({"kairos": NEAR | JSON}))
@settings(max_examples=200)
def test_a_schedule_is_parsed_or_refused_with_a_value_error(params: Any) -> None:
    try:
        schedule = parse_schedule(params)
    except ValueError as error:
        assert 0 < len(str(error)) < 300
        return
    if schedule is None:
        assert not isinstance(params, dict) or "kairos" not in params
        return
    raw = params["kairos"]
    assert raw["v"] == 1
    assert schedule.ticket == raw["ticket"]
    assert list(schedule.chunks) == raw["chunks"]
    assert all(type(c) is int and c >= 1 for c in schedule.chunks)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


BAD = {
    "deep version": {"v": nested(50_000)},
    "deep chunk": {"v": 1, "ticket": "t", "chunks": [nested(50_000)]},
    "huge integer": {"v": 1, "ticket": "t", "chunks": [-(10**9000)]},
    "huge version": {"v": 10**9000},
    "bool version": {"v": True, "ticket": "t", "chunks": [1]},
    "float chunk": {"v": 1, "ticket": "t", "chunks": [1.0]},
    "bool chunk": {"v": 1, "ticket": "t", "chunks": [True]},
    "no chunk": {"v": 1, "ticket": "t", "chunks": []},
    "zero": {"v": 1, "ticket": "t", "chunks": [5, 0]},
    "too many": {"v": 1, "ticket": "t", "chunks": [1] * 70_000},
    "empty ticket": {"v": 1, "ticket": "", "chunks": [1]},
    "long ticket": {"v": 1, "ticket": "t" * 129, "chunks": [1]},
    "other version": {"v": 2, "ticket": "t", "chunks": [1]},
    "text": "x" * 1_000_000,
    "none": None,
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_schedule_is_refused_in_a_short_line(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_schedule({"kairos": BAD[name]})
    assert len(str(caught.value)) < 200
    ticket_of({"kairos": BAD[name]})


@given(
    ticket=st.text(st.characters(codec="ascii"), min_size=1, max_size=128),
    chunks=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=9),
)
def test_a_schedule_survives_the_way_to_the_engine(
    ticket: str, chunks: list[int]
) -> None:
    params = msgspec.json.decode(msgspec.json.encode(schedule_params(ticket, chunks)))
    schedule = parse_schedule(params)
    assert schedule is not None
    assert (schedule.ticket, list(schedule.chunks)) == (ticket, chunks)
    assert ticket_of(params) == ticket


@given(params=JSON | st.fixed_dictionaries({TICKET_KEY: JSON, "kairos": NEAR | JSON}))
def test_a_ticket_is_text_or_none_whatever_was_sent(params: Any) -> None:
    ticket = ticket_of(params)
    assert ticket is None or 0 < len(ticket) <= 128


def test_the_ticket_of_an_ordinary_dispatch_stands_beside_the_connectors_keys() -> None:
    params = {"do_remote_decode": True, TICKET_KEY: "t"}
    assert ticket_of(params) == "t"
    assert parse_schedule(params) is None


COUNTS = st.integers(-1, 1 << 40)
REPORTS = st.builds(
    StateReport,
    engine_id=st.text(max_size=9),
    incarnation=st.text(max_size=9),
    seq=COUNTS,
    time_s=st.floats(allow_nan=False),
    role=st.sampled_from(["kv_both", "none"]),
    decodes=COUNTS,
    decode_kv_tokens=COUNTS,
    deflected=st.lists(
        st.builds(DeflectedReport, st.text(max_size=9), COUNTS, COUNTS), max_size=3
    ),
    prefills=st.lists(st.tuples(COUNTS, COUNTS), max_size=3),
    more_prefill_tokens=COUNTS,
    awaiting_kv=COUNTS,
    awaiting_kv_tokens=COUNTS,
    free_kv_blocks=COUNTS,
    total_kv_blocks=COUNTS,
    block_size=st.integers(1, 256),
    budget_tokens=st.integers(1, 1 << 20),
    max_num_seqs=st.integers(1, 1 << 12),
    admitted=st.lists(st.text(max_size=9), max_size=3),
    steps=st.lists(
        st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)), max_size=3
    ),
    malformed_schedules=COUNTS,
    guard_overrides=COUNTS,
)


@given(report=REPORTS)
def test_a_report_survives_the_way_to_the_proxy(report: StateReport) -> None:
    assert decode_report(encode_report(report)) == report


@given(data=st.binary(max_size=200))
@settings(max_examples=150)
def test_bytes_that_are_no_report_are_refused_with_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_report(data)


@given(report=REPORTS, data=st.data())
def test_a_damaged_report_is_read_or_refused_with_a_value_error(
    report: StateReport, data: st.DataObject
) -> None:
    raw = bytearray(encode_report(report))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        decode_report(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def plain_report() -> dict[str, Any]:
    zeros = dict.fromkeys(
        (
            *("seq", "time_s", "decodes", "decode_kv_tokens", "more_prefill_tokens"),
            *("awaiting_kv", "awaiting_kv_tokens", "free_kv_blocks"),
            *("total_kv_blocks",),
        ),
        0,
    )
    ones = dict.fromkeys(("block_size", "budget_tokens", "max_num_seqs"), 1)
    names = {"engine_id": "e", "incarnation": "i", "role": "none"}
    lists: dict[str, Any] = {
        name: [] for name in ("deflected", "prefills", "admitted", "steps")
    }
    return {**zeros, **ones, **names, **lists}


def test_a_report_that_does_not_tell_the_mode_is_of_an_adaptive_engine() -> None:
    assert decode_report(msgspec.msgpack.encode(plain_report())).adaptive
    planned = {**plain_report(), "adaptive": False}
    assert not decode_report(msgspec.msgpack.encode(planned)).adaptive


@pytest.mark.parametrize("name", ["budget_tokens", "block_size", "max_num_seqs"])
def test_a_report_with_a_limit_of_nothing_is_refused(name: str) -> None:
    good = plain_report()
    decode_report(msgspec.msgpack.encode(good))
    with pytest.raises(ValueError, match=name):
        decode_report(msgspec.msgpack.encode({**good, name: 0}))


def test_a_report_of_another_version_or_nested_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2"):
        decode_report(msgspec.msgpack.encode({**plain_report(), "v": 2}))
    with pytest.raises(ValueError):
        decode_report(b"\x81\xa1x" + b"\x91" * 500_000)
