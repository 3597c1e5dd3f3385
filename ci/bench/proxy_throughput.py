# SPDX-License-Identifier: Apache-2.0
"""Requests per second of our proxy and of vLLM's bundled ones.

All in front of the same stub backends, in turn within each round and in another
order in each. Within a round ours is divided by the faster bundled script, so
that both met the same machine, and the median over the rounds is the verdict:
requests per second of wall time. CPU time a request is printed beside, which
neighbours on a busy machine do not take. The last line of stdout is one JSON
object. Exit code 1 where ours serves fewer than the faster bundled script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

DEMO = "examples/online_serving/disaggregated_serving/disagg_proxy_demo.py"
TOY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
MODEL = "tiny"
OURS = ("round_robin", "kairos")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class StubBackend(asyncio.Protocol):
    """A backend that costs next to nothing: canned answers on a raw socket."""

    KV = json.dumps(
        {
            "id": "x",
            "usage": {"prompt_tokens": 512},
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "p",
                "remote_block_ids": list(range(32)),
                "remote_request_id": "r",
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
            },
        }
    ).encode()
    MODELS = json.dumps({"data": [{"id": MODEL}]}).encode()

    def __init__(self, chunks: int):
        event = b'data: {"choices": [{"text": "token"}]}\n\n'
        self._events = [event] * chunks + [b"data: [DONE]\n\n"]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            at = head.find(b"content-length:")
            if at >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            self._object(self.MODELS)
        elif b'"stream":true' in body.replace(b": ", b":"):
            # The demo streams its prefill leg too and drops what it gets.
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            loop = asyncio.get_running_loop()
            for event in self._events:
                loop.call_soon(self._chunk, event)
            loop.call_soon(self._transport.write, b"0\r\n\r\n")
        else:
            self._object(self.KV)

    def _chunk(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))

    def _object(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )


async def serve_stubs(ports: list[int], chunks: int) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: StubBackend(chunks), "127.0.0.1", port)
    await asyncio.Event().wait()


async def one_client(port: int, request: bytes, until: float, done: list[int]) -> None:
    """Sends requests one after another over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while time.monotonic() < until:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"port {port} answered {head[:60]!r}")
            if b"chunked" not in head.lower():
                raise RuntimeError("expected a chunked answer")
            whole = b""
            while True:
                size = int(await reader.readline(), 16)
                whole += await reader.readexactly(size + 2)
                if size == 0:
                    break
            if not whole.rstrip().endswith(b"data: [DONE]"):
                raise RuntimeError("the stream came incomplete")
            done.append(1)
    finally:
        writer.close()


