# SPDX-License-Identifier: Apache-2.0
"""The profiler on real engines. Figures are loose: test machines are shared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_kairos.files import load_profile
from vllm_kairos.profiling.collect import profile_running_engine
from vllm_kairos.profiling.kv import kv_bytes_per_token
from vllm_kairos.profiling.plan import CHUNK_SIZES
from vllm_kairos.profiling.steps import read_steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci" / "bench"))
import profile_accuracy

pytestmark = pytest.mark.cluster


def test_a_decode_engine_and_its_link_are_profiled_in_half_a_minute(cluster, tmp_path):
    spec = cluster.decode.spec
    output = tmp_path / "tiny.json"
    profile = profile_running_engine(
        cluster.decode.url,
        spec.step_log,
        30.0,
        output,
        report_address=spec.report_address,
        kv_dtype="float32",
        prefill_url=cluster.prefill.url,
        quiet=True,
    )
    assert load_profile(output) == profile
    assert profile.engine is not None
    assert profile.engine.budget_tokens == spec.budget_tokens
    assert profile.engine.max_num_seqs == spec.max_num_seqs

    config = json.loads((Path(spec.model) / "config.json").read_text())
    assert profile.kv is not None
    assert profile.kv.bytes_per_token == kv_bytes_per_token(config, "float32")
    link = profile.link_model()
    assert link is not None
    assert 0.05 < link.transfer_ms(1000) < 2000

    # The grid's chunks came out of the real scheduler at chi exactly.
    raw = output.with_suffix(".steps.csv")
    steps = read_steps([raw])
    alone = steps.take(steps.is_mixed & (steps.prefills == 1))
    exact = np.isin(alone.decodes + alone.prefill_tokens, CHUNK_SIZES)
    assert exact.mean() > 0.2

    held_out = profile.provenance["held_out_trace"]
    assert held_out["decode"]["count"] > 20
    # Computed again from the files alone, it is the error that is reported.
    for phase, again in profile_accuracy.again_percent(output).items():
        assert held_out[phase]["median_percent"] == pytest.approx(again, abs=2e-6)
    # How good it is depends on what else the machine does: ci/bench has the budget.
    assert held_out["decode"]["median_percent"] < 50
    # A step of twice the tokens takes longer, on any machine.
    model = profile.step_model()
    assert model.step_ms(0, 0, 2048) > model.step_ms(0, 0, 1024)
