# SPDX-License-Identifier: Apache-2.0
"""From requests to rows, and from rows to a summary.

A summary is computed from the rows alone, times rounded to a microsecond as
the rows hold them: what is reported can be recomputed from what is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_kairos.sim.engine_request import UserRequest

Row = dict[str, Any]
Array = npt.NDArray[np.float64]

#: Where the time to the first token goes; they add up to ``ttft_ms``.
TTFT_PARTS = ("prefill_queue", "prefill", "transfer", "decode_queue")

PERCENTILES = (("p50", 50.0), ("p95", 95.0), ("p99", 99.0), ("max", 100.0))


def _us(ms: float) -> int:
    return round(ms * 1e3)


def request_row(user: UserRequest) -> Row:
    """One request as it is written to ``requests.jsonl``.

    Times are milliseconds from the start of the workload, rounded to a
    microsecond before they are subtracted, so that the parts of TTFT add up.
    ``decode_queue_ms`` runs from the arrival of the KV to the first token and
    holds ``first_step_ms``, the decode step that gives it; a deflected
    request has neither, since its last chunk gives the token.
    """
    row = user.row
    route = user.route
    out: Row = {
        "request": user.index,
        "arrival_ms": _us(user.arrival_ms) / 1e3,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
        "prefill_node": route.prefill if route else None,
        "decode_node": route.decode if route else None,
        "deflected": user.deflected,
        "reason": route.reason if route else "",
        "rejected": user.rejected,
        "preemptions": user.preemptions,
        "migrations": user.migrations,
    }
    if user.rejected:
        return out
    tokens = [_us(t) for t in user.token_ms]
    marks = [
        _us(user.arrival_ms),
        _us(user.prefill_start_ms),
        _us(user.prefill_end_ms),
        _us(user.kv_arrived_ms),
        tokens[0],
    ]
    out["ttft_ms"] = (marks[-1] - marks[0]) / 1e3
    for place, part in enumerate(TTFT_PARTS):
        out[f"{part}_ms"] = (marks[place + 1] - marks[place]) / 1e3
    out["first_step_ms"] = (tokens[0] - _us(user.decode_start_ms)) / 1e3
    out["finish_ms"] = tokens[-1] / 1e3
    out["tbt_ms"] = [(b - a) / 1e3 for a, b in itertools.pairwise(tokens)]
    return out


def percentiles(values: Array | Sequence[float]) -> dict[str, float | None]:
    """P50, P95, P99 and the greatest, linearly interpolated; `None` of none."""
    if len(values) == 0:
        return {name: None for name, _ in PERCENTILES}
    found = np.percentile(values, [q for _, q in PERCENTILES])
    return {
        name: float(value) for (name, _), value in zip(PERCENTILES, found, strict=True)
    }


def meets_slos(row: Row, tau_ms: float, ttft_slo_ms: float) -> bool:
    """TTFT within its SLO, and the request's own P95 TBT within ``tau``."""
    if row["rejected"] or row["ttft_ms"] > ttft_slo_ms:
        return False
    tbt = row["tbt_ms"]
    return not tbt or _p95(tbt) <= tau_ms


def _p95(values: Sequence[float]) -> float:
    """``numpy.percentile(values, 95)`` of a short list, without its overhead."""
    ordered = sorted(values)
    place = 0.95 * (len(ordered) - 1)
    low = int(place)
    if low + 1 >= len(ordered):
        return ordered[-1]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (place - low)


def summarize(rows: Sequence[Row], tau_ms: float, ttft_slo_ms: float) -> dict[str, Any]:
    """What is reported of one run.

    Args:
        rows: Of `request_row`.
        tau_ms: TBT SLO.
        ttft_slo_ms: TTFT SLO.

    Returns:
        ``requests``, ``deflections``, ``rejected``, ``ttft_ms`` and
        ``tbt_ms`` by percentile, ``tbt_over_slo_share`` (of all times between
        tokens), ``slo_attainment`` (of all requests, a rejected one misses),
        ``ttft_attainment``, ``output_tokens_per_s`` and
        ``total_tokens_per_s`` from first arrival to last token, and
        ``ttft_parts_ms_p95``: the P95 of each part by itself, and of
        ``first_step`` and ``decode_wait``, which make up ``decode_queue``.
    """
    served = [r for r in rows if not r["rejected"]]
    ttft = np.array([r["ttft_ms"] for r in served])
    tbt = np.array([gap for r in served for gap in r["tbt_ms"]])
    met = sum(meets_slos(r, tau_ms, ttft_slo_ms) for r in rows)
    span_s = 0.0
    if served:
        first = min(r["arrival_ms"] for r in rows)
        span_s = (max(r["finish_ms"] for r in served) - first) / 1e3
    outputs = sum(r["output_tokens"] for r in served)
    prompts = sum(r["prompt_tokens"] for r in served)
    parts = {}
    for part in (*TTFT_PARTS, "first_step"):
        parts[part] = percentiles([r[f"{part}_ms"] for r in served])["p95"]
    waits = [r["decode_queue_ms"] - r["first_step_ms"] for r in served]
    parts["decode_wait"] = percentiles(waits)["p95"]
    return {
        "requests": len(rows),
        "deflections": sum(bool(r["deflected"]) for r in rows),
        "rejected": len(rows) - len(served),
        "ttft_ms": percentiles(ttft),
        "tbt_ms": percentiles(tbt),
        "tbt_over_slo_share": float((tbt > tau_ms).mean()) if len(tbt) else 0.0,
        "slo_attainment": met / len(rows) if rows else 0.0,
        "ttft_attainment": float((ttft <= ttft_slo_ms).sum()) / max(len(rows), 1),
        "output_tokens_per_s": outputs / span_s if span_s else 0.0,
        "total_tokens_per_s": (outputs + prompts) / span_s if span_s else 0.0,
        "ttft_parts_ms_p95": parts,
        "preemptions": sum(r["preemptions"] for r in rows),
        "migrations": sum(r["migrations"] for r in rows),
    }


def mean_of(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds, key by key; `None` where a run has no value."""
    runs = list(summaries)
    out: dict[str, Any] = {}
    for key, value in runs[0].items():
        values = [run[key] for run in runs]
        if isinstance(value, Mapping):
            out[key] = mean_of(values)
        elif any(v is None for v in values):
            out[key] = None
        else:
            out[key] = float(np.mean(values))
    return out
