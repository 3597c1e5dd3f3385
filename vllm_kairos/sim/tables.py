# SPDX-License-Identifier: Apache-2.0
"""Tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False
) -> str:
    """Aligned columns; the first one to the left, the others to the right."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        fitted = [
            str(cell).ljust(width) if i == 0 else str(cell).rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        if markdown:
            return "| " + " | ".join(fitted) + " |"
        return "  ".join(fitted).rstrip()

    rule = [
        "-" * width if i == 0 or not markdown else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


def number(value: float | None, digits: int = 1, factor: float = 1.0) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value * factor:,.{digits}f}"


def capacity_table(found: Mapping[str, Mapping[str, Any]], seeds: int) -> str:
    """The table of RPS99 by policy, with TTFT at that rate."""
    head = ["policy", "RPS99", "95 % interval"]
    head += ["TTFT p95 s there", "p99 s", "max s"]
    rows = []
    for label, capacity in found.items():
        ttft = capacity["ttft_ms"]
        low, high = capacity["ci95"]
        row = [label, number(capacity["rps99"], 2), f"{low:.2f} to {high:.2f}"]
        rows.append([*row, *(number(ttft[q], 2, 1e-3) for q in ("p95", "p99", "max"))])
    note = f"\nTTFT: means over {seeds} seeds" if seeds > 1 else ""
    return table(head, rows) + note


def sweep_table(means: Sequence[Mapping[str, Any]], tau_ms: float, seeds: int) -> str:
    """The table of a sweep: means over seeds."""
    head = [
        "policy",
        "RPS",
        "TTFT p50 s",
        "p95 s",
        "p99 s",
        "max s",
        "TBT p95 ms",
        f"TBT > {tau_ms:g} ms %",
        "attain %",
        "deflected",
        "out tok/s",
    ]
    rows = [
        [
            m["policy"],
            "own" if m["rate"] is None else f"{m['rate']:g}",
            number(m["ttft_ms"]["p50"], 2, 1e-3),
            number(m["ttft_ms"]["p95"], 2, 1e-3),
            number(m["ttft_ms"]["p99"], 2, 1e-3),
            number(m["ttft_ms"]["max"], 2, 1e-3),
            number(m["tbt_ms"]["p95"]),
            number(m["tbt_over_slo_share"], 2, 100),
            number(m["slo_attainment"], 1, 100),
            number(m["deflections"], 0),
            number(m["output_tokens_per_s"], 0),
        ]
        for m in means
    ]
    note = f"\nmeans over {seeds} seeds" if seeds > 1 else ""
    return table(head, rows) + note
