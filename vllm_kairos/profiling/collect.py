# SPDX-License-Identifier: Apache-2.0
"""Measure an engine: drive it, read its step log, fit, validate, write."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_kairos.core.messages import StateReport
from vllm_kairos.core.profile import EngineLimits, KvLink, Profile
from vllm_kairos.files import UserError, save_profile
from vllm_kairos.profiling import plan
from vllm_kairos.profiling.build import build_profile, validate
from vllm_kairos.profiling.client import EngineClient, Served
from vllm_kairos.profiling.fit import fit_steps
from vllm_kairos.profiling.hardware import describe_hardware
from vllm_kairos.profiling.kv import describe_kv
from vllm_kairos.profiling.progress import Progress
from vllm_kairos.profiling.reports import read_report
from vllm_kairos.profiling.run import HELD_OUT, Run
from vllm_kairos.profiling.session import Session
from vllm_kairos.profiling.steps import read_steps
from vllm_kairos.profiling.transfers import measure_link

#: Decode batch assumed where the engine's limit is not known.
_DEFAULT_SEQS = 32


@dataclass
class Target:
    """An engine to profile and what is known of it.

    Attributes:
        url: Base URL of its server.
        step_log: Its step log.
        output: Profile to write.
        budget_s: Time to measure for.
        name: Name of the profile, by default from `output`.
        model: Name of the model, by default as served.
        hardware: What it runs on, by default detected.
        report_address: Where it publishes state reports, if known; its limits
            are read there.
        kv_dtype: Element type of the KV cache, ``auto`` for the model's.
        tensor_parallel: GPUs the engine is spread over.
        seed: Of all that is drawn.
        lengths: ``(prompt, output)`` tokens of a trace that replays draw from.
        serve_args: Arguments the engine was started with, where we did.
        prefill_url: A prefill engine whose KV transfers to this one are
            measured too.
        quiet: Show no progress.
    """

    url: str
    step_log: str | os.PathLike[str]
    output: str | os.PathLike[str]
    budget_s: float
    name: str | None = None
    model: str | None = None
    hardware: str | None = None
    report_address: str | None = None
    kv_dtype: str = "auto"
    tensor_parallel: int = 1
    seed: int = 0
    lengths: Sequence[tuple[int, int]] = ()
    serve_args: Sequence[str] = ()
    prefill_url: str | None = None
    quiet: bool = False


def profile_running_engine(
    url: str,
    step_log: str | os.PathLike[str],
    budget_s: float,
    output: str | os.PathLike[str],
    *,
    report_address: str | None = None,
    name: str | None = None,
    kv_dtype: str = "auto",
    prefill_url: str | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Profile:
    """Profile an engine that runs already and write the profile.

    Args:
        url: Base URL of its server.
        step_log: File its ``step_log`` setting names.
        budget_s: Time to measure for, from about 30 s.
        output: Profile to write; the raw steps stay beside it.
        report_address: Where it publishes state reports, if known.
        name: Name of the profile, by default from `output`.
        kv_dtype: Element type of the KV cache, ``auto`` for the model's.
        prefill_url: A prefill engine whose KV transfers to this one are
            measured too.
        seed: Of all that is drawn.
        quiet: Show no progress.

    Returns:
        The profile written.

    Raises:
        UserError: The engine does not answer, logs no steps, or its steps
            cannot support a fit.
    """
    target = Target(
        url=url,
        step_log=step_log,
        output=output,
        budget_s=budget_s,
        report_address=report_address,
        name=name,
        kv_dtype=kv_dtype,
        prefill_url=prefill_url,
        seed=seed,
        quiet=quiet,
    )
    return asyncio.run(profile_engine(target))


async def profile_engine(target: Target) -> Profile:
    """`profile_running_engine` inside an event loop."""
    async with EngineClient(target.url, target.seed) as client:
        served = await client.served()
        report = await read_report(target.report_address)
        seqs = report.max_num_seqs if report else _DEFAULT_SEQS
        kv_tokens = served.kv_tokens or 1 << 30
        bounds = plan.Bounds(served.max_model_len, kv_tokens, seqs)
        session = Session(target.output, _session_key(target, served))
        run = Run(target, client, bounds, session)
        with Progress(target.budget_s, session, target.quiet) as progress:
            run.progress = progress
            await run.everything()
    kv, kv_note = describe_kv(served.root, target.kv_dtype, target.tensor_parallel)
    if target.prefill_url:
        kv = await _with_link(target, target.prefill_url, kv, kv_note)
    try:
        profile = _finish(target, served, report, session, kv, kv_note)
    except UserError:
        # All cells are done: resuming would meet the same steps again.
        session.close()
        raise
    save_profile(target.output, profile)
    session.close()
    return profile


def _session_key(target: Target, served: Served) -> dict[str, object]:
    """All that may not change between a run and its resuming."""
    return {
        "model": served.model,
        "root": served.root,
        "max_model_len": served.max_model_len,
        "engine_version": served.version,
        "hardware": target.hardware or describe_hardware(),
        "tensor_parallel": target.tensor_parallel,
        "serve_args": list(target.serve_args),
        "trace": zlib.crc32(repr(list(target.lengths)).encode()),
        "seed": target.seed,
        "v": 2,
    }


async def _with_link(
    target: Target, prefill_url: str, kv: KvLink | None, note: str
) -> KvLink:
    if kv is None:
        raise UserError(f"--prefill-url: KV bytes of a token are not known: {note}")
    return await measure_link(prefill_url, target.url, kv.bytes_per_token, target.seed)


def _finish(
    target: Target,
    served: Served,
    report: StateReport | None,
    session: Session,
    kv: KvLink | None,
    kv_note: str,
) -> Profile:
    """Fit what was measured, validate on what was held out."""
    steps = read_steps([session.steps_path])
    held_out = np.array([s.startswith(HELD_OUT) for s in session.segments()])
    fit = fit_steps(steps.take(~held_out), target.seed)
    limits = None
    if report is not None:
        limits = EngineLimits(
            budget_tokens=report.budget_tokens,
            max_num_seqs=report.max_num_seqs,
            kv_tokens=report.total_kv_blocks * report.block_size,
            block_size=report.block_size,
        )
    provenance: dict[str, object] = {
        "budget_s": round(target.budget_s),
        "measured_s": round(session.spent_s),
        "seed": target.seed,
        "steps": len(steps),
        "steps_file": session.steps_path.name,
        "cells": len(session.done),
        "kv": kv_note,
    }

    def build() -> Profile:
        return build_profile(
            fit,
            name=target.name or Path(target.output).stem,
            model=target.model or served.model,
            hardware=target.hardware or describe_hardware(),
            engine_version=served.version,
            kv=kv,
            engine=limits,
            provenance=provenance,
        )

    if held_out.any():
        errors = validate(build(), steps.take(held_out))
        provenance["held_out_trace"] = {
            phase: errors[phase] for phase in ("prefill", "decode", "mixed")
        }
    return build()
