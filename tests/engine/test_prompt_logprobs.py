# SPDX-License-Identifier: Apache-2.0
"""Chunked prefills that answer for their prompt (``echo``, ``prompt_logprobs``).

vLLM's worker keeps a prompt's log-probabilities with the request's place in
the batch, and a request that a step leaves out loses its place.
"""

from __future__ import annotations

import pytest

from tests.engine.test_adaptive import profile as profile
from tests.engine.virtual import VirtualEngine, make_scheduler


def add(e: VirtualEngine, prompt_logprobs: int | None) -> str:
    name = e.add(600, 1, chunks=[104] * 12)
    e.scheduler.requests[name].sampling_params.prompt_logprobs = prompt_logprobs
    return name


def gaps(e: VirtualEngine, name: str) -> int:
    """Steps without it between its first and its last."""
    held = [name in step.tokens for step in e.steps]
    first, last = held.index(True), len(held) - 1 - held[::-1].index(True)
    return held[first:last].count(False)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("mode", ["planned", "adaptive"])
def test_a_started_prefill_that_tells_of_its_prompt_is_in_every_step(
    profile: str, mode: str, async_scheduling: bool
) -> None:
    kairos = {"profile": profile, "mode": mode, "tau_ms": 30.0}
    e = VirtualEngine(make_scheduler(kairos=kairos, async_scheduling=async_scheduling))
    for _ in range(4):
        e.add(64, 400)
    e.step()
    names = [add(e, 1) for _ in range(2)]
    e.step()
    e.step()
    # Sixty decodes more leave no room beside the first.
    for _ in range(60):
        e.add(16, 400)
    names += [add(e, None) for _ in range(2)]
    e.drain()
    assert [gaps(e, name) for name in names[:2]] == [0, 0]
    assert all(sum(s.tokens.get(n, 0) for s in e.steps) >= 600 for n in names)


def test_one_that_does_not_may_be_left_out_of_a_step() -> None:
    e = VirtualEngine(make_scheduler())
    for _ in range(4):
        e.add(64, 400)
    e.step()
    first, second = e.add(600, 1, chunks=[104] * 12), e.add(600, 1, chunks=[154, 104])
    e.drain()
    assert gaps(e, first) == 0
    assert gaps(e, second) > 0
    again = VirtualEngine(make_scheduler())
    for _ in range(4):
        again.add(64, 400)
    again.step()
    first, second = add(again, 1), again.add(600, 1, chunks=[154, 104])
    again.scheduler.requests[second].sampling_params.prompt_logprobs = 0
    again.drain()
    assert gaps(again, first) == gaps(again, second) == 0
