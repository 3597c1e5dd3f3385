# SPDX-License-Identifier: Apache-2.0
"""What a user reads of a profile that does not fit the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
import pytest

from tests.engine.test_state_report import profile_of_model, snapshot
from tests.engine.virtual import VirtualEngine, make_scheduler
from vllm_kairos.files import load_profile, save_profile


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Warnings of the step meter; vLLM's logger does not propagate."""
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger = logging.getLogger("vllm_kairos.engine.meter")
    handler = Keep(logging.WARNING)
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def _run(e: VirtualEngine, slower: float = 1.0) -> None:
    """Decodes for a while, at a speed times the profile's."""
    e.truth = lambda ms: slower * ms
    for _ in range(4):
        e.add(64, 120)
    e.drain()
    e.scheduler._meter.digest()


@pytest.fixture
def profile(tmp_path) -> str:
    return profile_of_model(tmp_path / "p.json")


def test_an_engine_slower_than_its_profile_says_so_once(profile, warnings):
    e = VirtualEngine(make_scheduler(kairos={"profile": profile, "mode": "planned"}))
    _run(e)
    assert warnings == []
    for _ in range(8):
        _run(e, slower=2.0)
    (line,) = [text for text in warnings if "decode" in text]
    assert "off by" in line
    assert "vllm-kairos profile" in line


def test_the_threshold_is_the_one_set(profile, warnings):
    kairos = {"profile": profile, "mode": "planned", "error_warning_percent": 60.0}
    e = VirtualEngine(make_scheduler(kairos=kairos))
    for _ in range(8):
        _run(e, slower=2.0)
    assert warnings == []


def test_bias_and_error_of_every_phase_are_reported(profile):
    e = VirtualEngine(make_scheduler(kairos={"profile": profile, "mode": "planned"}))
    e.truth = lambda ms: 1.25 * ms
    for _ in range(4):
        e.add(64, 120)
    e.step()
    e.step()
    e.add(512, 4)
    e.drain()
    e.scheduler._meter.digest()
    errors = snapshot(e).errors
    assert set(errors) == {"prefill", "decode", "mixed"}
    for bias, mape in errors.values():
        assert bias == pytest.approx(-20.0)
        assert mape == pytest.approx(20.0)


def test_the_bound_shrinks_by_what_steps_were_late(profile):
    kairos = {"profile": profile, "mode": "planned", "tau_ms": 70.0, "beta": 0.9}
    e = VirtualEngine(make_scheduler(kairos=kairos))
    _run(e)
    assert snapshot(e).limit_ms == pytest.approx(0.9 * 70.0)
    for _ in range(8):
        _run(e, slower=2.0)
    assert snapshot(e).limit_ms == pytest.approx(70.0 / 2.0)


def test_steps_outside_the_profile_are_warned_of(tmp_path, warnings):
    path = tmp_path / "p.json"
    whole = load_profile(profile_of_model(path))
    ranges = {"B": (1.0, 2.0), "K": (0.0, 1e6)}
    decode = msgspec.structs.replace(whole.decode, ranges=ranges)
    save_profile(path, msgspec.structs.replace(whole, decode=decode))
    kairos = {"profile": str(path), "mode": "planned"}
    e = VirtualEngine(make_scheduler(kairos=kairos))
    _run(e)
    (line,) = warnings
    assert "decode steps lie outside the ranges" in line
    assert "(B)" in line
