# SPDX-License-Identifier: Apache-2.0
"""Compare routing policies on a workload, in virtual time.

  vllm-kairos simulate --workload bursty --rate 6..12 --seeds 101..110 \\
      --policy disagg disagg:balance=least kairos-paper kairos --output results

Every policy meets the same arrivals. Numbers depend on the seeds, not on the
number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from vllm_kairos.core.policies import policies
from vllm_kairos.core.policies.kairos import PARTS
from vllm_kairos.files import UserError, write_atomically
from vllm_kairos.sim.capacity import plan, rps99
from vllm_kairos.sim.cells import Cell, PolicySpec, run_cells
from vllm_kairos.sim.options import (
    add_cluster_arguments,
    cluster_of,
    parse_numbers,
    parse_policy,
    profile_of,
    settings_of,
    workload_of,
)
from vllm_kairos.sim.output import RowsFile
from vllm_kairos.sim.results import mean_of
from vllm_kairos.sim.tables import sweep_table, table
from vllm_kairos.sim.workload import WORKLOADS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm-kairos simulate`."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        default="bursty",
        help=f"{'|'.join(WORKLOADS)}, or a trace: Azure, Vidur or BurstGPT CSV, "
        "Mooncake JSON lines",
    )
    group.add_argument(
        "--rate",
        nargs="+",
        metavar="RPS",
        help="one or more, or A..B, or A..B..STEP; the workload's own by default",
    )
    group.add_argument("--requests", type=int, help="1500; all of a trace")
    group.add_argument(
        "--seeds", nargs="+", default=["1"], metavar="N", help="one or more, or A..B"
    )
    group.add_argument(
        "--cv",
        type=float,
        help="coefficient of variation of the gaps between arrivals, Gamma: 1 is "
        "Poisson; a workload's own by default (1.3 for bursty), a trace keeps its "
        "arrivals",
    )
    group.add_argument(
        "--arrivals",
        choices=("own", "gamma", "poisson"),
        default="own",
        help="of a trace: its own (stretched to --rate), or drawn anew",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["disagg", "kairos-paper", "kairos"],
        metavar="NAME[:KEY=VALUE,...]",
        help=f"one or more of {', '.join(sorted(policies()))}",
    )
    add_cluster_arguments(parser)
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--ablate",
        action="store_true",
        help="kairos whole, and without one of its parts at a time, in place of "
        "--policy",
    )
    group.add_argument(
        "--capacity",
        action="store_true",
        help="find the highest rate at which 99 %% of requests meet both SLOs",
    )
    group.add_argument(
        "--plan",
        action="store_true",
        help="try every split of the nodes into prefill and decode nodes",
    )
    parser.add_argument("--output", metavar="DIR", help="summary, rows and figures")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="worker processes"
    )
    parser.add_argument("--no-progress", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Run `vllm-kairos simulate`."""
    profile = profile_of(args.profile)
    settings = settings_of(args)
    cluster = cluster_of(args, profile)
    cv = args.cv
    if args.arrivals == "poisson":
        cv = 1.0
    elif args.arrivals == "gamma" and cv is None:
        cv = 1.3
    workload = workload_of(args.workload, args.requests, cv)
    policy = args.policy
    if args.ablate:
        without = [f"kairos:{part}={value}" for part, value in PARTS.items()]
        policy = ["kairos", *without]
    specs = [parse_policy(text, settings) for text in policy]
    rates: list[float | None] = [None]
    if args.rate:
        rates = list(parse_numbers(args.rate, "--rate", whole=False))
    for rate in rates:
        if rate is not None and not rate > 0:
            raise UserError(f"--rate {rate:g}: expected a number > 0")
    seeds = [int(s) for s in parse_numbers(args.seeds, "--seeds", whole=True)]
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: expected a whole number >= 1")
    if args.output and os.path.exists(args.output) and not os.path.isdir(args.output):
        raise UserError(f"--output {args.output}: is a file, expected a directory")

    def cell(spec: PolicySpec, rate: float | None, seed: int) -> Cell:
        return Cell(spec, rate, seed, workload, cluster, settings)

    shown = None if args.no_progress or not sys.stderr.isatty() else "simulating"
    own_cv = workload.cv
    if own_cv is None and workload.name in WORKLOADS:
        own_cv = WORKLOADS[workload.name].cv
    summary: dict[str, Any] = {
        "workload": {"name": workload.name, "requests": workload.requests},
        "cv": own_cv,
        "seeds": seeds,
        "profile": {"name": profile.name, "kind": profile.kind},
        "cluster": {
            "prefill_nodes": args.prefill,
            "decode_nodes": args.decode,
            "link_gb_per_s": (
                cluster.link.bytes_per_s / 1e9 if cluster.link is not None else None
            ),
            "link_hops": args.link_hops,
            "heartbeat_ms": args.heartbeat_ms,
            "budget_tokens": cluster.limits.budget_tokens,
            "max_num_seqs": cluster.limits.max_num_seqs,
            "kv_tokens": cluster.limits.kv_tokens,
            "model_bias": args.model_bias,
            "model_noise": args.model_noise,
        },
        "settings": {
            "tau_ms": settings.tau_ms,
            "ttft_slo_ms": settings.ttft_slo_ms,
            "alpha": settings.alpha,
            "beta": settings.beta,
        },
        "policies": {s.label: {"name": s.name, **s.options} for s in specs},
    }
    if args.capacity or args.plan:
        return _questions(args, summary, cell, specs, seeds, shown)
    cells = [cell(s, rate, seed) for rate in rates for s in specs for seed in seeds]
    runs = []
    with RowsFile(args.output) as rows:
        for result, lines in run_cells(cells, args.jobs, rows.wanted, shown):
            runs.append(result)
            rows.write(lines)
        summary["runs"] = runs
        summary["mean"] = _means(runs)
        print(sweep_table(summary["mean"], settings.tau_ms, len(seeds)))
        if args.output:
            from vllm_kairos.sim.plots import sweep_figures

            rows.keep()
            _write_summary(args.output, summary)
            sweep_figures(summary, args.output)
    return 0


