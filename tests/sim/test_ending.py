# SPDX-License-Identifier: Apache-2.0
"""A sweep that is cut off: no half of a result, and no worker, is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_kairos.sim.output import RowsFile

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc"
)

WAIT_S = 60.0


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def session(leader: int) -> list[int]:
    """Processes alive in the session that one leads."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(folder.name))
    return found


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long sweep in two workers that have begun."""
    words = "--requests 20000 --rate 12 --seeds 1..50 --policy kairos --jobs 2"
    command = ["-m", "vllm_kairos.cli", "simulate", *words.split(), "--no-progress"]
    run = subprocess.Popen(
        [sys.executable, *command, "--output", str(tmp_path / "out")],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job is started with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        # The command, two workers, and what loky adds.
        until(lambda: len(session(run.pid)) >= 3, "no workers were started")
        yield run
    finally:
        for pid in session(run.pid):
            os.kill(pid, signal.SIGKILL)
        run.wait()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_sweep_that_is_told_to_stop_leaves_nothing(
    sweep: subprocess.Popen[str],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    said: str,
) -> None:
    # As a terminal does it, to the whole group.
    os.killpg(sweep.pid, number) if number == signal.SIGINT else sweep.terminate()
    _, error = sweep.communicate(timeout=WAIT_S)
    assert (sweep.returncode, error) == (code, f"vllm-kairos simulate: {said}\n")
    until(lambda: not session(sweep.pid), "workers are left")
    assert not any((tmp_path / "out").iterdir())


def test_workers_of_a_sweep_that_was_killed_end_by_themselves(
    sweep: subprocess.Popen[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    time.sleep(1.0)
    sweep.kill()
    sweep.wait()
    until(lambda: not session(sweep.pid), "workers are left")
    assert [p.name for p in out.iterdir()] == [f"requests.jsonl.{sweep.pid}.part"]
    with RowsFile(str(out)) as rows:
        assert [p.name for p in out.iterdir()] == [f"requests.jsonl.{os.getpid()}.part"]
        rows.keep()
    assert [p.name for p in out.iterdir()] == ["requests.jsonl"]


def test_rows_of_a_sweep_that_still_runs_are_left_alone(tmp_path: Path) -> None:
    others = tmp_path / f"requests.jsonl.{os.getppid()}.part"
    not_ours = tmp_path / "requests.jsonl.backup.part"
    for file in (others, not_ours):
        file.write_text("")
    with RowsFile(str(tmp_path)):
        pass
    assert set(tmp_path.iterdir()) == {others, not_ours}
