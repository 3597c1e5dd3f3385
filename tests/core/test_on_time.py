# SPDX-License-Identifier: Apache-2.0
"""Moore and Hodgson's order against every other order."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kairos.core.on_time import Job, on_time_order

JOBS = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 200), st.integers(1, 400)),
    min_size=1,
    max_size=6,
)


def make(rows: list[tuple[int, int, int]]) -> list[Job]:
    jobs = [
        Job(str(i), float(arrival), float(arrival + slack), float(work))
        for i, (arrival, work, slack) in enumerate(rows)
    ]
    return sorted(jobs, key=lambda job: job.deadline_ms)


def on_time_count(jobs: tuple[Job, ...] | list[Job], now_ms: float) -> int:
    """Jobs in time when served one after the other from now on."""
    end, count = now_ms, 0
    for job in jobs:
        end += job.work_ms
        count += end <= job.deadline_ms
    return count


@settings(max_examples=200, deadline=None)
@given(rows=JOBS)
def test_no_order_serves_more_jobs_in_time(rows: list[tuple[int, int, int]]) -> None:
    jobs = make(rows)
    now = 500.0
    in_time, late = on_time_order(jobs, now, 0.0, 1.0, 1e9)
    best = max(on_time_count(order, now) for order in itertools.permutations(jobs))
    assert on_time_count([*in_time, *late], now) == best == len(in_time)


@settings(max_examples=200, deadline=None)
@given(rows=JOBS, speed=st.floats(0.5, 8.0), oldest=st.sampled_from([100.0, 1e9]))
def test_nobody_is_lost_and_the_overdue_come_first(
    rows: list[tuple[int, int, int]], speed: float, oldest: float
) -> None:
    jobs = make(rows)
    now = 500.0
    in_time, late = on_time_order(jobs, now, 10.0, speed, oldest)
    assert sorted(j.key for j in (*in_time, *late)) == sorted(j.key for j in jobs)
    overdue = [j for j in jobs if now - j.arrival_ms > oldest]
    assert in_time[: len(overdue)] == overdue
    deadlines = [j.deadline_ms for j in in_time[len(overdue) :]]
    assert deadlines == sorted(deadlines)


def test_the_longest_job_is_set_aside_where_one_must_be() -> None:
    jobs = make([(0, 300, 320), (0, 100, 330), (0, 100, 340)])
    in_time, late = on_time_order(jobs, 0.0, 0.0, 1.0, 1e9)
    assert [j.work_ms for j in in_time] == [100.0, 100.0]
    assert [j.work_ms for j in late] == [300.0]
