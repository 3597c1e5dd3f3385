# SPDX-License-Identifier: Apache-2.0
"""Stub engines that answer as vLLM does, and a proxy on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import uvicorn
import zmq
from aiohttp import web
from multidict import CIMultiDict

from vllm_kairos.core.messages import REPORT_TOPIC, StateReport, encode_report
from vllm_kairos.core.profile import EngineLimits, FittedPredictor, Profile
from vllm_kairos.proxy.app import make_app
from vllm_kairos.proxy.flags import ProxySettings

MODEL = "stub/tiny"
Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def profile(model: str = MODEL, prefill_ms_per_token: float = 1.0) -> Profile:
    """Prefill 1 ms a token; decode 10 ms a step; a chunk adds 0.1 ms a token."""
    return Profile(
        name="stub",
        model=model,
        hardware="none",
        engine_version="0.18.1",
        kind="calibrated",
        created="2026-01-01",
        prefill=FittedPredictor({"1": 1.0, "c": prefill_ms_per_token}),
        decode=FittedPredictor({"1": 10.0}),
        mixed=FittedPredictor({"c": 0.1}),
        engine=EngineLimits(8192, 64, 100_000),
    )


def report(**changes: Any) -> StateReport:
    """An idle engine's report."""
    idle = StateReport(
        engine_id="e",
        incarnation="one",
        seq=1,
        time_s=time.time(),
        role="kv_both",
        decodes=0,
        decode_kv_tokens=0,
        deflected=[],
        prefills=[],
        more_prefill_tokens=0,
        awaiting_kv=0,
        awaiting_kv_tokens=0,
        free_kv_blocks=10_000,
        total_kv_blocks=10_000,
        block_size=16,
        budget_tokens=8192,
        max_num_seqs=64,
        admitted=[],
        steps=[],
    )
    return msgspec.structs.replace(idle, **changes)


def sse(*events: str) -> list[bytes]:
    """Server-sent events as vLLM frames them."""
    return [f"data: {e}\n\n".encode() for e in events]


class StubEngine:
    """One engine: an HTTP server and a publisher of state reports.

    Attributes:
        requests: ``(path, body, headers)`` of every request that came.
        behaviour: Answers generation requests; replace it in a test.
        releases: Bodies of requests that are there to free KV, and no others.
        on_release: Answers those.
        cancelled: Requests whose client went away before the answer ended.
        chunks: What a streamed answer consists of.
        state: Report published every 20 ms, `None` for silence.
        deaf: ``/health`` is not answered.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], CIMultiDict[str]]] = []
        self.behaviour: Behaviour = self.answer
        self.releases: list[dict[str, Any]] = []
        self.on_release: Behaviour = self.answer
        self.cancelled = 0
        self.chunks = sse('{"t": 1}', '{"t": 2}', "[DONE]")
        self.kv: dict[str, Any] | None = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [1, 2],
            "remote_engine_id": "p",
            "remote_request_id": "r",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        }
        self.state: StateReport | None = None
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._transports: set[Any] = set()
        self._beat: asyncio.Task[None] | None = None
        self.state_address = ""
        self.deaf = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.requests]

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._handle)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.01
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        if not self.state_address:
            self._publisher = zmq.Context.instance().socket(zmq.PUB)
            port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
            self.state_address = f"tcp://127.0.0.1:{port}"
            self._beat = asyncio.create_task(self._publish())

    async def _publish(self) -> None:
        seq = 0
        while True:
            if self.state is not None:
                seq += 1
                self.send(msgspec.structs.replace(self.state, seq=seq))
            await asyncio.sleep(0.02)

    def send(self, state: StateReport | bytes) -> None:
        data = state if isinstance(state, bytes) else encode_report(state)
        self._publisher.send_multipart((REPORT_TOPIC, data))

    async def die(self) -> None:
        """As kill -9: every connection is reset and the port refuses."""
        for transport in list(self._transports):
            transport.abort()
        assert self._runner is not None
        await self._runner.cleanup()
        self._runner = None

    async def stop(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            self._publisher.close(linger=0)
        if self._runner is not None:
            await self.die()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]}
        )

    async def _health(self, _: web.Request) -> web.Response:
        if self.deaf:
            await asyncio.sleep(600)
        return web.Response()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._transports.add(request.transport)
        body = json.loads(await request.read())
        release = body.get("prompt") == [0]
        if release:
            self.releases.append(body)
        else:
            self.requests.append((request.path, body, request.headers.copy()))
        try:
            answer = self.on_release if release else self.behaviour
            return await answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._transports.discard(request.transport)

    async def answer(
        self, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        """As vLLM: KV handle for a remote decode, a stream or one object."""
        params = body.get("kv_transfer_params") or {}
        if not body.get("stream"):
            answer: dict[str, Any] = {
                "id": request.headers.get("X-Request-Id"),
                "usage": {"prompt_tokens": 7},
                "from": self.address,
                "kv_transfer_params": None,
            }
            if params.get("do_remote_decode"):
                answer["kv_transfer_params"] = self.kv
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in self.chunks:
            await response.write(chunk)
            await asyncio.sleep(0.005)
        return response


def error(status: int, message: str = "no") -> Behaviour:
    """A behaviour that answers as vLLM's error handler does."""

    async def behave(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        body = {"error": {"message": message, "type": "x", "code": status}}
        return web.json_response(body, status=status, headers={"X-Engine": "stub"})

    return behave


async def hang(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    """A behaviour that never answers."""
    await asyncio.sleep(600)
    raise AssertionError


async def break_off(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    """A behaviour that dies before its first byte."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(600)
    raise AssertionError


async def head_then_break(
    request: web.Request, _: dict[str, Any]
) -> web.StreamResponse:
    """Dies after the head of a stream, before the first byte of its body."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(600)
    raise AssertionError


class LiveProxy:
    """An ASGI app under uvicorn in a thread.

    Args:
        app: The app.
        grace_s: Seconds that answers have to end when it stops.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, app: Any, grace_s: int = 1):
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=grace_s)
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._listener.close()
        assert not self._thread.is_alive(), "the proxy did not stop"


@contextlib.contextmanager
def live(settings: ProxySettings, grace_s: int = 1) -> Iterator[LiveProxy]:
    """A running proxy with these settings."""
    app = make_app(settings)
    proxy = LiveProxy(app, grace_s)
    proxy.kairos = app.state.kairos  # type: ignore[attr-defined]
    try:
        yield proxy
    finally:
        proxy.stop()


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        await asyncio.sleep(0.005)
