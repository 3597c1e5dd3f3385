# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: the tiny model, and real vLLM engines on real NIXL.

Engines take half a minute to start, so a module that can share one takes the
session's `cluster`; one that kills or configures engines starts its own with
`start_engine`. All are stopped, whatever happens, by process group.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import make_tiny_model
from quickstart.compare import cache_directory
from quickstart.engines import START_TIMEOUT_S, Engine, EngineSpec, core_for
from quickstart.processes import Server, free_ports, stop_all, wait_until_ready
from quickstart.servers import proxy_command

#: A test machine may be busy with other tests.
WAIT_S = 2 * START_TIMEOUT_S
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def layer_state() -> dict[str, Any]:
    """What ci/setup_env.sh says of this environment."""
    path = Path(sys.prefix) / "kairos-layer.json"
    if not path.exists():
        pytest.skip("not run by the interpreter of ci/setup_env.sh")
    return dict(json.loads(path.read_text()))


@pytest.fixture(scope="session")
def vllm_sdist(layer_state: dict[str, Any]) -> Path:
    """vLLM's source tree as released; not to be written to."""
    return Path(layer_state["sdist"])


@pytest.fixture(scope="session")
def vllm_source(layer_state: dict[str, Any]) -> Path:
    """vLLM's examples/ and tests/ with the patches in; not to be written to."""
    return Path(sys.prefix) / "source"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny Llama, made once for all runs."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed, expected ci/setup_env.sh's venv")
    folder = cache_directory() / "tiny-llama"
    make_tiny_model.make(folder)
    return folder


class EngineFactory:
    """Starts engines and proxies, and stops every one of them.

    Args:
        model: Served by all.
        directory: For logs and step records.
    """

    def __init__(self, model: Path, directory: Path):
        self.model = model
        self.directory = directory
        self.servers: list[Server] = []

    def __call__(self, name: str, *, wait: bool = True, **fields: Any) -> Engine:
        """Start an engine.

        Args:
            name: Of the engine; its log and step records are named after it.
            wait: Return only when it serves.
            **fields: Fields of `EngineSpec` other than the defaults; a core is
                chosen in turn, ports are free ones.
        """
        port, side_channel_port, report_port = free_ports(3)
        number = len(self.servers)
        spec = EngineSpec(
            **{
                "name": name,
                "model": self.model,
                "port": port,
                "side_channel_port": side_channel_port,
                "report_port": report_port,
                "core": core_for(number),
                "step_log": self.directory / f"{number}-{name}.steps.csv",
                **fields,
            }
        )
        engine = Engine(spec, self.directory / f"{number}-{name}.log")
        self.servers.append(engine)
        if wait:
            self.wait(engine)
        return engine

    def wait(self, *servers: Server) -> None:
        """Wait until all of them serve."""
        wait_until_ready(servers, WAIT_S)

    def proxy(
        self, prefills: list[Engine], decodes: list[Engine], policy: str, *flags: str
    ) -> Server:
        """Start the bundled proxy over engines.

        Args:
            prefills: Prefill nodes.
            decodes: Decode nodes.
            policy: ``--scheduling-policy``.
            *flags: More of its flags.
        """
        (port,) = free_ports(1)
        command = [sys.executable, *proxy_command(), "--model", str(self.model)]
        command += ["--port", str(port), "--kv-handshake", "nixl"]
        command += ["--prefill", *(engine.spec.address for engine in prefills)]
        command += ["--decode", *(engine.spec.address for engine in decodes)]
        command += ["--scheduling-policy", policy, "--engine-state"]
        command += [engine.spec.report_address for engine in (*prefills, *decodes)]
        number = len(self.servers)
        proxy = Server(
            f"proxy-{policy}",
            [*command, *flags],
            f"http://127.0.0.1:{port}",
            self.directory / f"{number}-proxy-{policy}.log",
            ready_path="/status",
        )
        self.servers.append(proxy)
        self.wait(proxy)
        return proxy

    def stop(self) -> None:
        """Stop all of them."""
        stop_all(self.servers)


@dataclass
class Cluster:
    """One prefill and one decode engine, which any test may use but not stop.

    A request sent to ``prefill.url`` or ``decode.url`` itself is served by that
    engine alone.

    Attributes:
        factory: Starts proxies over them.
        prefill: The prefill engine.
        decode: The decode engine.
    """

    factory: EngineFactory
    prefill: Engine
    decode: Engine
    _proxies: dict[tuple[str, ...], Server] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Served model name."""
        return str(self.factory.model)

    def proxy(self, policy: str, *flags: str) -> Server:
        """A proxy over the two; the same one for the same flags."""
        key = (policy, *flags)
        if key not in self._proxies:
            self._proxies[key] = self.factory.proxy(
                [self.prefill], [self.decode], policy, *flags
            )
        return self._proxies[key]


@pytest.fixture(scope="session")
def _session_engines(
    layer_state: dict[str, Any],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineFactory]:
    factory = EngineFactory(tiny_model, tmp_path_factory.mktemp("cluster"))
    try:
        yield factory
    finally:
        factory.stop()


@pytest.fixture(scope="session")
def cluster(_session_engines: EngineFactory) -> Cluster:
    """The session's 1P1D cluster of Kairos engines."""
    prefill = _session_engines("prefill", wait=False)
    decode = _session_engines("decode", wait=False)
    _session_engines.wait(prefill, decode)
    return Cluster(_session_engines, prefill, decode)


@pytest.fixture
def start_engine(
    layer_state: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    """Starts engines that end with the test; see `EngineFactory`."""
    factory = EngineFactory(tiny_model, tmp_path)
    try:
        yield factory
    finally:
        factory.stop()
