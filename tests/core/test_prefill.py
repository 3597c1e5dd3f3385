# SPDX-License-Identifier: Apache-2.0
"""Eq. 1 to 3, as printed and exactly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import step_models
from vllm_kairos.core.fleet import NodeState, PrefillWork
from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.prefill import (
    drain_ms,
    prefill_paper_ms,
    queue_wait_paper_ms,
    ttft_prefill_ms,
    ttft_prefill_paper_ms,
)
from vllm_kairos.core.step_model import StepModel

ZERO = Predictor({})
#: 3 ms + 0.5 ms a token + 0.001 ms a token and cached token.
MODEL = StepModel(Predictor({"1": 3.0, "c": 0.5, "cp": 0.001}), ZERO, ZERO)


def test_eq_2_by_hand() -> None:
    # 250 tokens in chunks of 100, each with a prefix of 125.
    step = 3.0 + 100 * 0.5 + 0.001 * 100 * 125
    assert queue_wait_paper_ms(MODEL, 250, 100) == pytest.approx(2.5 * step)


def test_eq_3_by_hand() -> None:
    # The sum as printed runs to ceil(l / chi): one chunk too many.
    steps = [3.0 + 50.0 + 0.001 * 100 * p for p in (0, 100, 200, 300)]
    assert prefill_paper_ms(MODEL, 250, 100) == pytest.approx(sum(steps))
    assert prefill_paper_ms(MODEL, 300, 100) == pytest.approx(sum(steps))


def test_eq_1_is_the_sum_of_eq_2_and_eq_3() -> None:
    node = NodeState("p", model=MODEL, budget_tokens=100)
    node.prefills = [PrefillWork(200), PrefillWork(50, 70)]
    assert ttft_prefill_paper_ms(node, 250) == pytest.approx(
        queue_wait_paper_ms(MODEL, 250, 100) + prefill_paper_ms(MODEL, 250, 100)
    )


def test_the_exact_wait_packs_prompts_into_steps_as_vllm_does() -> None:
    model = StepModel(Predictor({"1": 3.0, "c": 0.5, "n": 1.0}), ZERO, ZERO)
    queue = [PrefillWork(150, 70), PrefillWork(20), PrefillWork(60)]
    # 100 of the first; 50 + 20 + 30; 30.
    steps = (3 + 50 + 1, 3 + 50 + 3, 3 + 15 + 1)
    assert drain_ms(model, queue, 100) == pytest.approx(sum(steps))


def test_the_exact_ttft_adds_transfer_the_step_under_way_and_a_decode_step() -> None:
    link = LinkModel(kv_bytes_per_token=1000, bytes_per_s=1e6, fixed_ms=2.0)
    node = NodeState("p", model=MODEL, budget_tokens=100, link=link)
    node.link_backlog_bytes = 5000
    node.step_in_flight_ms = 7.0
    # 80 of 100 tokens are cached; 105 KB cross the link.
    compute = 3.0 + 20 * 0.5 + 0.001 * 20 * 80
    expected = 7.0 + compute + 2.0 + 105.0 + 11.0
    assert ttft_prefill_ms(node, 100, 80, 11.0) == pytest.approx(expected)


def test_a_prompt_cached_whole_still_computes_its_last_token() -> None:
    node = NodeState("p", model=MODEL)
    assert ttft_prefill_ms(node, 100, 500) == pytest.approx(3.0 + 0.5 + 0.001 * 99)


QUEUES = st.lists(st.builds(PrefillWork, st.integers(1, 3000)), max_size=6)


@given(
    constant=st.floats(0, 50),
    per_token=st.floats(0, 1),
    per_pair=st.floats(0, 1e-4),
    queue=QUEUES,
    prompt=st.integers(1, 5000),
    budget=st.integers(1, 2048).map(lambda x: max(x, 32)),
)
@settings(max_examples=200, deadline=None)
def test_the_papers_estimate_is_an_upper_bound_of_the_exact_one(
    constant, per_token, per_pair, queue, prompt, budget
) -> None:
    terms = {"1": constant, "c": per_token, "cp": per_pair, "cc": per_pair / 2}
    model = StepModel(Predictor(terms), ZERO, ZERO)
    node = NodeState("p", model=model, budget_tokens=budget, prefills=queue)
    exact = ttft_prefill_ms(node, prompt)
    assert exact <= ttft_prefill_paper_ms(node, prompt) * (1 + 1e-9) + 1e-9


@given(model=step_models(), queue=QUEUES, budget=st.integers(16, 4096))
@settings(max_examples=100, deadline=None)
def test_a_longer_queue_is_never_drained_sooner(model, queue, budget) -> None:
    # Attention of several prompts in a step is taken at their means, which one
    # more small prompt may lower.
    linear = {t: ms for t, ms in model.prefill.terms.items() if t not in ("cp", "cc")}
    model = StepModel(Predictor(linear), model.decode, model.mixed)
    whole = drain_ms(model, queue, budget)
    assert math.isfinite(whole)
    assert drain_ms(model, queue[:-1], budget) <= whole + 1e-9
