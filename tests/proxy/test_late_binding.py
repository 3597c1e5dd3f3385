# SPDX-License-Identifier: Apache-2.0
"""Requests that wait in the proxy: what sends them, in which order, and how
they leave it otherwise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.proxy.conftest import Cluster, MakeCluster
from tests.proxy.stubs import MODEL, StubEngine, hang, live, profile, report, until
from vllm_kairos.core.fleet import Fleet
from vllm_kairos.core.messages import parse_schedule, ticket_of
from vllm_kairos.core.policies import policies
from vllm_kairos.core.settings import Settings
from vllm_kairos.proxy.flags import ProxySettings

#: A prefill node with four seconds of work, and a decode node whose step has no
#: room for a chunk (its profile: 10 ms and 0.1 ms a token).
BUSY = report(prefills=[(4000, 0)])
FULL = report(decodes=4, decode_kv_tokens=1000, limit_ms=5.0)


def prompt(tokens: int = 400) -> dict[str, Any]:
    return {"prompt": list(range(1, tokens + 1)), "max_tokens": 8}


async def waiting_cluster(cluster: MakeCluster, **settings: Any) -> Cluster:
    """One prefill and one decode node, neither of which has room."""
    c = cluster(policy="kairos", with_profile=True, with_state=True, **settings)
    c.prefill[0].state, c.decode[0].state = BUSY, FULL
    await c.reports_arrived()
    nodes = c.proxy.kairos.service.fleet  # type: ignore[attr-defined]
    await until(lambda: bool(nodes[c.prefill[0].address].report.prefills))
    await until(lambda: nodes[c.decode[0].address].report.limit_ms == 5.0)
    return c


def post(
    c: Cluster, client: aiohttp.ClientSession, body: dict[str, Any]
) -> asyncio.Task[tuple[int, str | None]]:
    async def ask() -> tuple[int, str | None]:
        async with client.post(f"{c.url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status, answer.headers.get("x-kairos-route")

    return asyncio.create_task(ask())


async def status(c: Cluster, client: aiohttp.ClientSession) -> dict[str, Any]:
    async with client.get(f"{c.url}/kairos/status") as answer:
        return dict(await answer.json())


async def wait_for_queue(
    c: Cluster, client: aiohttp.ClientSession, length: int
) -> None:
    for _ in range(500):
        if (await status(c, client))["queue"]["waiting"] == length:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"the queue never held {length}")


async def nothing_is_left(c: Cluster, client: aiohttp.ClientSession) -> None:
    await wait_for_queue(c, client, 0)
    kairos = c.proxy.kairos  # type: ignore[attr-defined]
    await until(lambda: not any(len(n.ledger) for n in kairos.service.fleet.nodes()))
    assert kairos._dispatcher._policy.waiting == 0


async def test_a_request_waits_while_nodes_are_busy_and_goes_when_one_runs_dry(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster)
    asked = post(c, client, prompt())
    await wait_for_queue(c, client, 1)
    await asyncio.sleep(0.3)
    shown = await status(c, client)
    assert shown["dispatch"] == "late"
    assert shown["queue"]["oldest_ms"] >= 300
    assert (shown["queue"]["in_time"], shown["queue"]["late"]) == (1, 0)
    assert not c.prefill[0].requests and not c.decode[0].requests
    c.prefill[0].state = report()
    assert await asked == (200, "kept")
    await nothing_is_left(c, client)
    async with client.get(f"{c.url}/metrics") as answer:
        text = await answer.text()
    assert 'kairos_proxy_queue_wait_seconds_count{order="in_time"} 1.0' in text
    assert 'kairos_proxy_queue_requests{order="late"} 0.0' in text
    assert 'kairos_proxy_decisions_total{reason="prefill"} 1.0' in text


async def test_a_decode_node_with_headroom_takes_what_waits_with_the_slack_it_has(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster)
    asked = post(c, client, prompt())
    await wait_for_queue(c, client, 1)
    await asyncio.sleep(0.2)
    c.decode[0].state = report(decodes=3)
    assert await asked == (200, "deflected")
    (body,) = c.decode[0].bodies()
    schedule = parse_schedule(body["kv_transfer_params"])
    assert schedule is not None and schedule.chunks == (353, 53)
    assert schedule.slack_ms is not None and 3000 < schedule.slack_ms < 3800
    assert not c.prefill[0].requests


async def test_the_engines_own_bound_sizes_the_schedule(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster)
    asked = post(c, client, prompt())
    await wait_for_queue(c, client, 1)
    c.decode[0].state = report(decodes=3, limit_ms=30.0)
    assert await asked == (200, "deflected")
    schedule = parse_schedule(c.decode[0].bodies()[0]["kv_transfer_params"])
    assert schedule is not None and schedule.chunks == (203, 203)


async def test_a_long_prompt_steps_back_for_one_that_can_still_be_in_time(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster)
    tasks = []
    # 3.8 s and 0.5 s of work before the same 4 s.
    for length, tokens in enumerate((3800, 500, 400), start=1):
        tasks.append(post(c, client, prompt(tokens)))
        await wait_for_queue(c, client, length)
    c.prefill[0].state = report()
    assert {await t for t in tasks} == {(200, "kept")}
    lengths = [len(body["prompt"]) for body in c.prefill[0].bodies()]
    assert lengths == [500, 400, 3800]


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster)
    tasks = [post(c, client, prompt()) for _ in range(5)]
    await wait_for_queue(c, client, 5)
    for task in tasks:
        task.cancel()
    await nothing_is_left(c, client)
    c.prefill[0].state = c.decode[0].state = report()
    await asyncio.sleep(0.1)
    assert not c.prefill[0].requests and not c.decode[0].requests


async def test_a_thousand_clients_that_leave_at_once_leave_nothing(
    cluster: MakeCluster,
) -> None:
    c = await waiting_cluster(cluster)
    kairos = c.proxy.kairos  # type: ignore[attr-defined]
    raw = json.dumps(prompt()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
    head = head % len(raw) + b"Content-Type: application/json\r\n\r\n"
    writers = []
    for _ in range(1000):
        _, writer = await asyncio.open_connection("127.0.0.1", c.proxy.port)
        writer.write(head + raw)
        writers.append(writer)
    late = kairos._dispatcher.late
    await until(lambda: len(late) == 1000, within_s=30.0)
    for writer in writers:
        writer.transport.abort()
    await until(lambda: len(late) == 0 and late.classes() == (0, 0), within_s=10.0)
    assert kairos._dispatcher._policy.waiting == 0
    assert not any(len(n.ledger) for n in kairos.service.fleet.nodes())
    assert not c.prefill[0].requests and not c.decode[0].requests


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_stop_serves_those_who_wait_while_its_grace_lasts(
    cluster: MakeCluster, client: aiohttp.ClientSession, in_time: bool
) -> None:
    c = await waiting_cluster(cluster)
    tasks = [post(c, client, prompt()) for _ in range(3)]
    await wait_for_queue(c, client, 3)
    stop = asyncio.create_task(asyncio.to_thread(c.proxy.stop))
    await asyncio.sleep(0.3)
    if in_time:
        c.prefill[0].state = report()
    answers = [await t for t in tasks]
    await stop
    assert answers == [(200, "kept") if in_time else (503, None)] * 3
    late = c.proxy.kairos._dispatcher.late  # type: ignore[attr-defined]
    assert late.classes() == (0, 0)


async def test_a_node_is_sent_no_more_than_keeps_it_busy_until_the_next_look(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster)
    c.prefill[0].behaviour = hang
    tasks = [post(c, client, prompt(100)) for _ in range(6)]
    await wait_for_queue(c, client, 6)
    c.prefill[0].state = report()
    await until(lambda: len(c.prefill[0].requests) == 2)
    await asyncio.sleep(0.06)
    # 101 ms each: two cover the lead of 150 ms. The stub says it is idle, but
    # the proxy knows what it sent.
    assert len(c.prefill[0].requests) == 2
    for task in tasks:
        task.cancel()
    await nothing_is_left(c, client)


async def test_without_fresh_state_everything_that_waits_is_sent_at_once(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster, state_max_age_ms=200.0)
    tasks = [post(c, client, prompt()) for _ in range(4)]
    await wait_for_queue(c, client, 4)
    c.prefill[0].state = c.decode[0].state = None
    assert {await t for t in tasks} == {(200, "kept")}
    await nothing_is_left(c, client)
    # And what arrives then does not wait at all.
    assert await post(c, client, prompt()) == (200, "kept")


async def test_when_every_node_dies_those_who_wait_are_told(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster, state_max_age_ms=200.0)
    tasks = [post(c, client, prompt()) for _ in range(4)]
    await wait_for_queue(c, client, 4)
    for stub in (*c.prefill, *c.decode):
        stub.state = None
        await stub.die()
    assert {(await t)[0] for t in tasks} == {502}
    await nothing_is_left(c, client)


async def test_when_the_prefill_nodes_die_decode_nodes_serve_those_who_wait(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster, state_max_age_ms=200.0)
    tasks = [post(c, client, prompt()) for _ in range(4)]
    await wait_for_queue(c, client, 4)
    c.prefill[0].state = None
    await c.prefill[0].die()
    assert {await t for t in tasks} == {(200, "fallback")}
    await nothing_is_left(c, client)
    # No prefill node is believed alive: nothing waits for one.
    assert await post(c, client, prompt()) == (200, "fallback")


async def test_no_request_waits_longer_than_its_age_allows(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    slo = Settings(tau_ms=50.0, ttft_slo_ms=50.0)
    c = await waiting_cluster(cluster, slo=slo)
    asked = post(c, client, prompt())
    await wait_for_queue(c, client, 1)
    # Eight SLOs and a heartbeat, with nodes as busy as ever.
    assert await asyncio.wait_for(asked, 3.0) == (200, "kept")
    async with client.get(f"{c.url}/metrics") as answer:
        text = await answer.text()
    assert 'kairos_proxy_queue_wait_seconds_count{order="late"} 1.0' in text


async def test_the_age_a_request_may_wait_is_the_policys_setting(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    slo = Settings(tau_ms=50.0, ttft_slo_ms=200.0)
    c = await waiting_cluster(cluster, slo=slo, policy_options={"oldest_slos": 2})
    started = asyncio.get_running_loop().time()
    # Two SLOs and a heartbeat, where eight would be 1.6 s.
    assert await post(c, client, prompt()) == (200, "kept")
    assert 0.4 <= asyncio.get_running_loop().time() - started < 1.4


async def test_a_look_that_has_many_to_send_leaves_the_loop_to_others_between(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = await waiting_cluster(cluster)
    late = c.proxy.kairos._dispatcher.late  # type: ignore[attr-defined]
    plain = late._policy.assign
    events: list[object] = []

    def assign(seen: Fleet, most: int) -> list[Any]:
        if not seen.prefill[0].fresh:
            if not events:
                loop = asyncio.get_running_loop()
                loop.call_soon(events.append, "another's turn")
            events.append(seen)
        routed = plain(seen, most)
        sent.append(len(routed))
        return routed

    sent: list[int] = []
    tasks = [post(c, client, prompt(50)) for _ in range(90)]
    await wait_for_queue(c, client, 90)
    monkeypatch.setattr(late._policy, "assign", assign)
    c.prefill[0].state = c.decode[0].state = None
    assert {await t for t in tasks} == {(200, "kept")}
    assert sorted(n for n in sent if n) == [26, 32, 32]
    # Each look sees the nodes as they are then.
    first, turn, *rest = events
    assert turn == "another's turn" and all(each is not first for each in rest)


async def test_a_policy_that_fails_over_its_queue_costs_no_request(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def assign(self: object, fleet: object, most: int) -> list[Any]:
        raise RuntimeError("no")

    c = await waiting_cluster(cluster)
    tasks = [post(c, client, prompt()) for _ in range(3)]
    await wait_for_queue(c, client, 3)
    monkeypatch.setattr(policies()["kairos"], "assign", assign)
    assert {await t for t in tasks} == {(200, "kept")}
    await nothing_is_left(c, client)


async def test_the_decode_node_is_the_least_loaded_when_the_prefill_is_done(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(1, 2, "kairos", True, True)
    c.decode[0].state = report(decodes=1, limit_ms=5.0)
    c.decode[1].state = report(decodes=9, limit_ms=5.0)
    await c.reports_arrived()
    fleet = c.proxy.kairos.service.fleet  # type: ignore[attr-defined]
    await until(lambda: fleet[c.decode[1].address].report.decodes == 9)
    plain = c.prefill[0].behaviour

    async def meanwhile(
        request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        c.decode[0].state = report(free_kv_blocks=0)
        await until(lambda: fleet[c.decode[0].address].report.free_kv_blocks == 0)
        return await plain(request, body)

    c.prefill[0].behaviour = meanwhile
    assert await post(c, client, prompt()) == (200, "kept")
    assert (len(c.decode[0].requests), len(c.decode[1].requests)) == (0, 1)


async def test_eager_dispatch_binds_at_once(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster, policy_options={"dispatch": "eager"})
    assert await post(c, client, prompt()) == (200, "kept")
    shown = await status(c, client)
    assert (shown["dispatch"], shown["queue"]["waiting"]) == ("eager", 0)


class Truthful:
    """Makes a stub prefill node report what it holds.

    Attributes:
        most: Prompts it ever held at once.
    """

    def __init__(self, stub: StubEngine):
        self.stub = stub
        self.most = 0
        self._held: dict[str, int] = {}
        self._admitted: list[str] = []
        self._plain = stub.behaviour
        stub.behaviour = self.serve

    async def serve(
        self, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        ticket = ticket_of(body.get("kv_transfer_params"))
        assert ticket is not None
        self._admitted.append(ticket)
        self._held[ticket] = len(body["prompt"])
        self.most = max(self.most, len(self._held))
        self._report()
        try:
            await asyncio.sleep(0.06)
            return await self._plain(request, body)
        finally:
            del self._held[ticket]
            self._report()

    def _report(self) -> None:
        assert self.stub.state is not None
        self.stub.state = msgspec.structs.replace(
            self.stub.state,
            prefills=[(tokens, 0) for tokens in self._held.values()],
            admitted=self._admitted[-256:],
        )


async def test_two_proxies_over_the_same_nodes_see_each_others_work(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = await waiting_cluster(cluster)
    node = Truthful(c.prefill[0])
    nodes = [c.prefill[0], c.decode[0]]
    settings = ProxySettings(
        model=MODEL,
        prefill=[c.prefill[0].address],
        decode=[c.decode[0].address],
        policy="kairos",
        engine_state={s.address: s.state_address for s in nodes},
        profiles=dict.fromkeys([s.address for s in nodes], profile()),
        slo=Settings(tau_ms=50.0, ttft_slo_ms=4000.0),
    )
    with live(settings) as proxy:
        other = Cluster(c.prefill, c.decode, proxy)
        await other.reports_arrived()
        tasks = []
        for _ in range(5):
            tasks += [post(c, client, prompt()), post(other, client, prompt())]
        await wait_for_queue(c, client, 5)
        await wait_for_queue(other, client, 5)
        c.prefill[0].state = report()
        assert {await t for t in tasks} == {(200, "kept")}
        # 401 ms of work is more than a node is kept supplied with: one at a
        # time, and one more where both look between two reports.
        assert node.most <= 2
        for each in (c, other):
            await nothing_is_left(each, client)
