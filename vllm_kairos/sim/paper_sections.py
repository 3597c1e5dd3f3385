# SPDX-License-Identifier: Apache-2.0
"""The experiments behind `vllm-kairos paper`, one function a table or figure.

Each runs its simulations, puts the numbers into the summary, writes its
figures and returns its part of the report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_kairos.sim import paper_numbers as printed
from vllm_kairos.sim.cluster import ModelError
from vllm_kairos.sim.paper_lab import Case, Lab
from vllm_kairos.sim.plots import bars, lines
from vllm_kairos.sim.tables import number, table
from vllm_kairos.sim.workload import WORKLOADS, fit_table

FIGURE_RATES = (6, 7, 8, 9, 10, 11, 12)
FIGURE_POLICIES = ("disagg", "taichi", "kairos-paper", "kairos")
TABLE_GB_PER_S = 0.60
FIGURE_GB_PER_S = 3.0
ERRORS = ((0.0, 0.0), (0.05, 0.0), (0.1, 0.0), (-0.1, 0.0), (0.0, 0.02), (0.0, 0.05))


def _beside(ours: float | None, paper: float, digits: int) -> str:
    return f"{number(ours, digits)} / {number(paper, digits)}"


def _late_percent(mean: Mapping[str, Any]) -> float:
    return 100 * float(mean["tbt_over_slo_share"])


def off(ours: float, paper: float) -> str:
    """How far a number is from the paper's, in words."""
    if paper == 0:
        return "as in the paper" if ours == 0 else f"{ours:g} where the paper has none"
    share = ours / paper - 1
    if abs(share) < 0.005:
        return "as in the paper"
    return f"{abs(100 * share):.0f} % {'above' if share > 0 else 'below'}"


def spread(counts: Sequence[int], paper: float) -> dict[str, Any]:
    """How far single runs are from a count that the paper has of one run.

    Args:
        counts: One a seed.
        paper: The paper's.

    Returns:
        ``ci95`` of the mean (bootstrap over seeds), ``min``, ``max``, and
        ``within_15_percent``: the share of seeds so close to the paper's.
    """
    values = np.array(counts, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (2000, len(values)))].mean(axis=1)
    return {
        "ci95": [float(q) for q in np.percentile(means, [2.5, 97.5])],
        "min": int(values.min()),
        "max": int(values.max()),
        "within_15_percent": float(np.mean(np.abs(values - paper) <= 0.15 * paper)),
    }


def _in_words(counts: Mapping[str, Any]) -> str:
    if counts["min"] == counts["max"]:
        return ""
    low, high = counts["ci95"]
    return (
        f" (95 % interval of the mean {low:.1f} to {high:.1f}, single runs "
        f"{counts['min']} to {counts['max']}, "
        f"{100 * counts['within_15_percent']:.0f} % of them within 15 % of the paper's)"
    )


def table_1(lab: Lab, summary: dict[str, Any], directory: str) -> str:
    """Workloads: quantiles asked and got."""
    rows = []
    worst = 0.0
    for workload in WORKLOADS.values():
        for name, asked, got in fit_table(workload):
            rows.append([workload.name, name, f"{asked:g}", f"{got:.4g}"])
            worst = max(worst, abs(got / asked - 1))
    summary["table_1"] = [
        dict(zip(("workload", "quantile", "asked", "got"), row, strict=True))
        for row in rows
    ]
    return (
        "## Table 1: workloads\n\n"
        + table(["workload", "quantile", "asked", "got"], rows, markdown=True)
        + f"\n\nThe farthest quantile is {100 * worst:.1f} % off. `ratio` is prompt "
        "over completion of a request. The quantiles of Bursty at 512, 1024 and 2048 "
        "tokens follow from the counts of SL in Table 4."
    )


def table_3(lab: Lab, summary: dict[str, Any], directory: str) -> str:
    """TTFT by its parts."""
    cluster = lab.at(TABLE_GB_PER_S)
    cases = [
        ("disagg", WORKLOADS[name].rate_rps, name, lab.requests, cluster)
        for name in printed.TABLE_3
    ]
    means = lab.means("Table 3", cases)
    summary["table_3"] = means
    rows, words = [], []
    for mean in means:
        name = mean["workload"]
        paper = printed.TABLE_3[name]
        parts = mean["ttft_parts_ms_p95"]
        ours = [
            parts["prefill_queue"],
            parts["prefill"],
            parts["transfer"],
            parts["decode_wait"],
            mean["ttft_ms"]["p95"],
        ]
        rows.append(
            [name, *(_beside(o, p, 0) for o, p in zip(ours, paper, strict=True))]
        )
        share = 100 * ours[1] / ours[4]
        words.append(
            f"- {name}: queue {off(ours[0], paper[0])}, prefill "
            f"{off(ours[1], paper[1])}, transfer {off(ours[2], paper[2])}, end to end "
            f"{off(ours[4], paper[4])}; prefill is {share:.0f} % of the P95 TTFT."
        )
    head = [
        "workload",
        "prefill queue",
        "prefill",
        "KV transfer",
        "decode queue",
        "TTFT",
    ]
    return (
        f"## Table 3: P95 TTFT in parts, ms (P/D, {TABLE_GB_PER_S:g} GB/s)\n\n"
        + table(head, rows, markdown=True)
        + "\n\nDecode queue is the wait for a decode step without that step.\n\n"
        + "\n".join(words)
    )


