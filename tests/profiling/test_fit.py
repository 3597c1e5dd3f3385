# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from tests.profiling.synthetic import TRUTH, synthetic_steps
from vllm_kairos.core.predictor import TERMS, Predictor
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.files import UserError
from vllm_kairos.profiling import clean
from vllm_kairos.profiling.errors import PHASES, predict, summarise
from vllm_kairos.profiling.fit import FORMS, fit_steps
from vllm_kairos.profiling.steps import Steps, concatenate, steps_of


def _mape(model: StepModel, steps: Steps, phase: str) -> float:
    rows = steps.take(steps.phase(phase))
    error = summarise(predict(model, rows), rows.latency_ms)
    assert error is not None
    return error.mape_percent


def test_a_noiseless_engine_is_recovered_exactly():
    steps = synthetic_steps()
    fit = fit_steps(steps)
    other = synthetic_steps(seed=2)
    for phase in PHASES:
        assert _mape(fit.model(), other, phase) < 0.01
    assert fit.mixed.form.combine == "add"
    assert fit.decode.predictor.terms["B"] == pytest.approx(0.15, rel=1e-4)


def test_a_memory_bound_engine_is_fitted_by_the_longer_of_the_two():
    truth = StepModel(
        TRUTH.prefill, TRUTH.decode, Predictor({"1": 4.0, "c": 0.03}), "max"
    )
    fit = fit_steps(synthetic_steps(noise=0.01, model=truth))
    assert fit.mixed.form.combine == "max"
    other = synthetic_steps(seed=2, model=truth)
    assert _mape(fit.model(), other, "mixed") < 1.5
    # Small chunks cost nothing there, and are never predicted to help.
    assert fit.model().step_ms(32, 100_000, 1) >= fit.model().step_ms(32, 100_000)


def test_stalls_do_not_bend_the_fit_and_are_counted():
    clear = fit_steps(synthetic_steps(noise=0.02)).model()
    steps = synthetic_steps(noise=0.02)
    rng = np.random.default_rng(0)
    stalled = rng.choice(len(steps), 20, replace=False)
    steps.latency_ms[stalled] *= 30.0
    fit = fit_steps(steps)
    assert fit.dropped["stray"] >= 18
    for phase in PHASES:
        held_out = synthetic_steps(seed=3)
        worse = _mape(fit.model(), held_out, phase) - _mape(clear, held_out, phase)
        assert worse < 0.3


def test_stalls_still_count_in_the_reported_error():
    steps = synthetic_steps(noise=0.01)
    rows = np.flatnonzero(steps.is_decode)[:5]
    steps.latency_ms[rows] *= 0.2  # 400 % too long, each
    fit = fit_steps(steps)
    count = int(steps.is_decode.sum())
    assert fit.decode.error is not None
    assert fit.decode.error.count == count
    assert fit.decode.error.mape_percent > 5 * 390 / count


@pytest.mark.parametrize(
    ("phase", "rows", "short_ms"),
    [
        ("decode", 1, 0.05),
        ("decode", 12, 0.002),
        ("decode", 5, 0.5),
        ("prefill", 2, 1.0),
        ("mixed", 3, 13.0),
    ],
)
def test_a_step_logged_in_next_to_no_time_does_not_bend_the_fit(phase, rows, short_ms):
    steps = synthetic_steps(noise=0.03)
    short = np.flatnonzero(steps.phase(phase))[5 : 5 + rows]
    steps.latency_ms[short] = short_ms
    fit = fit_steps(steps)
    assert fit.dropped["stray"] + fit.dropped["hidden"] >= rows
    for name in PHASES:
        assert _mape(fit.model(), synthetic_steps(seed=7), name) < 0.6, name


@pytest.mark.parametrize(
    ("phase", "field", "value"),
    [
        ("decode", "decode_kv_tokens", 1e9),
        ("decode", "decodes", 60_000),
        ("mixed", "prefill_tokens", 1e8),
        ("mixed", "prefill_kv_tokens", 1e7),
    ],
)
def test_one_row_far_beyond_all_others_does_not_bend_the_fit(phase, field, value):
    steps = synthetic_steps(noise=0.03)
    row = np.flatnonzero(steps.phase(phase))[5]
    getattr(steps, field)[row] = value
    fit = fit_steps(steps)
    assert fit.dropped["stray"] == 1
    assert (fit.decode.form.name, fit.mixed.form.name) == ("paper", "attention")
    for name in PHASES:
        assert _mape(fit.model(), synthetic_steps(seed=7), name) < 0.6, name


def test_a_row_far_beyond_all_others_that_the_fit_explains_is_kept():
    steps = synthetic_steps()
    row = np.flatnonzero(steps.is_decode)[5]
    steps.decode_kv_tokens[row] = 3e6
    steps.latency_ms[row] = TRUTH.step_ms(int(steps.decodes[row]), 3e6)
    fit = fit_steps(steps)
    assert fit.dropped["stray"] == 0
    assert fit.decode.ranges["K"][1] == 3e6


def test_hidden_steps_are_dropped_and_counted():
    steps = synthetic_steps(noise=0.01)
    rows = np.flatnonzero(steps.is_mixed & (steps.prefill_tokens > 500))[:4]
    steps.latency_ms[rows] = 9.0  # under any decode-only step
    fit = fit_steps(steps)
    assert fit.dropped["hidden"] == 4
    assert _mape(fit.model(), synthetic_steps(seed=2), "mixed") < 1.0


