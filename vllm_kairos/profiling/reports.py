# SPDX-License-Identifier: Apache-2.0
"""An engine's limits, from its state reports."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from vllm_kairos.core.messages import REPORT_TOPIC, StateReport, decode_report
from vllm_kairos.files import UserError


async def read_report(
    address: str | None, timeout_s: float = 3.0
) -> StateReport | None:
    """The next state report published at an address, `None` if there is none."""
    if not address:
        return None
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(REPORT_TOPIC)
        socket.connect(address)
        frames = await asyncio.wait_for(socket.recv_multipart(), timeout_s)
        return decode_report(frames[-1])
    except (asyncio.TimeoutError, ValueError):
        return None
    except zmq.ZMQError as error:
        raise UserError(
            f"--report-address is {address!r}, expected e.g. "
            f"tcp://127.0.0.1:15600 ({error})"
        ) from error
    finally:
        socket.close()
        context.term()