def table_4(lab: Lab, summary: dict[str, Any], directory: str) -> str:
    """Static policies and Oracle, with Figure 2."""
    cluster = lab.at(TABLE_GB_PER_S)
    rate = WORKLOADS["bursty"].rate_rps
    cases: list[Case] = [(p, rate, "bursty", 1200, cluster) for p in printed.TABLE_4]
    runs = lab.runs("Table 4", cases)
    means = lab.means("Table 4", cases, runs)
    summary["table_4"] = means
    rows, words = [], []
    for mean, part in zip(means, runs, strict=True):
        paper = printed.TABLE_4[mean["policy"]]
        name = printed.TABLE_4_NAMES[mean["policy"]]
        ours = (
            mean["deflections"],
            mean["ttft_ms"]["p95"] / 1e3,
            100 * mean["tbt_over_slo_share"],
            100 * mean["slo_attainment"],
        )
        cells = [_beside(o, p, 1) for o, p in zip(ours, paper, strict=True)]
        rows.append([name, *cells])
        mean["deflections_spread"] = counts = spread(
            [run["deflections"] for run in part], paper[0]
        )
        words.append(
            f"- {name}: deflections {off(round(ours[0], 1), paper[0])}"
            f"{_in_words(counts)}, P95 TTFT {off(ours[1], paper[1])}, attainment "
            f"{ours[3] - paper[3]:+.1f} points."
        )
    names = [printed.TABLE_4_NAMES[m["policy"]] for m in means]

    def both(of: Any, place: int) -> Mapping[str, list[float]]:
        return {
            "ours": [of(m) for m in means],
            "paper": [printed.TABLE_4[m["policy"]][place] for m in means],
        }

    bars(
        os.path.join(directory, "figure2.png"),
        [
            ("P95 TTFT (s)", names, both(lambda m: m["ttft_ms"]["p95"] / 1e3, 1)),
            (
                "TBT > 70 ms (%)",
                names,
                both(lambda m: 100 * m["tbt_over_slo_share"], 2),
            ),
            ("SLO attainment (%)", names, both(lambda m: 100 * m["slo_attainment"], 3)),
            (
                "output tokens/s",
                names,
                {"ours": [m["output_tokens_per_s"] for m in means]},
            ),
        ],
    )
    head = ["policy", "deflections", "P95 TTFT s", "TBT > 70 ms %", "attainment %"]
    return (
        f"## Table 4 and Figure 2: static policies and Oracle ({rate:g} RPS, 1,200 "
        f"requests, {TABLE_GB_PER_S:g} GB/s)\n\n"
        + table(head, rows, markdown=True)
        + "\n\nThe paper does not print the rate; this is Table 1's.\n\n"
        + "\n".join(words)
        + "\n\n![Figure 2](figure2.png)"
    )


def figures(lab: Lab, summary: dict[str, Any], directory: str) -> str:
    """Figures 4, 5 and 6: Bursty over the rate."""
    cluster = lab.at(FIGURE_GB_PER_S)
    cases = [
        (policy, float(rate), "bursty", lab.requests, cluster)
        for policy in FIGURE_POLICIES
        for rate in FIGURE_RATES
    ]
    means = lab.means("Figures 4 to 6", cases)
    summary["figures_4_5_6"] = means
    at = {(m["policy"], int(m["rate"])): m for m in means}

    def series(of: Any) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        return {
            p: (FIGURE_RATES, [of(at[p, r]) for r in FIGURE_RATES])
            for p in FIGURE_POLICIES
        }

    slo_s = lab.settings.ttft_slo_ms / 1e3
    x = "requests/s"
    lines(
        os.path.join(directory, "figure4.png"),
        [
            ("P95 TTFT (s)", series(lambda m: m["ttft_ms"]["p95"] / 1e3), slo_s),
            ("P95 TBT (ms)", series(lambda m: m["tbt_ms"]["p95"]), lab.settings.tau_ms),
        ],
        x,
    )
    lines(
        os.path.join(directory, "figure5.png"),
        [
            ("total tokens/s", series(lambda m: m["total_tokens_per_s"]), None),
            ("output tokens/s", series(lambda m: m["output_tokens_per_s"]), None),
        ],
        x,
    )
    counts: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        p: (FIGURE_RATES, [at[p, r]["deflections"] for r in FIGURE_RATES])
        for p in ("kairos-paper", "kairos")
    }
    counts["the paper, in words"] = (
        list(printed.DEFLECTIONS),
        list(printed.DEFLECTIONS.values()),
    )
    lines(
        os.path.join(directory, "figure6.png"),
        [
            ("SLO attainment (%)", series(lambda m: 100 * m["slo_attainment"]), None),
            ("deflections", counts, None),
        ],
        x,
        {"the paper, in words": "kairos-paper"},
    )
    head = ["policy", *(f"{rate} RPS" for rate in FIGURE_RATES)]

    def block(title: str, of: Any, digits: int) -> str:
        rows = [
            [p, *(number(of(at[p, r]), digits) for r in FIGURE_RATES)]
            for p in FIGURE_POLICIES
        ]
        return f"{title}\n\n" + table(head, rows, markdown=True)

    text = [
        f"## Figures 4, 5 and 6: Bursty by rate ({FIGURE_GB_PER_S:g} GB/s, "
        f"{lab.requests} requests)",
        block("P95 TTFT, s:", lambda m: m["ttft_ms"]["p95"] / 1e3, 2),
        block("P95 TBT, ms:", lambda m: m["tbt_ms"]["p95"], 1),
        block(
            "TBT over 70 ms, % of tokens:", lambda m: 100 * m["tbt_over_slo_share"], 2
        ),
        block("Output tokens/s:", lambda m: m["output_tokens_per_s"], 0),
        block("SLO attainment, %:", lambda m: 100 * m["slo_attainment"], 1),
        block("Deflections:", lambda m: m["deflections"], 0),
        "\n".join(_claims(at, slo_s)),
        "![Figure 4](figure4.png) ![Figure 5](figure5.png) ![Figure 6](figure6.png)",
    ]
    return "\n\n".join(text)


