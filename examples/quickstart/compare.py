# SPDX-License-Identifier: Apache-2.0
"""The comparison: engines, profile, arms in turns, results."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

import make_tiny_model
from quickstart import report
from quickstart.engines import START_TIMEOUT_S, Engine, EngineSpec, core_for
from quickstart.load import Prompts, Record, replay
from quickstart.machine import (
    MEDIAN_PREFILL_MS,
    Plan,
    limits_for,
    rate_for,
    scale_lengths,
    tokens_within,
)
from quickstart.processes import Server, port_is_free, stop_all, wait_until_ready
from vllm_kairos.core.profile import Profile
from vllm_kairos.files import UserError, load_profile
from vllm_kairos.sim.traces import TraceRow, load_trace
from vllm_kairos.sim.workload import bursty, resample

PROXY_SCRIPT = "examples/online_serving/disaggregated_serving/disagg_proxy_demo.py"
BUDGET_TOKENS = 2048
MAX_MODEL_LEN = 16384
PROFILE_S = 60
#: Engines need more: other ports lie this far above those of their servers.
SIDE_CHANNEL_OFFSET, REPORT_OFFSET = 1000, 2000


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


def proxy_command() -> list[str]:
    """vLLM's bundled proxy where there is a patched copy, else the same app."""
    script = Path(sys.prefix) / "source" / PROXY_SCRIPT
    if script.is_file() and "vllm_kairos" in script.read_text():
        return [str(script)]
    return ["-m", "vllm_kairos.cli", "proxy"]


