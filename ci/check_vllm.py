# SPDX-License-Identifier: Apache-2.0
"""Tells what moves when the patch set goes to another vLLM release.

    python ci/check_vllm.py 0.19.1
    python ci/check_vllm.py 0.19.1 --tests

Fetches the release and compares it with the one the patches are for: which
hunks still apply, which symbols that are overridden, called or imported have
changed, which of vLLM's scheduler tests are new, gone or rewritten. With
--tests the release's own Python is laid over this environment, patched, and
those tests are run with vLLM's scheduler and with Kairos in its place; that
tells which verdicts differ. ci/update_vllm.md says what to do then.

exit codes: 0 nothing to do by hand, 1 something is, 2 it could not be told.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vllm_release
import vllm_symbols

from vllm_kairos import patching, unified_diff
from vllm_kairos.files import UserError, write_atomically

CHECKOUT = Path(__file__).resolve().parent.parent

#: vLLM's tests of what the patches touch.
UPSTREAM_TESTS = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_priority_scheduler_random.py",
    "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "tests/v1/kv_connector/unit/test_remote_decode_lifecycle.py",
)


@dataclass
class Report:
    """Lines of the report, and how many of them ask for work."""

    lines: list[str] = field(default_factory=list)
    to_do: int = 0

    def head(self, text: str) -> None:
        """A heading."""
        self.lines += ["", f"## {text}"]

    def say(self, text: str, to_do: bool = False) -> None:
        """A line; with `to_do` one that asks for a look."""
        self.lines.append(f"{'! ' if to_do else '  '}{text}")
        self.to_do += to_do


@dataclass(frozen=True)
class Fit:
    """Where a hunk fits.

    Attributes:
        offset: Lines it has moved, `None` where it fits nowhere.
        places: How many places it fits.
        where: Name of the definition around it.
    """

    offset: int | None
    places: int = 0
    where: str = ""


def fit(lines: Sequence[bytes], hunk: unified_diff.Hunk, drift: int) -> Fit:
    """Find a hunk's old lines, nearest to where they would be by the last one.

    Args:
        lines: The file.
        hunk: The hunk.
        drift: Offset of the hunk before it.
    """
    size = len(hunk.old)
    places = [
        at
        for at in range(len(lines) - size + 1)
        if tuple(lines[at : at + size]) == hunk.old
    ]
    if not places:
        return Fit(None)
    at = min(places, key=lambda place: abs(place - hunk.old_start - drift))
    text = b"".join(lines).decode(errors="replace")
    return Fit(at - hunk.old_start, len(places), vllm_symbols.enclosing(text, at))


def check_hunks(report: Report, old: Path, new: Path) -> dict[str, bytes]:
    """Say of every hunk whether it applies.

    Returns:
        The files with every hunk in that fits, by path.
    """
    report.head("Hunks")
    old_files: dict[str, bytes] = {}
    files: dict[str, bytes] = {}
    for patch in patching.load_patches(patching.patch_directory()):
        for path, diff in patch.diffs.items():
            name = f"{patch.entry.name[:4]} {path}"
            if not (new / path).is_file():
                report.say(f"{name}: there is no such file any more", to_do=True)
                continue
            files.setdefault(path, (new / path).read_bytes())
            old_files.setdefault(path, (old / path).read_bytes())
            files[path] = _move(report, name, diff, files[path], old_files[path])
            old_files[path] = diff.apply(old_files[path])
    return files


def _move(
    report: Report, name: str, diff: unified_diff.FileDiff, data: bytes, old: bytes
) -> bytes:
    drift = 0
    grown = 0
    for number, hunk in enumerate(diff.hunks, 1):
        lines = unified_diff.split_lines(data)
        found = fit(lines, hunk, drift)
        was = vllm_symbols.enclosing(old.decode(errors="replace"), hunk.old_start)
        title = f"{name}, hunk {number} ({was})"
        if found.offset is None:
            report.say(f"{title}: does not apply", to_do=True)
            continue
        drift = found.offset
        at = hunk.old_start + found.offset
        lines[at : at + len(hunk.old)] = hunk.new
        data = b"".join(lines)
        # What this file has grown by is no drift of upstream's.
        moved = found.offset - grown
        grown += len(hunk.new) - len(hunk.old)
        drift += len(hunk.new) - len(hunk.old)
        verdict = "applies exactly" if not moved else f"applies {moved:+d} lines away"
        if found.where != was:
            report.say(f"{title}: {verdict}, but in {found.where}", to_do=True)
        elif found.places > 1:
            report.say(f"{title}: {verdict}, one of {found.places} places", to_do=True)
        else:
            report.say(f"{title}: {verdict}")
    return data


def check_symbols(report: Report, old: Path, new: Path) -> None:
    """Say of every symbol we use whether it has changed."""
    report.head("Symbols that Kairos overrides, calls or imports")
    package = CHECKOUT / "vllm_kairos"
    same = 0
    for use in vllm_symbols.uses(package, old):
        name = f"{use.path}: {use.name} ({use.how})"
        before = vllm_symbols.find(old, use.path, use.name)
        after = vllm_symbols.find(new, use.path, use.name)
        assert before is not None
        if after is None:
            report.say(f"{name}: gone", to_do=True)
        elif vllm_symbols.signature(before) != vllm_symbols.signature(after):
            report.say(
                f"{name}: {vllm_symbols.signature(before)} is now "
                f"{vllm_symbols.signature(after)}",
                to_do=True,
            )
        elif vllm_symbols.digest(before) == vllm_symbols.digest(after):
            same += 1
        elif isinstance(before, ast.ClassDef):
            # Its methods that matter have lines of their own.
            report.say(f"{name}: something in it changed")
        else:
            size = _changed_lines(before, after)
            report.say(f"{name}: body changed, {size} lines differ", to_do=True)
    report.say(f"{same} others are unchanged")
    for path, names in vllm_symbols.attributes_read(package, old).items():
        gone = sorted(names - vllm_symbols.assigned(new, path, "Scheduler"))
        for name in gone:
            report.say(f"{path}: Scheduler.{name} is not set any more", to_do=True)
        report.say(
            f"{len(names) - len(gone)} of {len(names)} attributes read of "
            "Scheduler are still there"
        )


def _changed_lines(before: ast.AST, after: ast.AST) -> int:
    import difflib

    lines = difflib.ndiff(
        ast.unparse(before).splitlines(), ast.unparse(after).splitlines()
    )
    return sum(line.startswith(("+ ", "- ")) for line in lines)


def check_test_texts(report: Report, old: Path, new: Path) -> None:
    """Say which of vLLM's tests are new, gone or rewritten."""
    report.head("vLLM's scheduler tests, by their text")
    for path in UPSTREAM_TESTS:
        before, after = dict(_tests(old / path)), dict(_tests(new / path))
        if not after:
            report.say(f"{path}: gone", to_do=True)
            continue
        added = sorted(after.keys() - before.keys())
        gone = sorted(before.keys() - after.keys())
        changed = sorted(
            name for name in before.keys() & after.keys() if before[name] != after[name]
        )
        report.say(
            f"{path}: {len(after)} tests, {len(added)} new, {len(gone)} gone, "
            f"{len(changed)} rewritten"
        )
        for word, names in (("new", added), ("gone", gone), ("rewritten", changed)):
            for name in names:
                report.say(f"  {word}: {name}")


