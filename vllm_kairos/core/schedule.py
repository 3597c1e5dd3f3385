# SPDX-License-Identifier: Apache-2.0
"""TBT-safe chunk schedules (paper §4.3.2, Eq. 5 and 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_kairos.core.chunk_planner import ChunkPlanner, Schedule
from vllm_kairos.core.step_model import StepModel

__all__ = [
    "CandidatePlanner",
    "ChunkPlanner",
    "Schedule",
    "closed_form_schedule",
    "paper_schedule",
]


def paper_schedule(
    model: StepModel,
    decodes: int,
    decode_kv_tokens: int,
    prompt_tokens: int,
    candidates: Sequence[int],
    limit_ms: float,
    *,
    cached_tokens: int = 0,
    literal_progress: bool = False,
) -> Schedule | None:
    """The greedy schedule of Algorithm 1, or `None` where none is safe.

    At each step the largest ``chi`` of `candidates` whose predicted step is
    within `limit_ms` (Eq. 5).

    Args:
        model: Step model of the decode node.
        decodes: ``B_n``.
        decode_kv_tokens: ``K_n``.
        prompt_tokens: ``l_r``.
        candidates: The set X, tokens of a whole step, any order.
        limit_ms: ``beta * tau``.
        cached_tokens: Prefix of the prompt already on the node.
        literal_progress: Count ``chi`` as served, as Algorithm 1 prints it.
            Otherwise a chunk serves the ``chi - B`` tokens that §3.2 says it
            adds, and a candidate with ``chi <= B`` is none.
    """
    ordered = sorted({c for c in candidates if c > decodes}, reverse=True)
    served = min(cached_tokens, prompt_tokens - 1)
    chunks: list[int] = []
    steps: list[float] = []
    while served < prompt_tokens:
        left = prompt_tokens - served
        for chi in ordered:
            # A last step holds what is left of the prompt, no more.
            prefill = chi - decodes if literal_progress else min(chi - decodes, left)
            step = model.step_ms(decodes, decode_kv_tokens, prefill, served)
            if step <= limit_ms:
                break
        else:
            return None
        chunks.append(chi)
        steps.append(step)
        served += chi if literal_progress else prefill
    return Schedule(tuple(chunks), tuple(steps))


def closed_form_schedule(
    model: StepModel,
    decodes: int,
    decode_kv_tokens: int,
    prompt_tokens: int,
    budget_tokens: int,
    limit_ms: float,
    *,
    cached_tokens: int = 0,
    smallest_tokens: int = 16,
) -> Schedule | None:
    """The schedule of largest safe chunks, each in closed form.

    Args:
        model: Step model of the decode node.
        decodes: ``B_n``.
        decode_kv_tokens: ``K_n``.
        prompt_tokens: ``l_r``.
        budget_tokens: The engine's own step budget.
        limit_ms: ``beta * tau``.
        cached_tokens: Prefix of the prompt already on the node.
        smallest_tokens: A chunk below this, unless it is the last, is held to
            be no headroom at all: it would cost more in fixed step time than
            it serves.
    """
    planner = ChunkPlanner(
        model, decodes, decode_kv_tokens, budget_tokens, limit_ms, smallest_tokens
    )
    return planner.schedule(prompt_tokens, cached_tokens)


class CandidatePlanner:
    """`ChunkPlanner` with the chunk sizes of a list (`paper_schedule`).

    Args:
        model: Step model of the node.
        decodes: ``B_n``.
        decode_kv_tokens: ``K_n``.
        candidates: The set X.
        limit_ms: ``beta * tau``.

    Attributes:
        key: Equal for planners that plan alike.
    """

    def __init__(
        self,
        model: StepModel,
        decodes: int,
        decode_kv_tokens: int,
        candidates: Sequence[int],
        limit_ms: float,
    ):
        self.key: object = (id(model), decodes, decode_kv_tokens, limit_ms)
        self._arguments = (model, decodes, decode_kv_tokens)
        self._candidates = candidates
        self._limit_ms = limit_ms

    def walk_ms(
        self,
        prompt_tokens: int,
        cached_tokens: int = 0,
        most_ms: float = math.inf,
        chunks: list[int] | None = None,
        steps: list[float] | None = None,
    ) -> float | None:
        """As `ChunkPlanner.walk_ms`; never stops on the way."""
        model, decodes, kv_tokens = self._arguments
        found = paper_schedule(
            model,
            decodes,
            kv_tokens,
            prompt_tokens,
            self._candidates,
            self._limit_ms,
            cached_tokens=cached_tokens,
        )
        if found is None:
            return None
        if chunks is not None:
            chunks += found.chunks
        if steps is not None:
            steps += found.step_ms
        return found.total_ms

    def quick_floor_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Nothing is known before the schedule is made."""
        return 0.0

    def floor_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Nothing is known before the schedule is made."""
        return 0.0
