# SPDX-License-Identifier: Apache-2.0
"""Start the engine that is to be profiled, and stop it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_kairos.files import UserError

#: Weights may have to be read from a slow disk.
_START_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 20.0

#: Flags of ``vllm serve`` that the profiler sets itself.
_OURS = ("--host", "--port", "--scheduler-cls", "--additional-config", "--model")

_TCMALLOC_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine.

    Attributes:
        url: Base URL of its server.
        step_log: File it logs steps to.
        report_address: Where it publishes state reports.
    """

    url: str
    step_log: Path
    report_address: str


@contextlib.asynccontextmanager
async def serving(
    model: str, serve_args: Sequence[str], step_log: Path, log: Path
) -> AsyncIterator[Started]:
    """An engine for the length of a ``with`` block.

    Args:
        model: Model to serve.
        serve_args: More arguments of ``vllm serve``.
        step_log: File for its step records; an old one is removed.
        log: File for its output.

    Raises:
        UserError: An argument is one the profiler sets itself, or the engine
            ends before it answers.
    """
    for word in serve_args:
        if word.split("=")[0] in _OURS:
            raise UserError(
                f"{word.split('=')[0]} after -- is set by the profiler itself, "
                "expected other arguments of vllm serve"
            )
    step_log.parent.mkdir(parents=True, exist_ok=True)
    step_log.unlink(missing_ok=True)
    port, report_port = _free_port(), _free_port()
    started = Started(
        f"http://127.0.0.1:{port}", step_log, f"tcp://127.0.0.1:{report_port}"
    )
    kairos = {
        "step_log": str(step_log.resolve()),
        "report_address": started.report_address,
        "engine_id": "profiled",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--scheduler-cls", "kairos"]
    command += ["--additional-config", json.dumps({"kairos": kairos})]
    command += serve_args
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=engine_environment(),
            # A group of its own, so that the workers it starts end with it.
            start_new_session=True,
        )
    try:
        await _wait_ready(process, started.url, log)
        with _out_of_the_way(process.pid):
            yield started
    finally:
        _stop(process)


@contextlib.contextmanager
def _out_of_the_way(server: int) -> Iterator[None]:
    """Server and profiler on the cores that the engine's is not bound to.

    An engine on the CPU computes on the cores of
    ``VLLM_CPU_OMP_THREADS_BIND``. The kernel does not know that it cannot go
    elsewhere: it puts the server that feeds it beside it as well, and steps
    then take as long as the server lets them.
    """
    if not hasattr(os, "sched_setaffinity"):  # Linux only.
        yield
        return
    cores = os.sched_getaffinity(0)
    bound: set[int] = set()
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        for child in psutil.Process(server).children(recursive=True):
            mine = os.sched_getaffinity(child.pid)
            if mine < cores:
                bound |= mine
    others = cores - bound
    if not bound or not others:
        yield
        return
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        for thread in psutil.Process(server).threads():
            os.sched_setaffinity(thread.id, others)
    os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def engine_environment() -> dict[str, str]:
    """Environment of an engine: what vLLM's CPU worker asks to be preloaded."""
    variables = dict(os.environ)
    variables.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not _is_cpu_build():
        return variables
    variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    preloaded = variables.get("LD_PRELOAD", "")
    wanted = {"tcmalloc": _tcmalloc(), "iomp5": _iomp5()}
    missing = [
        str(path) for name, path in wanted.items() if path and name not in preloaded
    ]
    if missing:
        variables["LD_PRELOAD"] = ":".join([*missing, *filter(None, [preloaded])])
    return variables


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _tcmalloc() -> Path | None:
    for folder in _TCMALLOC_FOLDERS:
        for name in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"):
            path = Path(folder, name)
            if path.exists():
                return path
    return None


def _iomp5() -> Path | None:
    try:
        files = importlib.metadata.files("intel-openmp") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libiomp5.so":
            return Path(str(file.locate())).resolve()
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(
                f"the engine ended with status {process.returncode} before it "
                f"answered: {_last_error(log)} (all of it in {log})"
            )
        if await asyncio.to_thread(_healthy, url):
            return
        await asyncio.sleep(0.5)
    raise UserError(
        f"the engine did not answer within {_START_TIMEOUT_S:.0f} s (output in {log})"
    )


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _last_error(log: Path) -> str:
    """The line of the engine's output that says most about its end."""
    lines = [
        line.strip()
        for line in log.read_text(errors="replace").splitlines()
        if line.strip()
    ]
    telling = [line for line in lines if "rror:" in line or "error" in line]
    return (telling or lines or ["no output"])[-1][:300]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the engine and its workers, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        with contextlib.suppress(ProcessLookupError):
            # Workers that outlived the server.
            os.killpg(process.pid, signal.SIGKILL)
        return
