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

A mixed step is the decode step plus what the prefill adds (Eq. 4), or, where
the profile says ``max``, the longer of the decode step and the mixed
predictor: a memory-bound decode batch hides the arithmetic of a small chunk,
which a sum of non-negative terms cannot express.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_kairos.core.predictor import Array, Predictor, polynomial_ms
from vllm_kairos.core.step_load import StepLoad

_BLOCK_ROWS = 8192

#: Least and greatest value seen of quantities by their letter.
Ranges = Mapping[str, tuple[float, float]]

#: How the mixed predictor joins the decode step.
Combine = Literal["add", "max"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted step and what of it lies outside the profiled ranges.

    Attributes:
        ms: Predicted latency in milliseconds.
        outside: Letters of the quantities outside the ranges seen, empty
            where the prediction interpolates.
    """

    ms: float
    outside: tuple[str, ...] = ()

    @property
    def extrapolated(self) -> bool:
        """Whether any quantity lies outside the ranges seen."""
        return bool(self.outside)


class StepModel:
    """The three predictors, evaluated without scikit-learn.

    A step with decodes only is `decode`; one with prefills only is `prefill`;
    a step with both is ``decode + mixed`` where `mixed` predicts what the
    prefill adds (Eq. 4), or ``max(decode, mixed)`` where it predicts the
    whole step.

    Args:
        prefill: Latency of a prefill-only step.
        decode: Latency of a decode-only step.
        mixed: Latency a prefill adds to a step that decodes, or with
            ``max`` the latency of a step bound by its prefill.
        combine: ``add`` or ``max``.
        ranges: Per predictor (``prefill``, ``decode``, ``mixed``) the least
            and greatest value seen by letter; nothing is flagged as
            extrapolated where absent.
    """

    __slots__ = (
        "prefill",
        "decode",
        "mixed",
        "combine",
        "ranges",
        "_pf",
        "_dec",
        "_mix",
        "_max",
    )

    def __init__(
        self,
        prefill: Predictor,
        decode: Predictor,
        mixed: Predictor,
        combine: Combine = "add",
        ranges: Mapping[str, Ranges] | None = None,
    ):
        if combine not in ("add", "max"):
            raise ValueError(f"combine is {combine!r}, expected 'add' or 'max'")
        self.prefill = prefill
        self.decode = decode
        self.mixed = mixed
        self.combine = combine
        self.ranges: Mapping[str, Ranges] = ranges or {}
        self._pf = prefill.vector()
        dec = decode.vector()
        self._dec = (dec[0], dec[1], dec[2])
        self._max = combine == "max"
        # A sum has the decode baseline folded in. Either way a mixed step is
        # never predicted below the decode step that it contains.
        mix = mixed.vector()
        self._mix = (
            mix if self._max else tuple(d + m for d, m in zip(dec, mix, strict=True))
        )

    def coefficients(self, decoding: bool) -> tuple[float, ...]:
        """Weights of `TERMS` of a step that prefills, decode step folded in.

        Args:
            decoding: Whether it decodes too.
        """
        return self._mix if decoding else self._pf

    @property
    def decode_coefficients(self) -> tuple[float, float, float]:
        """Weights of ``1``, ``B`` and ``K`` of a step that only decodes."""
        return self._dec

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
        ms = (
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
        if self._max and decodes > 0:
            one, b, k = self._dec
            decode_ms = one + b * decodes + k * decode_kv_tokens
            if decode_ms > ms:
                return decode_ms
        return ms

    def load_ms(self, load: StepLoad) -> float:
        """Predicted latency of a step of which every prefill is known.

        `step_ms` takes the sums over several prefills at their means, as a
        step record holds them; here they are exact. With one prefill both
        are the same.
        """
        decodes, kv_tokens = load.decodes, load.decode_kv_tokens
        if load.prefill_tokens <= 0:
            if decodes <= 0:
                return 0.0
            one, b, k = self._dec
            return one + b * decodes + k * kv_tokens
        # Every step of an engine comes by here, so nothing is called.
        one, b, k, c, p, n, cp, cc, cb, ck = self._mix if decodes > 0 else self._pf
        ms = (
            one
            + b * decodes
            + k * kv_tokens
            + p * load.prefill_kv_tokens
            + n * load.prefills
            + load.prefill_tokens * (c + cb * decodes + ck * kv_tokens)
            + cp * load.attended
            + cc * load.squared
        )
        if self._max and decodes > 0:
            one, b, k = self._dec
            decode_ms = one + b * decodes + k * kv_tokens
            if decode_ms > ms:
                return decode_ms
        return ms

    def largest_addition(
        self, load: StepLoad, computed_tokens: int, limit_ms: float, most_tokens: int
    ) -> int:
        """Largest prefill that `load` can take within `limit_ms`.

        `largest_chunk` beside prefills placed already: the same quadratic.

        Args:
            load: The step so far.
            computed_tokens: ``p`` of the prefill to be placed.
            limit_ms: Bound on the step.
            most_tokens: Upper bound on the answer.

        Returns:
            Tokens, ``0`` when not even one fits.
        """
        if most_tokens <= 0:
            return 0
        decodes, kv_tokens = load.decodes, load.decode_kv_tokens
        if decodes > 0:
            if self._max:
                one, b, k = self._dec
                if one + b * decodes + k * kv_tokens > limit_ms:
                    return 0
            one, b, k, c, p, n, cp, cc, cb, ck = self._mix
        else:
            one, b, k, c, p, n, cp, cc, cb, ck = self._pf
        per_token = c + cb * decodes + ck * kv_tokens
        fixed = one + b * decodes + k * kv_tokens
        if load.prefills:
            fixed += (
                p * load.prefill_kv_tokens
                + n * load.prefills
                + load.prefill_tokens * per_token
                + cp * load.attended
                + cc * load.squared
            )
        fixed += p * computed_tokens + n
        past = cp * computed_tokens
        chunk = _root(limit_ms - fixed, per_token + past, cc, most_tokens)
        # Rounding may land one token over the bound; the invariant is exact.
        while (
            chunk > 0 and fixed + chunk * (per_token + (past + cc * chunk)) > limit_ms
        ):
            chunk -= 1
        return chunk

    def estimate(
        self,
        decodes: int,
        decode_kv_tokens: float,
        prefill_tokens: int = 0,
        prefill_kv_tokens: float = 0,
        prefills: int = 1,
    ) -> Estimate:
        """`step_ms` with a flag for what lies outside the ranges seen.

        Arguments as for `step_ms`.
        """
        what = (decodes, decode_kv_tokens, prefill_tokens, prefill_kv_tokens, prefills)
        return Estimate(self.step_ms(*what), self.outside(*what))

    def outside(
        self,
        decodes: int,
        decode_kv_tokens: float,
        prefill_tokens: int = 0,
        prefill_kv_tokens: float = 0,
        prefills: int = 1,
    ) -> tuple[str, ...]:
        """Letters of the quantities outside the ranges seen.

        Arguments as for `step_ms`.
        """
        values: tuple[tuple[str, float], ...]
        values = (("B", decodes), ("K", decode_kv_tokens))
        if prefill_tokens <= 0:
            if decodes <= 0:
                return ()
            phase = "decode"
        else:
            phase = "mixed" if decodes > 0 else "prefill"
            values += ("c", prefill_tokens), ("p", prefill_kv_tokens), ("n", prefills)
        seen = self.ranges.get(phase, {})
        return tuple(
            letter
            for letter, value in values
            if letter in seen and not seen[letter][0] <= value <= seen[letter][1]
        )

    def step_ms_array(
        self,
        decodes: npt.ArrayLike,
        decode_kv_tokens: npt.ArrayLike,
        prefill_tokens: npt.ArrayLike,
        prefill_kv_tokens: npt.ArrayLike,
        prefills: npt.ArrayLike,
    ) -> Array:
        """`step_ms` of many steps at once, milliseconds.

        Arguments broadcast against one another; the answer has their shape.
        """
        arrays = np.broadcast_arrays(
            *(
                np.asarray(values)
                for values in (
                    decodes,
                    decode_kv_tokens,
                    prefill_tokens,
                    prefill_kv_tokens,
                    prefills,
                )
            )
        )
        shape = arrays[0].shape
        flat = [values.reshape(-1) for values in arrays]
        out = np.empty(flat[0].size, dtype=np.float64)
        # Blocks that stay in the processor's cache: the arithmetic is cheap
        # beside moving a dozen temporaries of a million rows each.
        for start in range(0, out.size, _BLOCK_ROWS):
            part = slice(start, start + _BLOCK_ROWS)
            out[part] = self._step_ms_block(
                *(values[part].astype(np.float64) for values in flat)
            )
        return out.reshape(shape)

    def _step_ms_block(self, b: Array, k: Array, c: Array, p: Array, n: Array) -> Array:
        """`step_ms` of as many steps as fit the cache."""
        np.maximum(n, 1.0, out=n)

        one, wb, wk = self._dec
        out: Array = one + wb * b + wk * k
        decoding = b > 0
        filling = c > 0
        out[~decoding] = 0.0
        both = polynomial_ms(self._mix, b, k, c, p, n)
        np.maximum(both, out, out=both)
        alone = filling & ~decoding
        np.copyto(out, both, where=filling & decoding)
        if alone.any():
            np.copyto(out, polynomial_ms(self._pf, b, k, c, p, n), where=alone)
        return out

    def quadratic(
        self, decodes: int, decode_kv_tokens: float, prefill_kv_tokens: float
    ) -> tuple[float, float, float]:
        """``(a0, a1, a2)`` with ``T(c) = a0 + a1·c + a2·c²`` for ``c > 0``.

        For one prefill that shares the step with ``B`` decodes. Where
        `combine` is ``max``, ``T(c)`` is never below ``step_ms(B, K)``: a
        step fits a limit if both do.
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
        if self._max and self.step_ms(decodes, decode_kv_tokens) > limit_ms:
            return 0
        a0, a1, a2 = self.quadratic(decodes, decode_kv_tokens, prefill_kv_tokens)
        chunk = _root(limit_ms - a0, a1, a2, most_tokens)
        # Rounding may land one token over the bound; the invariant is exact.
        while chunk > 0 and (
            self.step_ms(decodes, decode_kv_tokens, chunk, prefill_kv_tokens) > limit_ms
        ):
            chunk -= 1
        return chunk


def _root(room_ms: float, a1: float, a2: float, most_tokens: int) -> int:
    """Largest ``c <= most_tokens`` with ``a1·c + a2·c² <= room_ms``, or one more.

    Rounding may land a token over the bound; the caller steps back.
    """
    if room_ms < 0.0:
        return 0
    if a1 == 0.0 and a2 == 0.0:
        return most_tokens
    if room_ms == 0.0:
        return 0
    # The root as 2·room / slope is stable as a2 -> 0, and compared before it is
    # divided it can neither overflow nor divide by zero.
    slope = a1 + math.sqrt(a1 * a1 + 4.0 * a2 * room_ms)
    if slope * most_tokens <= 2.0 * room_ms:
        return most_tokens
    return int(2.0 * room_ms / slope)
