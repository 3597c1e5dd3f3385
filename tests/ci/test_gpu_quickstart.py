# SPDX-License-Identifier: Apache-2.0
"""The quick start's comparison on a pair of GPUs; its arguments anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci"))

import gpu_quickstart
from run_pipeline import CHECKOUT, gpus


def spec(core: int) -> gpu_quickstart.GpuEngineSpec:
    return gpu_quickstart.GpuEngineSpec("prefill", Path("m"), 1, 2, 3, core=core)


def test_an_engine_is_given_its_gpu_and_nothing_of_the_cpu() -> None:
    words, variables = spec(1).command(), spec(1).engine_environment()
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert not {"--enforce-eager", "--dtype", "float32"} & set(words)
    assert words.count("--kv-transfer-config") == 1
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_buffer_device"] == "cuda"
    assert not [name for name in variables if name.startswith("VLLM_CPU")]
    assert words[words.index("--scheduler-cls") + 1] == "kairos"


@pytest.mark.timeout(1500)
@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
def test_both_policies_serve_every_request_on_a_gpu_pair(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, CHECKOUT / "ci/gpu_quickstart.py", "--output", tmp_path),
            *("--requests", "40"),
        ],
        capture_output=True,
        text=True,
        timeout=1400,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["arms"]) >= 2
    for arm in summary["arms"].values():
        assert arm["failures"] == 0, summary
