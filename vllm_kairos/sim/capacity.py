# SPDX-License-Identifier: Apache-2.0
"""How much a cluster can carry: RPS99, and the best split of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_kairos.files import UserError
from vllm_kairos.sim.cells import Cell, PolicySpec, run_cells
from vllm_kairos.sim.results import mean_of, percentiles

#: Share of requests that must meet both SLOs.
TARGET = 0.99

#: Rates are found to within this.
RESOLUTION_RPS = 0.05

_HIGHEST_RPS = 4096.0
_RESAMPLES = 2000

MakeCell = Callable[[PolicySpec, float | None, int], Cell]


def rps99(
    make: MakeCell,
    spec: PolicySpec,
    seeds: Sequence[int],
    jobs: int = 1,
    shown: str | None = None,
) -> dict[str, Any]:
    """The highest rate at which 99 % of requests meet both SLOs.

    Bisection over the rate, every rate on the same seeds, on the mean
    attainment over seeds. The same lengths arrive in the same order at every
    rate, only faster. The interval is a bootstrap over seeds: for each
    resample of the seeds, the rate at which its attainment, interpolated
    between the rates tried, crosses the target.

    Args:
        make: A cell of a policy at a rate with a seed.
        spec: The policy.
        seeds: Paired over rates, and over policies.
        jobs: Worker processes.
        shown: Text of a progress bar.

    Returns:
        ``rps99``, ``ci95`` (low, high), ``ttft_ms`` at that rate by percentile
        (means over seeds), and ``tried``: attainment by rate.
    """
    tried: dict[float, list[float]] = {}
    ttft: dict[float, dict[str, Any]] = {0.0: percentiles([])}

    def attainment(rate: float) -> float:
        if rate not in tried:
            cells = [make(spec, rate, seed) for seed in seeds]
            text = f"{spec.label} at {rate:g} RPS" if shown else None
            runs = [run for run, _ in run_cells(cells, jobs, progress=text)]
            tried[rate] = [run["slo_attainment"] for run in runs]
            ttft[rate] = mean_of(run["ttft_ms"] for run in runs)
        return float(np.mean(tried[rate]))

    low, high = 0.0, 4.0
    while attainment(high) >= TARGET:
        low, high = high, high * 2
        if high > _HIGHEST_RPS:
            raise UserError(f"policy {spec.label}: no limit below {_HIGHEST_RPS:g} RPS")
    if low == 0.0:
        low = high
        while attainment(low) < TARGET:
            low, high = low / 2, low
            if low < RESOLUTION_RPS:
                return {
                    "rps99": 0.0,
                    "ci95": [0.0, 0.0],
                    "ttft_ms": ttft[0.0],
                    "tried": _by_rate(tried),
                }
    while high - low > RESOLUTION_RPS:
        middle = (low + high) / 2
        if attainment(middle) >= TARGET:
            low = middle
        else:
            high = middle
    # Wider than the bisection went, so that resamples find their crossing.
    for factor in (0.85, 0.93, 1.07, 1.15):
        attainment(round(low * factor, 6))
    return {
        "rps99": low,
        "ci95": _interval(tried, low),
        "ttft_ms": ttft[low],
        "tried": _by_rate(tried),
    }


def _by_rate(tried: dict[float, list[float]]) -> dict[str, float]:
    return {str(rate): float(np.mean(tried[rate])) for rate in sorted(tried)}


def _interval(tried: dict[float, list[float]], found: float) -> list[float]:
    """95 % bootstrap interval of the crossing, over seeds."""
    rates = np.array(sorted(tried))
    values = np.array([tried[rate] for rate in rates])
    seeds = values.shape[1]
    rng = np.random.default_rng(0)
    crossings = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):
        mean = values[:, rng.integers(0, seeds, seeds)].mean(axis=1)
        crossings[i] = _crossing(rates, mean)
    low, high = np.percentile(crossings, [2.5, 97.5])
    return [float(min(low, found)), float(max(high, found))]


def _crossing(rates: Any, attained: Any) -> float:
    """Where attainment first falls below the target, interpolated."""
    below = np.flatnonzero(attained < TARGET)
    if not len(below):
        return float(rates[-1])
    place = int(below[0])
    if place == 0:
        return float(rates[0])
    drop = attained[place - 1] - attained[place]
    share = (attained[place - 1] - TARGET) / drop if drop > 0 else 0.0
    return float(rates[place - 1] + share * (rates[place] - rates[place - 1]))


def plan(
    make: MakeCell,
    spec: PolicySpec,
    seeds: Sequence[int],
    nodes: int,
    jobs: int = 1,
    shown: str | None = None,
) -> dict[str, Any]:
    """RPS99 of every split of a node budget into prefill and decode nodes.

    Returns:
        ``splits``: ``prefill``, ``decode`` and what `rps99` finds of each, and
        ``best``: the one that carries most.
    """
    splits = []
    for prefill in range(1, nodes):

        def at(
            spec: PolicySpec, rate: float | None, seed: int, prefill: int = prefill
        ) -> Cell:
            cell = make(spec, rate, seed)
            cluster = replace(
                cell.cluster, prefill_nodes=prefill, decode_nodes=nodes - prefill
            )
            return replace(cell, cluster=cluster)

        found = rps99(at, spec, seeds, jobs, shown)
        splits.append({"prefill": prefill, "decode": nodes - prefill, **found})
    if not splits:
        raise UserError(f"--plan needs at least 2 nodes, got {nodes}")
    return {"splits": splits, "best": max(splits, key=lambda s: s["rps99"])}
