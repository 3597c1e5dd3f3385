# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is among prefills that are held back past their TTFT target.

Held back for ever they would starve. But a chunk for each of them in the same
step is as bad as no bound at all where many are late, so they take turns.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class OverdueTurns(Generic[Key]):
    """One prefill a step that gets the smallest chunk whatever the bound says.

    A step shows who is held back in it; of those past their target the one
    due first has the next step's turn, and keeps it until it is served in the
    ordinary way or done. One that is merely behind a prefill due before it
    waits for that: only finitely many are due before it, for what arrives
    after its target is due later. So each has its turn in bounded time, and
    who is never asked (no seat, no blocks) takes nobody's.

    Attributes:
        holder: Has the turn in the step being put together, `None` if nobody.
    """

    __slots__ = ("holder", "_next", "_next_due", "_served_due")

    def __init__(self) -> None:
        self.holder: Key | None = None
        self._next: Key | None = None
        self._next_due = math.inf
        self._served_due = math.inf

    def step_over(self) -> None:
        """The step has been put together: the turn is the next one's."""
        self.holder = self._next
        self._next = None
        self._next_due = math.inf

    def start(self) -> None:
        """Nobody is served yet in the step being put together."""
        self._served_due = math.inf

    def served(self, due: float) -> None:
        """A prefill gets tokens within the bound.

        Args:
            due: When its first token is due, on any clock.
        """
        if due < self._served_due:
            self._served_due = due

    def held_back(self, key: Key, due: float) -> None:
        """A prefill past its target gets nothing, or has the turn.

        Args:
            key: The prefill.
            due: When its first token was due, by the clock of `served`.
        """
        if due < self._served_due and due < self._next_due:
            self._next = key
            self._next_due = due
