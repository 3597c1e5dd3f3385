# SPDX-License-Identifier: Apache-2.0
"""From a fit to a profile, and a profile against other steps."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_kairos.core.profile import (
    EngineLimits,
    KvLink,
    Profile,
    decode_profile,
    encode_profile,
)
from vllm_kairos.files import UserError
from vllm_kairos.profiling import clean
from vllm_kairos.profiling.errors import (
    PHASES,
    ErrorSummary,
    Regime,
    predict,
    regimes,
    summarise,
)
from vllm_kairos.profiling.fit import Fit
from vllm_kairos.profiling.steps import Steps

#: What each phase's errors are broken down by.
REGIME_LETTERS = {"prefill": ("c",), "decode": ("B", "K"), "mixed": ("B", "K", "c")}

#: Held-out points a profile keeps per phase, for its scatter plot.
_MOST_POINTS = 200

_EMPTY = {
    "count": 0,
    "mape_percent": None,
    "median_percent": None,
    "p95_percent": None,
    "bias_percent": None,
}


def build_profile(
    fit: Fit,
    *,
    name: str,
    model: str,
    hardware: str,
    engine_version: str,
    kv: KvLink | None = None,
    engine: EngineLimits | None = None,
    provenance: Mapping[str, object] | None = None,
) -> Profile:
    """A measured profile out of a fit.

    Args:
        fit: The fit.
        name: Short name.
        model: Model as served.
        hardware: What it ran on.
        engine_version: vLLM version.
        kv: KV size and link, if known.
        engine: Limits of the engine, if known.
        provenance: Where the steps came from; what the fit knows is added.

    Raises:
        UserError: The fit is none that an engine could use.
    """
    story: dict[str, object] = dict(provenance or {})
    story["dropped_steps"] = dict(fit.dropped)
    story["notes"] = list(fit.notes)
    story["forms_mape_percent"] = {p: getattr(fit, p).tried for p in PHASES}
    story["held_out_regimes"] = {
        phase: [_regime_row(row) for row in _held_out_regimes(fit, phase)]
        for phase in PHASES
    }
    story["held_out_predicted_measured_ms"] = {p: _points(fit, p) for p in PHASES}
    profile = Profile(
        name=name,
        model=model,
        hardware=hardware,
        engine_version=engine_version,
        kind="measured",
        created=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        prefill=fit.prefill.to_profile(),
        decode=fit.decode.to_profile(),
        mixed=fit.mixed.to_profile(),
        kv=kv,
        engine=engine,
        provenance=story,
    )
    try:
        decode_profile(encode_profile(profile))
    except ValueError as error:
        raise UserError(
            f"steps: they give a profile that cannot be used: {error}"
        ) from error
    return profile


def validate(profile: Profile, steps: Steps) -> dict[str, Any]:
    """Errors of a profile on steps.

    Returns:
        ``prefill``, ``decode``, ``mixed``: `ErrorSummary.as_dict`, with
        `None` for the errors of a phase without steps; ``dropped``: rows that
        are no measurement of their own work, by reason; ``all_rows``: the
        same errors with the hidden rows counted in; ``extrapolated``: steps
        of each phase outside the ranges the profile has seen.
    """
    measured, dropped = clean.measured_where_it_happened(steps)
    result: dict[str, Any] = _phase_errors(profile, measured)
    result["extrapolated"] = {
        phase: int((measured.phase(phase) & _outside(profile, phase, measured)).sum())
        for phase in PHASES
    }
    result["dropped"] = dropped
    result["all_rows"] = _phase_errors(profile, steps)
    return result


def _outside(profile: Profile, phase: str, steps: Steps) -> npt.NDArray[np.bool_]:
    """Steps with a quantity outside the ranges of a phase's predictor."""
    outside = np.zeros(len(steps), dtype=np.bool_)
    letters = steps.letters()
    for letter, (low, high) in getattr(profile, phase).ranges.items():
        # A decode-only step has no chunk to be out of range.
        if letter in letters and (phase != "decode" or letter in ("B", "K")):
            outside |= (letters[letter] < low) | (letters[letter] > high)
    return outside


def _phase_errors(profile: Profile, steps: Steps) -> dict[str, Any]:
    predicted = predict(profile.step_model(), steps)
    result: dict[str, Any] = {}
    for phase in PHASES:
        rows = steps.phase(phase)
        error = summarise(predicted[rows], steps.latency_ms[rows])
        result[phase] = error.as_dict() if error else dict(_EMPTY)
    return result


def validation_regimes(profile: Profile, steps: Steps) -> list[Regime]:
    """Errors of a profile on steps, by phase and bucket."""
    measured, _ = clean.measured_where_it_happened(steps)
    predicted = predict(profile.step_model(), measured)
    rows: list[Regime] = []
    for phase in PHASES:
        mask = measured.phase(phase)
        rows += regimes(
            phase, measured.take(mask), predicted[mask], REGIME_LETTERS[phase]
        )
    return rows


def kept_regimes(profile: Profile) -> list[Regime]:
    """The held-out errors by bucket that a profile carries, if it does."""
    kept = profile.provenance.get("held_out_regimes")
    if not isinstance(kept, dict):
        return []
    try:
        return [_regime(p, row) for p in PHASES for row in kept.get(p, ())]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"profile {profile.name}: provenance.held_out_regimes: {error!r}, "
            "expected the rows that a fit writes"
        ) from error


def _regime(phase: str, row: Mapping[str, Any]) -> Regime:
    high = row["most"]
    return Regime(
        phase,
        str(row["of"]),
        float(row["above"]),
        float("inf") if high is None else float(high),
        ErrorSummary(**{name: row[name] + 0 for name in _EMPTY}),
    )


def kept_points(profile: Profile) -> dict[str, list[tuple[float, float]]]:
    """Held-out ``(predicted, measured)`` milliseconds that a profile carries."""
    kept = profile.provenance.get("held_out_predicted_measured_ms")
    if not isinstance(kept, dict):
        return {}
    points: dict[str, list[tuple[float, float]]] = {}
    try:
        for phase in PHASES:
            pairs = [pair.split(":") for pair in str(kept.get(phase, "")).split()]
            points[phase] = [(float(a), float(b)) for a, b in pairs]
    except ValueError as error:
        raise UserError(
            f"profile {profile.name}: provenance.held_out_predicted_measured_ms: "
            f"{error}, expected predicted:measured pairs"
        ) from error
    return points


def _held_out_regimes(fit: Fit, phase: str) -> Sequence[Regime]:
    part = getattr(fit, phase)
    if part.held_out is None or len(part.held_out) == 0:
        return ()
    return regimes(phase, part.held_out, part.held_out_ms, REGIME_LETTERS[phase])


def _regime_row(row: Regime) -> dict[str, object]:
    return {
        "of": row.quantity,
        "above": row.low,
        "most": None if np.isinf(row.high) else row.high,
        **row.error.as_dict(),
    }


def _points(fit: Fit, phase: str) -> str:
    """A sample of held-out points on one line, so that the JSON stays short."""
    part = getattr(fit, phase)
    if part.held_out is None or len(part.held_out) == 0:
        return ""
    count = len(part.held_out)
    rows = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(int))
    return " ".join(
        f"{part.held_out_ms[i]:.3f}:{part.held_out.latency_ms[i]:.3f}" for i in rows
    )
