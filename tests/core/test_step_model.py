# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kairos.core.predictor import TERMS, Predictor, feature_matrix
from vllm_kairos.core.step_model import StepModel

_SIZES = {"1": 20, "B": 0.5, "K": 1e-4, "c": 0.05, "p": 1e-3, "n": 5}
_SIZES |= {"cp": 1e-5, "cc": 1e-5, "cB": 1e-4, "cK": 1e-7}


def predictors(terms: tuple[str, ...] = TERMS) -> st.SearchStrategy[Predictor]:
    return st.fixed_dictionaries(
        {t: st.one_of(st.just(0.0), st.floats(0, _SIZES[t])) for t in terms}
    ).map(Predictor)


models = st.builds(
    StepModel,
    predictors(),
    predictors(("1", "B", "K")),
    predictors(),
    st.sampled_from(["add", "max"]),
)
batches = st.integers(0, 64)
kv_tokens = st.integers(0, 200_000)
prefixes = st.integers(0, 32_000)


@given(models, batches, kv_tokens, prefixes, st.integers(1, 8192), st.integers(1, 8192))
@settings(max_examples=200, deadline=None)
def test_a_larger_chunk_is_never_predicted_faster(model, b, k, p, c1, c2):
    small, large = sorted((c1, c2))
    assert model.step_ms(b, k, small, p) <= model.step_ms(b, k, large, p) * (1 + 1e-12)
    if b:
        assert model.step_ms(b, k) <= model.step_ms(b, k, small, p) * (1 + 1e-12)


@given(models, batches, kv_tokens, prefixes, st.floats(0, 500), st.integers(0, 9000))
@settings(max_examples=300, deadline=None)
def test_the_closed_form_chunk_is_the_largest_that_fits(model, b, k, p, limit, most):
    chunk = model.largest_chunk(b, k, p, limit, most)
    assert 0 <= chunk <= max(most, 0)
    if chunk:
        assert model.step_ms(b, k, chunk, p) <= limit
    if chunk < most:
        # The next one is over, but for rounding in the last digits.
        assert model.step_ms(b, k, chunk + 1, p) > limit * (1 - 1e-9) - 1e-9


@given(
    models,
    st.lists(
        st.tuples(
            batches,
            kv_tokens,
            st.integers(0, 8192),
            prefixes,
            st.integers(1, 5),
        ),
        min_size=1,
        max_size=20,
    ),
)
@settings(max_examples=100, deadline=None)
def test_many_steps_at_once_equal_one_by_one(model, steps):
    columns = np.array(steps).T
    expected = [model.step_ms(*step) for step in steps]
    assert model.step_ms_array(*columns) == pytest.approx(expected, rel=1e-12)


def test_arguments_of_many_steps_broadcast():
    model = StepModel(Predictor({}), Predictor({"B": 1.0}), Predictor({"c": 0.5}))
    got = model.step_ms_array(np.array([[1], [2]]), 0, np.array([0, 10, 20]), 0, 1)
    assert got.tolist() == [[1, 6, 11], [2, 7, 12]]


def test_blocks_join_without_a_seam():
    rng = np.random.default_rng(0)
    model = StepModel(
        Predictor({"1": 3, "c": 0.1}),
        Predictor({"1": 2, "B": 0.5}),
        Predictor({"1": 1, "c": 0.2, "cp": 1e-5}),
        "max",
    )
    columns = [rng.integers(0, 50, 20_000) for _ in range(4)]
    whole = model.step_ms_array(*columns, 1)
    for at in (0, 8191, 8192, 16383, 16384, 19_999):
        assert whole[at] == pytest.approx(model.step_ms(*(int(c[at]) for c in columns)))


def test_the_longer_of_decode_and_prefill_bounds_a_step():
    model = StepModel(
        Predictor({}), Predictor({"1": 20.0}), Predictor({"c": 0.1}), "max"
    )
    assert model.step_ms(4, 0, 100) == 20.0
    assert model.step_ms(4, 0, 300) == pytest.approx(30.0)
    assert model.largest_chunk(4, 0, 0, 25.0, 8192) == 250
    assert model.largest_chunk(4, 0, 0, 19.9, 8192) == 0


def test_a_step_outside_the_profiled_ranges_is_flagged():
    ranges = {
        "decode": {"B": (1.0, 32.0), "K": (100.0, 64_000.0)},
        "mixed": {"B": (1.0, 16.0), "c": (16.0, 2048.0), "p": (0.0, 8192.0)},
    }
    model = StepModel(
        Predictor({"1": 1.0}),
        Predictor({"1": 5.0}),
        Predictor({"c": 0.01}),
        ranges=ranges,
    )
    inside = model.estimate(8, 1000, 512, 1024)
    assert not inside.extrapolated
    assert inside.ms == model.step_ms(8, 1000, 512, 1024)
    assert model.estimate(33, 99_000).outside == ("B", "K")
    assert model.estimate(20, 1000, 4096, 9000).outside == ("B", "c", "p")
    assert not model.estimate(0, 0, 100).extrapolated  # No range is known.
    assert model.estimate(0, 0).ms == 0.0


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_a_coefficient_that_is_negative_or_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="coefficient of 'c'"):
        Predictor({"c": value})


def test_an_unknown_term_or_way_to_combine_is_refused():
    with pytest.raises(ValueError, match="unknown term 'x'"):
        Predictor({"x": 1.0})
    with pytest.raises(ValueError, match="combine"):
        StepModel(Predictor({}), Predictor({}), Predictor({}), "min")


def test_features_stand_in_the_order_of_the_terms():
    row = feature_matrix([3], [700], [64], [128], [2])[0]
    assert row.tolist() == [1, 3, 700, 64, 128, 2, 64 * 64, 64 * 32, 64 * 3, 64 * 700]
