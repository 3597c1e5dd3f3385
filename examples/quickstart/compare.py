# SPDX-License-Identifier: Apache-2.0
"""The comparison: engines, profile, arms in turns, results."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import make_tiny_model
from quickstart import report
from quickstart.load import Occupied, Prompts, Record, replay
from quickstart.machine import (
    MEDIAN_PREFILL_MS,
    Plan,
    limits_for,
    rate_for,
    scale_lengths,
    tokens_within,
)
from quickstart.servers import BUDGET_TOKENS, MAX_MODEL_LEN, Servers, bar
from vllm_kairos.core.profile import Profile
from vllm_kairos.files import UserError, load_profile
from vllm_kairos.sim.traces import TraceRow, load_trace
from vllm_kairos.sim.workload import bursty, resample

PROFILE_S = 60


@dataclass(frozen=True)
class Options:
    """The flags of the quick start, checked. See its ``--help``."""

    prefill: int
    decode: int
    model: Path | None
    policies: tuple[str, ...]
    rate_rps: float | None
    requests: int
    repetitions: int
    trace: Path | None
    profile: Path | None
    output: Path
    port: int
    seed: int


def cache_directory() -> Path:
    """Where ci/setup_env.sh keeps its things."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KAIROS_CACHE") or Path(base) / "vllm-kairos")


def segments(rows: Sequence[TraceRow], count: int) -> list[list[TraceRow]]:
    """Rows cut into runs, each with its own start of time."""
    out = []
    size, more = divmod(len(rows), count)
    start = 0
    for index in range(count):
        end = start + size + (index < more)
        began = rows[start - 1].arrived_at_s if start else 0.0
        out.append(
            [
                replace(row, arrived_at_s=row.arrived_at_s - began)
                for row in rows[start:end]
            ]
        )
        start = end
    return out


