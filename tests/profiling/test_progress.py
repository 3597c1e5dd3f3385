# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import sys

from vllm_kairos.profiling import progress
from vllm_kairos.profiling.progress import Progress
from vllm_kairos.profiling.session import Session


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch) -> _Terminal:
    """A terminal on standard error."""
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def _at(monkeypatch, now_s: float) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)


def test_the_bar_shows_what_runs_and_the_time_left(tmp_path, monkeypatch):
    terminal = _terminal(monkeypatch)
    session = Session(tmp_path / "p.json", {})
    _at(monkeypatch, 0.0)
    with Progress(1800.0, session, quiet=False) as bar:
        _at(monkeypatch, 450.0)
        bar.say("grid-8-1024")
    told = terminal.getvalue()
    assert "25%" in told
    assert "07:30<22:30, grid-8-1024" in told


def test_after_a_resume_the_time_left_is_that_of_the_budget(tmp_path, monkeypatch):
    terminal = _terminal(monkeypatch)
    session = Session(tmp_path / "p.json", {})
    session.finish_cell("x", "grid", [], 900.0)
    _at(monkeypatch, 10_000.0)
    with Progress(1800.0, session, quiet=False) as bar:
        _at(monkeypatch, 10_003.0)
        bar.say("replay")
    told = terminal.getvalue()
    assert "resuming after 1 cells, 900 s measured" in told
    assert "15:03<14:57, replay" in told


def test_quiet_is_silent(tmp_path, monkeypatch):
    terminal = _terminal(monkeypatch)
    session = Session(tmp_path / "p.json", {})
    session.finish_cell("x", "grid", [], 9.0)
    with Progress(60.0, session, quiet=True) as bar:
        bar.say("replay")
    assert terminal.getvalue() == ""
