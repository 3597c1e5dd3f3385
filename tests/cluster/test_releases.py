# SPDX-License-Identifier: Apache-2.0
"""KV left on a real prefill engine is freed long before vLLM's time-out."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quickstart.processes import free_ports
from tests.cluster.client import ask, prompt_ids
from tests.conftest import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


class Doomed:
    """A decode node that takes requests and never answers; then it is gone.

    Args:
        model: It says that it serves this one.

    Attributes:
        spec: Its addresses, as an engine's.
        requests: Bodies that came.
    """

    def __init__(self, model: str):
        self.requests: list[bytes] = []
        self._gone = threading.Event()
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"data": [{"id": model}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                node.requests.append(self.rfile.read(length))
                node._gone.wait()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        port, (report_port,) = self._server.server_port, free_ports(1)
        self.spec = SimpleNamespace(
            address=f"127.0.0.1:{port}",
            report_address=f"tcp://127.0.0.1:{report_port}",
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def die(self) -> None:
        """As a process that ends: connections are closed, the port refuses."""
        self._server.shutdown()
        self._server.socket.close()
        self._gone.set()
        self._thread.join(10)


@pytest.fixture
def doomed(cluster: Cluster) -> Iterator[Doomed]:
    node = Doomed(cluster.model)
    yield node
    node.die()


def held_share(cluster: Cluster) -> float:
    """Share of the prefill engine's KV cache in use, as of a step just now."""
    for _ in range(2):
        # An idle engine hears of nothing until its next step.
        ask(cluster.prefill.url, cluster.model, prompt_ids(1, 0), max_tokens=2)
    text = httpx.get(f"{cluster.prefill.url}/metrics", timeout=10).text
    found = re.search(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


def is_freed(cluster: Cluster, before: float, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if held_share(cluster) <= before:
            return True
        time.sleep(0.2)
    return False


def proxy_before(cluster: Cluster, doomed: Any) -> str:
    """URL of a proxy that sends its first request to the doomed node."""
    factory = cluster.factory
    return factory.proxy([cluster.prefill], [doomed, cluster.decode], "round_robin").url


@pytest.mark.parametrize("leaves", [True, False])
def test_kv_whose_decode_node_dies_is_freed_through_another(
    cluster: Cluster, doomed: Doomed, leaves: bool
) -> None:
    url = proxy_before(cluster, doomed)
    before = held_share(cluster)
    prompt = prompt_ids(1500, 4000 + leaves)
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 4}
    client = HTTPConnection(url.removeprefix("http://"), timeout=60)
    client.request(
        "POST",
        "/v1/completions",
        json.dumps({**body, "temperature": 0.0, "ignore_eos": True}),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + 60
    while not doomed.requests:
        assert time.monotonic() < deadline, "the decode leg did not come"
        time.sleep(0.02)
    assert held_share(cluster) > before
    if leaves:
        # In a second it is plain that no engine has taken the leg.
        client.close()
    doomed.die()
    if not leaves:
        answer = client.getresponse()
        text = json.loads(answer.read())["choices"][0]["text"]
        client.close()
        alone = ask(cluster.prefill.url, cluster.model, prompt, max_tokens=4)
        assert answer.status == 200 and text == alone.text
    assert is_freed(cluster, before)
    text = httpx.get(f"{url}/metrics", timeout=10).text
    assert 'kv_releases_total{outcome="released"} 1.0' in text
    # The decode engine has nothing of it in its cache.
    decoded = ask(cluster.decode.url, cluster.model, [0, *prompt], max_tokens=4)
    alone = ask(cluster.prefill.url, cluster.model, [0, *prompt], max_tokens=4)
    assert decoded.text == alone.text
