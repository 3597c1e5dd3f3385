# SPDX-License-Identifier: Apache-2.0
"""The rows of a sweep on disk, whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
from types import TracebackType
from typing import IO


class RowsFile:
    """``requests.jsonl`` of an output directory, written as results come.

    It has another name until `keep`: a sweep that is cut off leaves nothing
    that looks like a result. What one that was killed outright left under that
    other name goes when the next one starts.

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
            self._remove_stale()
            self._file = open(self._part, "w", encoding="utf-8")
        return self

    def _remove_stale(self) -> None:
        for part in glob.glob(f"{glob.escape(self._path)}.*.part"):
            word = part[len(self._path) + 1 : -len(".part")]
            if word.isdecimal() and not _alive(int(word)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)

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


def _alive(pid: int) -> bool:
    """Whether there is such a process, ours or another user's."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
