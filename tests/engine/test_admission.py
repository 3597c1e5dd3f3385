# SPDX-License-Identifier: Apache-2.0
"""Room is kept only for deflected prefills that can be admitted."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.test_adaptive import engine
from tests.engine.test_adaptive import profile as profile
from tests.engine.virtual import VirtualEngine


def deflect(e: VirtualEngine, tokens: int, slack_ms: float) -> str:
    schedule = {"v": 1, "ticket": f"t{tokens}-{slack_ms}", "chunks": [256] * 20}
    return e.add(tokens, 4, params={"kairos": {**schedule, "slack_ms": slack_ms}})


def decoding(e: VirtualEngine, count: int) -> VirtualEngine:
    for _ in range(count):
        e.add(64, 3000)
    e.step()
    e.step()
    assert e.steps[-1].decodes == count
    return e


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_full_batch_keeps_no_room_for_a_more_urgent_prefill(
    profile: str, async_scheduling: bool
) -> None:
    e = decoding(engine(profile, max_num_seqs=4, async_scheduling=async_scheduling), 3)
    running = deflect(e, 3000, 60_000.0)
    e.step()
    urgent = deflect(e, 2000, 1000.0)
    while running in e.scheduler._phases.deflected:
        step = e.step()
        assert step.tokens.get(running, 0) > 100 or e.steps[-2].tokens[running] > 100
        assert urgent not in step.tokens
    e.abort(running)
    e.step()
    e.step()
    assert e.steps[-1].tokens[urgent] > 100
    assert e.scheduler._chunks.overrides == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_without_blocks_for_both_the_one_begun_is_finished_first(
    profile: str, async_scheduling: bool
) -> None:
    # 3 decodes and either prompt fit, not both.
    e = decoding(engine(profile, num_blocks=260, async_scheduling=async_scheduling), 3)
    running = deflect(e, 2500, 60_000.0)
    e.step()
    urgent = deflect(e, 3000, 1000.0)
    steps = 0
    while running in e.scheduler._phases.deflected:
        e.step()
        steps += 1
        assert steps < 20
    # Nothing computed was thrown away for it.
    assert all(r.num_preemptions == 0 for r in e.scheduler.requests.values())
    e.drain()
    assert {running, urgent} <= set(e.finished)


def test_room_kept_in_vain_is_not_kept_again_until_something_is_free(
    profile: str,
) -> None:
    e = decoding(engine(profile), 3)
    running = deflect(e, 6000, 60_000.0)
    e.step()
    urgent = deflect(e, 2000, 1000.0)
    held = e.scheduler.requests[urgent]
    e.scheduler.waiting.remove_request(held)
    held.status = RequestStatus.WAITING_FOR_FSM  # Its grammar is not compiled yet.
    e.scheduler.skipped_waiting.add_request(held)
    taken = [e.step().tokens.get(running, 0) for _ in range(5)]
    assert taken[0] == 0  # Once.
    assert min(taken[1:]) > 100
    held.status = RequestStatus.WAITING
    e.abort(running)
    e.step()
    assert e.steps[-1].tokens[urgent] > 100


def test_an_urgent_prefill_that_fits_still_goes_before_the_one_begun(
    profile: str,
) -> None:
    e = decoding(engine(profile), 3)
    running = deflect(e, 6000, 60_000.0)
    e.step()
    urgent = deflect(e, 2000, 1000.0)
    step = e.step()
    assert step.tokens[urgent] > step.tokens.get(running, 0)
