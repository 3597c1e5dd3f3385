# SPDX-License-Identifier: Apache-2.0
"""A step-latency profile: coefficients and where they come from.

JSON, never a pickle: a network service loads it. This module only turns bytes
into a checked `Profile` and back; files are `vllm_kairos.files`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.step_model import Combine, StepModel

PROFILE_FORMAT = "vllm-kairos-profile"
PROFILE_VERSION = 1


class FittedPredictor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One predictor with what is known of its error.

    Attributes:
        terms: Milliseconds per unit of each term of `predictor.TERMS`.
        steps: Steps it was fitted on.
        ranges: Least and greatest value seen of ``B``, ``K``, ``c``, ``p``,
            ``n``.
        error: Held-out error: ``mape_percent``, ``median_percent``,
            ``p95_percent``, ``bias_percent``, ``count``.
        residual_quantiles: Held-out measured / predicted ratio by quantile.
        form: Name of the form chosen.
        combine: For `mixed` only. ``add``: a mixed step is the decode step
            plus these terms. ``max``: it is the longer of the two.
    """

    terms: dict[str, float]
    steps: int = 0
    ranges: dict[str, tuple[float, float]] = {}
    error: dict[str, float] = {}
    residual_quantiles: dict[str, float] = {}
    form: str = "linear"
    combine: Combine = "add"


class KvLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV size and the link it travels.

    Attributes:
        bytes_per_token: KV bytes of a token, all layers.
        bytes_per_s: Link bandwidth; `None` where transfers count as free.
        fixed_ms: Cost of an empty transfer.
    """

    bytes_per_token: float
    bytes_per_s: float | None = None
    fixed_ms: float = 0.0


class EngineLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of the engine that was profiled.

    Attributes:
        budget_tokens: vLLM ``max_num_batched_tokens``.
        max_num_seqs: vLLM ``max_num_seqs``.
        kv_tokens: KV cache size in tokens.
        block_size: Tokens of a KV block.
    """

    budget_tokens: int
    max_num_seqs: int
    kv_tokens: int
    block_size: int = 16


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step-latency profile of one model on one kind of hardware.

    Attributes:
        name: Short name.
        model: Model it was measured with, as served.
        hardware: What it ran on.
        engine_version: vLLM version.
        kind: ``measured`` on hardware, or ``calibrated`` to published
            numbers.
        created: ISO date.
        prefill: Prefill-only steps.
        decode: Decode-only steps.
        mixed: What a prefill adds to a step that decodes.
        kv: KV size and link, if known.
        engine: Limits of the profiled engine, if known.
        provenance: Free-form: commands, data, targets beside results.
    """

    name: str
    model: str
    hardware: str
    engine_version: str
    kind: Literal["measured", "calibrated"]
    created: str
    prefill: FittedPredictor
    decode: FittedPredictor
    mixed: FittedPredictor
    kv: KvLink | None = None
    engine: EngineLimits | None = None
    provenance: dict[str, object] = {}
    format: str = PROFILE_FORMAT
    v: int = PROFILE_VERSION

    def step_model(self) -> StepModel:
        """The three predictors.

        Raises:
            ValueError: A coefficient or term is invalid.
        """
        parts = {}
        for name in ("prefill", "decode", "mixed"):
            try:
                parts[name] = Predictor(getattr(self, name).terms)
            except ValueError as error:
                raise ValueError(f"{name}.terms: {error}") from error
        ranges = {name: getattr(self, name).ranges for name in parts}
        return StepModel(**parts, combine=self.mixed.combine, ranges=ranges)

    def link_model(self) -> LinkModel | None:
        """The KV-transfer model, `None` where the link is not known."""
        if self.kv is None or self.kv.bytes_per_s is None:
            return None
        return LinkModel(self.kv.bytes_per_token, self.kv.bytes_per_s, self.kv.fixed_ms)


_decoder = msgspec.json.Decoder(Profile)


def decode_profile(data: bytes) -> Profile:
    """A checked profile from JSON.

    Raises:
        ValueError: Not JSON, or a field is missing, extra, of the wrong type
            or out of range; the message names the field.
    """
    try:
        profile = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if profile.format != PROFILE_FORMAT:
        raise ValueError(f"format is {profile.format!r}, expected {PROFILE_FORMAT!r}")
    if profile.v != PROFILE_VERSION:
        raise ValueError(f"version is {profile.v}, expected {PROFILE_VERSION}")
    profile.step_model()
    profile.link_model()
    return profile


def encode_profile(profile: Profile) -> bytes:
    """A profile as indented JSON, newline at the end."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
