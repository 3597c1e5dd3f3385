# SPDX-License-Identifier: Apache-2.0
"""Step models, nodes and requests for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from vllm_kairos.core.fleet import NodeState, PrefillWork
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.step_model import StepModel


def _term(most: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(0, most, allow_nan=False))


@st.composite
def predictors(draw: st.DrawFn) -> Predictor:
    """Any predictor of plausible size, milliseconds."""
    most = {
        "1": 50.0,
        "B": 0.5,
        "K": 1e-3,
        "c": 0.5,
        "p": 1e-3,
        "n": 5.0,
        "cp": 1e-5,
        "cc": 1e-5,
        "cB": 1e-3,
        "cK": 1e-6,
    }
    return Predictor({name: draw(_term(value)) for name, value in most.items()})


@st.composite
def step_models(draw: st.DrawFn) -> StepModel:
    """Any step model, of either way to combine."""
    return StepModel(
        draw(predictors()),
        draw(predictors()),
        draw(predictors()),
        draw(st.sampled_from(["add", "max"])),
    )


@st.composite
def nodes(draw: st.DrawFn, name: str) -> NodeState:
    """Any node; some without a profile, stale, full or busy."""
    works = st.builds(PrefillWork, st.integers(1, 20_000), st.integers(0, 5_000))
    return NodeState(
        node=name,
        model=draw(st.one_of(st.none(), step_models())),
        budget_tokens=draw(st.sampled_from([64, 512, 2048, 8192])),
        max_num_seqs=draw(st.sampled_from([8, 256])),
        decodes=draw(st.integers(0, 64)),
        decode_kv_tokens=draw(st.integers(0, 200_000)),
        prefills=draw(st.lists(works, max_size=4)),
        deflected=draw(st.lists(works, max_size=1)),
        awaiting_kv=draw(st.integers(0, 4)),
        awaiting_kv_tokens=draw(st.integers(0, 20_000)),
        expected=draw(st.integers(0, 4)),
        expected_kv_tokens=draw(st.integers(0, 20_000)),
        free_kv_tokens=draw(st.sampled_from([0, 2_000, 1 << 40])),
        step_in_flight_ms=draw(st.sampled_from([0.0, 30.0])),
        fresh=draw(st.booleans()),
    )
