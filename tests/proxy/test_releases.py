# SPDX-License-Identifier: Apache-2.0
"""KV that a request leaves on its prefill node is freed through a decode node."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.conftest import Cluster, MakeCluster
from tests.proxy.stubs import (
    MODEL,
    StubEngine,
    break_off,
    error,
    hang,
    live,
    report,
    until,
)
from vllm_kairos.core.messages import ticket_of
from vllm_kairos.proxy import release
from vllm_kairos.proxy.flags import ProxySettings
from vllm_kairos.proxy.forward import PrefillLeg

PROMPT = {"model": MODEL, "prompt": list(range(1, 401)), "max_tokens": 8}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leg has arrived, or never will, after a tenth of the usual time."""
    monkeypatch.setattr(release, "SETTLED_S", 0.1)


def ask(
    c: Cluster, client: aiohttp.ClientSession, body: dict[str, Any] = PROMPT
) -> asyncio.Task[int]:
    async def post() -> int:
        async with client.post(f"{c.url}/v1/completions", json=body) as answer:
            await answer.read()
            return answer.status

    return asyncio.create_task(post())


async def outcomes(c: Cluster, client: aiohttp.ClientSession) -> dict[str, int]:
    async with client.get(f"{c.url}/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'kv_releases_total\{outcome="(\w+)"\} (\d+)', text)
    return {outcome: int(count) for outcome, count in found}


async def becomes(
    c: Cluster, client: aiohttp.ClientSession, expected: dict[str, int]
) -> None:
    for _ in range(300):
        if (got := await outcomes(c, client)) == expected:
            return
        await asyncio.sleep(0.01)
    assert got == expected


async def leave_the_decode_leg(
    c: Cluster, client: aiohttp.ClientSession, count: int = 1
) -> None:
    """Clients leave while decode node 0, which never answers, has their leg."""
    c.decode[0].behaviour = hang
    asked = [ask(c, client) for _ in range(count)]
    await until(lambda: len(c.decode[0].requests) == count)
    for task in asked:
        task.cancel()
    await until(lambda: c.decode[0].cancelled == count)


async def test_kv_of_a_client_that_leaves_early_in_its_decode_leg_is_freed(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    await leave_the_decode_leg(c, client)
    await becomes(c, client, {"released": 1})
    (sent,) = c.decode[0].releases
    assert sent.pop("cache_salt")
    # One token of its own, none of the client's.
    assert sent == {
        "model": MODEL,
        "prompt": [0],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": c.prefill[0].kv,
    }
    assert len(c.prefill[0].requests) == len(c.decode[0].requests) == 1
    fleet = c.proxy.kairos.service.fleet
    assert not any(len(n.ledger) for n in fleet.nodes())


async def test_the_clients_key_goes_with_the_release_but_not_its_request_id(
    cluster: MakeCluster,
) -> None:
    c = cluster()
    seen: list[Any] = []

    async def keep(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.copy())
        return web.json_response({})

    c.decode[0].on_release = keep
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
    async with aiohttp.ClientSession(headers=headers) as client:
        await leave_the_decode_leg(c, client)
        await until(lambda: len(seen) == 1)
    assert seen[0]["Authorization"] == "Bearer k"
    assert seen[0]["X-Request-Id"] != "mine"


@pytest.mark.parametrize("named_still", [True, False])
async def test_an_engine_that_has_the_decode_leg_frees_the_kv_itself(
    cluster: MakeCluster, client: aiohttp.ClientSession, named_still: bool
) -> None:
    c = cluster(with_state=True)
    await c.reports_arrived()

    async def admitted(request: web.Request, body: Any) -> web.StreamResponse:
        ticket = ticket_of(body["kv_transfer_params"])
        c.decode[0].state = report(admitted=[ticket])
        return await hang(request, body)

    c.decode[0].behaviour = admitted
    asked = ask(c, client)
    await until(lambda: len(c.decode[0].requests) == 1)
    if not named_still:
        # Reports name the latest alone.
        node = c.proxy.kairos.service.fleet[c.decode[0].address]
        await until(lambda: bool(node.report.admitted))
        c.decode[0].state = report()
        await until(lambda: not node.report.admitted)
    asked.cancel()
    await asyncio.sleep(0.3)
    assert not c.decode[0].releases


async def test_without_reports_a_decode_leg_of_some_age_is_taken_to_be_in_the_engine(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    c.decode[0].behaviour = hang
    asked = ask(c, client)
    await until(lambda: len(c.decode[0].requests) == 1)
    await asyncio.sleep(0.15)
    asked.cancel()
    await until(lambda: c.decode[0].cancelled == 1)
    await asyncio.sleep(0.2)
    assert not c.decode[0].releases


@pytest.mark.parametrize("status", [400, 404, 429])
async def test_a_decode_node_that_refuses_the_request_is_asked_to_free_its_kv(
    cluster: MakeCluster, client: aiohttp.ClientSession, status: int
) -> None:
    c = cluster(decode=2)
    c.decode[0].behaviour = error(status)
    assert await ask(c, client) == status
    await becomes(c, client, {"released": 1})
    (sent,) = c.decode[0].releases
    assert sent["kv_transfer_params"] == c.prefill[0].kv
    assert not c.decode[1].requests and not c.decode[1].releases


@pytest.mark.parametrize("how", [break_off, error(500)], ids=["breaks", "500"])
async def test_kv_whose_decode_node_failed_is_freed_through_another(
    cluster: MakeCluster, client: aiohttp.ClientSession, how: Any
) -> None:
    c = cluster(decode=2)
    c.decode[0].behaviour = how
    assert await ask(c, client) == 200
    await becomes(c, client, {"released": 1})
    assert not c.decode[0].releases
    assert len(c.decode[1].releases) == 1
    # The request itself goes there without that handle, as ever.
    assert "kv_transfer_params" not in c.decode[1].bodies()[0]


async def test_kv_whose_only_decode_node_is_dead_is_given_up_and_counted(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    await c.decode[0].die()
    assert await ask(c, client) == 502
    await becomes(c, client, {"no_node": 1})


async def test_a_decode_node_that_is_down_leaves_the_release_to_the_next(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(decode=2)
    await leave_the_decode_leg(c, client)
    await c.decode[0].die()
    await becomes(c, client, {"released": 1})
    assert len(c.decode[1].releases) == 1


async def test_a_handle_that_breaks_one_node_goes_to_no_other(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(decode=2)
    c.decode[0].on_release = break_off
    await leave_the_decode_leg(c, client)
    await becomes(c, client, {"broken": 1})
    assert not c.decode[1].releases


async def test_kv_that_a_silent_decode_node_may_yet_read_is_left_alone(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(decode=2, node_timeout_s=0.3, answer_timeout_s=0.3)
    c.decode[0].behaviour = hang
    c.decode[0].deaf = True
    assert await ask(c, client) == 200
    await asyncio.sleep(0.3)
    assert not c.decode[0].releases and not c.decode[1].releases


async def test_kv_of_a_prefill_node_that_is_down_has_gone_with_it(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(prefill=2)
    await leave_the_decode_leg(c, client)
    c.proxy.kairos.service.fleet[c.prefill[0].address].up = False
    await becomes(c, client, {"holder_down": 1})
    assert not c.decode[0].releases


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_of_the_prefill_node_under_way_when_the_client_leaves_is_read(
    cluster: MakeCluster, client: aiohttp.ClientSession, status: int
) -> None:
    half = asyncio.Event()
    c = cluster()
    stub = c.prefill[0]

    async def slowly(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        body = json.dumps({"kv_transfer_params": stub.kv}).encode()
        response = web.StreamResponse(
            status=status, headers={"Content-Length": str(len(body))}
        )
        await response.prepare(request)
        await response.write(body[:9])
        half.set()
        await asyncio.sleep(0.3)
        await response.write(body[9:])
        return response

    stub.behaviour = slowly
    asked = ask(c, client)
    await half.wait()
    await asyncio.sleep(0.05)
    asked.cancel()
    if status == 200:
        await becomes(c, client, {"released": 1})
        assert stub.cancelled == 0
        assert c.decode[0].releases[0]["kv_transfer_params"] == stub.kv
        assert not c.decode[0].requests
    else:
        await asyncio.sleep(0.5)
        assert not c.decode[0].releases


async def test_a_prefill_leg_whose_client_leaves_is_ended_at_once_with_no_release(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    c.prefill[0].behaviour = hang
    asked = ask(c, client)
    await until(lambda: len(c.prefill[0].requests) == 1)
    asked.cancel()
    await until(lambda: c.prefill[0].cancelled == 1, within_s=1.0)
    await asyncio.sleep(0.2)
    assert await outcomes(c, client) == {}
    assert not c.decode[0].requests and not c.decode[0].releases


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_an_answer_that_comes_in_the_turn_its_client_leaves_is_taken_in(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    handle = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
    freed: list[dict[str, Any]] = []

    class Answer:
        status = 200

        async def read(self) -> bytes:
            return json.dumps({"kv_transfer_params": handle}).encode()

        def close(self) -> None:
            pass

    async def opening() -> Any:
        for _ in range(turns):
            await asyncio.sleep(0)
        return Answer()

    async def note(_: object, kv: release.HeldKV, *__: object) -> None:
        freed.append(kv.handle)

    monkeypatch.setattr(release.Releases, "_release", note)
    nothing: Any = None
    releases = release.Releases(nothing, nothing, nothing)
    job: Any = SimpleNamespace(
        body=SimpleNamespace(fields={}), ticket="t", headers=nothing
    )
    leg = PrefillLeg(opening())
    releases.abandoned(leg, job, nothing, nothing)
    await leg.task
    await asyncio.sleep(0.01)
    assert freed == [handle]


async def test_releases_are_few_at_once_and_short_and_hold_nobody_up(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "LONGEST_S", 1.0)
    c = cluster(decode=2)
    # Every request on decode node 0, to begin with.
    c.proxy.kairos.service.fleet[c.decode[1].address].up = False
    for stub in c.decode:
        stub.on_release = hang
    await leave_the_decode_leg(c, client, 20)
    await until(lambda: len(c.decode[0].releases) == release.MOST_AT_ONCE)
    c.proxy.kairos.service.fleet[c.decode[1].address].up = True
    c.decode[0].behaviour = c.decode[0].answer
    started_s = asyncio.get_running_loop().time()
    assert [await ask(c, client) for _ in range(4)] == [200] * 4
    assert asyncio.get_running_loop().time() - started_s < 0.5
    assert len(c.decode[0].releases) == release.MOST_AT_ONCE
    await becomes(c, client, {"timeout": 20})
    # Those given up are closed; those that waited meanwhile had little time left.
    await until(lambda: c.decode[0].cancelled == 20 + len(c.decode[0].releases))
    assert not c.proxy.kairos.service.releases._tasks


async def test_a_silent_decode_node_keeps_no_turn_from_the_others_for_long(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "SILENT_S", 0.5)
    c = cluster(decode=2)
    first, other = (c.proxy.kairos.service.fleet[d.address] for d in c.decode)
    other.up = False
    c.decode[0].on_release = hang
    await leave_the_decode_leg(c, client, release.MOST_AT_ONCE)
    await until(lambda: len(c.decode[0].releases) == release.MOST_AT_ONCE)
    first.up, other.up = False, True
    c.decode[1].behaviour = error(400)
    assert await ask(c, client) == 400
    assert not c.decode[1].releases
    # And none of those goes on to it: the silent one has the handle.
    await becomes(c, client, {"timeout": release.MOST_AT_ONCE, "released": 1})
    assert len(c.decode[1].releases) == 1


async def test_more_than_a_bounded_number_of_them_are_not_begun(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(release, "MOST", 3)
    c = cluster()
    c.decode[0].on_release = hang
    await leave_the_decode_leg(c, client, 5)
    await becomes(c, client, {"full": 2})


async def test_a_connector_without_handles_has_nothing_to_free(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(handshake=False)
    await leave_the_decode_leg(c, client)
    await asyncio.sleep(0.2)
    assert not c.decode[0].releases


async def test_every_proxy_frees_what_its_own_clients_left(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    settings = ProxySettings(
        model=MODEL,
        prefill=[c.prefill[0].address],
        decode=[c.decode[0].address],
        policy="disagg",
    )
    with live(settings) as proxy:
        other = Cluster(c.prefill, c.decode, proxy)
        c.decode[0].behaviour = hang
        asked = [ask(c, client), ask(other, client), ask(other, client)]
        await until(lambda: len(c.decode[0].requests) == 3)
        for task in asked:
            task.cancel()
        await becomes(c, client, {"released": 1})
        await becomes(other, client, {"released": 2})
    assert len(c.decode[0].releases) == 3


async def test_a_proxy_that_stops_frees_what_it_cuts_off(
    monkeypatch: pytest.MonkeyPatch,
    client: aiohttp.ClientSession,
    engines: list[StubEngine],
) -> None:
    settings = ProxySettings(
        model=MODEL,
        prefill=[engines[0].address],
        decode=[engines[2].address],
        policy="disagg",
    )
    monkeypatch.setattr(release, "STOP_S", 2.0)
    monkeypatch.setattr(release, "SETTLED_S", 0.5)
    engines[2].behaviour = hang
    with live(settings, grace_s=0) as proxy:
        c = Cluster([engines[0]], [engines[2]], proxy)
        asked = ask(c, client)
        await until(lambda: len(engines[2].requests) == 1)
        await asyncio.to_thread(proxy.stop)
    assert await asked == 503
    assert len(engines[2].releases) == 1


async def test_a_proxy_that_stops_waits_for_no_release_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
    client: aiohttp.ClientSession,
    engines: list[StubEngine],
) -> None:
    settings = ProxySettings(
        model=MODEL,
        prefill=[engines[0].address],
        decode=[engines[2].address],
        policy="disagg",
    )
    engines[2].on_release = hang
    with live(settings) as proxy:
        c = Cluster([engines[0]], [engines[2]], proxy)
        await leave_the_decode_leg(c, client)
        await until(lambda: len(engines[2].releases) == 1)
        started_s = asyncio.get_running_loop().time()
        await asyncio.to_thread(proxy.stop)
        assert asyncio.get_running_loop().time() - started_s < 1.5
    await until(lambda: engines[2].cancelled == 2)
