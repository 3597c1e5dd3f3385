# SPDX-License-Identifier: Apache-2.0
"""How far predictions are from measurements, per phase and per regime.

Every relative error is against the measured latency:
``(predicted - measured) / measured``. A positive bias is a predictor that
says longer than it takes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from vllm_kairos.core.predictor import Array
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.profiling.steps import Steps

PHASES = ("prefill", "decode", "mixed")

#: Quantiles of measured / predicted that a profile keeps.
RESIDUAL_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)

#: Held-out MAPE past which a profile is not to be trusted, as the engine's own
#: threshold for a refit.
WARN_PERCENT = 25.0

#: Regimes of the report: upper edges of decode batch, decode KV and chunk.
_EDGES = {
    "B": (1, 4, 8, 16, 32, 64, 128),
    "K": (1_000, 4_000, 16_000, 64_000, 256_000),
    "c": (128, 256, 512, 1024, 2048, 4096, 8192),
}
_NAMES = {"B": "decode batch", "K": "decode KV tokens", "c": "prefill tokens"}


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Relative errors of a set of steps, in percent.

    Attributes:
        count: Steps.
        mape_percent: Mean absolute relative error.
        median_percent: Median absolute relative error.
        p95_percent: 95th percentile of the absolute relative error.
        bias_percent: Mean relative error.
    """

    count: int
    mape_percent: float
    median_percent: float
    p95_percent: float
    bias_percent: float

    def as_dict(self) -> dict[str, float]:
        """The fields by name; rounded, since JSON shows them to people."""
        return {
            "count": self.count,
            **{
                name: round(float(getattr(self, name)), 6)
                for name in (
                    "mape_percent",
                    "median_percent",
                    "p95_percent",
                    "bias_percent",
                )
            },
        }


def predict(model: StepModel, steps: Steps) -> Array:
    """Predicted latency of every step in milliseconds."""
    return model.step_ms_array(
        steps.decodes,
        steps.decode_kv_tokens,
        steps.prefill_tokens,
        steps.prefill_kv_tokens,
        steps.prefills,
    )


def summarise(predicted_ms: Array, measured_ms: Array) -> ErrorSummary | None:
    """Errors of predictions; `None` of no steps."""
    if measured_ms.size == 0:
        return None
    relative = 100.0 * (predicted_ms - measured_ms) / measured_ms
    size = np.abs(relative)
    return ErrorSummary(
        count=int(size.size),
        mape_percent=float(size.mean()),
        median_percent=float(np.median(size)),
        p95_percent=float(np.percentile(size, 95)),
        bias_percent=float(relative.mean()),
    )


def warning(phase: str, error: Mapping[str, float | None], of: str) -> str | None:
    """One line about errors past `WARN_PERCENT`, `None` where they are below.

    Args:
        phase: Predictor they are of.
        error: `ErrorSummary.as_dict`.
        of: Steps they were seen on, e.g. ``held-out steps``.
    """
    mape, median = error.get("mape_percent"), error.get("median_percent")
    if mape is None or median is None or mape <= WARN_PERCENT:
        return None
    if median <= WARN_PERCENT / 2:
        why = "a few steps are far off: look for stalls and wrong rows in the log"
    else:
        why = "steps of one engine and configuration are expected"
    return (
        f"{phase} predictions are off by {mape:.0f} % on average (median "
        f"{median:.1f} %) on {of}, over {WARN_PERCENT:g} %: {why}"
    )


def residual_quantiles(predicted_ms: Array, measured_ms: Array) -> dict[str, float]:
    """Quantiles of measured / predicted, empty of no steps."""
    if measured_ms.size == 0:
        return {}
    ratio = measured_ms / predicted_ms
    values = np.quantile(ratio, RESIDUAL_QUANTILES)
    return {
        f"{q:g}": round(float(v), 6)
        for q, v in zip(RESIDUAL_QUANTILES, values, strict=True)
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Regime:
    """Errors of the steps of one phase that fall into one bucket.

    Attributes:
        phase: ``prefill``, ``decode`` or ``mixed``.
        quantity: What the bucket is of, in words.
        low: Exclusive lower edge.
        high: Inclusive upper edge, infinite for the last.
        error: Their errors.
    """

    phase: str
    quantity: str
    low: float
    high: float
    error: ErrorSummary


def regimes(
    phase: str, steps: Steps, predicted_ms: Array, letters: Iterable[str]
) -> list[Regime]:
    """Errors of one phase's steps by bucket, buckets without steps left out.

    Args:
        phase: Name of the phase, for the rows.
        steps: Steps of that phase only.
        predicted_ms: Their predictions.
        letters: Quantities to bucket by, of ``B``, ``K``, ``c``.
    """
    rows = []
    for letter in letters:
        values = steps.letters()[letter]
        edges = (0.0, *_EDGES[letter], float("inf"))
        for low, high in itertools.pairwise(edges):
            mask: npt.NDArray[np.bool_] = (values > low) & (values <= high)
            error = summarise(predicted_ms[mask], steps.latency_ms[mask])
            if error is not None:
                rows.append(Regime(phase, _NAMES[letter], low, high, error))
    return rows
