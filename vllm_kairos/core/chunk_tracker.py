# SPDX-License-Identifier: Apache-2.0
"""Which chunk of its schedule a deflected prefill is at."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class ChunkTracker:
    """Position in a chunk schedule, told by the number of computed tokens.

    Steps are never counted. A prefix hit starts further on, preemption goes
    back, and asynchronous look-ahead has moved ``num_computed_tokens`` before
    the step has run: all of them are just another number of computed tokens.
    What is remembered is how far each granted chunk reached, since a chunk's
    progress is ``chi - others`` and the others come and go.

    Args:
        chunks: ``[chi_1, ...]``, tokens of whole steps, each at least 1.
    """

    __slots__ = ("chunks", "_ends", "_indices")

    def __init__(self, chunks: Sequence[int]):
        if not chunks:
            raise ValueError("chunks is empty, expected at least one chunk")
        self.chunks = tuple(chunks)
        self._ends: list[int] = []
        self._indices: list[int] = []

    def index(self, computed_tokens: int, other_tokens: int) -> int:
        """Index of the chunk that comes next.

        A schedule too short for its prompt repeats its last chunk; what is
        left of one too long is never reached.

        Args:
            computed_tokens: Prompt tokens computed so far.
            other_tokens: Tokens of the others in the step, by which the
                progress of chunks never granted (a prefix hit) is told.
        """
        last = len(self.chunks) - 1
        granted = bisect_right(self._ends, computed_tokens)
        if granted:
            return min(self._indices[granted - 1] + 1, last)
        index = reached = 0
        while index < last:
            reached += max(self.chunks[index] - other_tokens, 1)
            if reached > computed_tokens:
                break
            index += 1
        return index

    def step_tokens(self, computed_tokens: int, other_tokens: int) -> int:
        """``chi`` of the next chunk: most tokens of the whole step."""
        return self.chunks[self.index(computed_tokens, other_tokens)]

    def granted(self, computed_tokens: int, tokens: int, other_tokens: int) -> None:
        """Note that a step computes `tokens` after `computed_tokens`."""
        index = self.index(computed_tokens, other_tokens)
        keep = bisect_right(self._ends, computed_tokens)
        del self._ends[keep:]
        del self._indices[keep:]
        self._ends.append(computed_tokens + tokens)
        self._indices.append(index)
