# SPDX-License-Identifier: Apache-2.0
"""The heartbeat: state reports over ZMQ PUB, also while the engine idles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq
from vllm.logger import init_logger

from vllm_kairos.core.messages import REPORT_TOPIC, StateReport, encode_report

logger = init_logger(__name__)

#: Makes the latest report, given its sequence number. Runs on the thread.
ReportSource = Callable[[int], StateReport | None]


class Heartbeat:
    """A thread that sends the latest report every `heartbeat_ms`.

    EngineCore blocks while it is idle, so the beat needs its own thread. An
    address that cannot be bound is logged and reports are off: an engine
    serves without them.

    Args:
        address: ZMQ address to bind; empty for no reports.
        heartbeat_ms: Time between reports.
        source: Makes the report.
        also: Called every beat, e.g. to flush step records.
    """

    def __init__(
        self,
        address: str,
        heartbeat_ms: float,
        source: ReportSource,
        also: Callable[[], None],
    ):
        self._period_s = heartbeat_ms / 1e3
        self._source = source
        self._also = also
        self._stop = threading.Event()
        self._socket: zmq.Socket[bytes] | None = None
        if address:
            self._socket = _bind(address)
        self._thread = threading.Thread(
            target=self._run, name="kairos-heartbeat", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        seq = 0
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                self._also()
                if self._socket is not None:
                    report = self._source(seq)
                    if report is not None:
                        payload = encode_report(report)
                        self._socket.send_multipart((REPORT_TOPIC, payload))
                        seq += 1
            except Exception:
                # A report is an aid; whatever fails here must not take the
                # engine's only heartbeat with it.
                logger.exception("Kairos state report failed")
            due = max(due + self._period_s, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def close(self) -> None:
        """Stop the thread and release the address. May be called twice."""
        self._stop.set()
        self._thread.join(timeout=2.0)
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


def _bind(address: str) -> zmq.Socket[bytes] | None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    # A slow subscriber loses old reports, never delays new ones.
    socket.setsockopt(zmq.SNDHWM, 16)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        logger.error(
            "Kairos state reports are off: cannot bind %s (%s). Set "
            '--additional-config \'{"kairos": {"report_address": "tcp://..."}}\'.',
            address,
            error,
        )
        return None
    logger.info("Kairos state reports at %s", address)
    return socket
