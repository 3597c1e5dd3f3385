# SPDX-License-Identifier: Apache-2.0
"""A step-latency profile: coefficients and where they come from.

JSON, never a pickle: a network service loads it. This module only turns bytes
into a checked `Profile` and back; files are `vllm_kairos.files`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.predictor import TERMS, Predictor
from vllm_kairos.core.step_model import Combine, StepModel

PROFILE_FORMAT = "vllm-kairos-profile"
PROFILE_VERSION = 1

# Checked where a profile is read.
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Limit = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]

#: All that a decode-only step is predicted from.
_DECODE_TERMS = ("1", "B", "K")


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
    steps: _Count = 0
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

    bytes_per_token: _Positive
    bytes_per_s: _Positive | None = None
    fixed_ms: _NotNegative = 0.0


class EngineLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of the engine that was profiled.

    Attributes:
        budget_tokens: vLLM ``max_num_batched_tokens``.
        max_num_seqs: vLLM ``max_num_seqs``.
        kv_tokens: KV cache size in tokens.
        block_size: Tokens of a KV block.
    """

    budget_tokens: _Limit
    max_num_seqs: _Limit
    kv_tokens: _Limit
    block_size: _Limit = 16


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


class _Header(msgspec.Struct):
    """What says that a file is a profile; other fields are left alone."""

    format: str
    v: int


_decoder = msgspec.json.Decoder(Profile)
_header_decoder = msgspec.json.Decoder(_Header)


def decode_profile(data: bytes) -> Profile:
    """A checked profile from JSON.

    Raises:
        ValueError: Not JSON, or a field is missing, extra, of the wrong type
            or out of range; the message names the field.
    """
    try:
        header = _header_decoder.decode(data)
        if header.format != PROFILE_FORMAT:
            raise ValueError(
                f"format is {header.format!r}, expected {PROFILE_FORMAT!r}"
            )
        if header.v != PROFILE_VERSION:
            raise ValueError(f"version is {header.v}, expected {PROFILE_VERSION}")
        profile = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("nested too deeply, expected a profile") from error
    for phase in ("prefill", "decode", "mixed"):
        _check_predictor(phase, getattr(profile, phase))
    profile.step_model()
    profile.link_model()
    return profile


def _check_predictor(phase: str, part: FittedPredictor) -> None:
    """Refuse a predictor that says nothing, or what is not heard."""
    # `max` may leave every mixed step to the decode predictor.
    if part.combine == "add" and not any(part.terms.values()):
        raise ValueError(f"{phase}.terms has no term above 0, expected at least one")
    for term in part.terms if phase == "decode" else ():
        if term not in _DECODE_TERMS and term in TERMS:
            raise ValueError(
                f"decode.terms has {term!r}, expected only {', '.join(_DECODE_TERMS)}"
            )
    for letter, (low, high) in part.ranges.items():
        if letter not in ("B", "K", "c", "p", "n"):
            raise ValueError(
                f"{phase}.ranges has {letter!r}, expected only B, K, c, p, n"
            )
        if not 0 <= low <= high < math.inf:
            raise ValueError(
                f"{phase}.ranges.{letter} is {low:g} to {high:g}, expected least "
                "and greatest value, 0 or more"
            )


def encode_profile(profile: Profile) -> bytes:
    """A profile as indented JSON, newline at the end."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
