# SPDX-License-Identifier: Apache-2.0
"""The knobs of the decision, with the paper's values as defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

#: The paper's candidate set X.
PAPER_CANDIDATES = (2048, 1024, 512, 256, 128)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Settings:
    """SLOs and margins of the deflection decision.

    Attributes:
        tau_ms: TBT SLO ``tau``.
        ttft_slo_ms: TTFT SLO of Eq. 7.
        alpha: TTFT margin of Eq. 7: deflect up to this factor above the
            prefill node's TTFT.
        beta: Safety factor of Eq. 5 on ``tau``.
        candidates: Chunk sizes X of the greedy schedule, tokens of a step.

    Raises:
        ValueError: A value is out of range; the message names the field, the
            value and what was expected.
    """

    tau_ms: float = 70.0
    ttft_slo_ms: float = 4000.0
    alpha: float = 1.3
    beta: float = 0.9
    candidates: tuple[int, ...] = PAPER_CANDIDATES

    def __post_init__(self) -> None:
        for name in ("tau_ms", "ttft_slo_ms", "alpha"):
            value = getattr(self, name)
            if not (_number(value) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}, expected a number > 0")
        if not (_number(self.beta) and 0 < self.beta <= 1):
            raise ValueError(f"beta is {self.beta!r}, expected 0 < beta <= 1")
        if not self.candidates or any(c < 1 for c in self.candidates):
            raise ValueError(
                f"candidates is {self.candidates!r}, expected chunk sizes >= 1"
            )

    @property
    def limit_ms(self) -> float:
        """``beta * tau``, the bound on a predicted step (Eq. 5)."""
        return self.beta * self.tau_ms

    def with_options(self, **options: object) -> Settings:
        """A copy with some fields replaced; unknown names raise `ValueError`."""
        known = {f.name for f in fields(self)}
        for name in options:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}, expected one of {known}")
        return replace(self, **options)  # type: ignore[arg-type]