async def load(port: int, request: bytes, seconds: float, clients: int) -> float:
    """Requests per second."""
    done: list[int] = []
    started = time.monotonic()
    until = started + seconds
    await asyncio.gather(
        *(one_client(port, request, until, done) for _ in range(clients))
    )
    return len(done) / (time.monotonic() - started)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Contender:
    """One proxy under test."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            raise SystemExit(f"a process ended early:\n{log.read_text()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"port {port} did not open:\n{log.read_text()}")


def contenders(source: Path, stubs: list[int], work: Path) -> list[Contender]:
    """Every proxy, running, two prefill and two decode stubs behind each."""
    p1, p2, d1, d2 = (f"127.0.0.1:{port}" for port in stubs)
    nodes = ["--model", MODEL, "--prefill", p1, p2, "--decode", d1, d2]
    ours = ["-m", "vllm_kairos.cli", "proxy", *nodes, "--tokenizer", "none"]
    host = ["127.0.0.1", "127.0.0.1"]
    ports = [str(port) for port in stubs]
    toy = [
        *("--prefiller-hosts", *host, "--prefiller-ports", *ports[:2]),
        *("--decoder-hosts", *host, "--decoder-ports", *ports[2:]),
    ]
    commands = {
        **{f"vllm-kairos {p}": [*ours, "--scheduling-policy", p] for p in OURS},
        "disagg_proxy_demo.py": [str(source / DEMO), *nodes],
        "toy_proxy_server.py": [str(source / TOY), *toy],
    }
    out = []
    for name, words in commands.items():
        port = free_port()
        log = work / f"{name.replace(' ', '-')}.log"
        out.append(Contender(name, start([*words, "--port", str(port)], log), port))
        wait_for(port, out[-1].process, log)
    return out


def measure(args: argparse.Namespace, work: Path) -> list[Contender]:
    stubs = [free_port() for _ in range(4)]
    words = [__file__, "--stubs", *map(str, stubs), "--chunks", str(args.chunks)]
    log = work / "stubs.log"
    stub_process = start(words, log)
    running: list[Contender] = []
    try:
        wait_for(stubs[0], stub_process, log)
        running = contenders(args.vllm_source, stubs, work)
        body = json.dumps(
            {"model": MODEL, "prompt": list(range(512)), "stream": True}
        ).encode()
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        for turn in range(args.rounds + 1):
            first = turn % len(running)
            for c in (*running[first:], *running[:first]):
                before = cpu_seconds(c.process.pid)
                # The first round warms up.
                seconds = args.seconds if turn else 0.5
                rate = asyncio.run(load(c.port, request, seconds, args.clients))
                if turn:
                    c.rates.append(rate)
                    used = cpu_seconds(c.process.pid) - before
                    c.cpu_ms.append(1e3 * used / max(1.0, rate * seconds))
        return running
    finally:
        for process in (*(c.process for c in running), stub_process):
            process.terminate()
        for process in (*(c.process for c in running), stub_process):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="per turn")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=8, help="events of a stream")
    parser.add_argument(
        "--vllm-source",
        type=Path,
        default=os.environ.get("KAIROS_VLLM_SOURCE", f"{sys.prefix}/source"),
        help="vLLM's source tree (ci/setup_env.sh --print-source)",
    )
    parser.add_argument("--stubs", type=int, nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stubs:
        asyncio.run(serve_stubs(args.stubs, args.chunks))
        return 0
    args.vllm_source = Path(args.vllm_source)
    if not (args.vllm_source / TOY).exists():
        parser.error(f"--vllm-source {args.vllm_source} holds no {TOY}")
    with tempfile.TemporaryDirectory() as work:
        measured = measure(args, Path(work))
    for c in measured:
        print(
            f"{c.name:26} {statistics.median(c.rates):8.0f} requests/s "
            f"(least {min(c.rates):.0f}), {statistics.median(c.cpu_ms):.3f} CPU ms each"
        )
    ours = [c for c in measured if c.name.startswith("vllm-kairos")]
    bundled = [c for c in measured if c not in ours]

    # Paired within a round: all of them met the same machine.
    ratio = min(
        statistics.median(
            min(c.cpu_ms[i] for c in bundled) / mine for i, mine in enumerate(o.cpu_ms)
        )
        for o in ours
    )
    wall_ratio = min(
        statistics.median(
            mine / max(c.rates[i] for c in bundled) for i, mine in enumerate(o.rates)
        )
        for o in ours
    )
    met = wall_ratio >= 1.0
    print(
        json.dumps(
            {
                "benchmark": "proxy_throughput",
                "requests_per_s": {
                    c.name: round(statistics.median(c.rates), 1) for c in measured
                },
                "cpu_ms_per_request": {
                    c.name: round(statistics.median(c.cpu_ms), 4) for c in measured
                },
                "ratio_to_faster_bundled": round(wall_ratio, 3),
                "ratios": {
                    c.name: [
                        round(rate / max(b.rates[i] for b in bundled), 3)
                        for i, rate in enumerate(c.rates)
                    ]
                    for c in ours
                },
                "ratio_of_cpu_time": round(ratio, 3),
                "budget": 1.0,
                "met": met,
            }
        )
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
