# SPDX-License-Identifier: Apache-2.0
"""How many prefill tokens a step may take, decided while it is put together.

The engine's scheduler and the simulator's nodes call the same rule.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from vllm_kairos.core.chunk_tracker import ChunkTracker


@dataclass(slots=True)
class StepLoad:
    """What a step holds so far.

    Attributes:
        decodes: Decode requests ``B``, those joining in this step included.
        decode_kv_tokens: Their KV tokens ``K``.
        decode_tokens: Their tokens in this step: one each, more with
            speculative decoding.
        prefills: Prefill requests ``n`` placed so far.
        prefill_tokens: Their tokens ``c``.
        prefill_kv_tokens: Tokens they had computed before, ``p``.
        attended: ``sum(c_i * p_i)``.
        squared: ``sum(c_i ** 2)``.
    """

    decodes: int = 0
    decode_kv_tokens: int = 0
    decode_tokens: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    attended: float = 0.0
    squared: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of the whole step so far."""
        return self.decode_tokens + self.prefill_tokens

    def add_prefill(self, tokens: int, computed_tokens: int) -> None:
        """Place a prefill of `tokens` after `computed_tokens` in the step."""
        self.prefills += 1
        self.prefill_tokens += tokens
        self.prefill_kv_tokens += computed_tokens
        self.attended += tokens * computed_tokens
        self.squared += tokens * tokens


class ChunkRule(abc.ABC):
    """Bounds the prefills of a step."""

    @abc.abstractmethod
    def chunk(
        self,
        load: StepLoad,
        computed_tokens: int,
        wanted_tokens: int,
        tracker: ChunkTracker | None,
    ) -> int:
        """Tokens a prefill may take in the step that `load` describes.

        Args:
            load: The step so far, without this prefill.
            computed_tokens: Its prompt tokens computed so far.
            wanted_tokens: Tokens it would take unbounded.
            tracker: Its chunk schedule; `None` for an ordinary prefill.

        Returns:
            0 to `wanted_tokens`.
        """


class PlannedRule(ChunkRule):
    """The paper's rule (§5.4): the step holds at most the planned ``chi``.

    The cap is on the deflected request, ``c <= chi - others``, not on the
    step: ordinary prefills and requests whose KV has just arrived are never
    held back by it.
    """

    def chunk(
        self,
        load: StepLoad,
        computed_tokens: int,
        wanted_tokens: int,
        tracker: ChunkTracker | None,
    ) -> int:
        if tracker is None:
            return wanted_tokens
        others = load.tokens
        room = tracker.step_tokens(computed_tokens, others) - others
        return max(0, min(wanted_tokens, room))
