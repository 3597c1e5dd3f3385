# SPDX-License-Identifier: Apache-2.0
"""KV bytes of a token, from the model's own configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kairos.core.profile import KvLink

#: Bytes of one element, by the names of Hugging Face and of vLLM.
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
}

#: Fields of configurations whose layers do not all keep KV for every token.
_OTHER_LAYERS = ("linear_attention", "mamba", "recurrent", "conv")


def kv_bytes_per_token(
    config: Mapping[str, Any], kv_dtype: str = "auto", tensor_parallel: int = 1
) -> int:
    """Bytes of KV cache one token occupies, all layers and all ranks together.

    Multi-head and grouped-query attention keep a key and a value per KV head;
    where there are fewer KV heads than ranks, each rank keeps a copy of one.
    Multi-head latent attention keeps one latent and one rotary key, on every
    rank (vLLM ``MLAAttentionSpec``, ``FullAttentionSpec``).

    Args:
        config: The model's ``config.json``.
        kv_dtype: vLLM's ``--kv-cache-dtype``, or the ``--dtype`` served with;
            ``auto`` takes the configuration's own.
        tensor_parallel: Ranks.

    Raises:
        ValueError: The configuration lacks what is needed; the message names
            the field.
    """
    text = config.get("text_config")
    model: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    if kv_dtype == "auto":
        kv_dtype = str(
            model.get("dtype")
            or model.get("torch_dtype")
            or config.get("dtype")
            or config.get("torch_dtype")
            or "missing"
        )
    size = DTYPE_BYTES.get(kv_dtype.removeprefix("torch."))
    if size is None:
        raise ValueError(
            f"KV dtype is {kv_dtype!r}, expected one of {', '.join(DTYPE_BYTES)}"
        )
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel is {tensor_parallel}, expected >= 1")
    kinds = {str(kind) for kind in model.get("layer_types") or ()}
    other = sorted(k for k in kinds if any(word in k for word in _OTHER_LAYERS))
    if other:
        raise ValueError(f"layer_types holds {other[0]!r}, expected attention only")
    layers = _count(model, "num_hidden_layers", "n_layer", "num_layers")
    if model.get("kv_lora_rank"):
        latent = _count(model, "kv_lora_rank") + _count(model, "qk_rope_head_dim")
        return layers * latent * size * tensor_parallel
    heads = _count(model, "num_attention_heads", "n_head")
    kv_heads = int(model.get("num_key_value_heads") or model.get("num_kv_heads") or 0)
    kv_heads = max(kv_heads or heads, tensor_parallel)
    head_dim = int(model.get("head_dim") or 0)
    if not head_dim:
        head_dim = _count(model, "hidden_size", "n_embd") // heads
    return layers * 2 * kv_heads * head_dim * size


def _count(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    raise ValueError(f"{names[0]} is missing, expected a number >= 1")


def describe_kv(
    model: str, kv_dtype: str = "auto", tensor_parallel: int = 1
) -> tuple[KvLink | None, str]:
    """KV size of a model in a local folder, and how it was found.

    Returns:
        The size with no link measured, or `None` with the reason.
    """
    path = Path(model, "config.json")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return None, f"no readable config.json in {Path(model).name}"
    try:
        size = kv_bytes_per_token(config, kv_dtype, tensor_parallel)
    except ValueError as error:
        return None, f"config.json: {error}"
    return KvLink(float(size)), f"config.json, dtype {kv_dtype}, TP {tensor_parallel}"
