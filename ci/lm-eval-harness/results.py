# SPDX-License-Identifier: Apache-2.0
"""Evaluations of one model, shared by the tests of a run."""

from __future__ import annotations

from compare import Noise, measure_noise
from evaluation import Evaluation
from harness import Harness


class Results:
    """Evaluations of one model, each made when first asked for."""

    def __init__(self, harness: Harness):
        self.harness = harness
        self._found: dict[str, Evaluation] = {}
        self._noise: Noise | None = None

    def __getitem__(self, arm: str) -> Evaluation:
        """An arm's evaluation; ``one at a time`` is `alone` without a batch."""
        if arm not in self._found:
            if arm == "one at a time":
                found = self.harness.evaluate("alone", concurrent=1)
            else:
                found = self.harness.evaluate(arm)
            self._found[arm] = found
            told = ", ".join(
                f"{n} {route}" for route, n in sorted(found.routes.items())
            )
            print(f"\n{arm}: {found.seconds:.0f} s; {told or 'no proxy'}")
            for (task, metric), value in found.metrics.items():
                print(f"    {task} | {metric}: {value:.3f}")
        return self._found[arm]

    @property
    def noise(self) -> Noise:
        """What batch composition alone changes on one engine."""
        if self._noise is None:
            self._noise = measure_noise(self["alone"], self["one at a time"])
        return self._noise
