# SPDX-License-Identifier: Apache-2.0
"""Rows, table, summary and figure of a comparison."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quickstart.load import Record
from vllm_kairos.files import write_atomically

PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0}

COLUMNS = (
    "policy",
    "repetition",
    "index",
    "due_s",
    "late_ms",
    "prompt_tokens",
    "wanted_tokens",
    "output_tokens",
    "status",
    "route",
    "error",
    "ttft_ms",
    "tbt_ms",
)


@dataclass(frozen=True)
class Limits:
    """The SLOs a comparison is judged by.

    Attributes:
        tau_ms: TBT SLO.
        ttft_slo_ms: TTFT SLO.
    """

    tau_ms: float
    ttft_slo_ms: float


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The percentiles of `PERCENTILES`; `None` each where there are no values."""
    if not len(values):
        return dict.fromkeys(PERCENTILES)
    at = np.percentile(np.asarray(values), list(PERCENTILES.values()))
    return {n: round(float(v), 3) for n, v in zip(PERCENTILES, at, strict=True)}


def meets_slo(record: Record, limits: Limits) -> bool:
    """Whether a request came back whole, in time, and smoothly.

    Its TTFT is within the SLO and so is the 95th percentile of its times
    between tokens, the paper's two conditions taken for one request.
    """
    if record.failed or record.ttft_ms > limits.ttft_slo_ms:
        return False
    gaps = record.tbt_ms
    return not gaps or float(np.percentile(gaps, 95)) <= limits.tau_ms


def summarize(records: Sequence[Record], limits: Limits) -> dict[str, Any]:
    """One arm's figures, all of its repetitions together.

    Output tokens per second count from the first arrival to the last token of
    each repetition.
    """
    good = [record for record in records if not record.failed]
    gaps = [gap for record in good for gap in record.tbt_ms]
    spans: dict[int, float] = {}
    for record in good:
        end = record.due_s + record.token_s[-1]
        spans[record.repetition] = max(spans.get(record.repetition, 0.0), end)
    seconds = sum(spans.values())
    tokens = sum(len(record.tokens) for record in good)
    late = sum(gap > limits.tau_ms for gap in gaps)
    met = sum(meets_slo(record, limits) for record in records)
    return {
        "requests": len(records),
        "failures": len(records) - len(good),
        "deflections": sum(record.deflected for record in records),
        "ttft_ms": percentiles([record.ttft_ms for record in good]),
        "tbt_ms": percentiles(gaps),
        "tbt_over_slo_share": round(late / len(gaps), 6) if gaps else None,
        "slo_attainment": round(met / len(records), 6) if records else None,
        "output_tokens_per_s": round(tokens / seconds, 3) if seconds > 0 else None,
    }


def decode_steps_over(
    step_logs: Sequence[Path], windows: Sequence[tuple[float, float]], tau_ms: float
) -> float | None:
    """Share of the engines' own decode steps that took longer than tau.

    Args:
        step_logs: Step records of the decode engines.
        windows: ``(start, end)`` in Unix time, of the runs to look at.
        tau_ms: TBT SLO.

    Returns:
        `None` where no step fell in a window.
    """
    steps = late = 0
    for path in step_logs:
        if not path.exists():
            continue
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                at = float(row["time_s"])
                if int(row["num_decode_requests"]) > 0 and any(
                    start <= at <= end for start, end in windows
                ):
                    steps += 1
                    late += float(row["latency_ms"]) > tau_ms
    return round(late / steps, 6) if steps else None


def table(arms: Mapping[str, Mapping[str, Any]], limits: Limits) -> str:
    """The comparison as text, a column for each policy."""

    def number(value: float | None, pattern: str = "{:,.0f}") -> str:
        return "-" if value is None else pattern.format(value)

    percent = "{:.1%}"
    rows: list[tuple[str, list[str]]] = []
    for name, key in (
        ("requests", "requests"),
        ("failures", "failures"),
        ("deflections", "deflections"),
    ):
        rows.append((name, [number(arm[key]) for arm in arms.values()]))
    for name, at in (("P50 TTFT ms", "p50"), ("P95 TTFT ms", "p95")):
        rows.append((name, [number(arm["ttft_ms"][at]) for arm in arms.values()]))
    for at in ("p50", "p95", "p99"):
        name = f"{at.upper()} TBT ms"
        cells = [number(arm["tbt_ms"][at], "{:.1f}") for arm in arms.values()]
        rows.append((name, cells))
    tau, slo = f"{limits.tau_ms:g} ms", f"{limits.ttft_slo_ms:g} ms"
    for name, key in (
        (f"TBT over {tau} (tau)", "tbt_over_slo_share"),
        (f"decode steps over {tau}", "decode_steps_over_tau_share"),
        (f"TTFT <= {slo} and P95 TBT <= tau", "slo_attainment"),
    ):
        cells = [number(arm.get(key), percent) for arm in arms.values()]
        rows.append((name, cells))
    cells = [number(arm["output_tokens_per_s"], "{:.1f}") for arm in arms.values()]
    rows.append(("output tokens/s", cells))
    first = max(len(name) for name, _ in rows)
    width = max(10, *(len(name) for name in arms)) + 2
    lines = [" " * first + "".join(f"{name:>{width}}" for name in arms)]
    for name, cells in rows:
        lines.append(f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def write_rows(path: Path, records: Sequence[Record]) -> None:
    """The rows every figure comes from; ``tbt_ms`` separates its by blanks."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for r in records:
        writer.writerow(
            [
                *(r.policy, r.repetition, r.index, f"{r.due_s:.4f}"),
                *(f"{r.late_ms:.2f}", r.prompt_tokens, r.wanted_tokens),
                *(len(r.tokens), r.status, r.route, r.error),
                f"{r.ttft_ms:.2f}" if r.token_s else "",
                " ".join(f"{gap:.2f}" for gap in r.tbt_ms),
            ]
        )
    write_atomically(path, text.getvalue().encode())


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """The figures as JSON."""
    write_atomically(path, (json.dumps(summary, indent=2) + "\n").encode())


def draw(path: Path, records: Sequence[Record], limits: Limits) -> None:
    """Cumulative distributions of TTFT and TBT, a line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for policy in dict.fromkeys(record.policy for record in records):
        good = [r for r in records if r.policy == policy and not r.failed]
        ttfts = [r.ttft_ms / 1e3 for r in good]
        gaps = [gap for r in good for gap in r.tbt_ms]
        for axes, values in ((left, ttfts), (right, gaps)):
            if values:
                axes.ecdf(values, label=policy)
    left.set(xlabel="TTFT (s)", ylabel="share of requests", xlim=(0, None))
    right.set(xlabel="TBT (ms)", ylabel="share of tokens", xlim=(0, 4 * limits.tau_ms))
    left.axvline(limits.ttft_slo_ms / 1e3, color="0.5", linestyle="--", label="SLO")
    right.axvline(limits.tau_ms, color="0.5", linestyle="--", label="SLO")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    write_atomically(path, picture.getvalue())
