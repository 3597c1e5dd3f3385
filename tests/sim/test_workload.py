# SPDX-License-Identifier: Apache-2.0
"""Workloads and trace readers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kairos.files import UserError
from vllm_kairos.sim.traces import TraceRow, conversations, load_trace, spread_ticks
from vllm_kairos.sim.workload import (
    WORKLOADS,
    arrivals_s,
    bursty,
    fit_table,
    resample,
    synthesize,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_quantile_the_paper_prints_is_met_within_two_percent(name: str) -> None:
    for quantity, asked, got in fit_table(WORKLOADS[name]):
        assert got == pytest.approx(asked, rel=0.02), quantity


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_small_sample_holds_the_quantiles_too(seed: int) -> None:
    prompts = [r.prompt_tokens for r in bursty(1200, seed=seed)]
    assert [sum(p < n for p in prompts) for n in (512, 1024, 2048)] == [3, 151, 298]


def test_arms_of_a_sweep_are_paired() -> None:
    slow, fast = bursty(200, 3.0, seed=5), bursty(200, 12.0, seed=5)
    lengths = [(r.prompt_tokens, r.output_tokens) for r in slow]
    assert lengths == [(r.prompt_tokens, r.output_tokens) for r in fast]
    for a, b in zip(slow, fast, strict=True):
        assert a.arrived_at_s == pytest.approx(4 * b.arrived_at_s)
    assert bursty(200, 3.0, seed=6) != slow
    assert bursty(200, 3.0, seed=5) == slow


@pytest.mark.parametrize("cv", [0.5, 1.0, 1.3, 2.0])
def test_gamma_gaps_have_the_rate_and_cv_asked_for(cv: float) -> None:
    gaps = np.diff(arrivals_s(200_000, 8.0, cv, np.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_cv_zero_is_evenly_spaced_and_a_bad_rate_is_refused() -> None:
    rng = np.random.default_rng(0)
    assert np.allclose(np.diff(arrivals_s(10, 4.0, 0, rng)), 0.25)
    with pytest.raises(ValueError, match="rate_rps is 0"):
        arrivals_s(10, 0, 1, rng)


def test_resample_stretches_a_trace_or_draws_arrivals_anew() -> None:
    rows = [TraceRow(float(i * i), 100 + i, 5) for i in range(20)]
    stretched = resample(rows, rate_rps=2.0)
    assert stretched[-1].arrived_at_s == pytest.approx(19 / 2.0)
    ratio = [
        s.arrived_at_s / r.arrived_at_s
        for s, r in zip(stretched, rows, strict=True)
        if r.arrived_at_s
    ]
    assert np.allclose(ratio, ratio[0])
    drawn = resample(rows, rate_rps=2.0, cv=1.0, seed=1)
    assert [r.prompt_tokens for r in drawn] == [r.prompt_tokens for r in rows]
    assert resample(rows, requests=45)[40].prompt_tokens == 100
    times = [r.arrived_at_s for r in resample(rows, requests=45)]
    assert times == sorted(times)


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_four_formats_are_read(tmp_path: Path) -> None:
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    rows = load_trace(write(tmp_path, "a.csv", azure))
    assert [(r.prompt_tokens, r.output_tokens) for r in rows] == [(4808, 10), (3180, 8)]
    assert rows[0].arrived_at_s == 0
    assert rows[1].arrived_at_s == pytest.approx(0.052, abs=1e-5)
    vidur = "arrived_at,num_prefill_tokens,num_decode_tokens\n7.5,10,2\n7.0,11,3\n"
    rows = load_trace(write(tmp_path, "v.csv", vidur))
    assert [(r.arrived_at_s, r.prompt_tokens) for r in rows] == [(0.0, 11), (0.5, 10)]
    burst = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,API\n45,ChatGPT,10,0,10,API\n50,GPT-4,20,5,25,API\n"
    )
    rows = load_trace(write(tmp_path, "b.csv", burst))
    assert [r.prompt_tokens for r in rows] == [472, 20]
    lines = [
        {
            "timestamp": 0,
            "input_length": 1030,
            "output_length": 4,
            "hash_ids": [0, 1, 2],
        },
        {"timestamp": 3000, "input_length": 5, "output_length": 1, "hash_ids": [9]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    rows = load_trace(write(tmp_path, "m.jsonl", text))
    assert rows[0].hash_ids == (0, 1, 2)
    assert rows[1].arrived_at_s == 3.0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "v.csv",
            "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,1\n1,x,1\n",
            "v.csv:3: num_prefill_tokens is 'x', expected an integer >= 1",
        ),
        (
            "v.csv",
            "arrived_at,num_prefill_tokens,num_decode_tokens\n-1,5,1\n",
            "v.csv:2: arrived_at is '-1', expected a number >= 0",
        ),
        (
            "v.csv",
            "arrived_at,num_prefill_tokens,num_decode_tokens\n1,5\n",
            "v.csv:2: num_decode_tokens is missing, expected an integer >= 1",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,5,1\n",
            "a.csv:2: TIMESTAMP is 'noon', expected a time",
        ),
        ("c.csv", "a,b\n1,2\n", "c.csv:1: header is 'a,b', expected the columns"),
        ("m.jsonl", '{"timestamp": 0}\n', "m.jsonl:1: input_length is missing"),
        ("m.jsonl", '{"timestamp": 0\n', "m.jsonl:1: not JSON"),
        (
            "m.jsonl",
            '{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}\n',
            "m.jsonl:1: hash_ids has 1 ids, expected one for each 512 of 600",
        ),
        ("e.csv", "", "header is ''"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    with pytest.raises(UserError) as error:
        load_trace(write(tmp_path, name, text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(UserError, match="No such file"):
        load_trace("/nowhere/trace.csv")


@given(st.lists(st.sampled_from([0.0, 3.0, 6.0, 9.0]), min_size=1, max_size=40))
@settings(max_examples=50)
def test_spreading_ticks_keeps_the_order_and_stays_within_the_tick(
    ticks: list[float],
) -> None:
    rows = [TraceRow(t, i + 1, 1) for i, t in enumerate(sorted(ticks))]
    spread = spread_ticks(rows)
    assert [r.prompt_tokens for r in spread] == [r.prompt_tokens for r in rows]
    times = [r.arrived_at_s for r in spread]
    assert times == sorted(times)
    for old, new in zip(rows, spread, strict=True):
        assert old.arrived_at_s <= new.arrived_at_s < old.arrived_at_s + 9.1


def test_a_prompt_that_extends_another_is_its_next_turn() -> None:
    rows = [
        TraceRow(0, 1024, 5, (0, 1)),
        TraceRow(1, 1600, 5, (0, 1, 2, 3)),
        TraceRow(2, 1100, 5, (0, 7, 8)),
    ]
    told = conversations(rows)
    assert [(r.session, r.turn) for r in told] == [("s0", 1), ("s0", 2), ("s2", 1)]


@pytest.mark.parametrize(
    "name",
    ["azure2023_conv_first20min.csv", "mooncake_conversation_first20min_le32k.jsonl"],
)
def test_public_traces_are_read_whole(name: str) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not here: public traces are not shipped")
    rows = load_trace(path)
    assert len(rows) > 3000
    times = [r.arrived_at_s for r in rows]
    assert times[0] == 0 and times == sorted(times)
    assert len(set(times)) > 0.9 * len(times)


def test_synthesize_defaults_to_the_rate_and_cv_of_table_1() -> None:
    rows = synthesize(WORKLOADS["lpld"], 4000, seed=3)
    assert len(rows) / rows[-1].arrived_at_s == pytest.approx(22, rel=0.1)
