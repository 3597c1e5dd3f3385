# SPDX-License-Identifier: Apache-2.0
"""A profile's report: tables on the screen and two figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_kairos.core.profile import FittedPredictor, Profile
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.files import UserError
from vllm_kairos.profiling.build import kept_points, kept_regimes, validation_regimes
from vllm_kairos.profiling.errors import PHASES, Regime, predict
from vllm_kairos.profiling.steps import Steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Chunk sizes of the paper's Figure 1, tokens of the whole step.
FIGURE_1_CHUNKS = (128, 256, 512, 1024, 2048)
#: Successive chunks of a prompt that it shows.
FIGURE_1_INDICES = 5


def report_text(profile: Profile, steps: Steps | None = None) -> str:
    """The report as text.

    Args:
        profile: The profile.
        steps: Steps to compare with; without them the held-out errors that
            the profile carries are shown.
    """
    lines = [
        f"profile {profile.name}: {profile.kind}, model {profile.model}, "
        f"{profile.hardware}, vLLM {profile.engine_version}, {profile.created}",
    ]
    for phase in PHASES:
        lines += _predictor_lines(phase, getattr(profile, phase))
    rows = (
        kept_regimes(profile) if steps is None else validation_regimes(profile, steps)
    )
    if rows:
        of = "held-out steps" if steps is None else "the steps given"
        lines += ["", f"error by regime ({of})", *_regime_lines(rows)]
    lines += _story_lines(profile)
    if profile.kv is not None:
        rate = profile.kv.bytes_per_s
        lines += [
            "",
            f"KV cache: {profile.kv.bytes_per_token:.0f} bytes per token"
            + (
                f", link {rate / 1e9:.3g} GB/s, {profile.kv.fixed_ms:.3g} ms fixed"
                if rate
                else ", link not measured"
            ),
        ]
    return "\n".join(lines)


def _story_lines(profile: Profile) -> list[str]:
    """What the provenance says of dropped steps, of notes and of targets."""
    lines = []
    dropped = profile.provenance.get("dropped_steps")
    if dropped:
        words = dropped
        if isinstance(dropped, dict):
            words = ", ".join(f"{n} {reason}" for reason, n in dropped.items())
        lines += ["", f"dropped steps: {words}"]
    notes = profile.provenance.get("notes")
    if isinstance(notes, list) and notes:
        lines += ["", *(f"note: {note}" for note in notes)]
    targets = profile.provenance.get("targets")
    if isinstance(targets, list) and targets:
        rows = [row if isinstance(row, dict) else {"target": row} for row in targets]
        lines += ["", *_target_lines(rows)]
    return lines


def _target_lines(rows: Sequence[dict[str, object]]) -> list[str]:
    """Each target, what the paper has, and what the profile gives."""
    cells = [("target", "paper", "profile")]
    cells += [
        (str(r.get("target", "")), str(r.get("paper", "")), str(r.get("profile", "")))
        for r in rows
    ]
    first, second = (max(len(row[i]) for row in cells) for i in (0, 1))
    return [f"  {a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in cells]


def _predictor_lines(phase: str, part: FittedPredictor) -> list[str]:
    how = " (the longer of it and the decode step)" if part.combine == "max" else ""
    lines = ["", f"{phase}: form {part.form}{how}, fitted on {part.steps} steps"]
    if part.error:
        error = part.error
        lines.append(
            f"  held-out {error.get('count', 0):.0f} steps: "
            f"MAPE {error.get('mape_percent', float('nan')):.2f} %, "
            f"median {error.get('median_percent', float('nan')):.2f} %, "
            f"P95 {error.get('p95_percent', float('nan')):.2f} %, "
            f"bias {error.get('bias_percent', float('nan')):+.2f} %"
        )
    lines.append(
        "  ms per unit: "
        + (", ".join(f"{k} {v:.4g}" for k, v in part.terms.items()) or "none")
    )
    if part.ranges:
        lines.append(
            "  ranges seen: "
            + ", ".join(f"{k} {a:g}..{b:g}" for k, (a, b) in part.ranges.items())
        )
    if part.residual_quantiles:
        lines.append(
            "  measured/predicted: "
            + ", ".join(f"q{k} {v:.3f}" for k, v in part.residual_quantiles.items())
        )
    return lines


def _regime_lines(rows: Sequence[Regime]) -> list[str]:
    head = (
        f"  {'phase':<8}{'of':<18}{'range':>18}{'count':>8}{'MAPE %':>9}"
        f"{'median %':>10}{'P95 %':>9}{'bias %':>9}"
    )
    lines = [head]
    for row in rows:
        high = "" if np.isinf(row.high) else f"{row.high:g}"
        e = row.error
        lines.append(
            f"  {row.phase:<8}{row.quantity:<18}{f'{row.low:g} < .. {high}':>18}"
            f"{e.count:>8}{e.mape_percent:>9.2f}{e.median_percent:>10.2f}"
            f"{e.p95_percent:>9.2f}{e.bias_percent:>+9.2f}"
        )
    return lines


def added_ms(
    model: StepModel, decodes: int, decode_kv_tokens: float, chi: int
) -> list[float]:
    """Figure 1's curve: what each successive chunk of `chi` adds to a step."""
    chunk = chi - decodes
    base = model.step_ms(decodes, decode_kv_tokens)
    return [
        model.step_ms(decodes, decode_kv_tokens, chunk, i * chunk) - base
        for i in range(FIGURE_1_INDICES)
    ]


