# SPDX-License-Identifier: Apache-2.0
"""Nodes believed dead: left out for a short while, probed, taken back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp

from vllm_kairos.proxy.fleet import Node

logger = logging.getLogger(__name__)

_FIRST_PROBE_S = 0.25
_LAST_PROBE_S = 5.0
_PROBE_TIMEOUT_S = 2.0
#: A node that answers ``/health`` but has stopped to send reports is tried
#: again after this long: it may be its reports alone that are lost.
_LONGEST_SILENT_S = 60.0


class HealthWatch:
    """Probes ``/health`` of nodes that failed until they answer.

    Args:
        session: The proxy's session.
        stir: Called when a node goes or comes back.
    """

    def __init__(self, session: aiohttp.ClientSession, stir: Callable[[], None]):
        self._session = session
        self._stir = stir
        self._probes: dict[Node, asyncio.Task[None]] = {}
        self._silent_s: dict[Node, float] = {}

    def failed(self, node: Node, silent: bool = False) -> None:
        """It is believed dead: leave it out until a probe succeeds.

        Args:
            node: The node.
            silent: Its server may answer while its engine does not: a report
                is waited for as well, but not for ever.
        """
        if node.up:
            logger.warning("Node %s is out until it answers /health", node.address)
        node.up = False
        if silent and node.report is not None:
            self._silent_s[node] = time.monotonic()
        self._stir()
        self._watch(node, _FIRST_PROBE_S)

    def suspect(self, node: Node) -> None:
        """It answered with a server error: out only if a probe fails too."""
        self._watch(node, 0.0)

    def _watch(self, node: Node, wait_s: float) -> None:
        if node not in self._probes:
            task = asyncio.create_task(self._probe(node, wait_s))
            self._probes[node] = task
            task.add_done_callback(lambda _: self._probes.pop(node, None))

    async def _probe(self, node: Node, wait_s: float) -> None:
        while True:
            await asyncio.sleep(wait_s)
            if await self.healthy(node) and self._reports(node):
                if not node.up:
                    logger.info("Node %s is back", node.address)
                node.up = True
                self._stir()
                return
            node.up = False
            self._stir()
            wait_s = min(max(2 * wait_s, _FIRST_PROBE_S), _LAST_PROBE_S)

    def _reports(self, node: Node) -> bool:
        """Whether a node that fell silent has sent a report since."""
        silent_s = self._silent_s.get(node)
        if silent_s is None:
            return True
        back = node.received_s > silent_s
        if back or time.monotonic() - silent_s > _LONGEST_SILENT_S:
            del self._silent_s[node]
            return True
        return False

    async def healthy(self, node: Node) -> bool:
        """Whether its ``/health`` answers 200."""
        return await self._status(node, _PROBE_TIMEOUT_S) == 200

    async def answers(self, node: Node, timeout_s: float) -> bool:
        """Whether its server gives any sign of life within a time."""
        status = await self._status(node, timeout_s)
        return status is not None and status < 500

    async def _status(self, node: Node, timeout_s: float) -> int | None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(
                node.url("/health"), timeout=timeout
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return None

    async def stop(self) -> None:
        """End every probe."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
