# SPDX-License-Identifier: Apache-2.0
"""What is told of a patch set's move to another vLLM."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

import check_vllm
import vllm_symbols

from vllm_kairos import patching, unified_diff

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
CONFIG = "vllm/config/scheduler.py"
TESTS = "tests/v1/core/test_scheduler.py"


@pytest.fixture(scope="module")
def old(vllm_sdist: Path) -> Path:
    """The source tree that the patches are for."""
    return vllm_sdist


@pytest.fixture
def new(old: Path, tmp_path: Path) -> Path:
    """A copy of what the report looks at, to be changed."""
    paths = {
        use.path for use in vllm_symbols.uses(check_vllm.CHECKOUT / "vllm_kairos", old)
    }
    paths |= set(check_vllm.UPSTREAM_TESTS)
    for patch in patching.load_patches(patching.patch_directory()):
        paths |= set(patch.diffs)
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(old / path, tmp_path / path)
    return tmp_path


def edit(tree: Path, path: str, old: str, new: str) -> None:
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new, 1))
    vllm_symbols.parsed.cache_clear()


def report(old: Path, new: Path) -> check_vllm.Report:
    return check_vllm.make_report("9.9.9", old, new)[0]


def to_do(found: check_vllm.Report) -> list[str]:
    return [line for line in found.lines if line.startswith("! ")]


def test_the_same_release_leaves_nothing_to_do(old: Path, new: Path) -> None:
    found = report(old, new)
    assert to_do(found) == [] and found.to_do == 0
    hunks = [line for line in found.lines if "hunk" in line]
    count = sum(
        len(diff.hunks)
        for patch in patching.load_patches(patching.patch_directory())
        for diff in patch.diffs.values()
    )
    assert len(hunks) == count
    assert all(line.endswith("applies exactly") for line in hunks)


def test_what_applies_is_what_the_patch_tool_would_write(old: Path, new: Path) -> None:
    files = check_vllm.make_report("9.9.9", old, new)[1]
    patching.apply(new)
    assert {p: (new / p).read_bytes() for p in files} == files


def test_lines_added_above_move_a_hunk_and_no_more(old: Path, new: Path) -> None:
    edit(new, CONFIG, "@config", "# a\n# b\n# c\n@config")
    found = report(old, new)
    assert to_do(found) == []
    assert any(CONFIG in line and "+3 lines away" in line for line in found.lines)


def test_a_hunk_whose_lines_are_gone_does_not_apply(old: Path, new: Path) -> None:
    edit(new, SCHEDULER, "self.kv_cache_manager.new_step_starts()", "self.begin()")
    (line,) = [line for line in to_do(report(old, new)) if "hunk" in line]
    assert "does not apply" in line and "Scheduler.schedule" in line


def test_a_hunk_that_lands_in_another_function_is_told() -> None:
    text = "def a():\n    x\n    y\n\n\ndef b():\n    x\n    z\n"
    diff = unified_diff.FileDiff(
        "f.py", (unified_diff.Hunk(1, 1, (b"    x\n",), (b"    w\n",)),)
    )
    moved = text.replace("    x\n", "    q\n", 1)
    found = check_vllm.Report()
    check_vllm._move(found, "f.py", diff, moved.encode(), text.encode())
    assert found.to_do == 1 and "but in b" in found.lines[0]


def test_a_changed_signature_and_a_lost_method_are_told(old: Path, new: Path) -> None:
    edit(
        new,
        SCHEDULER,
        "def _preempt_request(self, request: Request, timestamp: float)",
        "def _preempt_request(self, request: Request, timestamp: float, why: str)",
    )
    edit(new, SCHEDULER, "def _free_request(", "def _let_go(")
    lines = to_do(report(old, new))
    assert any("_preempt_request" in line and "why: str" in line for line in lines)
    assert any("_free_request" in line and "gone" in line for line in lines)


def test_comments_and_docstrings_are_no_change(old: Path, new: Path) -> None:
    edit(
        new,
        SCHEDULER,
        "    def schedule(self) -> SchedulerOutput:\n",
        '    def schedule(self) -> SchedulerOutput:\n        """Said anew."""\n',
    )
    assert not any("Scheduler.schedule (" in line for line in to_do(report(old, new)))


def test_an_attribute_that_is_not_set_any_more_is_told(old: Path, new: Path) -> None:
    text = (new / SCHEDULER).read_text().replace("self.running", "self.active")
    (new / SCHEDULER).write_text(text)
    vllm_symbols.parsed.cache_clear()
    assert any("Scheduler.running" in line for line in to_do(report(old, new)))


def test_upstream_tests_new_and_gone_are_named(old: Path, new: Path) -> None:
    edit(new, TESTS, "def test_add_requests(", "def test_add_many(")
    lines = report(old, new).lines
    assert any(line.strip() == "new: test_add_many" for line in lines)
    assert any(line.strip() == "gone: test_add_requests" for line in lines)


def test_what_kairos_overrides_is_found(old: Path) -> None:
    found = vllm_symbols.uses(check_vllm.CHECKOUT / "vllm_kairos", old)
    names = {use.name: use.how for use in found}
    assert names["Scheduler.add_request"] == "overridden"
    assert names["Scheduler._preempt_request"] == "overridden"
    assert names["AsyncScheduler"] == "imported"
    assert names["NixlConnectorScheduler.request_finished"] == "hooked"


@pytest.mark.parametrize("version", ["", "../x", "1", "0.19.1; rm"])
def test_a_version_that_is_none_is_one_line(
    version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_vllm.main([version]) == 2
    assert capsys.readouterr().err.count("\n") == 1
