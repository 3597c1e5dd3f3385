# SPDX-License-Identifier: Apache-2.0
"""One client exchange as an ASGI response that does all the work itself."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_kairos.proxy.body import Body, error_body
from vllm_kairos.proxy.forward import Reply, upstream_headers
from vllm_kairos.proxy.handlers import Dispatcher
from vllm_kairos.proxy.job import Job, NoNode
from vllm_kairos.proxy.service import Service

logger = logging.getLogger(__name__)

#: Longest body. It is held several times over on its way: as it came, read, and
#: as either leg.
MOST_BODY_BYTES = 256 << 20

_REQUEST_ID = re.compile(r"^[\x21-\x7e]{1,256}$")


class Exchange(Response):
    """The answer to one request, made while it is sent.

    Args:
        service: The proxy's long-lived parts.
        dispatcher: Decides and forwards.
        request: The client's request, body not yet read.
        path: API path.
    """

    def __init__(
        self, service: Service, dispatcher: Dispatcher, request: Request, path: str
    ):
        self._service = service
        self._dispatcher = dispatcher
        self._request = request
        self._path = path
        # What FastAPI looks at before it calls the response.
        self.background = None
        self.status_code = 200
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it; called by the framework."""
        arrived_s = time.monotonic()
        if not self._service.running:
            await self._service.start()
        ended = [False]
        try:
            raw = await self._read()
        except ClientDisconnect:
            return
        if raw is None:
            most = f"Body is longer than {MOST_BODY_BYTES} bytes"
            await self._refuse(send, ended, 413, most, HTTPStatus(413).phrase)
            return
        task = asyncio.current_task()
        assert task is not None
        watch = _ClientWatch(receive, task, ended)
        try:
            await self._serve(raw, arrived_s, send, ended)
        except asyncio.CancelledError:
            # Both legs are closed by now, and a closed connection makes vLLM
            # abort. Nobody is left to answer, or the server is stopped and has
            # waited long enough: it would log a traceback of what is raised.
            if watch.gone:
                logger.debug("Client of %s left", self._path)
            else:
                logger.warning("Answer to %s broken off", self._path)
                if not self._begun:
                    kind = HTTPStatus.SERVICE_UNAVAILABLE.phrase
                    await self._refuse(send, ended, 503, "the proxy is stopped", kind)
        finally:
            watch.stop()

    async def _read(self) -> bytes | None:
        """The client's body, `None` where it is too long."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self._request.stream():
            size += len(piece)
            if size > MOST_BODY_BYTES:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    async def _serve(
        self, raw: bytes, arrived_s: float, send: Send, ended: list[bool]
    ) -> None:
        metrics = self._service.metrics
        content_type = self._request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            await self._refuse(
                send, ended, 400, "Content-Type is not application/json", "Bad Request"
            )
            return
        try:
            body = Body(raw, self._path)
        except (ValueError, RecursionError) as error:
            await self._refuse(
                send, ended, 400, f"Body is not a JSON object: {error}", "Bad Request"
            )
            return
        job = Job(
            body,
            upstream_headers(self._request.headers.raw, self._request_id(body)),
            uuid.uuid4().hex,
            arrived_s,
            await self._dispatcher.measure(body),
        )
        reply: Reply | None = None
        try:
            reply = await self._dispatcher.dispatch(job)
            metrics.answered(job.label, reply.status)
            if body.stream and reply.status == 200:
                metrics.first_byte(
                    job.label, time.monotonic() - arrived_s, job.predicted_ms
                )
            route = [(b"x-kairos-route", job.label.encode())]
            self._begun = True
            broken = await reply.relay(send, route, ended)
            if broken is not None:
                self._dispatcher.broke_off(reply, broken)
        except NoNode as error:
            kind = HTTPStatus(error.status).phrase
            await self._refuse(send, ended, error.status, str(error), kind, job.label)
        finally:
            self._dispatcher.finish(job, reply)

    def _request_id(self, body: Body) -> str:
        """The id the client gave, which vLLM shows in its answer."""
        for value in (
            self._request.headers.get("x-request-id"),
            body.fields.get("request_id"),
        ):
            if isinstance(value, str) and _REQUEST_ID.match(value):
                return value
        return uuid.uuid4().hex

    async def _refuse(
        self,
        send: Send,
        ended: list[bool],
        status: int,
        message: str,
        kind: str,
        label: str = "refused",
    ) -> None:
        self._service.metrics.answered(label, status)
        self._begun = True
        ended[0] = True
        await Response(
            error_body(message, kind, status), status, media_type="application/json"
        )(self._request.scope, self._request.receive, send)


class _ClientWatch:
    """Cancels a task when its client leaves before the answer has ended.

    Attributes:
        gone: It did, and the task was cancelled for it.
    """

    def __init__(self, receive: Receive, task: asyncio.Task[Any], ended: list[bool]):
        self.gone = False
        self._watch = asyncio.create_task(self._run(receive, task, ended))

    async def _run(
        self, receive: Receive, task: asyncio.Task[Any], ended: list[bool]
    ) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not ended[0]:
            self.gone = True
            task.cancel()

    def stop(self) -> None:
        """The exchange is over."""
        self._watch.cancel()
