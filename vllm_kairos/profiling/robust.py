# SPDX-License-Identifier: Apache-2.0
"""One robust fit of one form of a predictor.

Relative least squares with Huber weights on top, without strays: no single
row of a log has a say against all the others, neither by its latency, long or
short, nor by counts far beyond theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LinearRegression

from vllm_kairos.core.predictor import TERMS, Array
from vllm_kairos.core.step_model import Combine
from vllm_kairos.profiling import clean

_HUBER = 1.0
_HUBER_ROUNDS = 12
#: A latency below this percentile weighs as one at it in the first round.
_SHORT_PERCENTILE = 10
#: A quantity is far out at so many times this percentile of its own.
_FAR, _USUAL_PERCENTILE = 10, 95


@dataclass(frozen=True, slots=True)
class Form:
    """A named form of a predictor.

    Attributes:
        name: Its name in profiles and reports.
        terms: Terms of `predictor.TERMS` it uses.
        combine: How a mixed predictor joins the decode step.
    """

    name: str
    terms: tuple[str, ...]
    combine: Combine = "add"


@dataclass(frozen=True)
class Weights:
    """A robust fit of one form: weights over `TERMS` and the estimator."""

    vector: Array
    estimator: LinearRegression
    columns: tuple[int, ...]
    scale: Array


def combine_ms(form: Form, terms_ms: Array, baseline_ms: Array) -> Array:
    """Latency of whole steps from the terms of a form and the decode step."""
    if form.combine == "max":
        return np.maximum(terms_ms, baseline_ms)
    return terms_ms + baseline_ms


def without_strays(
    form: Form,
    x: Array,
    y: Array,
    baseline: Array,
    anchor: tuple[Array, Array] | None = None,
) -> tuple[Weights, npt.NDArray[np.bool_]]:
    """A robust fit, and the rows it was done without."""
    if anchor is not None and anchor[1][0] > 0.0:
        row, latency = anchor
        fitted, strays = without_strays(
            form,
            np.concatenate([x, row]),
            np.concatenate([y, latency]),
            np.concatenate([baseline, [0.0]]),
        )
        return fitted, strays[:-1]
    # A row far beyond all the others would be fitted whatever it says; they
    # judge it first.
    near = ~_far(x)
    fitted = _robust(form, x[near], y[near], baseline[near])
    strays = clean.stray(combine_ms(form, x @ fitted.vector, baseline), y)
    keep = ~strays
    if not (keep & near).all():
        fitted = _robust(form, x[keep], y[keep], baseline[keep])
    return fitted, strays


def _far(x: Array) -> npt.NDArray[np.bool_]:
    """Rows of ``B``, ``K``, ``c`` or ``p`` many times what other rows hold."""
    far = np.zeros(len(x), dtype=np.bool_)
    for term in ("B", "K", "c", "p"):
        values = x[:, TERMS.index(term)]
        some = values[values > 0]
        if some.size:
            usual = np.percentile(some, _USUAL_PERCENTILE, method="lower")
            far |= values > _FAR * usual
    return far


def _robust(form: Form, x: Array, y: Array, baseline: Array) -> Weights:
    """Huber regression of the relative residual, coefficients >= 0."""
    columns = tuple(TERMS.index(term) for term in form.terms)
    used = x[:, columns]
    scale = np.abs(used).max(axis=0)
    # A quantity that never occurs keeps a coefficient of zero.
    scale[scale == 0.0] = 1.0
    target = y - baseline if form.combine == "add" else y
    huber = np.ones_like(y)
    # Relative to the longer of measured and predicted: relative to the measured
    # alone, a step logged in next to no time outweighs all the others. Nothing
    # is predicted yet in the first round.
    longer = np.maximum(y, np.percentile(y, _SHORT_PERCENTILE))
    for _ in range(_HUBER_ROUNDS):
        estimator = LinearRegression(positive=True, fit_intercept=False)
        weight = huber * (longer.min() / longer) ** 2
        estimator.fit(used / scale, target, sample_weight=weight)
        fitted = used @ (estimator.coef_ / scale)
        residual = np.abs(fitted - target) / longer
        longer = np.maximum(y, fitted + (y - target))
        spread = 1.4826 * float(np.median(residual))
        if spread <= 1e-12:
            break
        before = huber
        huber = np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-12))
        if np.max(np.abs(huber - before)) < 1e-3:
            break
    vector = np.zeros(len(TERMS))
    vector[list(columns)] = estimator.coef_ / scale
    return Weights(vector, estimator, columns, scale)
