# SPDX-License-Identifier: Apache-2.0
"""Bytes in, bytes out: one exchange with a node, and its relay to the client."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from vllm_kairos.proxy.fleet import Node
from vllm_kairos.proxy.liveness import Liveness, Wait

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

#: vLLM's servers close an idle connection after 5 s; one that is reused just
#: then would look like a node that died.
_KEEP_ALIVE_S = 2.0
#: What the bundled script allows a request in all.
_TOTAL_S = 6 * 60 * 60.0

#: Headers of one connection, and those uvicorn sets itself.
_NOT_RELAYED = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"date", b"server"),
    )
)
_PASSED_ON = ("authorization", "traceparent", "tracestate", "x-data-parallel-rank")


class NodeFailure(Exception):
    """A node gave no answer.

    Attributes:
        node: The node.
        reached: Whether the request may have reached it. A KV handle that
            may have reached an engine is never served from again: the blocks
            it names may be gone or hold another prompt.
    """

    def __init__(self, node: Node, reason: str, reached: bool):
        super().__init__(f"{node.address}: {reason}")
        self.node = node
        self.reason = reason
        self.reached = reached


def client_session(connect_timeout_s: float) -> aiohttp.ClientSession:
    """The proxy's one session: no limit on connections, bytes as they come."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, limit_per_host=0, keepalive_timeout=_KEEP_ALIVE_S
        ),
        timeout=aiohttp.ClientTimeout(total=_TOTAL_S, sock_connect=connect_timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
    )


def upstream_headers(client: RawHeaders, request_id: str) -> CIMultiDict[str]:
    """Headers for a node.

    The client's ``Authorization`` is passed on; without one the bundled
    script's ``OPENAI_API_KEY`` is used.
    """
    headers = CIMultiDict(
        {"Content-Type": "application/json", "X-Request-Id": request_id}
    )
    for name, value in client:
        key = name.decode("latin-1").lower()
        if key in _PASSED_ON:
            headers.add(key, value.decode("latin-1"))
    if "authorization" not in headers:
        headers.update(api_key_header())
    return headers


def api_key_header() -> dict[str, str]:
    """The bundled script's ``OPENAI_API_KEY``, where it is set."""
    api_key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class Reply:
    """A node's answer, its first bytes at hand.

    Attributes:
        node: Who answered.
        status: HTTP status.
        first: First bytes of the body, empty where the body is.
    """

    __slots__ = ("node", "status", "first", "_response", "_liveness")

    def __init__(
        self,
        node: Node,
        response: aiohttp.ClientResponse,
        first: bytes,
        liveness: Liveness,
    ):
        self._liveness = liveness
        self.node = node
        self.status = response.status
        self.first = first
        self._response = response

    def headers(self) -> RawHeaders:
        """Headers to relay, as they came."""
        return [
            (name.lower(), value)
            for name, value in self._response.raw_headers
            if name.lower() not in _NOT_RELAYED
        ]

    async def read(self) -> bytes:
        """The rest of the body, `first` included.

        Raises:
            NodeFailure: It broke off.
        """
        wait = self._liveness.wait(self.node)
        try:
            async with wait:
                return self.first + await self._response.content.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise NodeFailure(self.node, _reason(error, wait), True) from error

    async def relay(
        self, send: Send, extra: RawHeaders, ended: list[bool]
    ) -> str | None:
        """Send it on, byte for byte, as the bytes come.

        Args:
            send: The client's ASGI channel.
            extra: Headers to add.
            ended: Set to ``[True]`` before the last message, so that whoever
                watches the client does not take the end for a disconnect.

        Returns:
            `None`, or how the node failed: ``broken``, ``silent`` or
            ``timeout``. No end is sent then, so the server closes the
            connection as a broken one.
        """
        content = self._response.content
        await send(
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": [*self.headers(), *extra],
            }
        )
        data = self.first
        wait = self._liveness.wait(self.node)
        try:
            async with wait:
                while data:
                    if content.at_eof():
                        break
                    wait.since_s = math.inf
                    await send(
                        {"type": "http.response.body", "body": data, "more_body": True}
                    )
                    wait.since_s = time.monotonic()
                    data = await content.readany()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            return _reason(error, wait)
        ended[0] = True
        await send({"type": "http.response.body", "body": data, "more_body": False})
        return None

    def close(self) -> None:
        """Drop the connection unless the body was read to its end.

        vLLM aborts the request when its connection closes.
        """
        self._response.close()


class PrefillLeg:
    """An exchange with a prefill node that outlives whoever waits for it.

    Args:
        opening: `open_reply`, not yet awaited.

    Attributes:
        task: Gives the reply and, where its status is 2xx, its body. Cancelled,
            it closes the connection.
        answered: The first bytes are here, so the node's work is done.
    """

    __slots__ = ("task", "answered")

    def __init__(self, opening: Coroutine[Any, Any, Reply]):
        self.answered = False
        self.task = asyncio.create_task(self._run(opening))

    async def _run(self, opening: Coroutine[Any, Any, Reply]) -> tuple[Reply, bytes]:
        reply = await opening
        self.answered = True
        if not 200 <= reply.status < 300:
            return reply, b""
        try:
            return reply, await reply.read()
        finally:
            reply.close()


async def open_reply(
    session: aiohttp.ClientSession,
    node: Node,
    path: str,
    payload: bytes,
    headers: CIMultiDict[str] | CIMultiDictProxy[str],
    liveness: Liveness,
    timeout_s: float | None = None,
) -> Reply:
    """POST to a node and wait for the first bytes of its answer.

    vLLM sends the head of a stream before the engine has done anything, so
    only a byte of the body says that the node is serving the request.

    Args:
        session: From `client_session`.
        node: The node.
        path: Path on it.
        payload: Body.
        headers: Headers.
        liveness: Ends the wait for a node that has gone silent.
        timeout_s: Longest the whole exchange may take.

    Raises:
        NodeFailure: It refused, broke off or took too long.
    """
    response: aiohttp.ClientResponse | None = None
    timeout = session.timeout
    if timeout_s is not None:
        timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=timeout.sock_connect
        )
    wait = liveness.wait(node)
    try:
        async with wait:
            response = await session.post(
                node.url(path), data=payload, headers=headers, timeout=timeout
            )
            first = await response.content.readany()
        return Reply(node, response, first, liveness)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise NodeFailure(node, "refused", False) from error
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        if response is not None:
            response.close()
        raise NodeFailure(node, _reason(error, wait), True) from error
    except BaseException:
        if response is not None:
            response.close()
        raise


def _reason(error: BaseException, wait: Wait) -> str:
    if wait.silent:
        return "silent"
    return "timeout" if isinstance(error, asyncio.TimeoutError) else "broken"
