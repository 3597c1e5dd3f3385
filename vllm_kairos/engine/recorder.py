# SPDX-License-Identifier: Apache-2.0
"""Step records: one CSV row a step, the food of the profiler."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

COLUMNS = (
    "engine_id",
    "step",
    "time_s",
    "sum_prefill_tokens",
    "num_prefill_requests",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
    "latency_ms",
)


class StepRecord(NamedTuple):
    """One step.

    Attributes:
        step: Number of the step in this incarnation.
        time_s: Unix time of its end.
        prefill_tokens: ``c``.
        prefills: ``n``.
        prefill_kv_tokens: ``p``.
        decodes: ``B``.
        decode_kv_tokens: ``K``.
        latency_ms: Time the step took.
    """

    step: int
    time_s: float
    prefill_tokens: int
    prefills: int
    prefill_kv_tokens: int
    decodes: int
    decode_kv_tokens: int
    latency_ms: float


class StepLog:
    """Appends step records to a CSV file.

    Rows are handed over in batches by the heartbeat thread, so that the
    scheduler never waits for a disk.

    Args:
        path: The file; created with its header, or appended to.
        engine_id: First column of every row.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str, engine_id: str):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._engine_id = engine_id
        self._file = target.open("a", newline="")
        self._writer = csv.writer(self._file)
        if self._file.tell() == 0:
            self._writer.writerow(COLUMNS)
            self._file.flush()

    def write(self, records: Sequence[StepRecord]) -> None:
        """Append rows and flush them."""
        self._writer.writerows(
            (
                self._engine_id,
                r.step,
                f"{r.time_s:.6f}",
                r.prefill_tokens,
                r.prefills,
                r.prefill_kv_tokens,
                r.decodes,
                r.decode_kv_tokens,
                f"{r.latency_ms:.4f}",
            )
            for r in records
        )
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
