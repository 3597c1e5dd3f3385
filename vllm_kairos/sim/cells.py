# SPDX-License-Identifier: Apache-2.0
"""One cell of a sweep: a policy, a rate and a seed."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vllm_kairos.core.policies import make_policy, policies
from vllm_kairos.core.policies.base import Policy
from vllm_kairos.core.settings import Settings
from vllm_kairos.files import UserError
from vllm_kairos.sim.cluster import Cluster, ClusterSettings
from vllm_kairos.sim.results import Row, request_row, summarize
from vllm_kairos.sim.traces import TraceRow, load_trace
from vllm_kairos.sim.workers import run_parallel
from vllm_kairos.sim.workload import WORKLOADS, resample, synthesize


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by name with its settings, ``name:key=value,…``.

    Attributes:
        label: As the user wrote it.
        name: Of the policy.
        options: The policy's own settings and fields of `Settings`.
    """

    label: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, settings: Settings) -> Policy:
        """The policy, new.

        Raises:
            ValueError: No policy or setting has that name, or a value is bad.
        """
        shared = {f.name for f in fields(Settings)}
        ours = {k: v for k, v in self.options.items() if k in shared}
        own = {k: v for k, v in self.options.items() if k not in shared}
        return make_policy(self.name, settings.with_options(**ours), **own)

    def reads(self, margin: str) -> bool:
        """Whether it goes by that margin of the settings it is made with."""
        return margin in policies()[self.name].margins and margin not in self.options


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What arrives.

    Attributes:
        name: Of a workload of Table 1, or the path of a trace.
        requests: How many; all of a trace by default.
        cv: Coefficient of variation of the gaps between arrivals; `None`
            keeps a workload's or a trace's own.
    """

    name: str
    requests: int | None = None
    cv: float | None = None

    def rows(self, rate: float | None, seed: int) -> list[TraceRow]:
        """The workload at a rate; `None` is its own rate."""
        if self.name in WORKLOADS:
            count = 1500 if self.requests is None else self.requests
            return synthesize(WORKLOADS[self.name], count, rate, self.cv, seed)
        return resample(_trace(self.name), self.requests, rate, self.cv, seed)


@functools.lru_cache(maxsize=2)
def _trace(path: str) -> list[TraceRow]:
    return load_trace(path)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        policy: Which policy.
        rate: Requests a second; `None` is the workload's own.
        seed: Of workload and model error.
        workload: What arrives.
        cluster: Where.
        settings: SLOs and margins.
    """

    policy: PolicySpec
    rate: float | None
    seed: int
    workload: WorkloadSpec
    cluster: ClusterSettings
    settings: Settings

    @property
    def key(self) -> dict[str, Any]:
        """What tells this cell from the others of a sweep."""
        return {"policy": self.policy.label, "rate": self.rate, "seed": self.seed}


def simulate(cell: Cell) -> list[Row]:
    """Run a cell: one row a request, in order of arrival."""
    trace = cell.workload.rows(cell.rate, cell.seed)
    cluster = cell.cluster
    if any(row.hash_ids for row in trace):
        limits = replace(cluster.limits, prefix_caching=True)
        cluster = replace(cluster, limits=limits)
    try:
        policy = cell.policy.make(cell.settings)
    except ValueError as error:
        raise UserError(f"policy {cell.policy.label!r}: {error}") from error
    users = Cluster(cluster, policy, trace, cell.seed).run()
    return [request_row(user) for user in users]


def run_cell(cell: Cell, want_rows: bool = False) -> tuple[dict[str, Any], str]:
    """A cell's summary, and its rows as JSON lines if they are wanted."""
    rows = simulate(cell)
    summary = summarize(rows, cell.settings.tau_ms, cell.settings.ttft_slo_ms)
    lines = ""
    if want_rows:
        lines = "".join(json.dumps({**cell.key, **row}) + "\n" for row in rows)
    return {**cell.key, **summary}, lines


def run_cells(
    cells: Sequence[Cell],
    jobs: int = 1,
    want_rows: bool = False,
    progress: str | None = None,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Run cells in parallel; results come in the order of `cells`.

    Args:
        cells: What to run. None depends on another, so the number of workers
            changes nothing but the time it takes.
        jobs: Worker processes.
        want_rows: Rows besides summaries.
        progress: Text of a progress bar on stderr, `None` for none.
    """
    from tqdm import tqdm

    call = functools.partial(run_cell, want_rows=want_rows)
    if jobs == 1 or len(cells) == 1:
        results: Iterator[tuple[dict[str, Any], str]] = map(call, cells)
    else:
        results = run_parallel(call, cells, min(jobs, len(cells)))
    yield from tqdm(
        results,
        total=len(cells),
        desc=progress,
        disable=progress is None,
        unit="run",
        leave=False,
    )
