# SPDX-License-Identifier: Apache-2.0
"""What the accuracy harness takes for a difference, and what for noise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci" / "lm-eval-harness"))

import models
from compare import Noise, differences, first_difference, measure_noise
from evaluation import Evaluation, Generation

from vllm_kairos.files import UserError

HARNESS = Path(__file__).resolve().parents[2] / "ci" / "lm-eval-harness"
QUIET = Noise(0.0, 0, 4, 0, 40)
LOUD = Noise(0.05, 1, 4, 30, 40)
PROMPT = (1, 2, 3)


def said(
    *tokens: int, logprob: float = -0.5, gap: float = 3.0, arm: str = "pd"
) -> Evaluation:
    count = len(tokens)
    generation = Generation(PROMPT, tokens, (logprob,) * count, (gap,) * count)
    return Evaluation(arm, generations={"recall": {PROMPT: generation}})


def test_the_same_is_no_difference() -> None:
    assert differences(said(5, 6, 7), said(5, 6, 7), QUIET) == []


def test_the_first_token_that_differs_is_told_with_both() -> None:
    (line,) = differences(said(5, 6, 7), said(5, 9, 7), QUIET)
    assert "number 1: [9, 7], [6, 7] on one engine" in line
    assert "pd, recall, prompt of 3 tokens" in line


@pytest.mark.parametrize("shorter", [(5, 6), ()])
def test_an_end_that_comes_early_or_late_is_a_difference(
    shorter: tuple[int, ...],
) -> None:
    assert differences(said(5, 6, 7), said(*shorter), QUIET)
    assert differences(said(*shorter), said(5, 6, 7), QUIET)


def test_a_tie_within_the_noise_is_excused_and_a_clear_choice_is_not() -> None:
    tie, clear = said(5, 6, gap=0.1), said(5, 6, gap=2.0)
    assert differences(tie, said(5, 9), LOUD) == []
    assert differences(tie, said(5, 9), QUIET)
    assert differences(clear, said(5, 9), LOUD)


def test_the_same_token_with_another_probability_is_a_difference() -> None:
    (line,) = differences(said(5, 6), said(5, 6, logprob=-1.5), LOUD)
    assert "log-probability of token 0 is -1.5" in line
    assert differences(said(5, 6), said(5, 6, logprob=-0.6), LOUD) == []


def test_a_prompt_that_one_engine_never_saw_is_a_difference() -> None:
    other = Evaluation("pd", generations={"recall": {(9,): Generation((9,), (5,))}})
    (line,) = differences(said(5), other, QUIET)
    assert "another prompt" in line


def test_likelihoods_are_compared_answer_by_answer() -> None:
    one = Evaluation("alone", likelihoods={"choice": [-1.0, -2.0]})
    other = Evaluation("pd", likelihoods={"choice": [-1.0, -2.3]})
    (line,) = differences(one, other, QUIET)
    assert "answer 1: log-likelihood -2.3000" in line
    assert differences(one, other, LOUD) == []
    short = Evaluation("pd", likelihoods={"choice": [-1.0]})
    with pytest.raises(ValueError):
        differences(one, short, QUIET)


def test_noise_is_measured_up_to_the_first_token_that_differs() -> None:
    one, other = said(5, 6, 7), said(5, 9, 7, logprob=-0.7)
    noise = measure_noise(one, other)
    assert noise.logprob == pytest.approx(0.2)
    assert (noise.different, noise.compared, noise.tokens) == (1, 1, 1)
    assert measure_noise(one, one).logprob == 0


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_first_difference_is_where_the_common_beginning_ends(
    a: list[int], b: list[int]
) -> None:
    index = first_difference(Generation((), tuple(a)), Generation((), tuple(b)))
    if index is None:
        assert a == b
    else:
        assert a[:index] == b[:index]
        assert a[index : index + 1] != b[index : index + 1]


def test_every_configuration_can_be_read_and_names_tasks_with_values() -> None:
    paths = sorted((HARNESS / "configs").glob("*.yaml"))
    assert len(paths) >= 3
    for path in paths:
        assert models.load_config(path).tasks
    for list_file in (HARNESS / "configs").glob("*.txt"):
        assert models.config_paths(list_file)


TASKS = "tasks:\n- {name: t, metrics: [{name: m, value: 0.5}]}\n"


def test_an_unknown_model_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model_name: No-Such-Model\n" + TASKS)
    with pytest.raises(UserError, match="'No-Such-Model' is not known"):
        models.load_config(path).model()


def test_weights_that_are_not_where_they_should_be_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_MODEL", str(tmp_path))
    path = tmp_path / "a.yaml"
    path.write_text("model_name: M\nmodel_path_env: SOME_MODEL\n" + TASKS)
    with pytest.raises(UserError, match="SOME_MODEL is"):
        models.load_config(path).model()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model_name: M\n", "tasks"),
        ("model_name: M\ntasks: []\n", "expected tasks"),
        ("model_name: M\ntasks:\n- {name: t, metrics: []}\n", "each with a metric"),
        ("model_name: M\nlimits: 3\n" + TASKS, "limits"),
        ("", "a.yaml"),
        ("- 1", "a.yaml"),
    ],
)
def test_a_bad_configuration_is_named(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        models.load_config(path)


@pytest.mark.parametrize("text", ["", "# nothing\n\n", "missing.yaml\n"])
def test_a_list_that_names_nothing_to_run_fails(tmp_path: Path, text: str) -> None:
    path = tmp_path / "models.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"models\.txt"):
        models.config_paths(path)
