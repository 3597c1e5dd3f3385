# SPDX-License-Identifier: Apache-2.0
"""Largest safe chunks on one node (Eq. 5 in closed form), fast.

A decision asks for schedules on every decode node of a fleet, on every
request's path. What depends on the node alone is worked out once, a chunk then
takes one square root, and most nodes are ruled out by a bound from below on
their schedule's total, without the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_kairos.core.step_model import StepModel

#: A bound is given away by this share, so that rounding cannot lift it over
#: what it bounds.
_ROUNDING = 1e-9
#: Points at which `ChunkPlanner.floor_ms` takes the size of a chunk.
_POINTS = 3


@dataclass(frozen=True, slots=True)
class Schedule:
    """A chunk schedule and its predicted steps.

    Attributes:
        chunks: ``[chi_1, ...]``: tokens of each whole step, decodes included.
        step_ms: Predicted latency of each of those steps.
    """

    chunks: tuple[int, ...]
    step_ms: tuple[float, ...]

    @property
    def total_ms(self) -> float:
        """Eq. 6: the sum of the step latencies."""
        return sum(self.step_ms)


class ChunkPlanner:
    """Schedules of largest safe chunks beside one node's decodes.

    Args:
        model: Step model of the node.
        decodes: ``B_n``.
        decode_kv_tokens: ``K_n``.
        budget_tokens: The engine's own step budget.
        limit_ms: ``beta * tau``.
        smallest_tokens: A chunk below this, unless it is the last, is held to
            be no headroom at all: it would cost more in fixed step time than
            it serves.

    Attributes:
        first_tokens: The first chunk of a long prompt of which nothing is
            cached; ``0`` where not one token fits.
        key: Equal for planners that plan alike.
    """

    __slots__ = (
        "key",
        "decodes",
        "limit_ms",
        "first_tokens",
        "_room",
        "_smallest",
        "_base",
        "_n",
        "_p",
        "_lin",
        "_cp",
        "_cc",
        "_decode_ms",
        "_first_ms",
        "_four",
        "_headroom",
        "_least_per_token",
        "_short_of_limit",
        "_last_ms",
    )

    def __init__(
        self,
        model: StepModel,
        decodes: int,
        decode_kv_tokens: float,
        budget_tokens: int,
        limit_ms: float,
        smallest_tokens: int = 16,
    ):
        plan = (decodes, decode_kv_tokens, budget_tokens, limit_ms)
        self.key: object = (id(model), plan)
        self.decodes = decodes
        self.limit_ms = limit_ms
        self._room = budget_tokens - decodes
        self._smallest = smallest_tokens
        # Sums in the order of `StepModel.step_ms`: a chunk found here is
        # within the limit there to the last bit.
        one, b, k, c, p, n, cp, cc, cb, ck = model.coefficients(decodes > 0)
        self._base = one + b * decodes + k * decode_kv_tokens
        self._lin = c + cb * decodes + ck * decode_kv_tokens
        self._n, self._p, self._cp, self._cc = n, p, cp, cc
        # A step of ``max`` is never below its decode step; one of ``add``
        # holds it already.
        self._decode_ms = (
            model.step_ms(decodes, decode_kv_tokens)
            if decodes > 0 and model.combine == "max"
            else 0.0
        )
        self.first_tokens = model.largest_chunk(
            decodes, decode_kv_tokens, 0, limit_ms, self._room
        )
        self._first_ms = model.step_ms(decodes, decode_kv_tokens, self.first_tokens)
        # For the bounds. A step that is not the last is the budget's size, or
        # one token more would break the limit; no step is below its fixed part.
        self._four = 4.0 * cc
        self._headroom = limit_ms - self._base - n
        self._least_per_token = 1.0 / max(self._room, 1)
        self._short_of_limit = limit_ms - self._lin - cc * (2 * self.first_tokens + 1)
        self._last_ms = max(self._base + n, self._decode_ms) * (1.0 - _ROUNDING)

    def schedule(self, prompt_tokens: int, cached_tokens: int = 0) -> Schedule | None:
        """The schedule of a prompt, `None` where none is safe.

        Args:
            prompt_tokens: ``l_r``.
            cached_tokens: Prefix of the prompt already on the node.
        """
        chunks: list[int] = []
        steps: list[float] = []
        total = self.walk_ms(prompt_tokens, cached_tokens, math.inf, chunks, steps)
        return None if total is None else Schedule(tuple(chunks), tuple(steps))

    def walk_ms(
        self,
        prompt_tokens: int,
        cached_tokens: int = 0,
        most_ms: float = math.inf,
        chunks: list[int] | None = None,
        steps: list[float] | None = None,
    ) -> float | None:
        """Total of a prompt's schedule, the schedule itself where asked for.

        `StepModel.largest_chunk` and `StepModel.step_ms` written out: this
        loop is where the time of a decision goes.

        Args:
            prompt_tokens: ``l_r``.
            cached_tokens: Prefix of the prompt already on the node.
            most_ms: Where the total is above this, any number above it may be
                returned, also in place of `None`.
            chunks: Takes ``[chi_1, ...]``.
            steps: Takes the latency of each step.

        Returns:
            Eq. 6; `None` where there is no schedule.
        """
        sqrt = math.sqrt
        base, lin, wp, n = self._base, self._lin, self._p, self._n
        cp, cc, limit = self._cp, self._cc, self.limit_ms
        most, smallest, decode_ms = self._room, self._smallest, self._decode_ms
        if decode_ms > limit or most <= 0:
            return None
        served = cached_tokens if cached_tokens < prompt_tokens else prompt_tokens - 1
        four = self._four
        if chunks is None:
            chunks = []
        if steps is None:
            steps = []
        if wp == 0.0 and decode_ms == 0.0 and lin > 0.0 and self._headroom > 0.0:
            return self._walk_level_ms(prompt_tokens, served, most_ms, chunks, steps)
        add, add_ms, decodes = chunks.append, steps.append, self.decodes
        total = 0.0
        while served < prompt_tokens:
            fixed = base + wp * served + n
            slope = lin + cp * served
            room = limit - fixed
            if room > 0.0:
                root = slope + sqrt(slope * slope + four * room)
                # Rounding may land one token over the bound.
                chunk = int(2.0 * room / root) if root * most > 2.0 * room else most
            else:
                flat = slope == 0.0 and cc == 0.0 and room == 0.0
                chunk = most if flat else 0
            end = served + chunk
            if end > prompt_tokens:
                chunk = prompt_tokens - served
                end = prompt_tokens
            step = fixed + chunk * (lin + (cp * served + cc * chunk))
            if step > limit:
                while step > limit and chunk > 0:
                    chunk -= 1
                    step = fixed + chunk * (lin + (cp * served + cc * chunk))
                end = served + chunk
            if chunk < smallest and (chunk == 0 or end < prompt_tokens):
                return None
            served = end
            if step < decode_ms:
                step = decode_ms
            total += step
            add(chunk + decodes)
            add_ms(step)
            if total > most_ms:
                return total
        return total

    def _walk_level_ms(
        self,
        prompt_tokens: int,
        served: int,
        most_ms: float,
        chunks: list[int],
        steps: list[float],
    ) -> float | None:
        """`walk_ms` where the fixed part of a step is the same in all of them.

        So it is with most profiles, and there is a quarter less to do.
        """
        sqrt = math.sqrt
        lin, cp, cc, limit = self._lin, self._cp, self._cc, self.limit_ms
        most, smallest, decodes = self._room, self._smallest, self.decodes
        add, add_ms = chunks.append, steps.append
        fixed = self._base + self._n
        room = limit - fixed
        twice, under = 2.0 * room, self._four * room
        total = 0.0
        while served < prompt_tokens:
            grown = cp * served
            slope = lin + grown
            root = slope + sqrt(slope * slope + under)
            chunk = int(twice / root) if root * most > twice else most
            end = served + chunk
            if end >= prompt_tokens:
                end = prompt_tokens
                chunk = end - served
            step = fixed + chunk * (lin + (grown + cc * chunk))
            if step > limit:
                while step > limit and chunk > 0:
                    chunk -= 1
                    step = fixed + chunk * (lin + (grown + cc * chunk))
                end = served + chunk
            if chunk < smallest and (chunk == 0 or end < prompt_tokens):
                return None
            served = end
            total += step
            add(chunk + decodes)
            add_ms(step)
            if total > most_ms:
                return total
        return total

    def quick_floor_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """A bound from below on `walk_ms`; infinite where there is no schedule.

        `floor_ms` of one part: for a first look at every node.
        """
        first = self.first_tokens
        if first == 0:
            return math.inf
        if cached_tokens >= prompt_tokens:
            cached_tokens = prompt_tokens - 1
        left = prompt_tokens - cached_tokens
        last = self._last_ms
        if left <= first:
            return last
        start = cached_tokens + 0.5 * left - first
        if start < cached_tokens:
            start = cached_tokens
        room = self._headroom - self._p * start
        per_token = self._least_per_token
        if room > 0.0:
            slope = self._lin + self._cp * start
            root = slope + math.sqrt(slope * slope + self._four * room)
            if root > 2.0 * per_token * room:
                per_token = root / (2.0 * room)
        full = self._short_of_limit - self._cp * prompt_tokens
        if self._first_ms < full:
            full = self._first_ms
        if full < last:
            full = last
        # So many whole chunks at least, and a last one.
        whole = int(left * per_token * (1.0 - _ROUNDING) - _ROUNDING)
        return (whole * full + last) * (1.0 - _ROUNDING)

    def floor_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """A closer bound from below on `total_ms`, at the cost of few roots.

        Chunk ``i`` starts at ``p_i`` and is no larger than the root
        ``c(p_i)``, so there are at least as many as the integral of
        ``1 / c(max(0, x - s))`` over the prompt, with ``s`` no smaller than any
        chunk there. That integrand is convex, so the midpoint rule is below
        the integral.
        """
        first = self.first_tokens
        if first == 0:
            return math.inf
        if cached_tokens >= prompt_tokens:
            cached_tokens = prompt_tokens - 1
        left = prompt_tokens - cached_tokens
        last_ms = self._last_ms
        if left <= first:
            return last_ms
        width = left / _POINTS
        at = cached_tokens + 0.5 * width
        chunks = 0.0
        shift: float = first
        seen, last = -math.inf, shift
        for _ in range(_POINTS):
            if seen <= at - 0.5 * width - first:
                # Chunks of this part start later and are no larger.
                shift = min(shift, last)
            start = at - shift
            if start < cached_tokens:
                start = cached_tokens
            room = self._headroom - self._p * start
            per_token = self._least_per_token
            if room > 0.0:
                slope = self._lin + self._cp * start
                root = slope + math.sqrt(slope * slope + self._four * room)
                if root > 2.0 * per_token * room:
                    per_token = root / (2.0 * room)
            elif room < -_ROUNDING * self.limit_ms:
                # The chunk this point lies in starts no sooner.
                return math.inf
            chunks += width * per_token
            seen, last = start, 1.0 / per_token
            at += width
        full = self._short_of_limit - self._cp * prompt_tokens
        full = max(min(full, self._first_ms), last_ms)
        whole = int(chunks * (1.0 - _ROUNDING) - _ROUNDING)
        whole = max(whole, (left - 1) // first)
        return (whole * full + last_ms) * (1.0 - _ROUNDING)
