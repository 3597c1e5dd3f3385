# SPDX-License-Identifier: Apache-2.0
"""Simulate the Kairos paper's evaluation: ours beside the numbers it prints.

Tables 1, 3 and 4 and Figures 2, 4, 5 and 6, deviations in words. Writes
REPORT.md, summary.json and the figures. Takes minutes; fewer --seeds are faster
and noisier.

examples:
  vllm-kairos paper --output paper-results
  vllm-kairos paper --output quick --seeds 101..102 --requests 300
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.settings import Settings
from vllm_kairos.files import UserError
from vllm_kairos.sim import paper_numbers as printed
from vllm_kairos.sim.cluster import ClusterSettings
from vllm_kairos.sim.options import (
    add_profile_argument,
    add_run_arguments,
    check_jobs,
    check_requests,
    limits_of,
    parse_numbers,
    profile_of,
)
from vllm_kairos.sim.output import check_files, write, writing
from vllm_kairos.sim.paper_lab import Lab
from vllm_kairos.sim.paper_sections import (
    FIGURE_GB_PER_S,
    figures,
    sensitivity,
    table_1,
    table_3,
    table_4,
)
from vllm_kairos.sim.workload import WORKLOADS

FILES = ("REPORT.md", "summary.json", *(f"figure{n}.png" for n in (2, 4, 5, 6)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm-kairos paper`."""
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="write the report and the figures here; made if need be",
    )
    add_profile_argument(parser)
    parser.add_argument(
        "--seeds",
        nargs="+",
        default=["101..110"],
        metavar="N",
        help="means are over these: one or more, or A..B (default 101..110)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=1500,
        metavar="N",
        help="of a run of Table 3 and the figures (default %(default)s)",
    )
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run `vllm-kairos paper`."""
    profile = profile_of(args.profile)
    if profile.kv is None:
        raise UserError(
            f"profile {args.profile}: it does not say how many bytes a token's KV "
            "takes (kv.bytes_per_token), which the paper's links need"
        )
    check_requests(args.requests)
    check_jobs(args.jobs)
    check_files(args.output, FILES)
    seeds = [int(s) for s in parse_numbers(args.seeds, "--seeds", whole=True)]
    cluster = ClusterSettings(
        profile.step_model(),
        LinkModel(profile.kv.bytes_per_token, FIGURE_GB_PER_S * 1e9, hops=2),
        limits_of(profile),
    )
    progress = not args.no_progress and sys.stderr.isatty()
    lab = Lab(cluster, Settings(), seeds, args.requests, args.jobs, progress)
    with writing(args.output):
        os.makedirs(args.output, exist_ok=True)
    summary: dict[str, Any] = {
        "profile": profile.name,
        "seeds": seeds,
        "cv": WORKLOADS["bursty"].cv,
        "requests": args.requests,
    }
    report = [
        "# The paper's evaluation, reproduced",
        f"Profile `{profile.name}` ({profile.kind}), 2P2D, seeds {seeds[0]} to "
        f"{seeds[-1]}, means over seeds. Bursty has Gamma arrivals with a "
        f"coefficient of variation of {WORKLOADS['bursty'].cv}; the paper gives none. "
        "Each cell reads ours / the paper's.",
    ]
    for section in (table_1, table_3, table_4, figures, sensitivity):
        text = section(lab, summary, args.output)
        report.append(text)
        print(text, end="\n\n", flush=True)
    report.append(
        "## What one parameter set cannot match\n\n"
        + "\n".join(f"- {line}" for line in printed.CANNOT_MATCH)
    )
    print(report[-1])
    write(args.output, "REPORT.md", "\n\n".join(report) + "\n")
    write(args.output, "summary.json", json.dumps(summary, indent=2) + "\n")
    return 0
