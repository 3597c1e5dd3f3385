# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kairos.core.link import LinkModel
from vllm_kairos.files import UserError
from vllm_kairos.profiling.kv import describe_kv, kv_bytes_per_token
from vllm_kairos.profiling.transfers import Transfer, fit_link, totals

LLAMA_7B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "torch_dtype": "float16",
}
LLAMA3_8B = {**LLAMA_7B, "num_key_value_heads": 8, "dtype": "bfloat16"}
DEEPSEEK_V2_LITE = {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "dtype", "ranks", "expected"),
    [
        (LLAMA_7B, "auto", 1, 2 * 32 * 32 * 128 * 2),  # multi-head
        (LLAMA3_8B, "auto", 1, 2 * 32 * 8 * 128 * 2),  # grouped-query
        (LLAMA3_8B, "fp8", 1, 2 * 32 * 8 * 128),
        (LLAMA3_8B, "float32", 1, 2 * 32 * 8 * 128 * 4),
        (LLAMA3_8B, "auto", 4, 2 * 32 * 8 * 128 * 2),
        (LLAMA3_8B, "auto", 16, 2 * 32 * 16 * 128 * 2),  # heads are copied
        (DEEPSEEK_V2_LITE, "auto", 1, 27 * 576 * 2),  # latent attention
        (DEEPSEEK_V2_LITE, "auto", 2, 27 * 576 * 2 * 2),  # on every rank
        ({**LLAMA3_8B, "head_dim": 64}, "auto", 1, 2 * 32 * 8 * 64 * 2),
        ({"text_config": LLAMA3_8B}, "auto", 1, 2 * 32 * 8 * 128 * 2),
    ],
)
def test_bytes_follow_from_the_models_own_layout(config, dtype, ranks, expected):
    assert kv_bytes_per_token(config, dtype, ranks) == expected


@pytest.mark.parametrize(
    ("config", "dtype", "named"),
    [
        ({**LLAMA_7B, "num_hidden_layers": None}, "auto", "num_hidden_layers"),
        ({**LLAMA_7B, "torch_dtype": "int3"}, "auto", "int3"),
        (LLAMA_7B, "fp7", "fp7"),
        ({**LLAMA_7B, "layer_types": ["linear_attention"]}, "auto", "layer_types"),
    ],
)
def test_a_layout_that_is_not_known_is_not_guessed(config, dtype, named):
    with pytest.raises(ValueError, match=named):
        kv_bytes_per_token(config, dtype)


def test_a_folder_without_a_configuration_gives_a_reason(tmp_path):
    assert describe_kv(str(tmp_path))[0] is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    link, how = describe_kv(str(tmp_path), "float32")
    assert link is not None
    assert link.bytes_per_token == 262144
    assert "float32" in how


@given(
    st.floats(1e8, 1e11), st.floats(0.0, 20.0), st.integers(1000, 300_000), st.data()
)
@settings(deadline=None, max_examples=40)
def test_a_link_is_recovered_from_its_transfers(rate, fixed, per_token, data):
    tokens = data.draw(
        st.lists(st.integers(16, 30_000), min_size=4, max_size=12, unique=True)
    )
    truth = LinkModel(per_token, rate, fixed)
    transfers = [Transfer(t, t * per_token, truth.transfer_ms(t)) for t in tokens]
    link = fit_link(transfers, per_token)
    fitted = LinkModel(per_token, link.bytes_per_s, link.fixed_ms)
    for t in tokens:
        assert fitted.transfer_ms(t) == pytest.approx(truth.transfer_ms(t), rel=1e-4)


def test_transfers_that_cannot_support_a_fit_are_refused():
    one = Transfer(100, 1e6, 1.0)
    with pytest.raises(UserError, match="expected at least 4"):
        fit_link([one], 1e4)
    with pytest.raises(UserError, match="two lengths"):
        fit_link([one] * 5, 1e4)
    falling = [Transfer(n, n * 1e6, 100.0 / n) for n in range(1, 6)]
    with pytest.raises(UserError, match="no longer for more bytes"):
        fit_link(falling, 1e6)


def test_a_busy_link_queues_and_the_papers_form_is_one_setting():
    paper = LinkModel(1000, 1e9)
    assert paper.transfer_ms(2000) == pytest.approx(2.0)
    busy = LinkModel(1000, 1e9, 0.5)
    alone = busy.transfer_ms(2000)
    assert busy.transfer_ms(2000, backlog_bytes=3e6) == pytest.approx(alone + 3.0)


def test_totals_are_read_from_the_connectors_histograms():
    text = """# HELP vllm:nixl_bytes_transferred Histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0"} 0.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 3.5e+06
vllm:nixl_bytes_transferred_count{engine="1",model_name="m"} 1.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.25
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 2.0
vllm:nixl_post_time_seconds_sum{engine="0",model_name="m"} 9.0
"""
    assert totals(text) == (3.0, 3.5e6, 0.25)
    assert totals("") == (0.0, 0.0, 0.0)
