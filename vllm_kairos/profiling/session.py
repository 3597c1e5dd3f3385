# SPDX-License-Identifier: Apache-2.0
"""A profiling session on disk: what was measured so far, so that it can resume.

Beside ``NAME.json`` lie ``NAME.steps.csv``, the raw steps with the cell they
belong to, and, until the profile is written, ``NAME.progress.json``.
"""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

from vllm_kairos.files import UserError, write_atomically
from vllm_kairos.profiling.steps import COLUMNS

_FIELDS = ("engine_id", "step", "time_s", *COLUMNS, "segment")
_FORMAT = "vllm-kairos-profiling-session"


class Session:
    """Steps and finished cells of one profile being measured.

    Args:
        output: Path of the profile.
        key: What the session measures; a session on disk of another key is
            not resumed but refused.

    Raises:
        UserError: The files beside `output` belong to something else or
            cannot be read or written.
    """

    def __init__(self, output: str | os.PathLike[str], key: dict[str, Any]):
        self.output = Path(output)
        self.steps_path = self.output.with_suffix(".steps.csv")
        self.progress_path = self.output.with_suffix(".progress.json")
        self._key = key
        self.done: list[str] = []
        self.spent_s = 0.0
        self._rows = 0
        if self.progress_path.exists():
            self._resume()
        else:
            self._write_steps("x", _line(_FIELDS))
            self._save()

    @property
    def resumed(self) -> bool:
        """Whether cells were already done when it was opened."""
        return bool(self.done)

    def _resume(self) -> None:
        where = f"session {self.progress_path}"
        try:
            raw = json.loads(self.progress_path.read_text())
            text = self.steps_path.read_text()
        except (OSError, ValueError) as error:
            raise UserError(
                f"{where}: cannot be resumed ({error}); remove it to start anew"
            ) from error
        if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
            raise UserError(f"{where}: not a profiling session; remove it")
        key = raw.get("key")
        if key != self._key:
            key = key if isinstance(key, dict) else {}
            others = [name for name in self._key if key.get(name) != self._key[name]]
            told = [f"{n} {key.get(n)!r}, not {self._key[n]!r}" for n in others]
            raise UserError(
                f"{where}: measured {'; '.join(told) or key}: expected the same to "
                "resume; remove it to start anew"
            )
        try:
            self.done = [str(name) for name in raw["done"]]
            self.spent_s = float(raw["spent_s"])
            self._rows = int(raw["rows"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where}: done, spent_s or rows is missing or wrong ({error!r}); "
                "remove it to start anew"
            ) from error
        lines = text.splitlines(keepends=True)
        # Rows of a cell that was cut off are measured again.
        write_atomically(self.steps_path, "".join(lines[: 1 + self._rows]).encode())

    def finish_cell(
        self, name: str, segment: str, rows: list[dict[str, str]], spent_s: float
    ) -> None:
        """Keep the steps of one cell and mark it done.

        Args:
            name: The cell.
            segment: What its rows are marked with.
            rows: Step records as the engine wrote them.
            spent_s: Seconds spent since the last cell.
        """
        lines = [
            _line(
                (
                    # One name for all incarnations of the profiled engine.
                    "profiled",
                    *(row.get(c) or "0" for c in _FIELDS[1:-1]),
                    segment,
                )
            )
            for row in rows
        ]
        self._write_steps("a", "".join(lines))
        self._rows += len(lines)
        self.done.append(name)
        self.spent_s += spent_s
        self._save()

    def segments(self) -> list[str]:
        """Segment of every step kept, in order."""
        with self.steps_path.open(newline="") as file:
            return [row["segment"] for row in csv.DictReader(file)]

    def close(self) -> None:
        """The profile is written: nothing is left to resume."""
        self.progress_path.unlink(missing_ok=True)

    def _write_steps(self, mode: str, text: str) -> None:
        try:
            self.steps_path.parent.mkdir(parents=True, exist_ok=True)
            with self.steps_path.open("w" if mode == "x" else mode) as file:
                file.write(text)
        except OSError as error:
            raise UserError(
                f"steps {self.steps_path}: {error.strerror or error}"
            ) from error

    def _save(self) -> None:
        state = {
            "format": _FORMAT,
            "key": self._key,
            "done": self.done,
            "spent_s": round(self.spent_s, 1),
            "rows": self._rows,
        }
        write_atomically(self.progress_path, json.dumps(state).encode() + b"\n")


def _line(cells: tuple[str, ...]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


class LogTail:
    """New rows of a step log that an engine is writing.

    Args:
        path: The log.
        from_start: Whether rows already there count.

    Raises:
        UserError: The file cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], from_start: bool = False):
        self._path = Path(path)
        self._header: list[str] = []
        self._at = 0
        if not from_start:
            self.new_rows()

    def new_rows(self) -> list[dict[str, str]]:
        """Rows completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError as error:
            raise UserError(
                f"step log {self._path}: {error.strerror or error}"
            ) from error
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        rows = list(csv.reader(io.StringIO(whole.decode("utf-8", "replace"))))
        if not self._header and rows:
            self._header = [cell.strip() for cell in rows.pop(0)]
            missing = [c for c in COLUMNS if c not in self._header]
            if missing:
                raise UserError(
                    f"step log {self._path}: row 1: missing column {missing[0]}, "
                    "expected the step log of a Kairos engine"
                )
        return [
            dict(zip(self._header, row, strict=True))
            for row in rows
            if len(row) == len(self._header)
        ]
