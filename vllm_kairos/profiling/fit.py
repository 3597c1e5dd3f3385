# SPDX-License-Identifier: Apache-2.0
"""Fit the three step-latency predictors (paper §3.3, §5.2).

Least squares with scikit-learn, coefficients never negative, each step
weighted by ``1 / latency²`` so that it is the relative error that is small
(the latency measured or predicted, whichever is longer), and Huber weights on
top so that a stalled step does not bend the rest. The form is chosen among a
few named ones by cross-validation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import KFold

from vllm_kairos.core.predictor import TERMS, Array, Predictor, feature_matrix
from vllm_kairos.core.profile import FittedPredictor
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.files import UserError
from vllm_kairos.profiling import clean
from vllm_kairos.profiling.errors import (
    PHASES,
    ErrorSummary,
    residual_quantiles,
    summarise,
)
from vllm_kairos.profiling.robust import Form, combine_ms, without_strays
from vllm_kairos.profiling.steps import Steps

#: Forms to choose among, simplest first: of two that err alike the earlier
#: one is taken. ``paper`` is the form of §5.2.
FORMS: dict[str, tuple[Form, ...]] = {
    "prefill": (
        Form("paper", ("1", "c", "p")),
        Form("prefix", ("1", "c", "p", "n", "cp")),
        Form("attention", ("1", "c", "p", "n", "cp", "cc")),
    ),
    "decode": (
        Form("batch", ("1", "B")),
        Form("paper", ("1", "B", "K")),
    ),
    "mixed": (
        Form("paper", ("1", "K", "c", "p")),
        Form("attention", ("1", "c", "p", "n", "cp", "cc")),
        Form("attention-batch", ("1", "c", "p", "n", "cp", "cc", "cB", "cK")),
        Form("roofline", ("1", "c", "p", "n", "cp", "cc"), "max"),
        Form("roofline-batch", ("1", "c", "p", "n", "cp", "cc", "cB"), "max"),
    ),
}

#: Fewest steps of a phase that are fitted.
FEWEST_STEPS = {"prefill": 8, "decode": 20, "mixed": 20}

_FOLDS = 5
#: A later form must be better than an earlier one by this factor.
_WORTH_A_TERM = 0.98

_HOW = {
    "prefill": "send prompts of several lengths, one at a time, to an idle engine",
    "decode": "let batches of several sizes decode with no prompt waiting",
    "mixed": "send prompts while others decode (chunks of several sizes)",
}


@dataclass(frozen=True)
class PhaseFit:
    """One fitted predictor.

    Attributes:
        form: The form chosen.
        predictor: Its coefficients.
        steps: Steps it was fitted on.
        ranges: Least and greatest value of each quantity in them.
        error: Held-out error over every measured step of the phase.
        quantiles: Held-out measured / predicted ratio by quantile.
        tried: Held-out MAPE in percent of every form, by name, each step
            counted as off by 100 % at most.
        stray: Steps left out of the fit as strays.
        held_out: The steps the errors were computed on.
        held_out_ms: Their predictions by fits that had not seen them.
        estimator: scikit-learn's own estimator over `columns` divided by
            `scale`; `None` where the predictor was derived from another.
        columns: Column of `TERMS` of each of the estimator's features.
        scale: What each feature was divided by.
    """

    form: Form
    predictor: Predictor
    steps: int
    ranges: dict[str, tuple[float, float]]
    error: ErrorSummary | None
    quantiles: dict[str, float]
    tried: dict[str, float] = field(default_factory=dict)
    stray: int = 0
    held_out: Steps | None = None
    held_out_ms: Array | None = None
    estimator: LinearRegression | None = None
    columns: tuple[int, ...] = ()
    scale: Array | None = None

    def to_profile(self) -> FittedPredictor:
        """As a part of a profile."""
        return FittedPredictor(
            terms={k: float(v) for k, v in self.predictor.terms.items()},
            steps=self.steps,
            ranges=self.ranges,
            error=self.error.as_dict() if self.error else {},
            residual_quantiles=self.quantiles,
            form=self.form.name,
            combine=self.form.combine,
        )


@dataclass(frozen=True)
class Fit:
    """The three predictors and what became of the rows.

    Attributes:
        prefill: Prefill-only steps.
        decode: Decode-only steps.
        mixed: What a prefill adds to a step that decodes.
        dropped: Rows left out, by reason.
        notes: Sentences for the user: what was derived rather than measured.
    """

    prefill: PhaseFit
    decode: PhaseFit
    mixed: PhaseFit
    dropped: dict[str, int]
    notes: tuple[str, ...] = ()

    def model(self) -> StepModel:
        """The step model, without scikit-learn."""
        return StepModel(
            self.prefill.predictor,
            self.decode.predictor,
            self.mixed.predictor,
            self.mixed.form.combine,
            {name: getattr(self, name).ranges for name in PHASES},
        )


def fit_steps(steps: Steps, seed: int = 0) -> Fit:
    """Fit prefill, decode and mixed predictors.

    Args:
        steps: Step records of one kind of engine.
        seed: Of the cross-validation's shuffle.

    Raises:
        UserError: The steps cannot support a fit; the message says what is
            missing and how to collect it.
    """
    measured, dropped = clean.measured_where_it_happened(steps)
    _check_support(measured)
    features = measured.features()
    latency = measured.latency_ms
    notes: list[str] = []

    decode = _fit_phase("decode", measured, features, latency, seed)
    # The baseline the mixed predictor stands on comes from decode-only steps
    # that no mixed row has seen, so it needs no folds of its own.
    baseline = features @ np.asarray(decode.predictor.vector())
    mixed = _fit_phase("mixed", measured, features, latency, seed, baseline)
    if int(measured.is_prefill.sum()) >= FEWEST_STEPS["prefill"]:
        prefill = _fit_phase(
            "prefill", measured, features, latency, seed, anchor=_anchor(decode)
        )
    else:
        prefill = _prefill_from_mixed(measured, decode, mixed)
        notes.append(
            f"prefill: {int(measured.is_prefill.sum())} prefill-only steps, fewer "
            f"than {FEWEST_STEPS['prefill']}: derived from the mixed predictor with "
            f"no decodes; to measure it, {_HOW['prefill']}"
        )
    dropped["stray"] = prefill.stray + decode.stray + mixed.stray
    return Fit(prefill, decode, mixed, dropped, tuple(notes))


def _check_support(steps: Steps) -> None:
    """Refuse steps that cannot tell the coefficients apart."""
    for phase in ("decode", "mixed"):
        count = int(steps.phase(phase).sum())
        if count < FEWEST_STEPS[phase]:
            none = "no" if count == 0 else f"only {count}"
            raise UserError(
                f"steps: {none} {phase} steps, expected at least "
                f"{FEWEST_STEPS[phase]}: {_HOW[phase]}"
            )
    quantities = {
        "decode": ("decodes", "decode batch size", _HOW["decode"]),
        "mixed": ("prefill_tokens", "chunk size", _HOW["mixed"]),
        "prefill": ("prefill_tokens", "prompt length", _HOW["prefill"]),
    }
    for phase, (name, words, how) in quantities.items():
        mask = steps.phase(phase)
        if phase == "prefill" and int(mask.sum()) < FEWEST_STEPS[phase]:
            continue
        values = np.unique(getattr(steps, name)[mask])
        if values.size < 2:
            raise UserError(
                f"steps: every {phase} step has the same {words} ({values[0]:.0f}), "
                f"expected at least two different ones: {how}"
            )


def _fit_phase(
    phase: str,
    steps: Steps,
    features: Array,
    latency: Array,
    seed: int,
    baseline: Array | None = None,
    anchor: tuple[Array, Array] | None = None,
) -> PhaseFit:
    rows = np.flatnonzero(steps.phase(phase))
    x = features[rows]
    y = latency[rows]
    base = np.zeros_like(y) if baseline is None else baseline[rows]

    folds = _folds(rows.size, seed)
    tried: dict[str, float] = {}
    chosen: tuple[Form, Array] | None = None
    for form in FORMS[phase]:
        held_out = np.empty_like(y)
        for train, test in folds:
            fitted, _ = without_strays(form, x[train], y[train], base[train], anchor)
            held_out[test] = combine_ms(form, x[test] @ fitted.vector, base[test])
        # Capped: a step logged in next to no time chooses no form.
        off = np.minimum(1.0, np.abs(held_out - y) / y)
        tried[form.name] = 100.0 * float(np.mean(off))
        if chosen is None or (tried[form.name] < _WORTH_A_TERM * tried[chosen[0].name]):
            chosen = (form, held_out)
    assert chosen is not None
    form, held_out = chosen

    fitted, strays = without_strays(form, x, y, base, anchor)
    terms = {
        TERMS[i]: float(fitted.vector[i])
        for i in fitted.columns
        if fitted.vector[i] > 0
    }
    used = steps.take(rows[~strays])
    return PhaseFit(
        form=form,
        predictor=Predictor(terms),
        steps=len(used),
        ranges=_ranges(used),
        error=summarise(held_out, y),
        quantiles=residual_quantiles(held_out, y),
        tried={name: round(value, 3) for name, value in tried.items()},
        stray=int(strays.sum()),
        held_out=steps.take(rows),
        held_out_ms=held_out,
        estimator=fitted.estimator,
        columns=fitted.columns,
        scale=fitted.scale,
    )


def _folds(
    count: int, seed: int
) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    splitter = KFold(_FOLDS, shuffle=True, random_state=seed)
    return list(splitter.split(np.empty(count)))


def _anchor(decode: PhaseFit) -> tuple[Array, Array]:
    """One row that a prefill log often lacks: the shortest step there is.

    To prefill one token is to decode one token: the same weights are read for
    the same arithmetic. It holds the intercept where no short prompt was
    seen, and weighs no more than any other row.
    """
    one = feature_matrix([0], [0], [1], [0], [1])
    terms = decode.predictor.terms
    return one, np.array([terms.get("1", 0.0) + terms.get("B", 0.0)])


def _ranges(steps: Steps) -> dict[str, tuple[float, float]]:
    return {
        letter: (float(values.min()), float(values.max()))
        for letter, values in steps.letters().items()
    }


def _prefill_from_mixed(steps: Steps, decode: PhaseFit, mixed: PhaseFit) -> PhaseFit:
    """A prefill-only step as the mixed step with no decodes."""
    terms = dict(mixed.predictor.terms)
    if mixed.form.combine == "add":
        terms["1"] = terms.get("1", 0.0) + decode.predictor.terms.get("1", 0.0)
    predictor = Predictor(
        {k: v for k, v in terms.items() if k not in ("B", "K", "cB", "cK")}
    )
    rows = steps.take(steps.is_prefill)
    predicted = rows.features() @ np.asarray(predictor.vector())
    ranges = {**mixed.ranges, "B": (0.0, 0.0), "K": (0.0, 0.0)}
    return PhaseFit(
        form=Form("from-mixed", tuple(predictor.terms)),
        predictor=predictor,
        steps=0,
        ranges=ranges,
        error=summarise(predicted, rows.latency_ms),
        quantiles=residual_quantiles(predicted, rows.latency_ms),
        held_out=rows,
        held_out_ms=predicted,
    )
