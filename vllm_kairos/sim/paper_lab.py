# SPDX-License-Identifier: Apache-2.0
"""Where the experiments of `vllm-kairos paper` are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_kairos.core.settings import Settings
from vllm_kairos.sim.cells import Cell, WorkloadSpec, run_cells
from vllm_kairos.sim.cluster import ClusterSettings
from vllm_kairos.sim.options import parse_policy
from vllm_kairos.sim.results import mean_of

#: Policy, rate, workload, requests of a run, cluster.
Case = tuple[str, float | None, str, int, ClusterSettings]


@dataclass
class Lab:
    """What every experiment shares.

    Attributes:
        cluster: 2P2D with the profile, links aside.
        settings: The paper's SLOs and margins.
        seeds: Paired over policies and rates.
        requests: Of a run of the figures.
        jobs: Worker processes.
        progress: Show bars.
    """

    cluster: ClusterSettings
    settings: Settings
    seeds: Sequence[int]
    requests: int
    jobs: int
    progress: bool

    def at(self, gb_per_s: float) -> ClusterSettings:
        """The cluster with links of a bandwidth."""
        assert self.cluster.link is not None
        link = replace(self.cluster.link, bytes_per_s=gb_per_s * 1e9)
        return replace(self.cluster, link=link)

    def runs(self, what: str, cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
        """A run a seed of each case."""
        cells = [
            Cell(
                parse_policy(policy, self.settings),
                rate,
                seed,
                WorkloadSpec(workload, requests),
                cluster,
                self.settings,
            )
            for policy, rate, workload, requests, cluster in cases
            for seed in self.seeds
        ]
        shown = what if self.progress else None
        runs = [run for run, _ in run_cells(cells, self.jobs, progress=shown)]
        each = len(self.seeds)
        return [runs[at : at + each] for at in range(0, len(runs), each)]

    def means(
        self,
        what: str,
        cases: Sequence[Case],
        runs: Sequence[Sequence[Mapping[str, Any]]] | None = None,
    ) -> list[dict[str, Any]]:
        """Mean over seeds of each case; of `runs`, where they are there."""
        if runs is None:
            runs = self.runs(what, cases)
        out = []
        for (policy, rate, workload, _, _), part in zip(cases, runs, strict=True):
            keys = ("policy", "rate", "seed")
            values = mean_of(
                {k: v for k, v in run.items() if k not in keys} for run in part
            )
            out.append({"policy": policy, "rate": rate, "workload": workload, **values})
        return out
