# SPDX-License-Identifier: Apache-2.0
"""What lives as long as the server: fleet, session, probes, subscriptions."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from vllm_kairos.core.fleet import NodeState
from vllm_kairos.proxy.flags import ProxySettings
from vllm_kairos.proxy.fleet import Node, ProxyFleet
from vllm_kairos.proxy.forward import client_session
from vllm_kairos.proxy.health import HealthWatch
from vllm_kairos.proxy.metrics import ProxyMetrics
from vllm_kairos.proxy.prompt_length import PromptCounter
from vllm_kairos.proxy.state import StateSubscriber


class Service:
    """The proxy's long-lived parts.

    Made before there is an event loop; `start` and `stop` run on it.

    Args:
        settings: Checked settings.
    """

    session: aiohttp.ClientSession
    health: HealthWatch

    def __init__(self, settings: ProxySettings):
        self.settings = settings
        self.fleet = ProxyFleet(settings)
        self.metrics = ProxyMetrics()
        self.counter = PromptCounter(settings.tokenizer, self.metrics)
        self._subscriber = StateSubscriber(self.metrics)
        self._running = False
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Open the session and subscribe. May be called again."""
        async with self._starting:
            if self._running:
                return
            self.session = client_session(self.settings.connect_timeout_s)
            self.health = HealthWatch(self.session)
            self.counter.start()
            nodes = self.fleet.nodes()
            self.metrics.watch(nodes)
            for node in nodes:
                address = self.settings.engine_state.get(node.address)
                if address is not None:
                    self._subscriber.start(node, address)
            self._running = True

    async def stop(self) -> None:
        """Close everything `start` opened."""
        if not self._running:
            return
        self._running = False
        await self._subscriber.stop()
        await self.health.stop()
        await self.session.close()
        self.counter.stop()

    @property
    def running(self) -> bool:
        """Whether it has been started."""
        return self._running

    def state(self, node: Node) -> NodeState:
        """A node as a policy sees it now."""
        return node.state(time.monotonic(), self.settings.state_max_age_ms / 1e3)
