# SPDX-License-Identifier: Apache-2.0
"""A linear predictor of step latency, and its terms over many steps.

The letters are those of `step_model`, which joins three predictors into the
latency of any step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Feature terms a predictor may use, by name. ``cp`` and ``cc`` are the
#: attention of a chunk over its prefix and over itself; with ``n`` prefills
#: in one step the sums over requests are taken at their means, since a step
#: record holds totals only.
TERMS = ("1", "B", "K", "c", "p", "n", "cp", "cc", "cB", "cK")


@dataclass(frozen=True, slots=True)
class Predictor:
    """One linear step-latency predictor.

    Attributes:
        terms: Coefficient in milliseconds per unit of each term in `TERMS`;
            absent terms are zero.

    Raises:
        ValueError: A term is unknown, or a coefficient is negative or not
            finite.
    """

    terms: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, value in self.terms.items():
            if name not in TERMS:
                raise ValueError(f"unknown term {name!r}, expected one of {TERMS}")
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(
                    f"coefficient of {name!r} is {value!r}, expected a finite "
                    "number >= 0"
                )

    def vector(self) -> tuple[float, ...]:
        """Coefficients in the order of `TERMS`."""
        return tuple(float(self.terms.get(name, 0.0)) for name in TERMS)


def feature_matrix(
    decodes: npt.ArrayLike,
    decode_kv_tokens: npt.ArrayLike,
    prefill_tokens: npt.ArrayLike,
    prefill_kv_tokens: npt.ArrayLike,
    prefills: npt.ArrayLike,
) -> Array:
    """Columns of `TERMS` for many steps.

    Args:
        decodes: ``B`` of each step, shape ``(steps,)``; likewise the others.
        decode_kv_tokens: ``K``.
        prefill_tokens: ``c``.
        prefill_kv_tokens: ``p``.
        prefills: ``n``; zero is read as one where there are prefill tokens.

    Returns:
        Shape ``(steps, len(TERMS))``.
    """
    b = np.asarray(decodes, dtype=np.float64)
    k = np.asarray(decode_kv_tokens, dtype=np.float64)
    c = np.asarray(prefill_tokens, dtype=np.float64)
    p = np.asarray(prefill_kv_tokens, dtype=np.float64)
    n = np.where(c > 0, np.maximum(np.asarray(prefills, dtype=np.float64), 1.0), 0.0)
    each = np.maximum(n, 1.0)
    return np.stack(
        [np.ones_like(c), b, k, c, p, n, c * p / each, c * c / each, c * b, c * k],
        axis=-1,
    )


def polynomial_ms(
    weights: tuple[float, ...], b: Array, k: Array, c: Array, p: Array, n: Array
) -> Array:
    """A predictor's latency of many steps that prefill.

    Args:
        weights: Coefficients in the order of `TERMS`.
        b: ``B`` of each step, shape ``(steps,)``; likewise the others.
        k: ``K``.
        c: ``c``.
        p: ``p``.
        n: ``n``, at least one.

    Returns:
        Milliseconds, shape ``(steps,)``.
    """
    one, wb, wk, wc, wp, wn, cp, cc, cb, ck = weights
    inner = np.full_like(c, wc)
    if cp or cc:
        inner += (cp * p + cc * c) / n
    for weight, values in ((cb, b), (ck, k)):
        if weight:
            inner += weight * values
    inner *= c
    inner += one
    for weight, values in ((wb, b), (wk, k), (wp, p), (wn, n)):
        if weight:
            inner += weight * values
    return inner
