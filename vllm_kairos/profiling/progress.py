# SPDX-License-Identifier: Apache-2.0
"""How far a profiling run is."""

from __future__ import annotations

import contextlib
import sys
import time

from tqdm import tqdm

from vllm_kairos.profiling.session import Session


class Progress(contextlib.AbstractContextManager["Progress"]):
    """A bar over the time budget, with the time left.

    Args:
        budget_s: The time budget.
        session: What was measured before counts as spent.
        quiet: Show nothing.
    """

    def __init__(self, budget_s: float, session: Session, quiet: bool):
        self._budget_s = budget_s
        self._started = time.monotonic() - session.spent_s
        self._bar = tqdm(
            total=round(budget_s),
            desc="profiling",
            unit="s",
            file=sys.stderr,
            disable=True if quiet else None,
            # tqdm's own times would be of the rate since a resume.
            bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}",
        )
        if session.resumed and not quiet:
            print(
                f"resuming after {len(session.done)} cells, "
                f"{session.spent_s:.0f} s measured",
                file=sys.stderr,
            )

    def say(self, what: str) -> None:
        """Name what runs now."""
        spent = min(time.monotonic() - self._started, self._budget_s)
        left = tqdm.format_interval(self._budget_s - spent)
        self._bar.n = round(spent)
        self._bar.set_postfix_str(f"{tqdm.format_interval(spent)}<{left}, {what}")

    def __exit__(self, *_: object) -> None:
        self._bar.close()
