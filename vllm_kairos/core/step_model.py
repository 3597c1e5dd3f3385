# SPDX-License-Identifier: Apache-2.0
"""Step latency as a function of what a step holds (paper §3.3, Eq. 4).

The paper writes ``T_step(B, K, chi)`` and lumps into ``K`` both the KV of the
requests being decoded and the cached prefix of the request being prefilled.
Here they are apart:

=====  ======================================================================
``B``  decode requests in the step
``K``  KV tokens of those decode requests
``c``  prefill tokens computed in the step, over all its prefills
``p``  tokens those prefills had already computed before the step
``n``  prefill requests in the step
=====  ======================================================================

A prediction is linear in its coefficients and at most quadratic in ``c``.
Coefficients are never negative, so a larger chunk is never predicted faster.
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


class StepModel:
    """The three predictors, evaluated without scikit-learn.

    A step with decodes only is `decode`; one with prefills only is `prefill`;
    a step with both is ``decode + mixed`` where `mixed` predicts what the
    prefill adds (Eq. 4).

    Args:
        prefill: Latency of a prefill-only step.
        decode: Latency of a decode-only step.
        mixed: Latency a prefill adds to a step that decodes.
    """

    __slots__ = ("prefill", "decode", "mixed", "_pf", "_dec", "_mix")

    def __init__(self, prefill: Predictor, decode: Predictor, mixed: Predictor):
        self.prefill = prefill
        self.decode = decode
        self.mixed = mixed
        self._pf = prefill.vector()
        dec = decode.vector()
        self._dec = (dec[0], dec[1], dec[2])
        # The mixed predictor with the decode baseline folded in.
        self._mix = tuple(d + m for d, m in zip(dec, mixed.vector(), strict=True))

    def step_ms(
        self,
        decodes: int,
        decode_kv_tokens: float,
        prefill_tokens: int = 0,
        prefill_kv_tokens: float = 0,
        prefills: int = 1,
    ) -> float:
        """Predicted latency of one step in milliseconds (Eq. 4).

        Args:
            decodes: ``B``.
            decode_kv_tokens: ``K``.
            prefill_tokens: ``c``.
            prefill_kv_tokens: ``p``.
            prefills: ``n``.
        """
        if prefill_tokens <= 0:
            if decodes <= 0:
                return 0.0
            one, b, k = self._dec
            return one + b * decodes + k * decode_kv_tokens
        one, b, k, c, p, n, cp, cc, cb, ck = self._mix if decodes > 0 else self._pf
        return (
            one
            + b * decodes
            + k * decode_kv_tokens
            + p * prefill_kv_tokens
            + n * prefills
            + prefill_tokens
            * (
                c
                + cb * decodes
                + ck * decode_kv_tokens
                + (cp * prefill_kv_tokens + cc * prefill_tokens) / prefills
            )
        )

    def step_ms_array(
        self,
        decodes: npt.ArrayLike,
        decode_kv_tokens: npt.ArrayLike,
        prefill_tokens: npt.ArrayLike,
        prefill_kv_tokens: npt.ArrayLike,
        prefills: npt.ArrayLike,
    ) -> Array:
        """`step_ms` of many steps at once, shape ``(steps,)``, milliseconds."""
        b = np.asarray(decodes, dtype=np.float64)
        k = np.asarray(decode_kv_tokens, dtype=np.float64)
        c = np.asarray(prefill_tokens, dtype=np.float64)
        p = np.asarray(prefill_kv_tokens, dtype=np.float64)
        n = np.maximum(np.asarray(prefills, dtype=np.float64), 1.0)

        def evaluate(w: tuple[float, ...]) -> Array:
            one, wb, wk, wc, wp, wn, cp, cc, cb, ck = w
            inner = wc + cb * b + ck * k + (cp * p + cc * c) / n
            return one + wb * b + wk * k + wp * p + wn * n + c * inner

        one, wb, wk = self._dec
        decode_only = np.where(b > 0, one + wb * b + wk * k, 0.0)
        with_prefill = np.where(b > 0, evaluate(self._mix), evaluate(self._pf))
        out: Array = np.where(c > 0, with_prefill, decode_only)
        return out

    def quadratic(
        self, decodes: int, decode_kv_tokens: float, prefill_kv_tokens: float
    ) -> tuple[float, float, float]:
        """``(a0, a1, a2)`` with ``T(c) = a0 + a1·c + a2·c²`` for ``c > 0``.

        For one prefill that shares the step with ``B`` decodes.
        """
        one, b, k, c, p, n, cp, cc, cb, ck = self._mix if decodes > 0 else self._pf
        return (
            one + b * decodes + k * decode_kv_tokens + p * prefill_kv_tokens + n,
            c + cb * decodes + ck * decode_kv_tokens + cp * prefill_kv_tokens,
            cc,
        )

    def largest_chunk(
        self,
        decodes: int,
        decode_kv_tokens: float,
        prefill_kv_tokens: float,
        limit_ms: float,
        most_tokens: int,
    ) -> int:
        """Largest ``c`` whose step is predicted within `limit_ms`.

        The closed form of Eq. 5 over all chunk sizes instead of a candidate
        list: the root of the quadratic in ``c``.

        Args:
            decodes: ``B``.
            decode_kv_tokens: ``K``.
            prefill_kv_tokens: ``p`` of the one request being prefilled.
            limit_ms: Bound on the step, e.g. ``beta * tau``.
            most_tokens: Upper bound on the answer.

        Returns:
            Tokens, ``0`` when not even one fits.
        """
        if most_tokens <= 0:
            return 0
        a0, a1, a2 = self.quadratic(decodes, decode_kv_tokens, prefill_kv_tokens)
        room = limit_ms - a0
        if room < 0.0:
            return 0
        if a1 == 0.0 and a2 == 0.0:
            return most_tokens
        # 2·room / (a1 + sqrt(a1² + 4·a2·room)) is stable as a2 -> 0.
        root = 2.0 * room / (a1 + math.sqrt(a1 * a1 + 4.0 * a2 * room))
        chunk = min(most_tokens, int(root))
        # Rounding may land one token over the bound; the invariant is exact.
        while chunk > 0 and (
            self.step_ms(decodes, decode_kv_tokens, chunk, prefill_kv_tokens) > limit_ms
        ):
            chunk -= 1
        return chunk
