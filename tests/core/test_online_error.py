# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kairos.core.online_error import FEWEST_STEPS, OnlineError, phase_of


def test_a_step_belongs_to_the_predictor_of_what_it_holds():
    assert phase_of(4, 0) == "decode"
    assert phase_of(4, 10) == "mixed"
    assert phase_of(0, 10) == "prefill"


@given(
    st.lists(
        st.tuples(st.floats(1.0, 200.0), st.floats(1.0, 200.0)),
        min_size=1,
        max_size=200,
    )
)
@settings(max_examples=60, deadline=None)
def test_errors_equal_those_recomputed_from_the_window(steps):
    tracker = OnlineError(window=60)
    for predicted, measured in steps:
        tracker.add(2, 0, predicted, measured)
    predicted, measured = np.array(steps[-60:]).T
    relative = 100 * (predicted - measured) / measured
    error = tracker.errors()["decode"]
    assert error.count == len(steps)
    assert error.mape_percent == pytest.approx(np.abs(relative).mean(), abs=1e-9)
    assert error.bias_percent == pytest.approx(relative.mean(), abs=1e-9)
    assert error.p95_percent == pytest.approx(
        np.percentile(np.abs(relative), 95, method="inverted_cdf")
    )
    assert error.late_p95 == pytest.approx(
        np.percentile(measured / predicted, 95, method="inverted_cdf")
    )


@given(st.lists(st.floats(0.3, 3.5), min_size=FEWEST_STEPS, max_size=300))
@settings(max_examples=60, deadline=None)
def test_a_step_planned_to_the_effective_beta_and_late_as_seen_is_on_time(lateness):
    tracker = OnlineError(window=300)
    for factor in lateness:
        tracker.add(8, 256, 40.0, 40.0 * factor)
    tau_ms = 70.0
    beta = tracker.effective_beta(0.9)
    assert 0 < beta <= 0.9
    planned_ms = beta * tau_ms
    late = sum(planned_ms * factor > tau_ms * (1 + 1e-9) for factor in lateness)
    assert late <= 0.05 * len(lateness)


def test_an_accurate_or_early_engine_keeps_its_beta():
    tracker = OnlineError()
    for _ in range(200):
        tracker.add(8, 256, 40.0, 40.0)
        tracker.add(8, 0, 40.0, 20.0)
    assert tracker.effective_beta(0.9) == 0.9


def test_prefill_only_steps_do_not_shrink_beta():
    tracker = OnlineError()
    for _ in range(200):
        tracker.add(0, 256, 40.0, 120.0)
    assert tracker.effective_beta(0.9) == 0.9


def test_one_warning_names_phase_error_and_command():
    tracker = OnlineError(warn_percent=20)
    warnings = []
    for _ in range(300):
        tracker.add(8, 256, 40.0, 80.0)
        tracker.add(8, 0, 20.0, 20.0)
        warnings.append(tracker.warning("vllm-kairos profile --url U"))
    told = [text for text in warnings if text]
    assert len(told) == 1
    assert "mixed" in told[0]
    assert "50 %" in told[0]
    assert "vllm-kairos profile --url U" in told[0]
    assert warnings.index(told[0]) >= FEWEST_STEPS - 1


@pytest.mark.parametrize("every", [20, 50, 500])
def test_a_step_measured_in_next_to_no_time_is_no_reason_to_refit(every):
    tracker = OnlineError()
    for step in range(1, 2000):
        tracker.add(16, 0, 15.0, 0.1 if step % every == 0 else 15.0)
        assert tracker.warning("refit") is None


def test_an_engine_much_faster_than_its_profile_is_a_reason_to_refit():
    tracker = OnlineError()
    for _ in range(FEWEST_STEPS):
        tracker.add(16, 0, 60.0, 15.0)
    told = tracker.warning("refit")
    assert told is not None
    assert "off by 100 %" in told


def test_steps_outside_the_profile_are_told_of_once_with_what_is_outside():
    tracker = OnlineError()
    told = []
    for step in range(300):
        tracker.add(8, 0, 20.0, 20.0, ("K",) if step % 20 == 0 else ())
        tracker.add(8, 64, 40.0, 40.0, ("c", "B") if step % 4 == 0 else ())
        told.append(tracker.warning("refit it"))
    (line,) = [text for text in told if text]
    assert "26 % of the last 50 mixed steps lie outside the ranges" in line
    assert "(B, c)" in line
    assert line.endswith("to refit: refit it")


def test_steps_without_a_prediction_are_ignored():
    tracker = OnlineError()
    for predicted, measured in ((0.0, 5.0), (-1.0, 5.0), (5.0, 0.0), (5.0, np.nan)):
        tracker.add(1, 0, predicted, measured)
    assert tracker.errors() == {}


@pytest.mark.parametrize(
    ("options", "field"), [({"window": 3}, "window"), ({"warn_percent": 0}, "warn")]
)
def test_a_setting_out_of_range_is_named(options, field):
    with pytest.raises(ValueError, match=field):
        OnlineError(**options)
