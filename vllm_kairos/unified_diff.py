# SPDX-License-Identifier: Apache-2.0
"""Unified diffs in `git format-patch` form, applied to bytes in memory.

Neither git nor patch(1) need be there. Exact context at the exact line only:
the caller knows by hash which file it holds, so a hunk that does not fit is a
broken patch, never something to search a place for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"
_UNSUPPORTED = (
    b"new file mode",
    b"deleted file mode",
    b"rename from",
    b"copy from",
    b"GIT binary patch",
)


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk.

    Attributes:
        old_start: First line it replaces, counted from 0.
        new_start: Where its new lines begin in the new file, from 0.
        old: The lines it replaces, line ends included.
        new: The lines it puts there.
    """

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        """The hunk that undoes this one."""
        return Hunk(self.new_start, self.old_start, self.new, self.old)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The changes to one existing file.

    Attributes:
        path: Path in the tree, with ``/``.
        hunks: In file order.
    """

    path: str
    hunks: tuple[Hunk, ...]

    def apply(self, data: bytes) -> bytes:
        """The new file.

        Raises:
            ValueError: A hunk does not fit `data`.
        """
        return _apply(data, self.hunks)

    def revert(self, data: bytes) -> bytes:
        """The old file from the new one.

        Raises:
            ValueError: A hunk does not fit `data`.
        """
        return _apply(data, tuple(hunk.reversed() for hunk in self.hunks))


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ends; only ``\\n`` ends a line, as in a diff."""
    lines = data.split(b"\n")
    last = lines.pop()
    out = [line + b"\n" for line in lines]
    if last:
        out.append(last)
    return out


def _apply(data: bytes, hunks: tuple[Hunk, ...]) -> bytes:
    lines = split_lines(data)
    out: list[bytes] = []
    position = 0
    for number, hunk in enumerate(hunks, 1):
        end = hunk.old_start + len(hunk.old)
        if hunk.old_start < position or tuple(lines[hunk.old_start : end]) != hunk.old:
            raise ValueError(f"hunk {number} does not fit at line {hunk.old_start + 1}")
        out += lines[position : hunk.old_start]
        out += hunk.new
        position = end
    out += lines[position:]
    return b"".join(out)


def parse(text: bytes) -> tuple[FileDiff, ...]:
    """The file changes in a patch; what is no diff in it is passed over.

    Raises:
        ValueError: It holds none, is cut off, or does something other than
            change existing files.
    """
    lines = split_lines(text)
    found: list[FileDiff] = []
    index = 0
    in_diff = False
    while index < len(lines):
        line = lines[index]
        if line.startswith(b"diff --git "):
            in_diff = True
        elif in_diff and line.startswith(_UNSUPPORTED):
            raise ValueError(
                f"line {index + 1}: {line.decode(errors='replace').strip()!r}, "
                "expected changes to existing files only"
            )
        elif in_diff and line.startswith(b"--- "):
            diff, index = _parse_file(lines, index)
            found.append(diff)
            in_diff = False
            continue
        index += 1
    if not found:
        raise ValueError("no diff found")
    return tuple(found)


def _name(line: bytes, prefix: bytes) -> str:
    name = line.rstrip(b"\r\n").split(b"\t")[0]
    if not name.startswith(prefix):
        raise ValueError(
            f"file line {name.decode(errors='replace')!r}, "
            f"expected it to start with {prefix.decode()!r}"
        )
    path = name[len(prefix) :].decode()
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"path {path!r} leaves the tree")
    return path


def _parse_file(lines: list[bytes], index: int) -> tuple[FileDiff, int]:
    old = _name(lines[index], b"--- a/")
    if index + 1 >= len(lines):
        raise ValueError(f"{old}: cut off")
    new = _name(lines[index + 1], b"+++ b/")
    if old != new:
        raise ValueError(f"{old} becomes {new}, expected the same path")
    index += 2
    hunks: list[Hunk] = []
    while index < len(lines) and (header := _HUNK.match(lines[index])):
        hunk, index = _parse_hunk(lines, index + 1, header, old)
        hunks.append(hunk)
    if not hunks:
        raise ValueError(f"{old}: no hunk found")
    return FileDiff(old, tuple(hunks)), index


def _parse_hunk(
    lines: list[bytes], index: int, header: re.Match[bytes], path: str
) -> tuple[Hunk, int]:
    old_line, old_count, new_line, new_count = header.groups()
    old_left = 1 if old_count is None else int(old_count)
    new_left = 1 if new_count is None else int(new_count)
    # A side without lines names the line before it.
    old_start = int(old_line) - (1 if old_left else 0)
    new_start = int(new_line) - (1 if new_left else 0)
    old: list[bytes] = []
    new: list[bytes] = []
    while old_left or new_left:
        kind = lines[index][:1] if index < len(lines) else b""
        takes_old, takes_new = kind in (b" ", b"-"), kind in (b" ", b"+")
        if (
            not (takes_old or takes_new)
            or (takes_old and not old_left)
            or (takes_new and not new_left)
        ):
            raise ValueError(f"{path}: hunk cut off or malformed at line {index + 1}")
        body = lines[index][1:]
        index += 1
        if index < len(lines) and lines[index].startswith(_NO_NEWLINE):
            body = body[:-1]
            index += 1
        if takes_old:
            old.append(body)
            old_left -= 1
        if takes_new:
            new.append(body)
            new_left -= 1
    return Hunk(old_start, new_start, tuple(old), tuple(new)), index