def _claims(at: Mapping[tuple[str, int], Mapping[str, Any]], slo_s: float) -> list[str]:
    """The sentences of §6 with their numbers, ours and the paper's."""
    out = []
    for policy, rate in printed.WITHIN_TTFT_SLO_RPS.items():
        held = [
            r for r in FIGURE_RATES if at[policy, r]["ttft_ms"]["p95"] / 1e3 <= slo_s
        ]
        ours = f"{max(held)} RPS" if held else "no rate"
        out.append(
            f"- `{policy}` keeps P95 TTFT within {slo_s:g} s up to {ours}; "
            f"paper: {rate}."
        )
    p95 = {key: mean["ttft_ms"]["p95"] for key, mean in at.items()}
    cuts = {r: 1 - p95["kairos-paper", r] / p95["disagg", r] for r in FIGURE_RATES}
    best = max(cuts, key=lambda r: cuts[r])
    out.append(
        "- Greatest cut in P95 TTFT, `kairos-paper` against `disagg`: "
        f"{100 * cuts[best]:.0f} % at {best} RPS; paper: up to "
        f"{printed.TTFT_CUT_PERCENT} %."
    )
    for rate, count in printed.DEFLECTIONS.items():
        ours_count = at["kairos-paper", rate]["deflections"]
        out.append(
            f"- Deflections at {rate} RPS: {ours_count:.0f}; paper: "
            f"{'over ' if rate == 6 else ''}{count} ({off(ours_count, count)})."
        )
    late = max(at["kairos-paper", r]["tbt_over_slo_share"] for r in FIGURE_RATES)
    out.append(
        f"- TBT over the SLO under `kairos-paper`: at most {100 * late:.3f} % of "
        "tokens; paper: none."
    )
    out.append(
        "- `taichi` here has its sliders tuned for this workload; the paper's loses "
        "its TBT SLO above 8 RPS and passes 100 ms at 10."
    )
    return out


def sensitivity(lab: Lab, summary: dict[str, Any], directory: str) -> str:
    """Item 7 of the paper's limitations: what if the models err."""
    rate = 9.0
    policies = ("disagg", "kairos-paper", "kairos")
    cases = [
        (
            policy,
            rate,
            "bursty",
            lab.requests,
            replace(lab.at(FIGURE_GB_PER_S), error=ModelError(bias, noise)),
        )
        for policy in policies
        for bias, noise in ERRORS
    ]
    means = lab.means("model error", cases)
    rows = []
    for (bias, noise), place in zip(
        ERRORS * len(policies), range(len(means)), strict=True
    ):
        mean = means[place]
        mean["model_bias"], mean["model_noise"] = bias, noise
        rows.append(
            [
                mean["policy"],
                f"{100 * bias:+.0f} %",
                f"{100 * noise:.0f} %",
                number(mean["ttft_ms"]["p95"], 2, 1e-3),
                number(mean["tbt_over_slo_share"], 2, 100),
                number(mean["slo_attainment"], 1, 100),
            ]
        )
    summary["sensitivity"] = means
    head = ["policy", "bias", "noise", "P95 TTFT s", "TBT > 70 ms %", "attainment %"]
    return (
        f"## Model error ({rate:g} RPS)\n\n"
        + table(head, rows, markdown=True)
        + "\n\nTrue step times against predicted ones: `bias` longer on average, "
        "`noise` the standard deviation around that."
    )