def test_idle_steps_are_dropped_and_counted():
    steps = concatenate([synthetic_steps(), steps_of([(0, 0, 0, 0, 0, 3.0)] * 7)])
    assert fit_steps(steps).dropped["empty"] == 7


def test_no_coefficient_is_ever_negative():
    rng = np.random.default_rng(5)
    for seed in range(5):
        steps = synthetic_steps(200, seed=seed)
        steps.latency_ms[:] = rng.uniform(1.0, 100.0, len(steps))
        fit = fit_steps(steps)
        for phase in PHASES:
            assert all(v >= 0 for v in getattr(fit, phase).predictor.terms.values())


def test_the_papers_form_is_among_those_compared():
    assert all(any(f.name == "paper" for f in FORMS[phase]) for phase in PHASES)
    fit = fit_steps(synthetic_steps(noise=0.05))
    for phase in PHASES:
        part = getattr(fit, phase)
        assert set(part.tried) == {form.name for form in FORMS[phase]}
        best = min(part.tried.values())
        assert part.tried[part.form.name] <= best / 0.95


def test_the_same_steps_give_the_same_fit():
    a = fit_steps(synthetic_steps(noise=0.05))
    b = fit_steps(synthetic_steps(noise=0.05))
    assert a.mixed.predictor == b.mixed.predictor
    assert a.mixed.error == b.mixed.error


@pytest.mark.parametrize("phase", PHASES)
def test_coefficients_evaluate_as_the_estimator_predicts(phase):
    fit = fit_steps(synthetic_steps(noise=0.03))
    part = getattr(fit, phase)
    steps = synthetic_steps(seed=9)
    rows = steps.take(steps.phase(phase))
    x = rows.features()[:, part.columns] / part.scale
    expected = part.estimator.predict(x)
    if phase == "mixed":
        decode = rows.features()[:, fit.decode.columns] / fit.decode.scale
        base = fit.decode.estimator.predict(decode)
        expected = (
            np.maximum(base, expected)
            if part.form.combine == "max"
            else base + expected
        )
    got = predict(fit.model(), rows)
    assert got == pytest.approx(expected, rel=1e-9)
    one_by_one = [
        fit.model().step_ms(int(b), int(k), int(c), int(p), int(max(n, 1)))
        for b, k, c, p, n in zip(
            rows.decodes,
            rows.decode_kv_tokens,
            rows.prefill_tokens,
            rows.prefill_kv_tokens,
            rows.prefills,
            strict=True,
        )
    ]
    assert one_by_one == pytest.approx(expected, rel=1e-9)
    assert {TERMS[i] for i in part.columns} == set(part.form.terms)


@pytest.mark.parametrize(
    ("break_it", "missing", "how"),
    [
        (lambda s: s.take(~s.is_mixed), "no mixed steps", "while others decode"),
        (lambda s: s.take(~s.is_decode), "no decode steps", "no prompt waiting"),
        (
            lambda s: s.take(np.arange(30)),
            "only 11 decode steps|only 9 decode steps|only [0-9]+ (decode|mixed) steps",
            "expected at least 20",
        ),
        (
            lambda s: s.take(~s.is_decode | (s.decodes == s.decodes[s.is_decode][0])),
            "only [0-9]+ decode steps",
            "several sizes",
        ),
    ],
)
def test_steps_that_cannot_support_a_fit_are_refused(break_it, missing, how):
    with pytest.raises(UserError, match=f"({missing}).*{how}"):
        fit_steps(break_it(synthetic_steps()))


def test_one_batch_size_is_refused():
    steps = synthetic_steps()
    steps.decodes[steps.is_decode] = 8
    with pytest.raises(UserError, match=r"same decode batch size .8."):
        fit_steps(steps)


def test_one_chunk_size_is_refused():
    steps = synthetic_steps()
    steps.prefill_tokens[steps.is_mixed] = 512
    with pytest.raises(UserError, match=r"same chunk size .512."):
        fit_steps(steps)


def test_without_prefill_only_steps_the_predictor_is_derived_and_said_so():
    steps = synthetic_steps()
    fit = fit_steps(steps.take(~steps.is_prefill))
    assert fit.prefill.form.name == "from-mixed"
    assert any("prefill-only" in note for note in fit.notes)
    expected = TRUTH.step_ms(0, 0, 1000)
    assert fit.model().step_ms(0, 0, 1000) == pytest.approx(expected, rel=0.6)


def test_without_short_prompts_the_decode_step_holds_the_intercept():
    truth = StepModel(
        Predictor({"1": 12.2, "c": 0.02}), TRUTH.decode, Predictor({"c": 0.02})
    )
    steps = synthetic_steps(300, noise=0.04, model=truth)
    short = steps.is_prefill & (steps.prefill_tokens < 2500)
    long = np.flatnonzero(steps.is_prefill & ~short)[:10]
    rows = np.concatenate([np.flatnonzero(~steps.is_prefill), long])
    model = fit_steps(steps.take(rows)).model()
    assert model.step_ms(0, 0, 64) == pytest.approx(truth.step_ms(0, 0, 64), rel=0.12)


def test_a_log_of_strays_only_is_a_misfit_not_strays():
    predicted = np.full(100, 10.0)
    measured = np.where(np.arange(100) < 30, 100.0, 10.0)
    assert not clean.stray(predicted, measured).any()
    measured = np.where(np.arange(100) < 3, 100.0, 10.0)
    assert clean.stray(predicted, measured).sum() == 3