class Comparison:
    """One run of the quick start.

    Args:
        options: The flags.

    Raises:
        UserError: The trace or the profile cannot be read, a port is taken,
            or the output folder cannot be written.
    """

    def __init__(self, options: Options):
        self.options = options
        self.output = options.output.absolute()
        self.logs = self.output / "logs"
        self.trace = load_trace(options.trace) if options.trace else None
        self.given = load_profile(options.profile) if options.profile else None
        self.model = options.model.resolve() if options.model else None
        name = self.model.name if self.model else "tiny-llama"
        if self.given and Path(self.given.model).name != name:
            raise UserError(
                f"--profile {options.profile} is of model {self.given.model!r}, "
                f"expected one of {name!r}"
            )
        self.profile_path = (options.profile or self.output / "profile.json").absolute()
        self.servers = Servers(options.prefill, options.decode, options.port, self.logs)
        self.records: list[Record] = []
        self.windows: dict[str, list[tuple[float, float]]] = {}
        self.servers.check_ports(len(options.policies))
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for old in self.logs.glob("*.csv"):
                old.unlink()
        except OSError as error:
            raise UserError(
                f"--output {options.output}: {error.strerror or error}"
            ) from error

    def run(self) -> int:
        """The whole of it.

        Returns:
            0, or 1 where a request failed.
        """
        try:
            model = self._model()
            if self.given is None:
                self.servers.start_engines(model, {})
                plan = self._plan(self._profile(model))
                self.servers.restart_decodes(self._settings(plan))
            else:
                plan = self._plan(self.given)
                self.servers.start_engines(model, self._settings(plan))
            self.servers.start_proxies(
                model, self.options.policies, self._proxy_flags(plan)
            )
            self._warm_up(model)
            self._measure(model, plan)
        finally:
            self.servers.stop()
        return self._report(plan)

    # --- before ---------------------------------------------------------------

    def _model(self) -> Path:
        if self.model is None:
            self.model = cache_directory() / "tiny-llama"
            with bar("Tiny model", 1, "model") as shown:
                make_tiny_model.make(self.model)
                shown.update()
        return self.model

    def _profile(self, model: Path) -> Profile:
        engine = self.servers.decodes[0]
        log = self.logs / "profile.log"
        command = [sys.executable, "-m", "vllm_kairos.cli", "profile"]
        command += ["--url", engine.url, "--step-log", str(engine.spec.step_log)]
        command += ["--model", str(model), "--budget", f"{PROFILE_S}s"]
        command += ["--output", str(self.profile_path)]
        occupied = Occupied(
            [engine.url for engine in self.servers.prefills],
            str(model),
            Prompts(model, seed=self.options.seed + 8_000_000),
            BUDGET_TOKENS,
        )
        with (
            log.open("wb") as output,
            bar("Profiling", PROFILE_S, "s") as shown,
            occupied,
        ):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                started = time.monotonic()
                while process.poll() is None:
                    time.sleep(0.5)
                    elapsed = min(int(time.monotonic() - started), PROFILE_S)
                    shown.update(elapsed - shown.n)
            finally:
                if process.poll() is None:
                    process.terminate()
                process.wait()
        if process.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"profiling failed, see {log}: {' '.join(last)}")
        return load_profile(self.profile_path)

    def _plan(self, profile: Profile) -> Plan:
        o = self.options
        count = o.requests
        raw = self.trace or bursty(count, rate_rps=1.0, seed=o.seed)
        raw = resample(raw, requests=count)
        median = tokens_within(profile, MEDIAN_PREFILL_MS, BUDGET_TOKENS)
        rows = scale_lengths(raw, median, MAX_MODEL_LEN - 1)
        rate = o.rate_rps or rate_for(profile, rows, o.prefill, BUDGET_TOKENS)
        rows = resample(rows, rate_rps=rate)
        limits = limits_for(profile, rows, BUDGET_TOKENS)
        prompts = sorted(row.prompt_tokens for row in rows)
        print(
            f"For this machine: tau {limits.tau_ms:g} ms, TTFT SLO "
            f"{limits.ttft_slo_ms:g} ms, {count} requests at {rate:.2f}/s, prompts "
            f"of {prompts[0]} to {prompts[-1]} tokens, median "
            f"{prompts[len(prompts) // 2]}",
            flush=True,
        )
        return Plan(rows, rate, limits)

    def _settings(self, plan: Plan) -> dict[str, Any]:
        """What a decode engine is told: its guard needs profile and SLOs."""
        return {
            "profile": str(self.profile_path),
            "tau_ms": plan.limits.tau_ms,
            "ttft_slo_ms": plan.limits.ttft_slo_ms,
        }

    def _proxy_flags(self, plan: Plan) -> list[str]:
        return [
            *("--profile", str(self.profile_path)),
            *("--tau-ms", str(plan.limits.tau_ms)),
            *("--ttft-slo-ms", str(plan.limits.ttft_slo_ms)),
        ]

    # --- what is measured ----------------------------------------------------

    def _warm_up(self, model: Path) -> None:
        """Every engine and path once, so that no arm pays for the first time."""
        rows = [TraceRow(0.3 * i, 200 * (i % 4 + 1), 8) for i in range(8)]
        with bar("Warming up", len(rows) * len(self.servers.proxies), "req") as shown:
            for number, proxy in enumerate(self.servers.proxies.values()):
                prompts = Prompts(model, seed=self.options.seed + 7_000_000 + number)
                drawn = [prompts.draw(row.prompt_tokens) for row in rows]
                got = replay(proxy.url, str(model), rows, drawn, done=shown.update)
                records = asyncio.run(got)
                bad = [record.error for record in records if record.failed]
                if bad:
                    raise UserError(
                        f"warm-up through {proxy.name} failed: {bad[0]}; logs are in "
                        f"{self.logs}"
                    )

    def _measure(self, model: Path, plan: Plan) -> None:
        runs = segments(plan.rows, self.options.repetitions)
        draws = Prompts(model, seed=self.options.seed)
        for repetition, rows in enumerate(runs):
            # In turns, and every other time backwards: a machine that slows
            # down in the course of it does so for every arm.
            order = self.options.policies[:: -1 if repetition % 2 else 1]
            for policy in order:
                # Drawn on for each arm: none finds the prefixes of another.
                prompts = [draws.draw(row.prompt_tokens) for row in rows]
                what = f"{policy} {repetition + 1}/{len(runs)}"
                with bar(what, len(rows), "req") as shown:
                    started = time.time()
                    proxy = self.servers.proxies[policy]
                    self.records += asyncio.run(
                        replay(
                            proxy.url,
                            str(model),
                            rows,
                            prompts,
                            policy,
                            repetition,
                            shown.update,
                        )
                    )
                    self.windows.setdefault(policy, []).append((started, time.time()))
                self.servers.check_alive()

    def _report(self, plan: Plan) -> int:
        arms = {}
        logs = [e.spec.step_log for e in self.servers.decodes if e.spec.step_log]
        for policy in self.options.policies:
            mine = [record for record in self.records if record.policy == policy]
            arms[policy] = report.summarize(mine, plan.limits)
            arms[policy]["decode_steps_over_tau_share"] = report.decode_steps_over(
                logs, self.windows[policy], plan.limits.tau_ms
            )
        summary = {
            "arms": arms,
            "tau_ms": plan.limits.tau_ms,
            "ttft_slo_ms": plan.limits.ttft_slo_ms,
            "rate_rps": plan.rate_rps,
            "prefill": self.options.prefill,
            "decode": self.options.decode,
            "repetitions": self.options.repetitions,
            "seed": self.options.seed,
            "trace": str(self.options.trace) if self.options.trace else "bursty",
        }
        report.write_rows(self.output / "requests.csv", self.records)
        report.write_summary(self.output / "summary.json", summary)
        report.draw(self.output / "cdf.png", self.records, plan.limits)
        print(report.table(arms, plan.limits))
        print(f"Rows, summary and figure are in {self.options.output}")
        failed = [record for record in self.records if record.failed]
        if failed:
            print(
                f"quickstart: {len(failed)} requests failed, the first: "
                f"{failed[0].error}",
                file=sys.stderr,
            )
        return 1 if failed else 0
