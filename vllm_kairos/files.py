# SPDX-License-Identifier: Apache-2.0
"""Files at the edge: profiles in and out, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vllm_kairos.core.profile import Profile, decode_profile, encode_profile


class UserError(Exception):
    """Bad input. The command line prints it as one line and exits with 2."""


def check_output_file(path: str | os.PathLike[str], flag: str) -> None:
    """Refuse a file that could not be written, before any work is done for it.

    Args:
        path: File to be written; its folder must be there.
        flag: The flag that named it, for the message.

    Raises:
        UserError: Why it cannot be written.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise UserError(f"{flag} {path}: is a directory, expected a file to write")
    if not folder.is_dir():
        kind = "is not a directory" if folder.exists() else "does not exist"
        raise UserError(f"{flag} {path}: {folder} {kind}, expected a file's directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{flag} {path}: {folder} may not be written to")


def check_output_directory(path: str | os.PathLike[str], flag: str) -> None:
    """Refuse a directory that could not be made or written to.

    It may be new, and so may the ones above it.

    Args:
        path: Directory to be written to.
        flag: The flag that named it, for the message.

    Raises:
        UserError: Why not.
    """
    target = Path(path)
    if not os.fspath(path):
        raise UserError(f"{flag} is empty, expected a directory")
    if target.exists() and not target.is_dir():
        raise UserError(f"{flag} {path}: is a file, expected a directory")
    above = target
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise UserError(f"{flag} {path}: {above} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{flag} {path}: {above} may not be written to")


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`: afterwards the file is the old or the new one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file.

    Raises:
        UserError: The file cannot be read or does not hold a profile.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror or error}") from error
    try:
        return decode_profile(data)
    except ValueError as error:
        raise UserError(f"profile {path}: {error}") from error


def save_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write a profile, whole or not at all."""
    write_atomically(path, encode_profile(profile))
