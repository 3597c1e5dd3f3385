# SPDX-License-Identifier: Apache-2.0
"""Frees KV that a prefill node holds for a request nobody waits for any more.

A prefill node keeps a prompt's KV until a decode node has read it, or until
vLLM's time-out of minutes: no request to the prefill node itself would free
it. So a decode node is sent the handle with a request of its own, of one token
of prompt and one of answer. It reads one block, the last of those named, and
with that the prefill node is told that all is read. The client's own decode
leg, sent and closed at once, is no way: vLLM drops one that it has not passed
to its engine yet, handle and all, and reads all of the KV for one that it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDict

from vllm_kairos.proxy.body import COMPLETIONS, decode_prefill_reply
from vllm_kairos.proxy.fleet import Node, ProxyFleet
from vllm_kairos.proxy.forward import NodeFailure, PrefillLeg
from vllm_kairos.proxy.job import Job
from vllm_kairos.proxy.metrics import ProxyMetrics

logger = logging.getLogger(__name__)

#: Releases on the wire at once; each is a token of a decode node's step.
MOST_AT_ONCE = 8
#: Releases in all, those that wait for their turn included.
MOST = 1024
#: Longest a release may take, its wait for its turn included.
LONGEST_S = 20.0
#: Longest silence of a node that was asked: it keeps a turn from the others.
SILENT_S = 5.0
#: A decode leg whose client has left may have reached the engine, which then
#: frees the KV itself. After so long it has, or never will.
SETTLED_S = 1.0
#: What releases under way have to end in when the proxy stops.
STOP_S = 2.0
#: Turns of the event loop in which an answer that is here already is taken in.
_TURNS = 4


@dataclass(frozen=True, slots=True)
class HeldKV:
    """KV on a prefill node, kept for whoever has its handle.

    Attributes:
        holder: The prefill node.
        handle: Its ``kv_transfer_params``, as they came.
        ticket: Of the request.
        model: Model the client named, `None` for none.
        headers: For the nodes.
    """

    holder: Node
    handle: dict[str, Any]
    ticket: str
    model: object
    headers: CIMultiDict[str]

    @classmethod
    def of(cls, job: Job, holder: Node, handle: dict[str, Any] | None) -> HeldKV | None:
        """What a prefill leg left, `None` where its node keeps nothing."""
        if not handle or not handle.get("do_remote_prefill"):
            return None
        model = job.body.fields.get("model")
        return cls(holder, handle, job.ticket, model, job.headers)

    def request(self) -> bytes:
        """The least request that makes a decode node tell its holder."""
        body = {
            "prompt": [0],
            "max_tokens": 1,
            "temperature": 0,
            # What it reads is no KV of that token: never to be found again,
            # also where a token is a block.
            "cache_salt": uuid.uuid4().hex,
            "kv_transfer_params": self.handle,
        }
        if self.model is not None:
            body["model"] = self.model
        return msgspec.json.encode(body)


class Releases:
    """Sends releases, a few at a time, and each gives up after a short while.

    Args:
        session: The proxy's session.
        fleet: The nodes.
        metrics: Counts them by outcome.
    """

    def __init__(
        self, session: aiohttp.ClientSession, fleet: ProxyFleet, metrics: ProxyMetrics
    ):
        self._session = session
        self._fleet = fleet
        self._metrics = metrics
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def start(self, kv: HeldKV, node: Node, last: bool = False) -> None:
        """Free KV whose handle no decode node has, or has any use for.

        Args:
            kv: The KV.
            node: The decode node to ask first.
            last: Ask it last of all: it has failed.
        """
        self._spawn(self._release(kv, node, last))

    def unfetched(
        self, kv: HeldKV, node: Node, error: BaseException, sent_s: float
    ) -> None:
        """A decode leg has ended before its first byte.

        Args:
            kv: The KV that it was to fetch.
            node: The decode node, the leg still in its ledger.
            error: How it ended.
            sent_s: When it went out.
        """
        if isinstance(error, NodeFailure):
            # One that refused leaves the KV to the next node. One that is
            # silent may wake up and read on, and what it reads must not be
            # another prompt's by then: that KV is left to vLLM's time-out.
            if error.reason == "broken":
                self.start(kv, node, last=True)
            return
        # The client left. Without reports there is no telling where the leg
        # is; one that old is in the engine.
        late = node.report is None and time.monotonic() - sent_s > SETTLED_S
        if not late and not node.ledger.shown(kv.ticket):
            self._spawn(self._release_unless_taken(kv, node))

    def abandoned(self, leg: PrefillLeg, job: Job, holder: Node, node: Node) -> None:
        """The client left during its prefill leg, which is ended here.

        Args:
            leg: The leg.
            job: The request.
            holder: The prefill node.
            node: The decode node it was to go to.
        """
        if self._stopped or len(self._tasks) >= MOST:
            leg.task.cancel()
            return
        self._spawn(self._end(leg, job, holder, node))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._stopped or len(self._tasks) >= MOST:
            work.close()
            self._metrics.released("stopped" if self._stopped else "full")
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, leg: PrefillLeg, job: Job, holder: Node, node: Node) -> None:
        # The answer may be here, unread: closed now, its handle would be lost.
        for _ in range(_TURNS):
            if not leg.answered:
                await asyncio.sleep(0)
        if not leg.answered:
            # The engine hears of it, and frees all that it has computed.
            leg.task.cancel()
        try:
            reply, data = await asyncio.wait_for(leg.task, LONGEST_S)
        except (asyncio.CancelledError, asyncio.TimeoutError, NodeFailure):
            return
        reply.close()
        if reply.status != 200:
            return
        try:
            handle = decode_prefill_reply(data).kv_transfer_params
        except ValueError:
            return
        kv = HeldKV.of(job, holder, handle)
        if kv is not None:
            await self._release(kv, node, False)

    async def _release_unless_taken(self, kv: HeldKV, node: Node) -> None:
        await asyncio.sleep(SETTLED_S)
        if node.report is None or kv.ticket not in node.report.admitted:
            await self._release(kv, node, False)

    async def _release(self, kv: HeldKV, node: Node, last: bool) -> None:
        outcome = "stopped"
        try:
            outcome = await asyncio.wait_for(self._in_turn(kv, node, last), LONGEST_S)
        except asyncio.TimeoutError:
            outcome = "timeout"
        finally:
            self._metrics.released(outcome)
            logger.debug("KV of %s on %s: %s", kv.ticket, kv.holder.address, outcome)

    async def _in_turn(self, kv: HeldKV, node: Node, last: bool) -> str:
        async with self._turn:
            nodes = sorted(self._fleet.decode, key=lambda n: (n is node) == last)
            return await self._ask(kv, nodes)

    async def _ask(self, kv: HeldKV, nodes: Sequence[Node]) -> str:
        """Ask one after the other; one that was reached is the last.

        A handle that brings one engine to a failure must not go round, and one
        that is silent may read yet.
        """
        timeout = aiohttp.ClientTimeout(
            sock_connect=self._session.timeout.sock_connect, sock_read=SILENT_S
        )
        for node in nodes:
            if not kv.holder.up:
                return "holder_down"
            if not node.up:
                continue
            headers = kv.headers.copy()
            headers["X-Request-Id"] = uuid.uuid4().hex
            try:
                async with self._session.post(
                    node.url(COMPLETIONS),
                    data=kv.request(),
                    headers=headers,
                    timeout=timeout,
                ) as answer:
                    await answer.read()
                    return "released" if answer.status == 200 else "refused"
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                continue
            except asyncio.TimeoutError:
                return "timeout"
            except (aiohttp.ClientError, OSError):
                return "broken"
        return "no_node"

    async def stop(self) -> None:
        """Let those under way end for a moment, and then end them."""
        # Requests cut off just now hand theirs in within a turn.
        await asyncio.sleep(0)
        deadline_s = time.monotonic() + STOP_S
        while self._tasks and (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s)
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
