# SPDX-License-Identifier: Apache-2.0
"""Measure an engine: drive it, read its step log, fit, validate, write.

The time budget is shared out among prompts alone, the grid and the replay.
One replay in three, of a short run one in two, is held out of the fit: the
profile is validated on it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_kairos.core.messages import StateReport
from vllm_kairos.core.profile import EngineLimits, KvLink, Profile
from vllm_kairos.files import UserError, save_profile
from vllm_kairos.profiling import plan
from vllm_kairos.profiling.build import build_profile, validate
from vllm_kairos.profiling.client import EngineClient, Served
from vllm_kairos.profiling.drive import run_alone, run_grid, run_replay
from vllm_kairos.profiling.fit import fit_steps
from vllm_kairos.profiling.hardware import describe_hardware
from vllm_kairos.profiling.kv import describe_kv
from vllm_kairos.profiling.progress import Progress
from vllm_kairos.profiling.reports import read_report
from vllm_kairos.profiling.session import LogTail, Session
from vllm_kairos.profiling.steps import read_steps
from vllm_kairos.profiling.transfers import measure_link

#: Times that prompts alone, the grid and the replay take turns: the most, the
#: least, and the seconds that are worth one.
_MOST_CYCLES, _LEAST_CYCLES, _CYCLE_S = 6, 2, 25.0
#: Shares of a cycle; the replay takes the rest.
_ALONE_SHARE = 0.15
_GRID_SHARE = 0.45
#: Grid and prompts alone are run at most this often.
_MOST_ROUNDS = 3
#: Segment of the replays that are held out of the fit.
_HELD_OUT = "held-out"
_SHORTEST_REPLAY_S = 2.0
#: The engine writes its log every heartbeat; wait for at least two.
_FLUSH_S = 0.3
_FIRST_ROWS_S = 5.0
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
        run = _Run(target, client, bounds, session)
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
    held_out = np.array([s.startswith(_HELD_OUT) for s in session.segments()])
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


class _Run:
    """One profiling run: cells one after the other until the time is up."""

    def __init__(
        self,
        target: Target,
        client: EngineClient,
        bounds: plan.Bounds,
        session: Session,
    ):
        self.target = target
        self.client = client
        self.bounds = bounds
        self.session = session
        self.progress: Progress | None = None
        self._tail = LogTail(target.step_log)
        self._prefill_tokens = 0.0
        self._prefill_ms = 0.0
        self._decode_ms: list[float] = []
        self._last = time.monotonic()
        self._before_s = session.spent_s
        self._started = self._last

    def _spent_s(self) -> float:
        return self._before_s + time.monotonic() - self._started

    def _in_time(self, share: float) -> bool:
        return self._spent_s() < share * self.target.budget_s

    async def everything(self) -> None:
        """Prompts alone, the grid, the replay, in cycles.

        A machine that others use drifts: each kind of step is measured early
        and late, so that no coefficient stands for one moment only.
        """
        cycles = int(self.target.budget_s / _CYCLE_S)
        cycles = min(max(cycles, _LEAST_CYCLES), _MOST_CYCLES)
        for cycle in range(1, cycles + 1):
            start, end = (cycle - 1) / cycles, cycle / cycles
            alone_until = start + _ALONE_SHARE * (end - start)
            for number in range(1, _MOST_ROUNDS + 1):
                await self._alone(number, alone_until)
            grid_until = start + (_ALONE_SHARE + _GRID_SHARE) * (end - start)
            for number in range(1, _MOST_ROUNDS + 1):
                await self._grid(number, grid_until)
            await self._replay(cycle, end, last=cycle == cycles)

    async def _cell(
        self, name: str, segment: str, work: Callable[[], Awaitable[None]]
    ) -> None:
        if name in self.session.done:
            return
        if self.progress is not None:
            self.progress.say(name)
        await work()
        await asyncio.sleep(_FLUSH_S)
        rows = self._tail.new_rows()
        if not rows and not self.session.done:
            await asyncio.sleep(_FIRST_ROWS_S)
            rows = self._tail.new_rows()
            if not rows:
                raise UserError(
                    f"step log {self.target.step_log}: no step was added while the "
                    f"engine at {self.target.url} worked, expected its own step log"
                )
        for row in rows:
            self._learn(row)
        now = time.monotonic()
        self.session.finish_cell(name, segment, rows, now - self._last)
        self._last = now

    def _learn(self, row: dict[str, str]) -> None:
        """Rough speeds, to know what there is time for."""
        tokens = float(row["sum_prefill_tokens"])
        latency = float(row["latency_ms"])
        if tokens > 0:
            self._prefill_tokens += tokens
            self._prefill_ms += latency
        elif float(row["num_decode_requests"]) > 0:
            self._decode_ms.append(latency)

    @property
    def _tokens_per_s(self) -> float:
        if not self._prefill_ms:
            return 2000.0
        return 1e3 * self._prefill_tokens / self._prefill_ms

    async def _alone(self, number: int, until: float) -> None:
        for cell in plan.alone_cells(self.bounds):
            left = until * self.target.budget_s - self._spent_s()
            if left <= 0:
                return
            if cell.prompt_tokens > 0.5 * left * self._tokens_per_s:
                continue
            await self._cell(
                f"{cell.name}#{number}",
                "alone",
                functools.partial(run_alone, self.client, cell),
            )

    async def _grid(self, number: int, until: float) -> None:
        cells = plan.grid_cells(self.bounds)
        share_s = _GRID_SHARE * self.target.budget_s
        # A short budget is spent on a few cells rather than on one.
        each_s = share_s / min(len(cells), max(8.0, self.target.budget_s / 20.0))
        for cell in cells:
            left = until * self.target.budget_s - self._spent_s()
            tokens = min(each_s, left) * self._tokens_per_s
            if left <= 0:
                return
            if cell.setup_tokens > 0.6 * tokens:
                continue
            await self._cell(
                f"{cell.name}#{number}",
                "grid",
                functools.partial(
                    run_grid,
                    self.client,
                    cell,
                    cell.prompts(tokens),
                    self.bounds,
                    functools.partial(self._in_time, until),
                ),
            )

    async def _replay(self, cycle: int, until: float, last: bool) -> None:
        """Rounds of every load; the last of each three replays is held out."""
        end_s = until * self.target.budget_s
        left = end_s - self._spent_s()
        sessions = [
            (load, segment)
            for _ in range(max(1, round(left / 60.0)))
            for segment in ("replay", "replay", _HELD_OUT)
            for load in plan.LOADS
        ]
        if left < 2.0 * _SHORTEST_REPLAY_S:
            # Early cycles are fitted, the last tests.
            sessions = [(plan.LOADS[1], _HELD_OUT if last else "replay")]
        elif left < 2.0 * _SHORTEST_REPLAY_S * len(sessions):
            # Too short for all loads at once: one a cycle, the middle one first.
            load = plan.LOADS[cycle % len(plan.LOADS)]
            sessions = [(load, "replay"), (load, _HELD_OUT)]
        prompt, output, full_rate = self._replay_shape()
        ran: set[str] = set()
        for i, (load, segment) in enumerate(sessions):
            duration = (end_s - self._spent_s()) / (len(sessions) - i)
            if duration < _SHORTEST_REPLAY_S:
                if segment in ran:
                    return
                # However short the time: a profile is never left untested.
                duration = _SHORTEST_REPLAY_S
            ran.add(segment)
            name = f"{segment}-{load:g}#{cycle}.{i}"
            requests = plan.arrivals(
                load * full_rate,
                duration,
                prompt,
                output,
                self.bounds,
                f"{self.target.seed}-{name}",
                self.target.lengths,
            )
            await self._cell(
                name,
                f"{segment}-{load:g}",
                functools.partial(run_replay, self.client, requests, duration),
            )

    def _replay_shape(self) -> tuple[int, int, float]:
        """Median prompt and output, and the rate the engine can just serve."""
        speed = self._tokens_per_s
        prompt = int(min(3569, max(64, 0.25 * speed), self.bounds.max_model_len / 8))
        output = 24
        decode_s = float(np.median(self._decode_ms)) / 1e3 if self._decode_ms else 0.02
        # Means of the lognormals, a batch of eight decoding together.
        mean_prompt, mean_output = 1.5 * prompt, 1.5 * output
        if self.target.lengths:
            mean_prompt, mean_output = np.mean(self.target.lengths, axis=0)
        seconds = mean_prompt / speed + mean_output * decode_s / 8.0
        return prompt, output, 1.0 / float(seconds)
