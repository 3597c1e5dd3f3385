# SPDX-License-Identifier: Apache-2.0
"""Prompts of which a part turns out to be in the prefix cache, or not there."""

from __future__ import annotations

import pytest

from tests.engine.test_state_report import profile_of_model, snapshot
from tests.engine.virtual import VirtualEngine, make_scheduler

TAU_MS = 70.0
CACHED = list(range(10, 30_010))


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return profile_of_model(tmp_path_factory.mktemp("cache") / "p.json")


def engine(profile: str | None = None, **kairos: object) -> VirtualEngine:
    """An engine that has `CACHED` in its prefix cache and idles."""
    settings = dict(kairos)
    if profile is not None:
        settings |= {"profile": profile, "tau_ms": TAU_MS, "feedback": False}
    e = VirtualEngine(
        make_scheduler(kairos=settings, prefix_caching=True, max_num_seqs=600)
    )
    e.add([*CACHED, 5], 1)
    e.drain()
    return e


def decodes(e: VirtualEngine, count: int) -> None:
    for _ in range(count):
        e.add(2, 5000)
    while len(e.scheduler._phases.decoding) < count:
        e.step()


def deflect(e: VirtualEngine, prompt: int | list[int], slack_ms: float) -> str:
    message = {"v": 1, "ticket": "t", "chunks": [256] * 20, "slack_ms": slack_ms}
    return e.add(prompt, 4, params={"kairos": message})


@pytest.mark.parametrize("slack_ms", [1000.0, 9000.0])
def test_a_chunk_behind_a_prefix_found_in_the_cache_is_within_the_bound(
    profile: str, slack_ms: float
) -> None:
    e = engine(profile)
    decodes(e, 8)
    deflect(e, 3000, 5000.0)
    e.step()
    r = deflect(e, [*CACHED, *range(3000, 5000)], slack_ms)
    taken = []
    while r in e.scheduler._phases.deflected:
        step = e.step()
        taken.append(step.tokens.get(r, 0))
        assert step.latency_ms <= 0.9 * TAU_MS + 1e-6
    assert sum(taken) == 2000
    assert e.scheduler._chunks.overrides == 0


@pytest.mark.parametrize("others", [0, 1])
def test_a_late_prefill_that_fits_only_without_its_cached_prefix_is_not_starved(
    profile: str, others: int
) -> None:
    e = engine(profile)
    # The decodes alone take 62 of the 63 ms: 30 tokens fit, but not behind that
    # prefix, of which every token costs three times as much.
    decodes(e, 517)
    for _ in range(others):
        deflect(e, 40, 1.0)
    r = deflect(e, [*CACHED, *range(3000, 3040)], 100.0)
    over = 0
    for _ in range(60):
        step = e.step()
        if step.latency_ms > 0.9 * TAU_MS + 1e-6 and r in step.tokens:
            over += 1
        if r not in e.scheduler._phases.deflected:
            break
    assert r not in e.scheduler._phases.deflected
    e.scheduler._settle()
    assert e.scheduler._chunks.overrides == over


@pytest.mark.parametrize("timed", [False, True])
def test_a_decode_that_has_lost_its_loaded_kv_prefills_again(
    profile: str, timed: bool
) -> None:
    e = engine(profile if timed else None)
    e.scheduler.recompute_kv_load_failures = True
    decodes(e, 3)
    r = e.add([*CACHED[:4000], 7], 50)
    e.step(), e.step()
    phases = e.scheduler._phases
    assert r in phases.decoding
    (blocks,) = e.scheduler.kv_cache_manager.get_block_ids(r)
    assert e.scheduler._handle_invalid_blocks({blocks[10]}) == {r}
    report = snapshot(e)
    assert report.decodes == 3
    assert report.decode_kv_tokens == sum(
        request.num_computed_tokens for request in phases.decoding.values()
    )
    assert report.prefills == [(4001 + 2 - 160, 160)]
    e.step()
    e.drain()
    assert phases.decode_kv_tokens == 0 and not phases.prefilling


@pytest.mark.parametrize("asks", ["launched", "late", "never"])
def test_the_kv_of_decodes_is_known_after_a_time_in_which_nobody_asked(
    asks: str,
) -> None:
    e = VirtualEngine(make_scheduler(kairos={"heartbeat_ms": 1e6}, num_blocks=60))
    e.asks_for_bitmask = asks
    e.add(100, 40), e.add(30, 400), e.add(200, 400)
    phases = e.scheduler._phases

    def in_truth() -> int:
        return sum(request.num_computed_tokens for request in phases.decoding.values())

    for _ in range(30):
        e.step()
    assert snapshot(e).decode_kv_tokens == in_truth() > 330
    for _ in range(20):  # One ends meanwhile.
        e.step()
    assert snapshot(e).decode_kv_tokens == in_truth()
    e.add(300, 4, chunks=[64] * 9)
    for _ in range(3):
        e.step()
    assert snapshot(e).decode_kv_tokens == in_truth()
    while not any(r.num_preemptions for r in e.scheduler.requests.values()):
        e.step()
    assert snapshot(e).decode_kv_tokens == in_truth()
    e.drain()
    assert snapshot(e).decode_kv_tokens == 0
