# SPDX-License-Identifier: Apache-2.0
"""Step logs of a made-up engine whose coefficients are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.profiling.steps import Steps

COLUMNS = (
    "engine_id,step,time_s,sum_prefill_tokens,num_prefill_requests,"
    "sum_prefill_kv_tokens,num_decode_requests,sum_decode_kv_tokens,latency_ms"
)

TRUTH = StepModel(
    prefill=Predictor({"1": 9.0, "c": 0.04, "cp": 1.5e-6, "cc": 8e-7}),
    decode=Predictor({"1": 12.0, "B": 0.15, "K": 3e-5}),
    mixed=Predictor({"1": 2.0, "c": 0.03, "cp": 1.5e-6, "cc": 6e-7}),
)


def synthetic_steps(
    count: int = 900, noise: float = 0.0, seed: int = 1, model: StepModel = TRUTH
) -> Steps:
    """Steps of an engine that `model` describes, lognormal noise on top."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, count)  # 0 prefill, 1 decode, 2 mixed
    decodes = np.where(kind == 0, 0, rng.integers(1, 33, count)).astype(float)
    kv = decodes * rng.integers(100, 5000, count)
    chunk = np.where(kind == 1, 0, rng.integers(1, 4097, count)).astype(float)
    prefix = np.where(kind == 1, 0, rng.integers(0, 4, count) * 1024).astype(float)
    prefills = np.where(kind == 1, 0, 1).astype(float)
    exact = model.step_ms_array(decodes, kv, chunk, prefix, prefills)
    latency = exact * np.exp(noise * rng.standard_normal(count))
    return Steps(decodes, kv, chunk, prefix, prefills, latency)


def step_rows(steps: Steps, engine: str = "engine-0") -> list[str]:
    """CSV rows as the engine's recorder writes them."""
    return [
        f"{engine},{i},{1700000000 + i / 10:.6f},{c:.0f},{n:.0f},{p:.0f},{b:.0f},"
        f"{k:.0f},{ms:.4f}"
        for i, (b, k, c, p, n, ms) in enumerate(
            zip(
                steps.decodes,
                steps.decode_kv_tokens,
                steps.prefill_tokens,
                steps.prefill_kv_tokens,
                steps.prefills,
                steps.latency_ms,
                strict=True,
            )
        )
    ]


def write_steps(path: Path, steps: Steps, engine: str = "engine-0") -> Path:
    """A step log in a file."""
    path.write_text("\n".join([COLUMNS, *step_rows(steps, engine)]) + "\n")
    return path
