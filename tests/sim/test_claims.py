# SPDX-License-Identifier: Apache-2.0
"""What is claimed of kairos against the others, and of its loop, with slack.

The claims are of seeds 101..110; `vllm-kairos simulate --capacity` finds the
rates themselves. Here a few of the seeds must clear them with room to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.files import load_profile
from vllm_kairos.sim.cells import WorkloadSpec
from vllm_kairos.sim.cluster import Cluster, ClusterSettings, ModelError, SimNode
from vllm_kairos.sim.options import limits_of, parse_policy
from vllm_kairos.sim.results import request_row, summarize

PROFILE = load_profile(
    Path(__file__).resolve().parents[2] / "profiles" / "a100-deepseek-v2-lite.json"
)
SLO = Settings()

#: Requests a second that kairos carries with slack (its RPS99 is above 15).
CARRIED_RPS = 14.0
SEEDS = (101, 102, 103, 104)
#: Requests a second at which the loop is judged.
ERRING_RPS = 9.0


def cluster(
    policy: str, rate: float, seed: int, cv: float, error: ModelError
) -> Cluster:
    """2P2D with 3 GB/s links; 1,500 requests of Bursty."""
    assert PROFILE.kv is not None
    link = LinkModel(PROFILE.kv.bytes_per_token, 3e9, PROFILE.kv.fixed_ms, hops=2)
    settings = ClusterSettings(
        PROFILE.step_model(), link, limits_of(PROFILE, SLO.ttft_slo_ms), error=error
    )
    rows = WorkloadSpec("bursty", 1500, cv).rows(rate, seed)
    return Cluster(settings, parse_policy(policy, SLO).make(SLO), rows, seed)


def attainment(run: Cluster) -> float:
    rows = [request_row(user) for user in run.run()]
    share = summarize(rows, SLO.tau_ms, SLO.ttft_slo_ms)["slo_attainment"]
    return float(share)


def mean_attainment(
    policy: str, rate: float, seeds: Sequence[int] = SEEDS, cv: float = 1.3
) -> float:
    runs = [cluster(policy, rate, seed, cv, ModelError()) for seed in seeds]
    return sum(map(attainment, runs)) / len(runs)


@pytest.fixture(scope="module")
def kairos_attains() -> float:
    return mean_attainment("kairos", CARRIED_RPS)


@pytest.mark.parametrize(
    ("other", "ratio"),
    [("kairos-paper", 1.4), ("disagg:balance=least", 1.5), ("taichi", 1.1)],
)
def test_kairos_carries_more_than_the_others_by_what_is_claimed(
    kairos_attains: float, other: str, ratio: float
) -> None:
    assert kairos_attains >= 0.995
    # It is within the SLOs at a rate so many times that at which this is not.
    assert mean_attainment(other, CARRIED_RPS / ratio) < 0.975


def test_at_the_rate_kairos_carries_the_others_have_broken_down(
    kairos_attains: float,
) -> None:
    assert kairos_attains >= 0.995
    assert mean_attainment("kairos-paper", CARRIED_RPS, SEEDS[:2]) < 0.7
    assert mean_attainment("disagg:balance=least", CARRIED_RPS, SEEDS[:2]) < 0.3


def test_at_9_rps_bursts_of_cv_2_are_served() -> None:
    assert mean_attainment("kairos", ERRING_RPS, SEEDS[:2], cv=2.0) >= 0.99


@pytest.mark.parametrize(
    ("error", "after_s", "most_late", "least_attained"),
    [
        (ModelError(noise=0.05), 0.0, 0.007, 0.99),
        (ModelError(noise=0.1), 0.0, 0.01, 0.98),
        (ModelError(bias=0.15), 30.0, 0.005, 0.99),
    ],
)
def test_decode_steps_are_in_time_where_the_model_errs(
    error: ModelError, after_s: float, most_late: float, least_attained: float
) -> None:
    late = steps = 0
    attained = []
    for seed in SEEDS[:2]:
        run = cluster("kairos", ERRING_RPS, seed, 1.3, error)

        def note(
            node: SimNode, load: StepLoad, took_ms: float, run: Cluster = run
        ) -> None:
            nonlocal late, steps
            if node.plan.decodes and load.decodes and run.now_ms > 1e3 * after_s:
                steps += 1
                late += took_ms > SLO.tau_ms

        run.on_step = note
        attained.append(attainment(run))
    assert steps > 2000
    assert late / steps <= most_late
    assert sum(attained) / len(attained) >= least_attained
