# SPDX-License-Identifier: Apache-2.0
"""The proxy's routes, and the ASGI app of `vllm-kairos proxy`."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_kairos.files import UserError
from vllm_kairos.proxy.body import CHAT, COMPLETIONS, error_body
from vllm_kairos.proxy.exchange import Exchange
from vllm_kairos.proxy.flags import ProxySettings, check_node, last_component
from vllm_kairos.proxy.fleet import Node
from vllm_kairos.proxy.handlers import Dispatcher
from vllm_kairos.proxy.residency import PIECE_TOKENS
from vllm_kairos.proxy.service import Service

_ASK_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)


class KairosProxy:
    """Request handlers and routes over one `Service`.

    Args:
        settings: Checked settings.

    Attributes:
        router: Every route but those of the two request handlers.
    """

    def __init__(self, settings: ProxySettings):
        self.service = Service(settings)
        self._dispatcher = Dispatcher(self.service)
        self.router = APIRouter(lifespan=self._lifespan)
        for path, endpoint in (
            ("/v1/models", self.models),
            ("/health", self.health),
            ("/metrics", self.metrics),
            ("/status", self.status),
            ("/kairos/status", self.status),
        ):
            self.router.add_route(path, endpoint, methods=["GET"])
        self.router.add_route("/instances/add", self.add_instance, methods=["POST"])

    @asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        await self.service.start()
        try:
            yield
        finally:
            if self._dispatcher.late is not None:
                self._dispatcher.late.stop()
            await self.service.stop()

    async def create_completion(self, raw_request: Request) -> Response:
        """``POST /v1/completions``."""
        return Exchange(self.service, self._dispatcher, raw_request, COMPLETIONS)

    async def create_chat_completion(self, raw_request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return Exchange(self.service, self._dispatcher, raw_request, CHAT)

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``: the answer of a decode node, as it is."""
        await self.service.start()
        headers = {}
        if "authorization" in request.headers:
            headers["Authorization"] = request.headers["authorization"]
        fleet = self.service.fleet
        for node in sorted(fleet.decode, key=lambda n: not n.up):
            try:
                async with self.service.session.get(
                    node.url("/v1/models"), headers=headers, timeout=_ASK_TIMEOUT
                ) as reply:
                    return Response(
                        await reply.read(),
                        reply.status,
                        media_type=reply.headers.get("Content-Type"),
                    )
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                self.service.metrics.error(node.address, "models")
        return Response(
            error_body("no decode node answers", "Bad Gateway", 502),
            502,
            media_type="application/json",
        )

    async def health(self, _: Request) -> Response:
        """``GET /health``: 200 while a decode node is healthy, else 503."""
        await self.service.start()
        for node in sorted(self.service.fleet.decode, key=lambda n: not n.up):
            if await self.service.health.healthy(node):
                return Response(status_code=200)
        return Response(status_code=503)

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``: the proxy's own."""
        return Response(
            self.service.metrics.text(),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def status(self, _: Request) -> Response:
        """``GET /status``: the bundled script's fields and each node's state."""
        fleet, settings = self.service.fleet, self.service.settings
        fleet.sync()
        return JSONResponse(
            {
                "prefill_node_count": len(fleet.prefill),
                "decode_node_count": len(fleet.decode),
                "prefill_nodes": [n.address for n in fleet.prefill],
                "decode_nodes": [n.address for n in fleet.decode],
                "policy": settings.policy,
                "dispatch": "eager" if self._dispatcher.late is None else "late",
                "queue": self._queue(),
                "tokenizer_ready": self.service.counter.ready,
                "nodes": {n.address: self._node(n) for n in fleet.nodes()},
            }
        )

    def _queue(self) -> dict[str, Any]:
        late = self._dispatcher.late
        if late is None:
            return {"waiting": 0, "in_time": 0, "late": 0, "oldest_ms": 0.0}
        in_time, hopeless = late.classes()
        return {
            "waiting": len(late),
            "in_time": in_time,
            "late": hopeless,
            "oldest_ms": round(1e3 * late.oldest_s(time.monotonic()), 1),
        }

    def _node(self, node: Node) -> dict[str, Any]:
        state = self.service.state(node)
        return {
            "up": node.up,
            "profile": node.profile.name if node.profile else None,
            "report": node.report is not None,
            "fresh": state.fresh,
            "decodes": state.decodes,
            "decode_kv_tokens": state.decode_kv_tokens,
            "prefill_tokens": sum(w.tokens for w in state.prefills),
            "deflected": len(state.deflected),
            "awaiting_kv": state.awaiting_kv,
            "expected": state.expected,
            "step_in_flight_ms": round(state.step_in_flight_ms, 2),
            "worked_off_ms": round(state.worked_off_ms, 2),
            "limit_ms": state.limit_ms,
            "link_backlog_bytes": round(state.link_backlog_bytes),
            "cached_prefix_tokens": PIECE_TOKENS * len(node.residency),
            "dispatches_open": len(node.ledger),
        }

    async def add_instance(self, request: Request) -> Response:
        """``POST /instances/add``, as the bundled script has it."""
        expected = os.environ.get("ADMIN_API_KEY")
        if not expected:
            return _detail(500, "Server configuration error.")
        given = request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), expected.encode()):
            return _detail(403, "Forbidden: Invalid API Key.")
        try:
            data = await request.json()
            kind, address = data["type"], str(data["instance"])
        except (ValueError, TypeError, KeyError):
            return _detail(400, "expected {'type': ..., 'instance': ...}")
        if kind not in ("prefill", "decode"):
            return _detail(400, "Invalid instance type.")
        try:
            check_node("instance", address)
        except UserError as error:
            return _detail(400, str(error))
        settings = self.service.settings
        known = settings.prefill if kind == "prefill" else settings.decode
        if address in known:
            return _detail(400, "Instance already exists.")
        await self.service.start()
        card = await self.service.model_card(address) or {}
        served = str(card.get("id", ""))
        if last_component(served) != last_component(settings.model):
            return _detail(400, "Instance validation failed.")
        known.append(address)
        self.service.metrics.watch(self.service.fleet.nodes())
        return JSONResponse({"message": f"Added {address} to {kind}_instances."})


def _detail(status: int, text: str) -> Response:
    return JSONResponse({"detail": text}, status)


def make_app(settings: ProxySettings) -> FastAPI:
    """The ASGI app of `vllm-kairos proxy`."""
    proxy = KairosProxy(settings)
    app = FastAPI(title="vllm-kairos proxy")
    # Plain Starlette routes: the handlers need nothing of FastAPI's own.
    proxy.router.add_route(COMPLETIONS, proxy.create_completion, methods=["POST"])
    proxy.router.add_route(CHAT, proxy.create_chat_completion, methods=["POST"])
    app.include_router(proxy.router)
    app.state.kairos = proxy
    return app
