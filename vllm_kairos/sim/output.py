# SPDX-License-Identifier: Apache-2.0
"""The rows of a sweep on disk, whole or not at all."""

from __future__ import annotations

import os
from types import TracebackType
from typing import IO


class RowsFile:
    """``requests.jsonl`` of an output directory, written as results come.

    It has another name until `keep`: a sweep that is cut off leaves nothing
    that looks like a result.

    Args:
        directory: Output directory, made if need be; `None` drops all rows.
    """

    def __init__(self, directory: str | None):
        self.wanted = directory is not None
        self._path = os.path.join(directory or "", "requests.jsonl")
        self._part = f"{self._path}.{os.getpid()}.part"
        self._file: IO[str] | None = None

    def __enter__(self) -> RowsFile:
        if self.wanted:
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            self._file = open(self._part, "w", encoding="utf-8")
        return self

    def write(self, lines: str) -> None:
        """Add rows, one JSON object a line."""
        if self._file is not None:
            self._file.write(lines)

    def keep(self) -> None:
        """All rows are in: give the file its name."""
        if self._file is not None:
            self._file.close()
            self._file = None
            os.replace(self._part, self._path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            os.unlink(self._part)