def _tests(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        return
    tree = vllm_symbols.parsed(path)
    assert tree is not None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, vllm_symbols.digest(node)


def make_report(version: str, old: Path, new: Path) -> tuple[Report, dict[str, bytes]]:
    """The report without running anything.

    Args:
        version: Of the new release.
        old: Source tree of the release the patches are for.
        new: Source tree of the new one.

    Returns:
        The report, and the files with every hunk in that fits.
    """
    report = Report([f"# From vLLM {patching.VLLM_VERSION} to {version}"])
    files = check_hunks(report, old, new)
    check_symbols(report, old, new)
    check_test_texts(report, old, new)
    return report, files


def main(words: Sequence[str] | None = None) -> int:
    """Parse arguments, check, print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="of vLLM, such as 0.19.1")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="its source tree")
    parser.add_argument("--tests", action="store_true", help="run vLLM's tests on it")
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    try:
        old = vllm_release.source_tree(patching.VLLM_VERSION)
        new = args.tree or vllm_release.source_tree(args.version)
        if not (new / "vllm").is_dir():
            raise UserError(f"--tree {new}: no vllm/ in it")
        report, files = make_report(args.version, old, new)
        if args.tests:
            import vllm_verdicts

            vllm_verdicts.check(report, args.version, old, new, files, UPSTREAM_TESTS)
    except UserError as error:
        print(f"check_vllm.py: error: {error}", file=sys.stderr)
        return 2
    report.lines += ["", f"{report.to_do} points to look at, marked with !"]
    text = "\n".join(report.lines) + "\n"
    if args.output:
        write_atomically(args.output, text.encode())
    print(text, end="")
    return 1 if report.to_do else 0


if __name__ == "__main__":
    sys.exit(main())
