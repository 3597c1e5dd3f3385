# SPDX-License-Identifier: Apache-2.0
"""Kairos in the simulator: what each idea is for, and what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from vllm_kairos.core.policies.kairos import PARTS
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.files import load_profile
from vllm_kairos.sim.cells import Cell, PolicySpec, WorkloadSpec, run_cell
from vllm_kairos.sim.cluster import ClusterSettings, ModelError
from vllm_kairos.sim.node import NodeLimits
from vllm_kairos.sim.options import parse_policy

PROFILE = (
    Path(__file__).resolve().parents[2] / "profiles" / "a100-deepseek-v2-lite.json"
)


def summary(
    policy: str,
    rate: float,
    *,
    error: ModelError | None = None,
    cv: float = 1.3,
    requests: int = 700,
    seed: int = 101,
    models: dict[str, StepModel] | None = None,
    slo: Settings | None = None,
) -> dict[str, Any]:
    profile = load_profile(PROFILE)
    cluster = ClusterSettings(
        profile.step_model(),
        profile.link_model(),
        NodeLimits(kv_tokens=1_200_000),
        error=error or ModelError(),
        models=models or {},
    )
    slo = slo or Settings()
    spec: PolicySpec = parse_policy(policy, slo)
    workload = WorkloadSpec("bursty", requests, cv)
    return run_cell(Cell(spec, rate, seed, workload, cluster, slo))[0]


def test_late_binding_serves_a_rate_that_breaks_the_others() -> None:
    kairos = summary("kairos", 13.0)
    paper = summary("kairos-paper", 13.0)
    least = summary("disagg:balance=least", 13.0)
    assert kairos["slo_attainment"] >= 0.99
    assert paper["slo_attainment"] < 0.9 and least["slo_attainment"] < 0.5
    assert kairos["tbt_over_slo_share"] <= 0.0005
    assert kairos["ttft_ms"]["p95"] < 0.5 * paper["ttft_ms"]["p95"]


def test_bursts_twice_as_wild_are_served() -> None:
    assert summary("kairos", 9.0, cv=2.0)["slo_attainment"] >= 0.99


@pytest.mark.parametrize(
    ("error", "most_late"),
    [
        (ModelError(noise=0.05), 0.007),
        (ModelError(noise=0.1), 0.01),
        (ModelError(bias=0.15), 0.005),
    ],
)
def test_the_loop_holds_late_steps_where_the_model_errs(
    error: ModelError, most_late: float
) -> None:
    ours = summary("kairos", 9.0, error=error)
    blind = summary("kairos:feedback=false", 9.0, error=error)
    assert ours["tbt_over_slo_share"] <= most_late
    assert ours["tbt_over_slo_share"] < blind["tbt_over_slo_share"]


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_can_be_left_out_and_every_request_is_still_served(
    part: str,
) -> None:
    got = summary(f"kairos:{part}={PARTS[part]}", 10.0, requests=200)
    assert got["requests"] == 200
    assert got["slo_attainment"] > 0.9


def test_hopeless_requests_are_deferred_but_bounded_in_age() -> None:
    overload = summary("kairos:oldest_slos=3", 26.0, requests=500)
    assert overload["requests"] == 500
    patient = summary("kairos:oldest_slos=1000", 26.0, requests=500)
    assert overload["ttft_ms"]["max"] < patient["ttft_ms"]["max"]


def test_under_overload_late_binding_does_not_become_first_come_first_served() -> None:
    # The queue grows past what is looked at in one decision.
    overload = summary("kairos", 24.0, requests=1500)
    assert overload["requests"] == 1500
    assert overload["slo_attainment"] >= 0.55
    assert overload["ttft_ms"]["max"] <= 10 * 4000.0


@given(
    factor=st.floats(1.0, 6.0),
    slow=st.sampled_from(["p0", "p1"]),
    rate=st.floats(3.0, 11.0),
    seed=st.integers(0, 1000),
)
@examples(max_examples=15, deadline=None)
def test_on_nodes_of_mixed_speeds_late_binding_is_no_worse_than_eager(
    factor: float, slow: str, rate: float, seed: int
) -> None:
    model = load_profile(PROFILE).step_model()
    slower = Predictor({k: factor * v for k, v in model.prefill.terms.items()})
    models = {slow: StepModel(slower, model.decode, model.mixed)}
    late, eager = (
        summary(policy, rate, requests=150, seed=seed, models=models)
        for policy in ("kairos", "kairos:dispatch=eager")
    )
    assert late["slo_attainment"] >= eager["slo_attainment"] - 0.02


@pytest.mark.parametrize("slow", ["p0", "p1"])
def test_on_nodes_of_mixed_speeds_a_tight_slo_is_held_as_well_as_by_eager(
    slow: str,
) -> None:
    # A run alone has a few percent of luck in it: the mean of several.
    model = load_profile(PROFILE).step_model()
    slower = Predictor({k: 5.0 * v for k, v in model.prefill.terms.items()})
    models = {slow: StepModel(slower, model.decode, model.mixed)}
    slo = Settings(ttft_slo_ms=1500.0)
    late, eager = (
        sum(
            summary(policy, 9.0, requests=200, seed=seed, models=models, slo=slo)[
                "slo_attainment"
            ]
            for seed in range(101, 107)
        )
        / 6
        for policy in ("kairos", "kairos:dispatch=eager")
    )
    assert late >= eager - 0.01


def test_on_nodes_of_mixed_speeds_the_order_they_are_listed_in_is_no_matter() -> None:
    model = load_profile(PROFILE).step_model()
    slower = Predictor({k: 4.0 * v for k, v in model.prefill.terms.items()})
    slow = StepModel(slower, model.decode, model.mixed)
    first, second = (
        summary("kairos", 9.5, requests=300, models={name: slow})
        for name in ("p0", "p1")
    )
    for key in ("p50", "p95"):
        assert first["ttft_ms"][key] == pytest.approx(second["ttft_ms"][key], rel=0.02)
