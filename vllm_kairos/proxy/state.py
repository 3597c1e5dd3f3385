# SPDX-License-Identifier: Apache-2.0
"""State reports in: one ZMQ SUB socket per engine, any number of proxies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from vllm_kairos.core.messages import REPORT_TOPIC, decode_report
from vllm_kairos.proxy.fleet import Node
from vllm_kairos.proxy.metrics import ProxyMetrics

logger = logging.getLogger(__name__)

_MOST_REPORT_BYTES = 1 << 20


class StateSubscriber:
    """Feeds the reports of every engine to its node.

    Args:
        metrics: Counts reports taken, dropped and unreadable.
        stir: Called when a node has a new report.
    """

    def __init__(self, metrics: ProxyMetrics, stir: Callable[[], None]):
        self._metrics = metrics
        self._stir = stir
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, node: Node, address: str) -> None:
        """Subscribe to one engine. ZMQ reconnects by itself."""
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_REPORT_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.IPV6, 1)
        socket.subscribe(REPORT_TOPIC)
        socket.connect(address)
        task = asyncio.create_task(self._receive(socket, node))
        self._tasks.append(task)

    async def _receive(self, socket: zmq.asyncio.Socket, node: Node) -> None:
        readable = True
        try:
            while True:
                frames = await socket.recv_multipart()
                try:
                    report = decode_report(frames[-1])
                except ValueError as error:
                    self._metrics.reports("unreadable")
                    if readable:
                        logger.warning("State of %s: %s", node.address, error)
                    readable = False
                    continue
                readable = True
                taken = node.observe(report, time.monotonic())
                self._metrics.reports("taken" if taken else "old")
                if taken:
                    self._stir()
        finally:
            socket.close(linger=0)

    async def stop(self) -> None:
        """Close every socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._context is not None:
            self._context.term()
            self._context = None
