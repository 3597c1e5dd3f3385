# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from tests.profiling.synthetic import synthetic_steps, write_steps
from vllm_kairos.cli import main
from vllm_kairos.files import UserError, load_profile
from vllm_kairos.profiling.command import add_arguments
from vllm_kairos.profiling.flags import READ, parse_budget_s
from vllm_kairos.profiling.report import added_ms, measured_added_ms
from vllm_kairos.profiling.steps import read_steps, steps_of


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A profile and other steps of the same engine, in files."""
    folder = tmp_path_factory.mktemp("fitted")
    train = write_steps(folder / "train.csv", synthetic_steps(noise=0.03))
    test = write_steps(folder / "test.csv", synthetic_steps(noise=0.05, seed=2))
    profile = folder / "p.json"
    words = ["profile", "--from-steps", str(train), "--output", str(profile)]
    assert main(words) == 0
    return profile, test


def _last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_the_reported_error_equals_an_independent_recomputation(fitted, capsys):
    profile, test = fitted
    assert (
        main(
            ["profile", "--validate", str(profile), "--from-steps", str(test), "--json"]
        )
        == 0
    )
    told = _last_json(capsys)
    raw = json.loads(profile.read_text())
    steps = read_steps([test])
    phases = {"prefill": [], "decode": [], "mixed": []}
    for b, k, c, p, n, ms in zip(
        steps.decodes,
        steps.decode_kv_tokens,
        steps.prefill_tokens,
        steps.prefill_kv_tokens,
        steps.prefills,
        steps.latency_ms,
        strict=True,
    ):
        phase = "decode" if c == 0 else ("mixed" if b else "prefill")
        n = max(n, 1)
        term = {"1": 1, "B": b, "K": k, "c": c, "p": p, "n": n}
        term |= {"cp": c * p / n, "cc": c * c / n, "cB": c * b, "cK": c * k}

        def value(name, term=term):
            return sum(w * term[t] for t, w in raw[name]["terms"].items())

        predicted = value(phase)
        if phase == "mixed":
            base = value("decode")
            longer = raw["mixed"]["combine"] == "max"
            predicted = max(predicted, base) if longer else predicted + base
        phases[phase].append(100 * (predicted - ms) / ms)
    assert told["dropped"] == {"empty": 0, "hidden": 0}
    for phase, errors in phases.items():
        size = np.abs(errors)
        assert told[phase]["count"] == len(errors)
        assert told[phase]["mape_percent"] == pytest.approx(size.mean(), abs=1e-5)
        assert told[phase]["median_percent"] == pytest.approx(np.median(size), abs=1e-5)
        assert told[phase]["p95_percent"] == pytest.approx(
            np.percentile(size, 95), abs=1e-5
        )
        assert told[phase]["bias_percent"] == pytest.approx(np.mean(errors), abs=1e-5)


def test_steps_of_two_engines_fitted_together_are_warned_of(tmp_path, capsys):
    logs = [
        write_steps(tmp_path / "a.csv", synthetic_steps(noise=0.03), "a"),
        write_steps(tmp_path / "b.csv", synthetic_steps(seed=2), "b"),
    ]
    words = ["profile", "--from-steps", str(logs[0]), "--output"]
    assert main([*words, str(tmp_path / "one.json")]) == 0
    assert capsys.readouterr().err == ""
    slow = synthetic_steps(seed=2)
    slow.latency_ms[:] *= 4.0
    write_steps(logs[1], slow, "b")
    words = ["profile", "--from-steps", *map(str, logs), "--output"]
    assert main([*words, str(tmp_path / "two.json")]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    for phase, line in zip(("prefill", "decode", "mixed"), told, strict=True):
        assert line.startswith(f"warning: {phase} predictions are off by ")
        assert "steps of one engine and configuration are expected" in line


def test_hidden_steps_count_in_all_rows_only(fitted, tmp_path, capsys):
    profile, _ = fitted
    steps = synthetic_steps(seed=2)
    rows = np.flatnonzero(steps.is_mixed & (steps.prefill_tokens > 500))[:4]
    steps.latency_ms[rows] = 9.0
    log = write_steps(tmp_path / "h.csv", steps)
    words = ["profile", "--validate", str(profile), "--from-steps", str(log), "--json"]
    assert main(words) == 0
    told = _last_json(capsys)
    assert told["dropped"] == {"empty": 0, "hidden": 4}
    assert told["mixed"]["count"] == int(steps.is_mixed.sum()) - 4
    assert told["all_rows"]["mixed"]["count"] == int(steps.is_mixed.sum())
    assert told["all_rows"]["mixed"]["mape_percent"] > told["mixed"]["mape_percent"]


def test_a_phase_without_steps_is_counted_as_none(fitted, tmp_path, capsys):
    profile, _ = fitted
    steps = synthetic_steps()
    only = write_steps(tmp_path / "d.csv", steps.take(steps.is_decode))
    words = ["profile", "--validate", str(profile), "--from-steps", str(only), "--json"]
    assert main(words) == 0
    told = _last_json(capsys)
    assert told["mixed"] == {
        "count": 0,
        "mape_percent": None,
        "median_percent": None,
        "p95_percent": None,
        "bias_percent": None,
    }


def test_steps_beyond_what_was_profiled_are_counted(fitted, tmp_path, capsys):
    profile, _ = fitted
    ranges = load_profile(profile).mixed.ranges
    steps = synthetic_steps(seed=2)
    rows = np.flatnonzero(steps.is_mixed)[:3]
    steps.prefill_tokens[rows] = ranges["c"][1] + 1
    log = write_steps(tmp_path / "far.csv", steps)
    words = ["profile", "--validate", str(profile), "--from-steps", str(log), "--json"]
    assert main(words) == 0
    told = _last_json(capsys)["extrapolated"]["mixed"]
    model = load_profile(profile).step_model()
    mixed = steps.take(steps.is_mixed)
    one_by_one = [
        model.estimate(int(b), k, int(c), p, int(n)).extrapolated
        for b, k, c, p, n in zip(
            mixed.decodes,
            mixed.decode_kv_tokens,
            mixed.prefill_tokens,
            mixed.prefill_kv_tokens,
            mixed.prefills,
            strict=True,
        )
    ]
    assert told == sum(one_by_one) >= 3


def test_a_report_has_tables_and_two_figures(fitted, tmp_path, capsys):
    profile, test = fitted
    for extra in ([], ["--from-steps", str(test)]):
        folder = tmp_path / f"r{len(extra)}"
        words = ["profile", "--report", str(profile), "--output", str(folder), *extra]
        assert main(words) == 0
        text = capsys.readouterr().out
        for word in ("prefill: form", "MAPE", "ranges seen", "measured/predicted"):
            assert word in text
        assert "mixed   prefill tokens" in text
        for name in ("predicted-measured.png", "figure1.png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("held_out_regimes", {"mixed": [{"of": "decode batch"}]}),
        ("held_out_regimes", {"mixed": 3}),
        ("held_out_predicted_measured_ms", {"mixed": "1.0:2.0 3.0"}),
        ("held_out_predicted_measured_ms", {"mixed": "1.0:fast"}),
    ],
)
def test_a_provenance_changed_by_hand_is_named(fitted, tmp_path, capsys, name, value):
    raw = json.loads(fitted[0].read_text())
    raw["provenance"][name] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(raw))
    assert main(["profile", "--report", str(path), "--output", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert name in told
    assert told.count("\n") == 1


def test_junk_beside_a_profile_does_not_hide_its_report(fitted, tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_bytes(fitted[0].read_bytes())
    (tmp_path / "p.steps.csv").write_text("junk\n")
    words = ["profile", "--report", str(path), "--output", str(tmp_path / "r")]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "p.steps.csv: row 1: missing columns" in told.err
    assert "MAPE" in told.out
    given = [*words, "--from-steps", str(tmp_path / "p.steps.csv")]
    assert main(given) == 2


def test_figure_1_shows_what_each_chunk_adds(fitted):
    model = load_profile(fitted[0]).step_model()
    curve = added_ms(model, 8, 20_000, 512)
    assert len(curve) == 5
    assert curve == sorted(curve)
    assert curve[2] == pytest.approx(
        model.step_ms(8, 20_000, 504, 1008) - model.step_ms(8, 20_000)
    )
    raw = steps_of(
        [
            (8, 20_000, 504, 1008, 1, 50.0),  # third chunk
            (8, 20_000, 504, 1000, 1, 50.0),  # no whole number of chunks
            (8, 20_000, 300, 0, 1, 50.0),  # another size
            (9, 20_000, 504, 0, 1, 50.0),  # another batch
        ]
    )
    points = measured_added_ms(model, raw, 8, 512)
    assert points == [(2, pytest.approx(50.0 - model.step_ms(8, 20_000)))]


def test_a_failed_fit_leaves_no_file(tmp_path, capsys):
    steps = synthetic_steps()
    log = write_steps(tmp_path / "d.csv", steps.take(~steps.is_mixed))
    output = tmp_path / "p.json"
    words = ["profile", "--from-steps", str(log), "--output", str(output)]
    assert main(words) == 2
    told = capsys.readouterr()
    assert "no mixed steps" in told.err
    assert told.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["d.csv"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "nothing to do"),
        (["--from-steps", "x.csv"], "--output is missing"),
        (["--validate", "p.json"], "--from-steps"),
        (["--validate", "p.json", "--report", "p.json"], "expected one of them"),
        (["--url", "http://u", "--output", "p"], "--step-log"),
        (
            ["--url", "http://u", "--from-steps", "f", "--output", "p"],
            "expected one of them",
        ),
        (["--model", "m", "--output", "p", "--budget", "soon"], "--budget is 'soon'"),
        (["--model", "m", "--output", "p", "--budget", "5s"], "at least 20s"),
        (["--model", "m", "--output", "p", "--prefill-url", "u"], "needs --url"),
        (["--report", "nowhere.json"], "nowhere.json"),
        (
            ["--validate", "p.json", "--from-steps", "a", "--output", "x"],
            "--output is not used with --validate",
        ),
        (["--report", "p.json", "--trace", "t"], "--trace is not used with --report"),
        (
            ["--from-steps", "a", "--output", "x", "--prefill-url", "u"],
            "--prefill-url is not used with --from-steps",
        ),
        (
            ["--model", "m", "--output", "x", "--step-log", "l"],
            "--step-log is not used with --model",
        ),
        (
            ["--validate", "p.json", "--from-steps", "a", "--seed", "0"],
            "--seed is not used with --validate",
        ),
        (
            ["--report", "p.json", "--budget", "30m"],
            "--budget is not used with --report",
        ),
        (
            ["--report", "p.json", "--engine", "e"],
            "--engine is not used with --report without --from-steps",
        ),
        (
            ["--from-steps", "a", "--output", "x", "--kv-dtype", "auto"],
            "--kv-dtype is not used with --from-steps",
        ),
        (
            ["--url", "http://u", "--step-log", "l", "--output", "x", "--engine", "e"],
            "--engine is not used with --url",
        ),
        (
            ["--model", "m", "--output", "p", "--engine", "e"],
            "--engine is not used with --model",
        ),
        (
            ["--report", "p.json", "--", "--port", "1"],
            "-- ARG is not used with --report",
        ),
        (
            ["--model", "m", "--output", "p", "--", "--port", "1"],
            "--port after -- is set by the profiler",
        ),
    ],
)
def test_flags_that_do_not_fit_together_are_told_in_one_line(
    words, named, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *words]) == 2
    told = capsys.readouterr().err
    lines = [line for line in told.splitlines() if line != "starting the engine"]
    assert len(lines) == 1
    assert named in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_every_flag_is_read_by_something_that_can_be_asked_for():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = {action.dest for action in parser._actions} - {"help"}
    assert {name for names in READ.values() for name in names} == known


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--from-steps", "other.csv", "kept.csv", "--output", "kept.csv"], "from"),
        (["--from-steps", "link.csv", "--output", "./kept.csv"], "from"),
        (
            ["--url", "http://u", "--step-log", "kept.csv", "--output", "kept.csv"],
            "log",
        ),
        (
            ["--url", "http://u", "--step-log", "p.steps.csv", "--output", "p.json"],
            "log",
        ),
        (["--model", "m", "--trace", "kept.csv", "--output", "kept.csv"], "trace"),
    ],
)
def test_what_is_read_is_never_written_over(words, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_steps(tmp_path / "other.csv", synthetic_steps(200, seed=2), "e")
    kept = write_steps(tmp_path / "kept.csv", synthetic_steps(200), "f")
    (tmp_path / "link.csv").symlink_to(kept)
    before = kept.read_bytes()
    assert main(["profile", *words]) == 2
    told = capsys.readouterr().err
    assert "would be written over" in told
    assert flag in told
    assert kept.read_bytes() == before


@pytest.mark.parametrize("seed", ["-1", "99999999999"])
@pytest.mark.parametrize("source", [["--from-steps", "a.csv"], ["--model", "m"]])
def test_a_seed_that_cannot_be_used_is_refused_before_any_work(
    seed, source, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["profile", *source, "--output", "p.json", "--seed", seed]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"--seed is {seed}, expected 0 to 4294967295" in told


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("90", 90), ("30m", 1800), ("1.5h", 5400)]
)
def test_a_budget_is_read_with_its_unit(text, seconds):
    assert parse_budget_s(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5m", "1d", "nan", "1e9"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(UserError, match="--budget"):
        parse_budget_s(text)
