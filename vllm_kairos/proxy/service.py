# SPDX-License-Identifier: Apache-2.0
"""What lives as long as the server: fleet, session, probes, subscriptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from vllm_kairos.core.fleet import NodeState
from vllm_kairos.proxy.flags import ProxySettings
from vllm_kairos.proxy.fleet import Node, ProxyFleet
from vllm_kairos.proxy.forward import api_key_header, client_session
from vllm_kairos.proxy.health import HealthWatch
from vllm_kairos.proxy.liveness import Liveness
from vllm_kairos.proxy.metrics import ProxyMetrics
from vllm_kairos.proxy.prompt_length import PromptCounter
from vllm_kairos.proxy.release import Releases
from vllm_kairos.proxy.state import StateSubscriber

_ASK_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
_ASK_AGAIN_S = 5.0


class Service:
    """The proxy's long-lived parts.

    Made before there is an event loop; `start` and `stop` run on it.

    Args:
        settings: Checked settings.

    Attributes:
        session: The one HTTP session.
        health: Probes of failed nodes.
        liveness: Ends waits for nodes that have gone silent.
        releases: Frees KV that clients have left on prefill nodes.
        max_model_len: Longest sequence the engines take, once known.
        stirred: Called when a report has come or a node is back, if set.
    """

    session: aiohttp.ClientSession
    health: HealthWatch
    liveness: Liveness
    releases: Releases

    def __init__(self, settings: ProxySettings):
        self.settings = settings
        self.fleet = ProxyFleet(settings)
        self.metrics = ProxyMetrics()
        # To load a tokenizer takes seconds of a CPU.
        tokenizer = settings.tokenizer if settings.counts_prompts else None
        self.counter = PromptCounter(tokenizer, self.metrics)
        self._subscriber = StateSubscriber(self.metrics, self._stir)
        self.stirred: Callable[[], None] | None = None
        self.max_model_len: int | None = None
        self._running = False
        self._starting = asyncio.Lock()
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the session and subscribe. May be called again."""
        async with self._starting:
            if self._running:
                return
            self.session = client_session(self.settings.connect_timeout_s)
            self.health = HealthWatch(self.session, self._stir)
            self.liveness = Liveness(
                self.health,
                self.settings.node_timeout_s,
                self.settings.answer_timeout_s,
            )
            self.releases = Releases(self.session, self.fleet, self.metrics)
            self.counter.start()
            nodes = self.fleet.nodes()
            self.metrics.watch(nodes)
            for node in nodes:
                address = self.settings.engine_state.get(node.address)
                if address is not None:
                    self._subscriber.start(node, address)
            self._asking = asyncio.create_task(self._ask_limit())
            self._running = True

    def _stir(self) -> None:
        if self.stirred is not None:
            self.stirred()

    async def _ask_limit(self) -> None:
        """Learn the longest sequence from whichever node tells it first."""
        while self.max_model_len is None:
            for node in self.fleet.nodes():
                card = await self.model_card(node.address)
                limit = (card or {}).get("max_model_len")
                if isinstance(limit, int) and limit > 0:
                    self.max_model_len = limit
                    return
            await asyncio.sleep(_ASK_AGAIN_S)

    async def model_card(
        self, address: str, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any] | None:
        """What a node says of its model, `None` where it does not.

        Args:
            address: ``host:port``.
            headers: For the node.
        """
        try:
            async with self.session.get(
                f"http://{address}/v1/models",
                headers=headers or api_key_header(),
                timeout=_ASK_TIMEOUT,
            ) as reply:
                data = await reply.json()
                if reply.status != 200:
                    return None
                card = data["data"][0]
                return card if isinstance(card, dict) else None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
            return None
        except (KeyError, IndexError, TypeError):
            return None

    async def stop(self) -> None:
        """Close everything `start` opened."""
        if not self._running:
            return
        self._running = False
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.releases.stop()
        await self._subscriber.stop()
        await self.liveness.stop()
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
