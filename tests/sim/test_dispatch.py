# SPDX-License-Identifier: Apache-2.0
"""What the simulator shows a policy of its nodes between two reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kairos.core.policies.base import Policy
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings
from vllm_kairos.files import load_profile
from vllm_kairos.sim.cells import PolicySpec, WorkloadSpec
from vllm_kairos.sim.cluster import Cluster, ClusterSettings
from vllm_kairos.sim.dispatch import Dispatcher, EagerDispatcher
from vllm_kairos.sim.engine_request import UserRequest
from vllm_kairos.sim.traces import TraceRow

PROFILE = (
    Path(__file__).resolve().parents[2] / "profiles" / "a100-deepseek-v2-lite.json"
)


def cluster(rows: list[TraceRow], heartbeat_ms: float = 100.0) -> Cluster:
    model = load_profile(PROFILE).step_model()
    settings = ClusterSettings(
        model, prefill_nodes=1, decode_nodes=1, heartbeat_ms=heartbeat_ms
    )
    policy = PolicySpec("disagg", "disagg", {"balance": "least"}).make(Settings())
    return Cluster(settings, policy, rows)


@pytest.mark.parametrize("worked_ms", [0.0, 1.0, 25.0])
def test_time_a_node_stood_idle_is_no_work_done_on_what_came_later(
    worked_ms: float,
) -> None:
    run = cluster([TraceRow(0.6, 9000, 2)], heartbeat_ms=1000.0)
    counted = []

    def look(_: object) -> None:
        counted.append(run.dispatcher.fleet(None).node("p0").worked_off_ms)

    run.at(600.0 + worked_ms + 1e-6, look, None)
    run.run()
    assert counted == [pytest.approx(worked_ms, abs=1e-5)]


def test_a_node_without_work_has_worked_nothing_off() -> None:
    run = cluster([])
    run.now_ms = 90.0
    assert run.dispatcher.fleet(None).node("p0").worked_off_ms == 0.0


class Forgetful(EagerDispatcher):
    """Makes every state anew for every request."""

    def arrive(self, user: UserRequest) -> None:
        self._shown.clear()
        super().arrive(user)


def test_states_kept_between_reports_change_no_route_of_the_paper() -> None:
    model = load_profile(PROFILE).step_model()
    rows = WorkloadSpec("bursty", 600).rows(80.0, 7)

    def routes(make: type[Dispatcher]) -> list[Route | None]:
        settings = ClusterSettings(
            model, prefill_nodes=20, decode_nodes=20, dispatcher=make
        )
        policy: Policy = PolicySpec("k", "kairos-paper").make(Settings())
        return [user.route for user in Cluster(settings, policy, rows).run()]

    kept = routes(EagerDispatcher)
    assert kept == routes(Forgetful)
    assert 100 < sum(r is not None and r.deflected for r in kept) < 600
