# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV comes from another node, and steps beside a KV connector."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.engine.test_state_report import profile_of_model, snapshot
from tests.engine.virtual import VirtualEngine, make_scheduler

TAU_MS = 30.0


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return profile_of_model(tmp_path_factory.mktemp("joining") / "p.json")


def engine(profile: str | None, decodes: int = 8, **kairos: Any) -> VirtualEngine:
    if profile is not None:
        kairos = {"profile": profile, "tau_ms": TAU_MS, **kairos}
    e = VirtualEngine(make_scheduler(kairos=kairos))
    for _ in range(decodes):
        e.add(64, 3000)
    for _ in range(3):
        e.step()
    return e


def anew(e: VirtualEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the steps that were not made ready for beforehand."""
    steps: list[int] = []
    schedule_anew = e.scheduler._schedule_anew

    def counted() -> Any:
        steps.append(1)
        return schedule_anew()

    monkeypatch.setattr(e.scheduler, "_schedule_anew", counted)
    return steps


@pytest.mark.parametrize("deflects", [False, True])
def test_a_connector_that_has_nothing_to_say_makes_no_step_wait(
    profile: str, deflects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(profile if deflects else None)
    if deflects:
        e.add(20_000, 4, chunks=[400] * 60)
        e.step()
        e.step()
    steps = anew(e, monkeypatch)
    for _ in range(30):
        e.step()
    assert not steps
    assert e.scheduler._quiet is not deflects


def test_one_that_was_promoted_but_found_no_block_joins_when_there_is_one(
    profile: str,
) -> None:
    e = engine(profile, decodes=10, ttft_slo_ms=50.0)
    # No headroom beside that many decodes: a deflected prefill would be held.
    e.truth = lambda ms: 3.0 * ms
    for _ in range(60):
        e.step()
    held = e.add(2000, 4, chunks=[200] * 10)
    joiner = e.add(500, 40, remote=True)
    e.step()
    e.kv_arrives(joiner)
    manager = e.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    refused = []

    def refuses_once(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.request_id == joiner and not refused and request.num_computed_tokens:
            refused.append(joiner)
            return None
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = refuses_once
    for _ in range(6):
        e.step()
    assert refused
    assert joiner in e.first_token_ms
    e.truth = lambda ms: ms
    for _ in range(3000):
        if held in e.first_token_ms:
            break
        e.step()
    assert held in e.first_token_ms


@pytest.mark.parametrize("deflects", [False, True])
def test_a_prompt_for_which_there_is_nothing_to_fetch_obeys_the_bound(
    profile: str, deflects: bool
) -> None:
    e = engine(profile)
    deflected = e.add(20_000, 4, chunks=[400] * 60) if deflects else None
    for _ in range(3):
        e.step()
    e.scheduler.connector.get_num_new_matched_tokens = lambda *_: (0, False)
    r = e.add(3000, 4, remote=True)
    e._remote.discard(r)  # It computes its prompt itself.
    steps = 0
    while r not in e.first_token_ms:
        step = e.step()
        assert step.latency_ms <= TAU_MS
        steps += 1
        assert steps < 3000
    if deflected is not None:
        e.abort(deflected)
    assert snapshot(e).awaiting_kv == 0


@pytest.mark.parametrize("decodes_alone", [False, True])
def test_a_pause_is_no_step(profile: str, decodes_alone: bool) -> None:
    e = engine(profile)
    if decodes_alone:
        e.add(64, 200)
    else:
        e.add(4000, 4, chunks=[400] * 20)
    for _ in range(5):
        e.step()
    e.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    e.now_ms += 60_000.0
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    for _ in range(5):
        e.step()
    e.scheduler._settle()
    assert max(measured for _, measured in e.scheduler._meter.recent) < 100.0
