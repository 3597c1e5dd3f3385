# SPDX-License-Identifier: Apache-2.0
"""Measured against predicted, step by step (paper §7, error of the models).

Fed by the engine after every step. Pure: no clock, no log; the caller prints
what `warning` returns and plans with what `effective_beta` returns.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass

#: Phases an error is kept for, by what a step held.
PHASES = ("prefill", "decode", "mixed")

#: A predictor is not judged on fewer steps than this.
FEWEST_STEPS = 50

#: Bounds of the factor that a predicted step may be late by. Outside of them
#: the profile is of another machine, and no margin repairs that.
_LEAST_LATE = 1.0
_MOST_LATE = 4.0

#: Thresholds that one step counts for at most: fewer than one step in four
#: off, however far, is no warning.
_CAP = 4.0

#: Share of recent steps outside the profile's ranges that is worth a word.
_WORTH_A_WORD = 0.1


def phase_of(decodes: int, prefill_tokens: int) -> str:
    """Name of the predictor a step belongs to."""
    if prefill_tokens <= 0:
        return "decode"
    return "mixed" if decodes > 0 else "prefill"


@dataclass(frozen=True, slots=True)
class PhaseError:
    """Error of one predictor over its recent steps.

    Relative to the measured latency: ``(predicted - measured) / measured``.

    Attributes:
        count: Steps seen since the start.
        mape_percent: Mean absolute error of the steps in the window.
        bias_percent: Mean error; negative where steps take longer than
            predicted.
        p95_percent: 95th percentile of the absolute error.
        late_p95: 95th percentile of measured / predicted.
    """

    count: int
    mape_percent: float
    bias_percent: float
    p95_percent: float
    late_p95: float


class _Window:
    """Errors of the last steps of one phase, kept in order for quantiles."""

    __slots__ = (
        "count",
        "_size",
        "_recent",
        "_ordered",
        "_ordered_error",
        "_sum",
        "_sum_abs",
        "_sum_capped",
        "_cap",
        "_outside",
        "letters",
    )

    def __init__(self, size: int, cap: float):
        self.count = 0
        self._size = size
        self._cap = cap
        self._recent: deque[tuple[float, float, bool]] = deque()
        self._outside = 0
        #: Quantities that have been outside the ranges of the profile.
        self.letters: set[str] = set()
        self._ordered: list[float] = []
        self._ordered_error: list[float] = []
        # Running sums: errors are asked for at every step.
        self._sum = 0.0
        self._sum_abs = 0.0
        self._sum_capped = 0.0

    def add(self, ratio: float, error: float, outside: tuple[str, ...]) -> None:
        if len(self._recent) == self._size:
            old_ratio, old_error, old_outside = self._recent.popleft()
            self._outside -= old_outside
            del self._ordered[bisect.bisect_left(self._ordered, old_ratio)]
            del self._ordered_error[
                bisect.bisect_left(self._ordered_error, abs(old_error))
            ]
            self._sum -= old_error
            self._sum_abs -= abs(old_error)
            self._sum_capped -= min(abs(old_error), self._cap)
        self._recent.append((ratio, error, bool(outside)))
        self._outside += bool(outside)
        self.letters.update(outside)
        bisect.insort(self._ordered, ratio)
        bisect.insort(self._ordered_error, abs(error))
        self._sum += error
        self._sum_abs += abs(error)
        self._sum_capped += min(abs(error), self._cap)
        self.count += 1

    def __len__(self) -> int:
        return len(self._recent)

    def late(self, quantile: float) -> float:
        """Quantile of measured / predicted, from above."""
        index = math.ceil(quantile * len(self._ordered)) - 1
        return self._ordered[max(index, 0)]

    def mape_percent(self) -> float:
        """Mean absolute error, without the rest of `error`."""
        return 100.0 * max(self._sum_abs, 0.0) / len(self._recent)

    def outside_share(self) -> float:
        """Share of the steps in the window that were extrapolated."""
        return self._outside / len(self._recent)

    def capped_percent(self) -> float:
        """Mean absolute error, each step counted up to the cap.

        A step whose work was measured in the one before looks thousands of
        percent off; one such step is no reason to refit.
        """
        return 100.0 * max(self._sum_capped, 0.0) / len(self._recent)

    def error(self) -> PhaseError:
        errors = self._ordered_error
        index = max(math.ceil(0.95 * len(errors)) - 1, 0)
        return PhaseError(
            count=self.count,
            mape_percent=self.mape_percent(),
            bias_percent=100.0 * self._sum / len(errors),
            p95_percent=100.0 * errors[index],
            late_p95=self.late(0.95),
        )


class OnlineError:
    """Recent prediction error of an engine, per phase.

    Args:
        window: Steps of each phase that are looked back on.
        warn_percent: Mean absolute error past which `warning` speaks, each
            step counted up to four times as much; infinite never does.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, window: int = 512, warn_percent: float = 25.0):
        if window < FEWEST_STEPS:
            raise ValueError(f"window is {window!r}, expected at least {FEWEST_STEPS}")
        if not warn_percent > 0:
            raise ValueError(f"warn_percent is {warn_percent!r}, expected > 0")
        self._warn_percent = warn_percent
        cap = _CAP * warn_percent / 100.0
        self._windows = {phase: _Window(window, cap) for phase in PHASES}
        self._warned: set[str] = set()
        self._told_outside: set[str] = set()

    def add(
        self,
        decodes: int,
        prefill_tokens: int,
        predicted_ms: float,
        measured_ms: float,
        outside: tuple[str, ...] = (),
    ) -> None:
        """Take one step; one that was not predicted or measured is ignored.

        Args:
            decodes: ``B`` of the step.
            prefill_tokens: ``c``.
            predicted_ms: As the profile says, uncorrected.
            measured_ms: As it was.
            outside: Its quantities outside the ranges of the profile
                (`StepModel.outside`).
        """
        if not (0.0 < predicted_ms < math.inf and 0.0 < measured_ms < math.inf):
            return
        self._windows[phase_of(decodes, prefill_tokens)].add(
            measured_ms / predicted_ms,
            (predicted_ms - measured_ms) / measured_ms,
            outside,
        )

    def errors(self) -> dict[str, PhaseError]:
        """Error of every phase that has steps."""
        return {
            phase: window.error()
            for phase, window in self._windows.items()
            if len(window)
        }

    def warning(self, refit_command: str) -> str | None:
        """One line about a phase, once each: its error, or its extrapolation.

        The error has passed the threshold, or more than a tenth of recent
        steps lie outside the ranges that the profile has seen.

        Args:
            refit_command: What the user can run to measure anew.
        """
        for phase, window in self._windows.items():
            if phase in self._warned or len(window) < FEWEST_STEPS:
                continue
            off_percent = window.capped_percent()
            if off_percent > self._warn_percent:
                error = window.error()
                self._warned.add(phase)
                return (
                    f"step predictions for {phase} steps are off by "
                    f"{off_percent:.0f} % on average (bias "
                    f"{error.bias_percent:+.0f} %, P95 {error.p95_percent:.0f} %) "
                    f"over the last {len(window)} steps, threshold "
                    f"{self._warn_percent:g} %; to refit: {refit_command}"
                )
        for phase, window in self._windows.items():
            if phase in self._told_outside or len(window) < FEWEST_STEPS:
                continue
            if window.outside_share() > _WORTH_A_WORD:
                self._told_outside.add(phase)
                return (
                    f"{100 * window.outside_share():.0f} % of the last {len(window)} "
                    f"{phase} steps lie outside the ranges the profile has seen "
                    f"({', '.join(sorted(window.letters))}): their predictions "
                    f"extrapolate; to refit: {refit_command}"
                )
        return None

    def effective_beta(self, beta: float) -> float:
        """`beta` lowered so that a predicted step plus the error stays safe.

        A step planned up to the answer times ``tau`` and late by the factor
        seen at the 95th percentile of mixed (and of decode) steps ends within
        ``tau``. The configured value is never exceeded: an engine faster than
        its profile gains nothing here.

        Args:
            beta: Configured safety factor, in ``(0, 1]``.
        """
        late = max(
            (
                window.late(0.95)
                for phase, window in self._windows.items()
                if phase != "prefill" and len(window) >= FEWEST_STEPS
            ),
            default=1.0,
        )
        return min(beta, 1.0 / min(max(late, _LEAST_LATE), _MOST_LATE))