def _means(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, one entry a policy and rate."""
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for result in runs:
        groups.setdefault((result["policy"], result["rate"]), []).append(result)
    keys = ("policy", "rate", "seed")
    return [
        {
            "policy": policy,
            "rate": rate,
            **mean_of({k: v for k, v in r.items() if k not in keys} for r in group),
        }
        for (policy, rate), group in groups.items()
    ]


def _questions(
    args: argparse.Namespace,
    summary: dict[str, Any],
    cell: Any,
    specs: list[PolicySpec],
    seeds: list[int],
    shown: str | None,
) -> int:
    """`--capacity` and `--plan`."""
    if args.capacity:
        found = {s.label: rps99(cell, s, seeds, args.jobs, shown) for s in specs}
        summary["capacity"] = found
        lines = [
            [label, f"{c['rps99']:.2f}", "{:.2f} to {:.2f}".format(*c["ci95"])]
            for label, c in found.items()
        ]
        print(table(["policy", "RPS99", "95 % interval"], lines))
    if args.plan:
        budget = args.prefill + args.decode
        plans = {s.label: plan(cell, s, seeds, budget, args.jobs, shown) for s in specs}
        summary["plan"] = plans
        lines = [
            [label, f"{p['prefill']}:{p['decode']}", f"{p['rps99']:.2f}", mark]
            for label, found in plans.items()
            for p in found["splits"]
            for mark in ["best" if p == found["best"] else ""]
        ]
        print(table(["policy", "prefill:decode", "RPS99", ""], lines))
    if args.output:
        _write_summary(args.output, summary)
    return 0


def _write_summary(directory: str, summary: dict[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    write_atomically(os.path.join(directory, "summary.json"), text.encode())
