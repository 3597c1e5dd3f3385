# SPDX-License-Identifier: Apache-2.0
"""Where prompts were computed: read off the engines' own step records."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path

from evaluation import Work

#: Records are written once a heartbeat, 0.1 s; a busy machine may be late.
_QUIET_S = 0.6
_LONGEST_S = 30.0


class StepReader:
    """Reads what is new in the step records of engines.

    Args:
        logs: File of each engine, by its name.
    """

    def __init__(self, logs: Mapping[str, Path]):
        self._logs = dict(logs)
        self._read = dict.fromkeys(logs, 0)

    def take(self) -> dict[str, Work]:
        """Work of each engine since the last call, once all is written."""
        self._settle()
        return {name: self._take(name) for name in self._logs}

    def _settle(self) -> None:
        deadline = time.monotonic() + _LONGEST_S
        sizes, since = self._sizes(), time.monotonic()
        while time.monotonic() < min(since + _QUIET_S, deadline):
            time.sleep(0.05)
            if self._sizes() != sizes:
                sizes, since = self._sizes(), time.monotonic()

    def _sizes(self) -> list[int]:
        return [path.stat().st_size for path in self._logs.values()]

    def _take(self, name: str) -> Work:
        with self._logs[name].open(newline="") as file:
            rows = list(csv.DictReader(file))
        new = rows[self._read[name] :]
        self._read[name] = len(rows)
        tokens = [int(row["sum_prefill_tokens"]) for row in new]
        return Work(
            sum(tokens),
            sum(int(row["num_prefill_requests"]) for row in new),
            max(tokens, default=0),
        )
