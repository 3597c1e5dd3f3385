# SPDX-License-Identifier: Apache-2.0
"""Engine settings: ``--additional-config '{"kairos": {...}}'``."""

from __future__ import annotations

from typing import Literal

import msgspec

from vllm_kairos.core.profile import Profile
from vllm_kairos.core.settings import Settings
from vllm_kairos.files import UserError, load_profile


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the scheduler inside one engine. All have defaults.

    Attributes:
        report_address: ZMQ address the state reports are bound to. By default
            loopback, at the NIXL side-channel port plus 10000, which is
            unique per engine on a host; an empty string turns reports off.
            The port grows by the data-parallel rank.
        engine_id: Name of this engine in its reports; by default that of the
            KV connector.
        heartbeat_ms: Time between reports, the paper's ``Delta_h``.
        step_log: CSV file that step records are appended to; off by default.
        profile: Path of a step-latency profile of this engine.
        mode: ``planned``: chunks as scheduled, the paper's way; ``adaptive``:
            the largest chunk that is safe in the step at hand, which needs a
            profile and is the default where there is one.
        tau_ms: TBT SLO.
        ttft_slo_ms: TTFT target; a prefill held past it gets a smallest chunk.
        beta: Safety factor on `tau_ms`.
        late_share: Target share of decode steps over `tau_ms`.
        feedback: Learn from how far predictions were off; without it the bound
            stays where `beta` puts it.
        smallest_chunk_tokens: Chunk of a prefill past its target for which no
            headroom is left.
        error_warning_percent: Mean prediction error past which one warning
            names the phase and the command to refit.
    """

    report_address: str | None = None
    engine_id: str | None = None
    heartbeat_ms: float = 100.0
    step_log: str | None = None
    profile: str | None = None
    mode: Literal["planned", "adaptive"] | None = None
    tau_ms: float = 70.0
    ttft_slo_ms: float = 4000.0
    beta: float = 0.9
    late_share: float = 0.005
    feedback: bool = True
    smallest_chunk_tokens: int = 16
    error_warning_percent: float = 25.0

    def __post_init__(self) -> None:
        Settings(tau_ms=self.tau_ms, ttft_slo_ms=self.ttft_slo_ms, beta=self.beta)
        for name, least in (
            ("heartbeat_ms", 1.0),
            ("smallest_chunk_tokens", 1),
            ("error_warning_percent", 0.1),
        ):
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise ValueError(f"{name} is {value!r}, expected at least {least}")
        if not 1e-6 <= self.late_share <= 0.4:
            raise ValueError(f"late_share is {self.late_share!r}, expected 1e-6 to 0.4")
        if self.mode == "adaptive" and self.profile is None:
            raise ValueError("mode is 'adaptive', which needs a profile")


def load_settings(additional_config: object) -> tuple[EngineSettings, Profile | None]:
    """Settings and profile out of vLLM's ``additional_config``.

    Args:
        additional_config: The whole dictionary, or whatever else vLLM holds.

    Raises:
        UserError: A key is unknown or a value wrong; one line that names it.
    """
    raw: object = {}
    if isinstance(additional_config, dict):
        raw = additional_config.get("kairos") or {}
    try:
        settings = msgspec.convert(raw, EngineSettings)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"--additional-config kairos: {error}") from error
    profile = load_profile(settings.profile) if settings.profile else None
    return settings, profile
