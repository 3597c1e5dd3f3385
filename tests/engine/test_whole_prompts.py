# SPDX-License-Identifier: Apache-2.0
"""Engines with chunked prefill off (``--no-enable-chunked-prefill``)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.test_adaptive import profile as profile
from tests.engine.test_chunk_caps import ARRIVALS
from tests.engine.virtual import MODEL, VirtualEngine, make_scheduler
from vllm_kairos.core.schedule import closed_form_schedule
from vllm_kairos.engine import scheduler

#: vLLM wants a budget that holds the longest prompt.
WHOLE = {"chunked_prefill": False, "budget_tokens": 65536}


@pytest.mark.parametrize("mode", ["planned", "adaptive"])
@pytest.mark.parametrize("deflected", [False, True])
def test_a_prompt_that_no_chunk_holds_is_computed_whole_and_at_once(
    profile: str, mode: str, deflected: bool
) -> None:
    kairos = {"profile": profile, "mode": mode, "tau_ms": 30.0}
    e = VirtualEngine(make_scheduler(kairos=kairos, **WHOLE))  # type: ignore[arg-type]
    for _ in range(8):
        e.add(64, 400)
    e.step()
    r = e.add(5000, 4, chunks=[64] * 100 if deflected else None)
    assert e.step().tokens[r] == 5000
    assert e.scheduler._chunks.overrides == 0


@settings(max_examples=60, deadline=None)
@given(
    arrivals=ARRIVALS,
    async_scheduling=st.booleans(),
    mode=st.sampled_from(["planned", "adaptive"]),
)
def test_every_step_is_that_of_the_stock_scheduler_whatever_is_deflected(
    profile: str,
    arrivals: list[tuple[int, int, int, str, list[int], bool]],
    async_scheduling: bool,
    mode: str,
) -> None:
    stock = AsyncScheduler if async_scheduling else Scheduler
    runs = []
    for scheduler_class in (stock, None):
        e = VirtualEngine(
            make_scheduler(
                scheduler_class,
                kairos={"profile": profile, "mode": mode, "tau_ms": 15.0},
                async_scheduling=async_scheduling,
                num_blocks=200,
                max_num_seqs=6,
                **WHOLE,  # type: ignore[arg-type]
            )
        )
        for wait, prompt, output, kind, chunks, _ in arrivals:
            for _ in range(wait):
                e.step()
            e.add(prompt, output, chunks=chunks if kind == "deflected" else None)
        e.drain()
        runs.append([s.tokens for s in e.steps])
    assert runs[0] == runs[1]


def test_its_reports_leave_no_room_for_a_chunk(profile: str) -> None:
    options = {"kairos": {"profile": profile}, "budget_tokens": 65536}
    for splits in (True, False):
        e = VirtualEngine(make_scheduler(chunked_prefill=splits, **options))  # type: ignore[arg-type]
        report = e.scheduler._reporter.report(0)
        assert report is not None and report.limit_ms is not None
        schedule = closed_form_schedule(
            MODEL, 0, 0, 100, report.budget_tokens, report.limit_ms
        )
        assert (schedule is not None) is splits


def test_its_log_says_so_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *_: said.append(text))
    make_scheduler()
    assert not said
    make_scheduler(**WHOLE)  # type: ignore[arg-type]
    assert len(said) == 1 and "chunked prefill is off" in said[0]
