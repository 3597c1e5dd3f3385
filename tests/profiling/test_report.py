# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.profiling.synthetic import synthetic_steps, write_steps
from vllm_kairos.cli import main
from vllm_kairos.files import load_profile
from vllm_kairos.profiling.build import build_profile
from vllm_kairos.profiling.errors import PHASES, predict
from vllm_kairos.profiling.fit import fit_steps
from vllm_kairos.profiling.report import (
    FIGURE_1_CHUNKS,
    added_ms,
    figure_1,
    report_text,
    scatter_figure,
)
from vllm_kairos.profiling.steps import concatenate, steps_of
from vllm_kairos.sim.paper_numbers import TABLE_3

CALIBRATED = Path(__file__).parents[2] / "profiles" / "a100-deepseek-v2-lite.json"


@pytest.fixture(scope="module")
def profile():
    steps = synthetic_steps(noise=0.03)
    rows = np.flatnonzero(steps.is_decode)[:2]
    steps.latency_ms[rows] *= 20.0
    return build_profile(
        fit_steps(steps), name="t", model="m", hardware="h", engine_version="v"
    )


def test_each_phase_has_its_steps_predicted_over_measured(profile):
    steps = synthetic_steps(60, seed=2)
    predicted = predict(profile.step_model(), steps)
    figure = scatter_figure(profile, steps)
    assert figure is not None
    for axis, phase in zip(figure.axes, PHASES, strict=True):
        mask = steps.phase(phase)
        dots, diagonal = axis.lines
        assert axis.get_xlabel() == "measured ms"
        assert dots.get_xdata().tolist() == steps.latency_ms[mask].tolist()
        assert dots.get_ydata().tolist() == predicted[mask].tolist()
        assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())


def test_without_steps_the_held_out_ones_are_drawn(profile):
    figure = scatter_figure(profile, None)
    assert figure is not None
    assert all(len(axis.lines[0].get_xdata()) == 200 for axis in figure.axes)


def test_a_profile_without_steps_has_no_scatter_and_says_so(tmp_path, capsys):
    words = ["profile", "--report", str(CALIBRATED), "--output", str(tmp_path)]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "no predicted-measured.png: the profile carries no held-out steps" in told
    assert [path.name for path in tmp_path.iterdir()] == ["figure1.png"]


def test_targets_stand_in_a_table(capsys):
    lines = report_text(load_profile(CALIBRATED)).splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["target"])
    at = [lines[head].index(word) for word in ("target", "paper", "profile")]
    row = next(line for line in lines if "P50 TBT" in line)
    assert row[at[1] :].startswith("49 / 53")
    assert row[at[2] :].startswith("49.3 / 50.2")
    assert not any("{" in line for line in lines)


def test_figure_1_draws_the_measured_steps_as_dots(profile):
    chi, decodes = 512, 8
    chunk = chi - decodes
    rows = [(decodes, 20_000, chunk, i * chunk, 1, 60.0 + i) for i in range(5)]
    figure = figure_1(profile, steps_of(rows))
    (axis,) = figure.axes
    model = profile.step_model()
    base = model.step_ms(decodes, 20_000)
    dots = [line for line in axis.lines if line.get_marker() == "o"]
    drawn = [list(line.get_ydata()) for line in dots if len(line.get_xdata())]
    assert drawn == [[pytest.approx(60.0 + i - base) for i in range(5)]]
    curves = [
        list(line.get_ydata()) for line in axis.lines if line.get_label()[0] == "χ"
    ]
    assert curves == [added_ms(model, decodes, 20_000, c) for c in FIGURE_1_CHUNKS]
    title = figure.get_suptitle()
    assert "dots measured" in title


def test_figure_1_says_where_no_step_was_measured_at_its_sizes(profile):
    steps = steps_of([(8, 20_000, 300, 0, 1, 60.0)])
    title = figure_1(profile, steps).get_suptitle()
    assert "no step measured at these sizes" in title
    assert "dots" not in title
    assert "measured" not in figure_1(profile, None).get_suptitle()


def test_figure_1_marks_what_lies_outside_the_ranges(profile):
    ranges = {**profile.mixed.ranges, "c": (1.0, 1000.0)}
    narrow = msgspec.structs.replace(
        profile, mixed=msgspec.structs.replace(profile.mixed, ranges=ranges)
    )
    figure = figure_1(narrow, steps_of([(8, 20_000, 300, 0, 1, 60.0)]))
    assert "× outside the ranges profiled" in figure.get_suptitle()
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    outside = [list(line.get_ydata()) for line in marks]
    model = profile.step_model()
    whole = [added_ms(model, 8, 20_000, chi) for chi in (1024, 2048)]
    assert outside[-2:] == whole


def test_the_report_has_p95_bias_and_what_was_dropped(profile):
    lines = report_text(profile).splitlines()
    error = profile.mixed.error
    held_out = next(line for line in lines if "held-out" in line and "MAPE" in line)
    for word in ("median", "P95", "bias"):
        assert word in held_out
    head = next(line for line in lines if line.lstrip().startswith("phase"))
    assert head.split()[-8:] == ["MAPE", "%", "median", "%", "P95", "%", "bias", "%"]
    row = next(
        line.split()
        for line in lines
        if line.split()[:3] == ["mixed", "prefill", "tokens"]
    )
    rows = profile.provenance["held_out_regimes"]["mixed"]
    first = next(r for r in rows if r["of"] == "prefill tokens")
    told = [f"{first[f'{n}_percent']:.2f}" for n in ("mape", "median", "p95")]
    assert row[-4:] == [*told, f"{first['bias_percent']:+.2f}"]
    assert any(f"P95 {error['p95_percent']:.2f} %" in line for line in lines)
    assert "dropped steps: 0 empty, 0 hidden, 2 stray" in lines


def test_the_hidden_and_the_stray_are_printed_by_the_fit(tmp_path, capsys):
    steps = synthetic_steps(noise=0.02)
    steps.latency_ms[np.flatnonzero(steps.is_decode)[:2]] *= 20.0
    steps = concatenate([steps, steps_of([(0, 0, 0, 0, 0, 3.0)] * 7)])
    log = write_steps(tmp_path / "a.csv", steps)
    words = ["profile", "--from-steps", str(log), "--output", str(tmp_path / "p.json")]
    assert main(words) == 0
    assert "dropped  7 empty, 0 hidden, 2 stray" in capsys.readouterr().out


def test_the_calibrated_profile_says_where_it_misses_table_3_and_figure_1():
    profile = load_profile(CALIBRATED)
    targets = {row["target"]: row for row in profile.provenance["targets"]}
    table_3 = next(row for name, row in targets.items() if "Table 3" in name)
    assert table_3["paper"] == ", ".join(f"{TABLE_3[n][1]:.0f}" for n in TABLE_3)
    assert "below" in table_3["profile"]
    model = profile.step_model()
    fifth = [
        added_ms(model, decodes, decodes * context, 2048)[4]
        for decodes in (4, 8, 16, 32)
        for context in (842, 998, 3569, 13_968, 14_013)
    ]
    told = next(row for name, row in targets.items() if "fifth chunk" in name)
    low, high = min(fifth), max(fifth)
    assert told["profile"].startswith(f"{low:.0f} to {np.ceil(high):.0f} at B 4 to 32")
    assert high < 250.0
    assert "250" in told["paper"]
