# SPDX-License-Identifier: Apache-2.0
"""The servers of a comparison: engines, and a proxy for each policy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quickstart.engines import START_TIMEOUT_S, Engine, EngineSpec, core_for
from quickstart.processes import Server, port_is_free, stop_all, wait_until_ready
from vllm_kairos.files import UserError

PROXY_SCRIPT = "examples/online_serving/disaggregated_serving/disagg_proxy_demo.py"
BUDGET_TOKENS = 2048
MAX_MODEL_LEN = 16384
#: Engines' own ports lie this far above the first one, and those of their side
#: channels and reports this far above their own.
ENGINE_OFFSET, SIDE_CHANNEL_OFFSET, REPORT_OFFSET = 10, 1000, 2000


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


class Servers:
    """Prefill and decode engines, one a core, and proxies over them.

    Args:
        prefill: Prefill engines.
        decode: Decode engines.
        port: First port; proxies are there, engines above.
        logs: Folder for logs and step records.
    """

    def __init__(self, prefill: int, decode: int, port: int, logs: Path):
        self.prefill = prefill
        self.decode = decode
        self.port = port
        self.logs = logs
        self.engines: list[Engine] = []
        self.proxies: dict[str, Server] = {}

    @property
    def prefills(self) -> list[Engine]:
        """The prefill engines."""
        return self.engines[: self.prefill]

    @property
    def decodes(self) -> list[Engine]:
        """The decode engines."""
        return self.engines[self.prefill :]

    def check_ports(self, proxies: int) -> None:
        """See that every port is free.

        Raises:
            UserError: One is not; it is named.
        """
        first = self.port + ENGINE_OFFSET
        engines = range(first, first + self.prefill + self.decode)
        ports = [*range(self.port, self.port + proxies), *engines]
        ports += [port + SIDE_CHANNEL_OFFSET for port in engines]
        ports += [port + REPORT_OFFSET for port in engines]
        for port in ports:
            if not port_is_free(port):
                raise UserError(
                    f"port {port} is in use, expected it free: stop what listens "
                    "there or choose others with --port"
                )

    def start_engines(self, model: Path, decode_settings: Mapping[str, Any]) -> None:
        """Start all engines and wait for them.

        Args:
            model: Folder of the model.
            decode_settings: Engine settings of the decode engines.
        """
        for index in range(self.prefill + self.decode):
            spec = self._spec(model, index)
            if index >= self.prefill:
                spec = replace(spec, settings=decode_settings)
            self.engines.append(self._launch(spec))
        self._wait("Starting engines", self.engines)

    def restart_decodes(self, settings: Mapping[str, Any]) -> None:
        """Engines read their settings when they start."""
        stop_all(self.decodes)
        for index in range(self.prefill, len(self.engines)):
            spec = replace(self.engines[index].spec, settings=settings)
            self.engines[index] = self._launch(spec)
        self._wait("Decode engines with profile", self.decodes)

    def start_proxies(
        self, model: Path, policies: Sequence[str], flags: Sequence[str]
    ) -> None:
        """Start a proxy for each policy and wait for them.

        Args:
            model: Folder of the model.
            policies: Their policies.
            flags: More flags for all of them.
        """
        specs = [engine.spec for engine in self.engines]
        for index, policy in enumerate(policies):
            port = self.port + index
            command = [sys.executable, *proxy_command(), "--model", str(model)]
            command += ["--port", str(port), "--kv-handshake", "nixl"]
            command += ["--prefill", *(spec.address for spec in specs[: self.prefill])]
            command += ["--decode", *(spec.address for spec in specs[self.prefill :])]
            # The replayed prompts are token ids: nothing to count.
            command += ["--scheduling-policy", policy, "--tokenizer", "none"]
            command += ["--engine-state", *(spec.report_address for spec in specs)]
            self.proxies[policy] = Server(
                f"proxy ({policy})",
                [*command, *flags],
                f"http://127.0.0.1:{port}",
                self.logs / f"proxy-{policy}.log",
                ready_path="/status",
            )
        self._wait("Starting proxies", list(self.proxies.values()))

    def check_alive(self) -> None:
        """See that none has ended.

        Raises:
            StartError: One has; its log is told.
        """
        for server in (*self.engines, *self.proxies.values()):
            server.is_ready()

    def stop(self) -> None:
        """Stop all of them."""
        stop_all([*self.proxies.values(), *self.engines])

    def _spec(self, model: Path, index: int) -> EngineSpec:
        is_prefill = index < self.prefill
        number = index if is_prefill else index - self.prefill
        name = f"{'prefill' if is_prefill else 'decode'}-{number}"
        port = self.port + ENGINE_OFFSET + index
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
        return Engine(spec, self.logs / f"{spec.name}.log")

    def _wait(self, what: str, servers: Sequence[Server]) -> None:
        with bar(what, len(servers), "up") as shown:

            def told(ready: int) -> None:
                shown.update(ready - shown.n)
                if sys.stderr.isatty():
                    # Nothing has moved but the time.
                    shown.refresh()

            wait_until_ready(servers, START_TIMEOUT_S, told)
