# SPDX-License-Identifier: Apache-2.0
"""The loop on the bound: bias corrected, share of late steps at its target."""

from __future__ import annotations

import random

import pytest

from vllm_kairos.core.feedback import Feedback

TAU_MS = 70.0


def run(
    feedback: Feedback, steps: int, sigma: float, bias: float, seed: int = 1
) -> list[bool]:
    """Steps packed to the bound: which of them came out late."""
    rng = random.Random(seed)
    late = []
    for _ in range(steps):
        predicted = feedback.limit_ms
        measured = predicted * (1.0 + bias) * rng.lognormvariate(0.0, sigma)
        feedback.observe(predicted, measured)
        late.append(measured > TAU_MS)
    return late


def test_the_bound_starts_at_beta_tau() -> None:
    assert Feedback(TAU_MS, 0.9).limit_ms == pytest.approx(0.9 * TAU_MS)


def test_an_exact_model_lets_the_bound_rise_but_never_to_tau() -> None:
    feedback = Feedback(TAU_MS, 0.9, beta_most=0.98)
    assert not any(run(feedback, 4000, 0.0, 0.0))
    assert 0.96 * TAU_MS < feedback.limit_ms <= 0.98 * TAU_MS


@pytest.mark.parametrize("bias", [-0.2, 0.0, 0.15, 0.5])
@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1])
def test_late_steps_settle_at_or_under_the_target(sigma: float, bias: float) -> None:
    late = run(Feedback(TAU_MS, 0.9, late_share=0.005), 12_000, sigma, bias)
    assert sum(late[1000:]) / len(late[1000:]) <= 0.0065


def test_the_bound_is_not_timid_where_the_model_is_good() -> None:
    feedback = Feedback(TAU_MS, 0.9)
    run(feedback, 6000, 0.02, 0.0)
    assert feedback.limit_ms > 0.9 * TAU_MS


def test_a_bias_is_learnt_within_few_steps() -> None:
    feedback = Feedback(TAU_MS, 0.9)
    late = run(feedback, 200, 0.0, 0.3)
    assert sum(late[30:]) == 0
    assert feedback.bias == pytest.approx(1.3, rel=0.05)


def test_heavy_tails_are_met_by_the_trim() -> None:
    feedback = Feedback(TAU_MS, 0.9, late_share=0.01)
    rng = random.Random(3)
    late = []
    for _ in range(20_000):
        predicted = feedback.limit_ms
        # One step in fifty takes half as long again, whatever the model says.
        slow = 1.25 if rng.random() < 0.02 else 1.0
        measured = predicted * slow * rng.lognormvariate(0.0, 0.02)
        feedback.observe(predicted, measured)
        late.append(measured > TAU_MS)
    assert sum(late[2000:]) / len(late[2000:]) <= 0.02


def test_without_learning_the_bound_stays() -> None:
    feedback = Feedback(TAU_MS, 0.9, learns=False)
    late = run(feedback, 500, 0.0, 0.2)
    assert all(late) and feedback.late == 500
    assert feedback.limit_ms == pytest.approx(0.9 * TAU_MS)


def shocked() -> Feedback:
    """A loop after a second in which the machine was somebody else's."""
    feedback = Feedback(TAU_MS, 0.9)
    for _ in range(30):
        feedback.observe(20.0, 600.0)
    assert feedback.limit_ms < 0.2 * TAU_MS
    return feedback


def test_a_bound_that_admits_nothing_recovers() -> None:
    """By decodes alone until a prefill fits, and then by prefills."""
    feedback = shocked()
    for _ in range(1500):
        feedback.observe_decodes(10.0, 10.0)
    assert feedback.limit_ms > 20.0
    run(feedback, 300, 0.0, 0.0)
    assert feedback.limit_ms > 0.8 * TAU_MS


def test_it_recovers_no_further_than_the_decodes_warrant() -> None:
    feedback = shocked()
    for _ in range(5000):
        feedback.observe_decodes(40.0, 60.0)
    assert 40.0 < feedback.limit_ms < TAU_MS / 1.5


@pytest.mark.parametrize("bias", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("quiet_steps", [150, 600])
def test_long_spells_without_a_prefill_cost_no_late_steps(
    bias: float, quiet_steps: int
) -> None:
    """The prefills' bias is not that of the decodes, and is kept."""
    feedback = Feedback(TAU_MS, 0.9)
    rng = random.Random(1)
    late: list[bool] = []
    for burst in range(200):
        for _ in range(quiet_steps):
            feedback.observe_decodes(25.0, 25.0 * rng.lognormvariate(0.0, 0.05))
        late += run(feedback, 20, 0.05, bias, seed=burst)
    assert sum(late[1000:]) / len(late[1000:]) <= 0.0075


def test_decodes_between_prefills_change_nothing() -> None:
    """A prefill's steps may err otherwise than decodes do."""
    feedback = Feedback(TAU_MS, 0.9)
    run(feedback, 500, 0.0, 0.3)
    limit_ms = feedback.limit_ms
    for _ in range(50):
        for _ in range(30):
            feedback.observe_decodes(10.0, 10.0)
        run(feedback, 1, 0.0, 0.3)
    assert feedback.limit_ms == pytest.approx(limit_ms, rel=0.01)
