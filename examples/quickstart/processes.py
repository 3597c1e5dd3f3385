# SPDX-License-Identifier: Apache-2.0
"""Servers as child processes: started, waited for, and always stopped."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from vllm_kairos.files import UserError

_PR_SET_PDEATHSIG = 1


class StartError(UserError):
    """A server ended, or did not answer in time, before it was ready."""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            # All held until the last is found, so that they differ.
            holder = stack.enter_context(socket.socket())
            holder.bind(("127.0.0.1", 0))
            ports.append(int(holder.getsockname()[1]))
        return ports


def port_is_free(port: int) -> bool:
    """Whether a server could listen on a port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def layer() -> dict[str, str]:
    """What ci/setup_env.sh says of the environment that runs this.

    Empty where another environment does, such as a GPU user's own.
    """
    try:
        state = json.loads((Path(sys.prefix) / "kairos-layer.json").read_text())
    except OSError:
        return {}
    return {str(key): str(value) for key, value in state.items()}


def _die_with_parent() -> None:
    # A parent that is killed outright cannot stop its servers.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """One server process and the processes it starts.

    It gets a session of its own: a Ctrl-C in the terminal reaches the one who
    started it, who then stops it in order.

    Args:
        name: For messages.
        command: Program and arguments.
        url: Base URL it will answer at.
        log: File for its output.
        environment: Its environment variables, this process's by default.
        ready_path: Path of `url` that answers 200 once it serves.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        url: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        ready_path: str = "/health",
    ):
        self.name = name
        self.url = url
        self.log = log
        self._ready_path = ready_path
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self.process.pid

    def is_ready(self) -> bool:
        """Whether it answers.

        Raises:
            StartError: It has ended.
        """
        if self.process.poll() is not None:
            raise StartError(
                f"{self.name} ended with {self.process.returncode} before it was "
                f"ready; the end of {self.log}:\n{self.tail()}"
            )
        try:
            with urllib.request.urlopen(self.url + self._ready_path, timeout=2) as got:
                return bool(got.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def stop(self, patience_s: float = 15.0) -> None:
        """End it and every process of its group; safe to call again."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _alive(self) -> bool:
        """Whether anything of the process group still runs.

        What has ended but was not waited for is none: an engine's helpers
        outlive it, and a container's first process may never wait for them.
        """
        self.process.poll()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                ours = os.getpgid(process.pid) == self.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def stop_all(servers: Sequence[Server]) -> None:
    """Stop servers side by side: the wait is that of the slowest."""
    for server in servers:
        server._signal(signal.SIGTERM)
    for server in servers:
        server.stop()


def wait_until_ready(
    servers: Sequence[Server],
    timeout_s: float,
    told: Callable[[int], None] = lambda ready: None,
) -> None:
    """Wait for servers that start side by side.

    Args:
        servers: Those to wait for.
        timeout_s: For all of them together.
        told: Called with how many are ready, whenever looked.

    Raises:
        StartError: One ended, or the time is up.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(servers)
    while True:
        waiting = [server for server in waiting if not server.is_ready()]
        told(len(servers) - len(waiting))
        if not waiting:
            return
        if time.monotonic() > deadline:
            late = waiting[0]
            raise StartError(
                f"{late.name} is not ready after {timeout_s:.0f} s; the end of "
                f"{late.log}:\n{late.tail()}"
            )
        time.sleep(0.25)
