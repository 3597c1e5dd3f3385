# SPDX-License-Identifier: Apache-2.0
"""What a step holds, while it is put together and after."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
        guarded: A deflected prefill is among them.
        limit_ms: Bound on its prediction that it was put together under.
    """

    decodes: int = 0
    decode_kv_tokens: int = 0
    decode_tokens: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    attended: float = 0.0
    squared: float = 0.0
    guarded: bool = False
    limit_ms: float = math.inf

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

    def take_back(self, tokens: int, computed_tokens: int) -> None:
        """Undo `add_prefill`."""
        self.prefills -= 1
        self.prefill_tokens -= tokens
        self.prefill_kv_tokens -= computed_tokens
        self.attended -= tokens * computed_tokens
        self.squared -= tokens * tokens
