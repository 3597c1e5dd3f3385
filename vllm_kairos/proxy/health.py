# SPDX-License-Identifier: Apache-2.0
"""Nodes believed dead: left out for a short while, probed, taken back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from vllm_kairos.proxy.fleet import Node

logger = logging.getLogger(__name__)

_FIRST_PROBE_S = 0.25
_LAST_PROBE_S = 5.0
_PROBE_TIMEOUT_S = 2.0


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

    def failed(self, node: Node) -> None:
        """It refused or broke off: leave it out until a probe succeeds."""
        if node.up:
            logger.warning("Node %s is out until it answers /health", node.address)
        node.up = False
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
            if await self.healthy(node):
                if not node.up:
                    logger.info("Node %s is back", node.address)
                node.up = True
                self._stir()
                return
            node.up = False
            self._stir()
            wait_s = min(max(2 * wait_s, _FIRST_PROBE_S), _LAST_PROBE_S)

    async def healthy(self, node: Node) -> bool:
        """Whether its ``/health`` answers 200."""
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        try:
            async with self._session.get(
                node.url("/health"), timeout=timeout
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False

    async def stop(self) -> None:
        """End every probe."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
