# SPDX-License-Identifier: Apache-2.0
"""Compare routing policies on a workload, in virtual time.

Every policy meets the same arrivals, on prefill and decode nodes that step as
vLLM's scheduler does. A table is printed, a row a policy and rate, means over
seeds: TTFT (time to first token) and TBT (time between tokens), the share of
requests within both SLOs, how many prefills were deflected to a decode node.
Numbers depend on the seeds, not on the number of workers.

examples:
  vllm-kairos simulate
      disaggregation, the paper's Kairos and ours on the paper's workload
  vllm-kairos simulate --workload bursty --rate 6..12 --seeds 101..110 \\
      --policy disagg disagg:balance=least kairos-paper kairos --output results
      a sweep over the rate, with figures and a row for every request
  vllm-kairos simulate --workload my-trace.csv --profile my-profile.json \\
      --prefill 3 --decode 5 --capacity
      what a cluster of your own carries
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from vllm_kairos.core.policies import policies
from vllm_kairos.core.policies.kairos import PARTS
from vllm_kairos.files import UserError
from vllm_kairos.given import refuse_unread
from vllm_kairos.sim.capacity import plan, rps99
from vllm_kairos.sim.cells import Cell, PolicySpec, run_cells
from vllm_kairos.sim.cluster_settings import ClusterSettings
from vllm_kairos.sim.options import (
    add_cluster_arguments,
    add_run_arguments,
    check_jobs,
    check_once,
    cluster_of,
    parse_numbers,
    parse_policy,
    profile_of,
    settings_of,
    workload_of,
)
from vllm_kairos.sim.output import RowsFile, check_files, write
from vllm_kairos.sim.results import mean_of
from vllm_kairos.sim.tables import capacity_table, sweep_table, table
from vllm_kairos.sim.workload import WORKLOADS

FILES = (
    "summary.json",
    "requests.jsonl",
    *("latency.png", "throughput.png", "attainment.png"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm-kairos simulate`."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        default="bursty",
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)} (the paper's Table 1), or a trace: Azure, "
        "Vidur or BurstGPT CSV, Mooncake JSON lines (default %(default)s)",
    )
    group.add_argument(
        "--rate",
        nargs="+",
        metavar="RPS",
        help="requests a second: one or more, or A..B, or A..B..STEP (default: the "
        "workload's own; with --ablate the highest that kairos carries)",
    )
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="of a run (default: 1500, or all of a trace)",
    )
    group.add_argument(
        "--seeds",
        nargs="+",
        default=["1"],
        metavar="N",
        help="a run each: one or more, or A..B (default 1)",
    )
    group.add_argument(
        "--cv",
        type=float,
        help="coefficient of variation of the gaps between arrivals, drawn from a "
        "Gamma distribution: 1 is Poisson, more is burstier (default: the "
        "workload's own, 1.3 for bursty; a trace keeps its arrivals)",
    )
    group.add_argument(
        "--arrivals",
        choices=("own", "gamma", "poisson"),
        default="own",
        help="of a trace: its own (stretched to --rate), or drawn anew (default "
        "%(default)s)",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        metavar="NAME[:KEY=VALUE,...]",
        help=f"one or more of {', '.join(sorted(policies()))}; e.g. sl:length=1024 "
        "(default: disagg kairos-paper kairos)",
    )
    add_cluster_arguments(parser)
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--ablate",
        action="store_true",
        help="kairos whole, and without one of its parts at a time, in place of "
        "--policy; without --rate at the highest rate at which 99 %% of requests "
        "meet both SLOs, where each part shows",
    )
    group.add_argument(
        "--capacity",
        action="store_true",
        help="find the highest rate at which 99 %% of requests meet both SLOs, with "
        "its 95 %% interval over seeds, in place of a sweep",
    )
    group.add_argument(
        "--plan",
        action="store_true",
        help="the same for every split of the nodes into prefill and decode nodes",
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="write summary.json, requests.jsonl (a row a request) and figures here; "
        "made if need be",
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run `vllm-kairos simulate`."""
    profile = profile_of(args.profile)
    settings = settings_of(args)
    cluster = cluster_of(args, profile)
    _check_read(args, cluster)
    cv = args.cv
    if args.arrivals == "poisson":
        cv = 1.0
    elif args.arrivals == "gamma" and cv is None:
        cv = 1.3
    workload = workload_of(args.workload, args.requests, cv)
    policy = args.policy or ["disagg", "kairos-paper", "kairos"]
    if args.ablate:
        without = [f"kairos:{part}={value}" for part, value in PARTS.items()]
        policy = ["kairos", *without]
    check_once("--policy", policy)
    specs = [parse_policy(text, settings) for text in policy]
    for margin in ("alpha", "beta"):
        if not any(spec.reads(margin) for spec in specs):
            refuse_unread(args, f"with --policy {' '.join(policy)}", (margin,))
    rates: list[float | None] = [None]
    if args.rate:
        rates = list(parse_numbers(args.rate, "--rate", whole=False))
    for rate in rates:
        if rate is not None and not rate > 0:
            raise UserError(f"--rate {rate:g}: expected a number > 0")
        if rate is not None and not 1e-6 <= rate <= 1e6:
            raise UserError(f"--rate {rate:g}: expected a number from 1e-6 to 1e6")
    seeds = [int(s) for s in parse_numbers(args.seeds, "--seeds", whole=True)]
    check_jobs(args.jobs)
    if args.output is not None:
        check_files(args.output, FILES)

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
    if args.ablate and not args.rate:
        limit = rps99(cell, specs[0], seeds, args.jobs, shown)["rps99"]
        if not limit:
            raise UserError("--ablate: kairos meets the SLOs at no rate, give a --rate")
        rates = [limit]
    cells = [cell(s, rate, seed) for rate in rates for s in specs for seed in seeds]
    runs = []
    with RowsFile(args.output) as rows:
        for result, lines in run_cells(cells, args.jobs, rows.wanted, shown):
            runs.append(result)
            rows.write(lines)
        summary["runs"] = runs
        summary["mean"] = _means(runs)
        if args.output:
            from vllm_kairos.sim.plots import sweep_figures

            rows.keep()
            _write_summary(args.output, summary)
            sweep_figures(summary, args.output)
    print(sweep_table(summary["mean"], settings.tau_ms, len(seeds)))
    return 0


def _check_read(args: argparse.Namespace, cluster: ClusterSettings) -> None:
    """Refuse a flag that what was asked for does not read."""
    if args.ablate:
        refuse_unread(args, "with --ablate, which is of kairos", ("policy",))
    for asked in ("capacity", "plan"):
        if getattr(args, asked):
            refuse_unread(args, f"with --{asked}, which finds the rate", ("rate",))
    if "arrivals" in args.given and args.arrivals != "gamma":
        refuse_unread(args, f"with --arrivals {args.arrivals}", ("cv",))
    if cluster.link is None:
        where = f"with --profile {args.profile}, which has no link"
        refuse_unread(args, where, ("link_hops",))


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
    tables = []
    if args.capacity:
        found = {s.label: rps99(cell, s, seeds, args.jobs, shown) for s in specs}
        summary["capacity"] = found
        tables.append(capacity_table(found, len(seeds)))
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
        tables.append(table(["policy", "prefill:decode", "RPS99", ""], lines))
    if args.output:
        _write_summary(args.output, summary)
    print(*tables, sep="\n")
    return 0


def _write_summary(directory: str, summary: dict[str, Any]) -> None:
    text = json.dumps(summary, indent=2) + "\n"
    write(directory, "summary.json", text)
