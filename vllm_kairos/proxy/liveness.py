# SPDX-License-Identifier: Apache-2.0
"""Waits for a node's bytes, ended when the node shows no sign of life.

Slow is not dead: a queue of minutes is legal, and so is an answer that comes
in one piece after them. What tells the two apart is what a node does beside
the answer. Its heartbeat thread sends reports however busy the engine is, and
its server answers ``/health``; a process that is stopped, or a host that is
gone, does neither.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import Any

from vllm_kairos.proxy.fleet import Node
from vllm_kairos.proxy.health import HealthWatch

#: Longest time between two looks at the waits.
_LOOK_S = 1.0


class Wait:
    """A wait for bytes of one node; a context manager around it.

    Attributes:
        node: The node.
        since_s: Since when it is being waited for, infinite while it is not:
            a client that reads slowly is no fault of the node's.
        silent: The wait was ended because the node is silent.
    """

    __slots__ = ("node", "since_s", "silent", "_liveness", "_task")

    def __init__(self, liveness: Liveness, node: Node):
        self.node = node
        self.since_s = time.monotonic()
        self.silent = False
        self._liveness = liveness
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Wait:
        self._task = asyncio.current_task()
        self._liveness.waits.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._liveness.waits.discard(self)
        if not self.silent:
            if kind is None:
                self._liveness.served(self.node)
            return
        if sys.version_info >= (3, 11):
            assert self._task is not None
            if self._task.uncancel() > 0:
                # The client has left as well.
                return
        if kind is asyncio.CancelledError:
            raise asyncio.TimeoutError from error

    def end(self) -> None:
        """Raise `TimeoutError` where it waits."""
        if not self.silent and self._task is not None:
            self.silent = True
            self._task.cancel()


class Liveness:
    """Looks after every wait for a node.

    Args:
        health: Asks nodes for a sign of life.
        node_timeout_s: A node that has been silent for so long is dead:
            without a byte, and without a report where it has sent reports or
            without an answer to ``/health``.
        answer_timeout_s: Longest wait for a byte of a node that sends no
            reports, whatever its ``/health`` says.

    Attributes:
        waits: Those under way.
    """

    def __init__(
        self, health: HealthWatch, node_timeout_s: float, answer_timeout_s: float
    ):
        self.waits: set[Wait] = set()
        self._health = health
        self._node_timeout_s = node_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._heard_s: dict[Node, float] = {}
        self._served_s: dict[Node, float] = {}
        self._asking: dict[Node, asyncio.Task[None]] = {}
        self._task = asyncio.create_task(self._run())

    def wait(self, node: Node) -> Wait:
        """A wait for the node that starts now."""
        return Wait(self, node)

    def served(self, node: Node) -> None:
        """What was waited for has come from the node."""
        self._served_s[node] = time.monotonic()

    def _reports(self, node: Node) -> bool:
        """Whether the node's reports are a sign of its life.

        One that serves long after its last report lives without them: it was
        started anew with reports off, or their path is broken.
        """
        if node.report is None:
            return False
        served_s = self._served_s.get(node, -math.inf)
        return served_s - node.received_s < self._node_timeout_s

    async def _run(self) -> None:
        pause_s = min(_LOOK_S, self._node_timeout_s / 4)
        awake_s = looked_s = time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            if now_s - looked_s > 2 * pause_s + 0.1:
                # It was this process that stood still: reports and bytes may
                # lie unread, so nobody's silence counts until now.
                awake_s = now_s
            looked_s = now_s
            self._look(now_s, awake_s)

    def _look(self, now_s: float, awake_s: float) -> None:
        limit_s = self._node_timeout_s
        for wait in list(self.waits):
            since_s = max(wait.since_s, awake_s)
            if math.isinf(since_s) or now_s - since_s < limit_s:
                continue
            node = wait.node
            if self._reports(node):
                if now_s - node.received_s >= limit_s:
                    wait.end()
                    continue
            elif now_s - since_s >= self._answer_timeout_s:
                wait.end()
                continue
            if now_s - self._heard_s.get(node, -math.inf) >= limit_s:
                self._ask(node)

    def _ask(self, node: Node) -> None:
        """Ask the node for a sign of life; its waits end without one."""
        if node not in self._asking:
            task = asyncio.create_task(self._answers(node))
            self._asking[node] = task
            task.add_done_callback(lambda _: self._asking.pop(node, None))

    async def _answers(self, node: Node) -> None:
        asked_s = time.monotonic()
        if await self._health.answers(node, self._node_timeout_s):
            self._heard_s[node] = time.monotonic()
            return
        for wait in list(self.waits):
            # A wait whose bytes came meanwhile starts anew.
            if wait.node is node and wait.since_s <= asked_s:
                wait.end()

    async def stop(self) -> None:
        """Look no more."""
        tasks = [self._task, *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