@contextmanager
def bar(what: str, total: int, unit: str) -> Iterator[tqdm[Any]]:
    """A progress bar for one phase."""
    with tqdm(
        total=total, desc=f"{what:<28}", unit=unit, file=sys.stderr, dynamic_ncols=True
    ) as shown:
        yield shown


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
        self.servers: list[Server] = []
        self.engines: list[Engine] = []
        self.proxies: dict[str, Server] = {}
        self.records: list[Record] = []
        self.windows: dict[str, list[tuple[float, float]]] = {}
        self._check_ports()
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
                self._start_engines(model)
                plan = self._plan(self._profile(model))
                self._restart_decodes(plan)
            else:
                plan = self._plan(self.given)
                self._start_engines(model, plan)
            self._start_proxies(model, plan)
            self._warm_up(model)
            self._measure(model, plan)
        finally:
            stop_all(self.servers)
        return self._report(plan)

    # --- what runs ---------------------------------------------------------

    def _check_ports(self) -> None:
        o = self.options
        engines = range(o.port + 10, o.port + 10 + o.prefill + o.decode)
        ports = [*range(o.port, o.port + len(o.policies)), *engines]
        ports += [port + SIDE_CHANNEL_OFFSET for port in engines]
        ports += [port + REPORT_OFFSET for port in engines]
        for port in ports:
            if not port_is_free(port):
                raise UserError(
                    f"port {port} is in use, expected it free: stop what listens "
                    "there or choose others with --port"
                )

    def _model(self) -> Path:
        if self.model is None:
            self.model = cache_directory() / "tiny-llama"
            with bar("Tiny model", 1, "model") as shown:
                make_tiny_model.make(self.model)
                shown.update()
        return self.model

    def _spec(self, model: Path, index: int) -> EngineSpec:
        is_prefill = index < self.options.prefill
        number = index if is_prefill else index - self.options.prefill
        name = f"{'prefill' if is_prefill else 'decode'}-{number}"
        port = self.options.port + 10 + index
        return EngineSpec(
            name=name,
            model=model,
            port=port,
            side_channel_port=port + SIDE_CHANNEL_OFFSET,
            report_port=port + REPORT_OFFSET,
            core=core_for(index),
            step_log=self.logs / f"{name}.steps.csv",
            max_model_len=MAX_MODEL_LEN,
            budget_tokens=BUDGET_TOKENS,
        )

    def _launch(self, spec: EngineSpec) -> Engine:
        engine = Engine(spec, self.logs / f"{spec.name}.log")
        self.servers.append(engine)
        return engine

    def _wait(self, what: str, servers: Sequence[Server]) -> None:
        with bar(what, len(servers), "up") as shown:

            def told(ready: int) -> None:
                shown.update(ready - shown.n)
                if sys.stderr.isatty():
                    # Nothing has moved but the time.
                    shown.refresh()

            wait_until_ready(servers, START_TIMEOUT_S, told)

    def _start_engines(self, model: Path, plan: Plan | None = None) -> None:
        count = self.options.prefill + self.options.decode
        specs = [self._spec(model, index) for index in range(count)]
        if plan is not None:
            settings = self._settings(plan)
            for index in range(self.options.prefill, count):
                specs[index] = replace(specs[index], settings=settings)
        self.engines = [self._launch(spec) for spec in specs]
        self._wait("Starting engines", self.engines)

    def _settings(self, plan: Plan) -> dict[str, Any]:
        """What a decode engine is told: its guard needs profile and SLOs."""
        return {
            "profile": str(self.profile_path),
            "tau_ms": plan.limits.tau_ms,
            "ttft_slo_ms": plan.limits.ttft_slo_ms,
        }

    @property
    def _decodes(self) -> list[Engine]:
        return self.engines[self.options.prefill :]

    def _profile(self, model: Path) -> Profile:
        engine = self._decodes[0]
        log = self.logs / "profile.log"
        command = [sys.executable, "-m", "vllm_kairos.cli", "profile"]
        command += ["--url", engine.url, "--step-log", str(engine.spec.step_log)]
        command += ["--model", str(model), "--budget", f"{PROFILE_S}s"]
        command += ["--output", str(self.profile_path)]
        with log.open("wb") as output, bar("Profiling", PROFILE_S, "s") as shown:
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

    def _restart_decodes(self, plan: Plan) -> None:
        """Engines read their settings when they start."""
        old = self._decodes
        stop_all(old)
        new = []
        for engine in old:
            self.servers.remove(engine)
            new.append(
                self._launch(replace(engine.spec, settings=self._settings(plan)))
            )
        self.engines[self.options.prefill :] = new
        self._wait("Decode engines with profile", new)

    def _start_proxies(self, model: Path, plan: Plan) -> None:
        prefills = [e.spec for e in self.engines[: self.options.prefill]]
        decodes = [e.spec for e in self._decodes]
        start = proxy_command()
        for index, policy in enumerate(self.options.policies):
            port = self.options.port + index
            command = [sys.executable, *start, "--model", str(model)]
            command += ["--port", str(port), "--kv-handshake", "nixl"]
            command += ["--prefill", *(spec.address for spec in prefills)]
            command += ["--decode", *(spec.address for spec in decodes)]
            command += ["--scheduling-policy", policy]
            command += ["--engine-state"]
            command += [spec.report_address for spec in (*prefills, *decodes)]
            command += ["--profile", str(self.profile_path)]
            command += ["--tau-ms", str(plan.limits.tau_ms)]
            command += ["--ttft-slo-ms", str(plan.limits.ttft_slo_ms)]
            proxy = Server(
                f"proxy ({policy})",
                command,
                f"http://127.0.0.1:{port}",
                self.logs / f"proxy-{policy}.log",
                ready_path="/status",
            )
            self.servers.append(proxy)
            self.proxies[policy] = proxy
        self._wait("Starting proxies", list(self.proxies.values()))

    # --- what is measured ----------------------------------------------------

    def _warm_up(self, model: Path) -> None:
        """Every engine and path once, so that no arm pays for the first time."""
        rows = [TraceRow(0.3 * i, 200 * (i % 4 + 1), 8) for i in range(8)]
        with bar("Warming up", len(rows) * len(self.proxies), "req") as shown:
            for number, proxy in enumerate(self.proxies.values()):
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
                    proxy = self.proxies[policy]
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
                for server in self.servers:
                    server.is_ready()

    def _report(self, plan: Plan) -> int:
        arms = {}
        logs = [e.spec.step_log for e in self._decodes if e.spec.step_log]
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
