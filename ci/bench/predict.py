# SPDX-License-Identifier: Apache-2.0
"""Budget of a prediction: one step in plain Python, a million rows at once.

    python ci/bench/predict.py [--json]

Prints one JSON line last with --json; exits with 1 where a budget is missed.
The best of several repeats is taken: on a shared machine the others measure
the neighbours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import timeit

import numpy as np

from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.step_model import StepModel

STEP_BUDGET_US = 2.0
ROWS = 1_000_000
ROWS_BUDGET_MS = 50.0


def model(combine: str) -> StepModel:
    """A model that uses every term."""
    mixed = {"1": 2.0, "c": 0.02, "p": 1e-4, "n": 0.5, "cp": 1e-6, "cc": 1e-7}
    return StepModel(
        Predictor({"1": 9.0, "c": 0.03, "p": 1e-4, "n": 1.0, "cp": 1e-6, "cc": 1e-7}),
        Predictor({"1": 12.0, "B": 0.1, "K": 4e-5}),
        Predictor({**mixed, "cB": 1e-5, "cK": 1e-9}),
        combine,  # type: ignore[arg-type]
    )


def one_step_us(step_model: StepModel, repeats: int) -> float:
    """Microseconds of one prediction of a mixed step."""
    loops = 20_000
    best = min(
        timeit.repeat(
            lambda: step_model.step_ms(32, 100_000, 512, 1024, 1),
            number=loops,
            repeat=repeats,
        )
    )
    return 1e6 * best / loops


def rows_ms(step_model: StepModel, repeats: int) -> float:
    """Milliseconds of `ROWS` predictions at once."""
    rng = np.random.default_rng(0)
    columns = [
        rng.integers(0, 64, ROWS).astype(float),
        rng.integers(0, 200_000, ROWS).astype(float),
        rng.integers(0, 2048, ROWS).astype(float),
        rng.integers(0, 16_000, ROWS).astype(float),
        rng.integers(1, 4, ROWS).astype(float),
    ]
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        step_model.step_ms_array(*columns)
        best = min(best, time.perf_counter() - started)
    return 1e3 * best


def main() -> int:
    """Measure, print, compare with the budgets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    result: dict[str, float | bool] = {}
    for combine in ("add", "max"):
        step_model = model(combine)
        result[f"one_step_us_{combine}"] = one_step_us(step_model, args.repeats)
        result[f"million_rows_ms_{combine}"] = rows_ms(step_model, args.repeats)
    result["ok"] = all(
        value <= (STEP_BUDGET_US if name.startswith("one_step") else ROWS_BUDGET_MS)
        for name, value in result.items()
    )
    for name, value in result.items():
        print(f"{name:<24} {value if isinstance(value, bool) else round(value, 3)}")
    if args.json:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