def measured_added_ms(
    model: StepModel, steps: Steps, decodes: int, chi: int
) -> list[tuple[int, float]]:
    """Figure 1's points: ``(chunk index, added ms)`` of raw steps of `chi`.

    The decode-only step a point is compared with is the predicted one at the
    very (B, K) of that step.
    """
    chunk = chi - decodes
    mask = (
        steps.is_mixed
        & (steps.prefills == 1)
        & (steps.decodes == decodes)
        & (steps.prefill_tokens == chunk)
    )
    part = steps.take(mask)
    points = []
    for k, p, ms in zip(
        part.decode_kv_tokens, part.prefill_kv_tokens, part.latency_ms, strict=True
    ):
        index, rest = divmod(int(p), chunk)
        if rest == 0 and index < FIGURE_1_INDICES:
            base = model.step_ms(decodes, float(k))
            points.append((index, float(ms) - base))
    return points


def draw(
    profile: Profile, steps: Steps | None, folder: str | os.PathLike[str]
) -> tuple[list[Path], list[str]]:
    """Write both figures as PNG.

    Args:
        profile: The profile.
        steps: Raw steps, if at hand.
        folder: Where to; made if need be.

    Returns:
        The files written, and a sentence for each figure that there is
        nothing to draw in.

    Raises:
        UserError: The folder cannot be written to.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    target = Path(folder)
    written: list[Path] = []
    missing: list[str] = []
    figures = {
        "predicted-measured.png": scatter_figure(profile, steps),
        "figure1.png": figure_1(profile, steps),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            if figure is None:
                missing.append(
                    f"no {name}: the profile carries no held-out steps and none "
                    "were given (--from-steps)"
                )
                continue
            figure.savefig(target / name, dpi=110)
            written.append(target / name)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror or error}") from error
    finally:
        for figure in figures.values():
            pyplot.close(figure)
    return written, missing


def scatter_figure(profile: Profile, steps: Steps | None) -> Figure | None:
    """Predicted against measured, `None` where there are no steps to show."""
    from matplotlib import pyplot

    if steps is None:
        points = kept_points(profile)
    else:
        predicted = predict(profile.step_model(), steps)
        points = {
            phase: list(zip(predicted[mask], steps.latency_ms[mask], strict=True))
            for phase in PHASES
            for mask in (steps.phase(phase),)
        }
    if not any(points.values()):
        return None
    figure: Figure
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axis, phase in zip(axes, PHASES, strict=True):
        pairs = points.get(phase, [])
        axis.set_title(f"{phase} ({len(pairs)} steps)")
        axis.set_xlabel("measured ms")
        axis.set_ylabel("predicted ms")
        if pairs:
            values = np.asarray(pairs)
            axis.plot(values[:, 1], values[:, 0], ".", markersize=3)
            ends = [values.min(), values.max()]
            axis.plot(ends, ends, color="grey", linewidth=0.8)
            axis.set_xscale("log")
            axis.set_yscale("log")
    figure.suptitle(f"{profile.name}: predicted against measured")
    return figure


def _batches(profile: Profile, steps: Steps | None) -> list[int]:
    """Decode batch sizes to draw: those most measured, or across the range."""
    if steps is not None:
        total = steps.decodes + steps.prefill_tokens
        drawn = steps.is_mixed & (steps.prefills == 1) & np.isin(total, FIGURE_1_CHUNKS)
        if not drawn.any():
            drawn = steps.is_mixed
        sizes, counts = np.unique(steps.decodes[drawn], return_counts=True)
        most = sizes[np.argsort(-counts, kind="stable")[:4]]
        if most.size:
            return sorted(int(size) for size in most)
    low, high = profile.decode.ranges.get("B", (1.0, 32.0))
    return sorted({round(float(v)) for v in np.geomspace(max(low, 1), max(high, 1), 4)})


def figure_1(profile: Profile, steps: Steps | None) -> Figure:
    """The paper's Figure 1; what lies outside the ranges profiled is marked."""
    from matplotlib import pyplot

    model = profile.step_model()
    batches = _batches(profile, steps)
    low_b, high_b = profile.decode.ranges.get("B", (1.0, 1.0))
    low_k, high_k = profile.decode.ranges.get("K", (1000.0, 1000.0))
    context = (low_k + high_k) / max(low_b + high_b, 1.0)
    figure: Figure
    figure, axes = pyplot.subplots(
        1,
        len(batches),
        figsize=(4 * len(batches), 4),
        layout="constrained",
        squeeze=False,
    )
    dots = beyond = 0
    for axis, decodes in zip(axes[0], batches, strict=True):
        kv = decodes * context
        if steps is not None:
            mine = steps.take(steps.is_mixed & (steps.decodes == decodes))
            if len(mine):
                kv = float(np.median(mine.decode_kv_tokens))
        for chi in (c for c in FIGURE_1_CHUNKS if c > decodes):
            curve = added_ms(model, decodes, kv, chi)
            index = range(1, len(curve) + 1)
            (line,) = axis.plot(index, curve, label=f"χ {chi}")
            outside = [
                i
                for i in range(len(curve))
                if model.outside(decodes, kv, chi - decodes, i * (chi - decodes))
            ]
            if outside:
                beyond += len(outside)
                axis.plot(
                    [i + 1 for i in outside],
                    [curve[i] for i in outside],
                    "x",
                    markersize=5,
                    color=line.get_color(),
                )
            if steps is not None:
                seen = measured_added_ms(model, steps, decodes, chi)
                dots += len(seen)
                axis.plot(
                    [i + 1 for i, _ in seen],
                    [ms for _, ms in seen],
                    "o",
                    markersize=3,
                    color=line.get_color(),
                )
        axis.set_title(f"B {decodes}, K {kv:.0f}")
        axis.set_xlabel("chunk index")
        axis.set_ylabel("added to the step, ms")
        axis.legend(fontsize=7, loc="upper left")
    drawn = ["lines predicted"]
    if steps is not None:
        drawn.append("dots measured" if dots else "no step measured at these sizes")
    if beyond:
        drawn.append("× outside the ranges profiled")
    figure.suptitle(
        f"{profile.name}: step latency added by a chunk ({', '.join(drawn)})"
    )
    return figure
