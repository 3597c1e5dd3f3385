# SPDX-License-Identifier: Apache-2.0
"""What a simulation leaves on disk, whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from vllm_kairos.files import UserError, check_output_directory, write_atomically


def check_files(directory: str, names: Sequence[str]) -> None:
    """Refuse an output directory that could not take its files, before any work.

    Raises:
        UserError: Why not.
    """
    check_output_directory(directory, "--output")
    for name in names:
        if (Path(directory) / name).is_dir():
            raise UserError(
                f"--output {directory}: {name} in it is a directory, expected a file "
                "or none"
            )


@contextlib.contextmanager
def writing(directory: str) -> Iterator[None]:
    """Tells of a file that cannot be written as of bad input.

    Raises:
        UserError: It cannot, and why: a disk may be full by now.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        name = error.filename2 or error.filename
        where = f"{name}: " if name else ""
        raise UserError(
            f"--output {directory}: {where}{error.strerror or error}"
        ) from error


def write(directory: str, name: str, text: str) -> None:
    """Write a file of an output directory.

    Raises:
        UserError: It cannot be written.
    """
    with writing(directory):
        write_atomically(os.path.join(directory, name), text.encode())


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
            with writing(os.path.dirname(self._path)):
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
            with writing(os.path.dirname(self._path)):
                self._file.write(lines)

    def keep(self) -> None:
        """All rows are in: give the file its name."""
        if self._file is not None:
            with writing(os.path.dirname(self._path)):
                self._file.close()
                os.replace(self._part, self._path)
            self._file = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            # What is buffered may not fit on the disk; it is dropped anyway.
            with contextlib.suppress(OSError):
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
