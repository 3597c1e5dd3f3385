# SPDX-License-Identifier: Apache-2.0
"""What a client gets when an engine refuses, fails or dies, and when it leaves."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.conftest import Cluster, MakeCluster
from tests.proxy.stubs import (
    break_off,
    error,
    hang,
    head_then_break,
    report,
    until,
)
from vllm_kairos.core.fleet import Fleet, Request
from vllm_kairos.core.messages import parse_schedule
from vllm_kairos.core.policies import Policy, policies
from vllm_kairos.core.route import Route
from vllm_kairos.proxy import exchange
from vllm_kairos.proxy.body import MOST_NESTED

PROMPT = {"prompt": list(range(1, 401)), "max_tokens": 8}
STREAM = {**PROMPT, "stream": True}

EAGER = {"dispatch": "eager"}


async def post(
    c: Cluster, client: aiohttp.ClientSession, body: Any = PROMPT
) -> tuple[int, bytes, str | None]:
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        return answer.status, await answer.read(), answer.headers.get("x-kairos-route")


def holds_a_handle(body: dict[str, Any]) -> bool:
    return "remote_block_ids" in (body.get("kv_transfer_params") or {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_a_4xx_of_the_prefill_node_is_the_answer(
    cluster: MakeCluster, client: aiohttp.ClientSession, status: int, stream: bool
) -> None:
    c = cluster()
    c.prefill[0].behaviour = error(status, "context too long")
    body = {**PROMPT, "stream": stream}
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert answer.status == status
        assert answer.headers["Content-Type"].startswith("application/json")
        assert answer.headers["X-Engine"] == "stub"
        sent = {"message": "context too long", "type": "x", "code": status}
        assert json.loads(await answer.read()) == {"error": sent}
    assert not c.decode[0].requests


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_an_error_of_the_only_decode_node_is_the_answer(
    cluster: MakeCluster, client: aiohttp.ClientSession, status: int
) -> None:
    c = cluster()
    c.decode[0].behaviour = error(status, "why")
    got, body, _ = await post(c, client, STREAM)
    assert got == status
    assert json.loads(body)["error"]["message"] == "why"
    # A failure may be of the KV it was to fetch: it is asked once more, without.
    handles = [
        bool((body.get("kv_transfer_params") or {}).get("remote_engine_id"))
        for _, body, _ in c.decode[0].requests
    ]
    assert handles == ([True] if status < 500 else [True, False])


FAILURES = ["refuses", "breaks", "breaks late", "500", "hangs", "garbage"]


async def make_fail(stub: Any, how: str) -> None:
    async def garbage(_: web.Request, __: dict[str, Any]) -> web.Response:
        return web.Response(body=b"<html>")

    if how == "refuses":
        await stub.die()
    else:
        stub.behaviour = {
            "breaks": break_off,
            "breaks late": head_then_break,
            "500": error(500),
            "hangs": hang,
            "garbage": garbage,
        }[how]


@pytest.mark.parametrize("how", FAILURES)
async def test_a_prefill_node_that_fails_leaves_the_whole_request_to_a_decode_node(
    cluster: MakeCluster, client: aiohttp.ClientSession, how: str
) -> None:
    c = cluster(with_profile=True, with_state=True, prefill_timeout_s=0.3)
    c.decode[0].state = report(decodes=1)
    await c.reports_arrived()
    await make_fail(c.prefill[0], how)
    assert (await post(c, client, STREAM)) == (
        200,
        b"".join(c.decode[0].chunks),
        "fallback",
    )
    (body,) = c.decode[0].bodies()
    params = body.pop("kv_transfer_params")
    assert parse_schedule(params).chunks == (351, 51)
    assert not holds_a_handle(params)
    assert body == STREAM


async def test_a_prompt_without_headroom_gets_the_smallest_chunks_on_failover(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    from vllm_kairos.core.settings import Settings

    slo = Settings(tau_ms=10.0, candidates=(256, 128))
    c = cluster(with_profile=True, with_state=True, slo=slo)
    c.decode[0].state = report(decodes=2)
    await c.reports_arrived()
    await c.prefill[0].die()
    await post(c, client)
    (body,) = c.decode[0].bodies()
    assert parse_schedule(body["kv_transfer_params"]).chunks == (130,) * 4


async def test_a_dead_prefill_node_is_left_out_and_comes_back_by_itself(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(prefill=2)
    await c.prefill[0].die()
    routes = [(await post(c, client))[2] for _ in range(6)]
    assert routes.count("fallback") == 1
    assert routes.count("kept") == 5
    await c.prefill[0].start()
    node = c.proxy.kairos.service.fleet[c.prefill[0].address]
    await until(lambda: node.up)
    for _ in range(2):
        await post(c, client)
    assert c.prefill[0].requests


@pytest.mark.parametrize("how", ["refuses", "breaks", "breaks late", "500"])
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
async def test_a_decode_node_that_dies_before_its_first_byte_is_replaced(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    how: str,
    body: dict[str, Any],
) -> None:
    c = cluster(decode=2, with_profile=True, with_state=True)
    await c.reports_arrived()
    await make_fail(c.decode[0], how)
    status, _, route = await post(c, client, body)
    assert status == 200
    (second,) = c.decode[1].bodies()
    if how == "refuses":
        # Nobody can have fetched the KV, so it still stands.
        assert route == "kept"
        assert holds_a_handle(second)
    else:
        assert route == "fallback"
        assert not holds_a_handle(second)
        assert parse_schedule(second["kv_transfer_params"]) is not None


async def test_a_deflected_request_moves_to_another_decode_node_with_its_own_schedule(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(2, 2, "kairos", True, True, policy_options=EAGER)
    c.prefill[0].state = c.prefill[1].state = report(prefills=[(4000, 0)])
    c.decode[0].state = report(decodes=1)
    c.decode[1].state = report(decodes=9)
    await c.reports_arrived()
    c.decode[0].behaviour = break_off
    assert (await post(c, client))[2] == "fallback"
    first, second = c.decode[0].bodies()[0], c.decode[1].bodies()[0]
    assert parse_schedule(first["kv_transfer_params"]).chunks == (351, 51)
    assert parse_schedule(second["kv_transfer_params"]).chunks == (359, 59)


async def test_a_request_that_kills_engines_does_not_go_round_the_fleet(
    engines: list[Any], cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(decode=2)
    for stub in c.decode:
        stub.behaviour = break_off
    async with client.post(f"{c.url}/v1/completions", json=PROMPT) as answer:
        assert answer.status == 502
        assert (await answer.json())["error"]["code"] == 502
    assert [len(s.requests) for s in c.decode] == [1, 1]


async def test_with_every_decode_node_dead_the_answer_is_a_502(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(decode=2)
    for stub in c.decode:
        await stub.die()
    assert (await post(c, client))[0] == 502
    await c.decode[1].start()
    assert (await post(c, client))[0] == 200


async def test_a_stream_that_breaks_after_its_first_byte_ends_broken(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    async def half(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(600)
        return response

    c = cluster(decode=2)
    c.decode[0].behaviour = half
    got = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with client.post(f"{c.url}/v1/completions", json=STREAM) as answer:
            assert answer.status == 200
            async for data in answer.content.iter_any():
                got += data
    assert got == b"data: one\n\n"
    assert not c.decode[1].requests


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_cancels_the_work_at_once(
    cluster: MakeCluster, client: aiohttp.ClientSession, leg: str
) -> None:
    async def endless(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"data: x\n\n")
            await asyncio.sleep(0.005)

    c = cluster()
    stub = c.prefill[0] if leg == "prefill" else c.decode[0]
    stub.behaviour = endless if leg == "stream" else hang
    answer = asyncio.create_task(client.post(f"{c.url}/v1/completions", json=STREAM))
    await until(lambda: len(stub.requests) == 1)
    if leg == "stream":
        (await answer).close()
    else:
        await asyncio.sleep(0.02)
        answer.cancel()
    await until(lambda: stub.cancelled == 1, within_s=1.0)
    if leg == "prefill":
        assert not c.decode[0].requests
    fleet = c.proxy.kairos.service.fleet
    await until(lambda: not any(len(n.ledger) for n in fleet.nodes()))
    assert all(n.up for n in fleet.nodes())


@pytest.mark.parametrize(
    "raw", [b"{", b"[1]", b'"x"', b"", b"\xff\xfe", b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object_is_a_400_in_openai_form(
    cluster: MakeCluster, client: aiohttp.ClientSession, raw: bytes
) -> None:
    c = cluster()
    headers = {"Content-Type": "application/json"}
    async with client.post(
        f"{c.url}/v1/chat/completions", data=raw, headers=headers
    ) as answer:
        assert answer.status == 400
        told = (await answer.json())["error"]
    assert told["code"] == 400
    assert told["type"] and told["message"]
    assert not c.prefill[0].requests


@pytest.mark.parametrize("form", ["[%s]", '{"a":%s}', "[NaN,%s]"])
async def test_a_body_that_nests_almost_too_deep_to_be_read_is_a_400_not_a_500(
    cluster: MakeCluster, client: aiohttp.ClientSession, form: str
) -> None:
    c = cluster()
    headers = {"Content-Type": "application/json"}
    before, _, after = form.partition("%s")
    for depth in (MOST_NESTED - 2, MOST_NESTED, *range(900, 1000, 2)):
        nested = before * depth + "1" + after * depth
        raw = '{"prompt": [1, 2], "max_tokens": 4, "x": %s}' % nested  # noqa: UP031
        async with client.post(
            f"{c.url}/v1/completions", data=raw, headers=headers
        ) as answer:
            assert answer.status == (200 if depth < MOST_NESTED else 400), depth
            await answer.json()
    assert len(c.prefill[0].requests) == len(c.decode[0].requests) == 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_absurd_length_is_a_413_in_openai_form(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    chunked: bool,
) -> None:
    monkeypatch.setattr(exchange, "MOST_BODY_BYTES", 1_000_000)
    c = cluster()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100_000

    for length, status in ((1_000_001, 413), (900_000, 200)):
        raw = json.dumps(PROMPT).encode().ljust(length)
        data = pieces() if chunked and status == 413 else raw
        async with client.post(
            f"{c.url}/v1/completions",
            data=data,
            headers={"Content-Type": "application/json"},
        ) as answer:
            assert answer.status == status
            told = await answer.json()
            assert status == 200 or told["error"]["code"] == 413
    assert len(c.prefill[0].requests) == 1


@pytest.mark.parametrize(
    "params", ["null", "{}", '"x"', "[1]", "3", "[" * 5000 + "]" * 5000]
)
async def test_a_prefill_answer_without_a_handle_leaves_the_request_to_a_decode_node(
    cluster: MakeCluster, client: aiohttp.ClientSession, params: str
) -> None:
    async def odd(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        body = '{"kv_transfer_params": %s}' % params  # noqa: UP031
        return web.json_response(text=body)

    c = cluster()
    c.prefill[0].behaviour = odd
    assert (await post(c, client))[::2] == (200, "fallback")
    assert c.decode[0].bodies() == [PROMPT]


async def test_a_body_of_another_type_is_refused(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    async with client.post(
        f"{c.url}/v1/completions", data=b"{}", headers={"Content-Type": "text/plain"}
    ) as answer:
        assert answer.status == 400
    assert not c.prefill[0].requests


@pytest.mark.parametrize("with_profile", [True, False])
@pytest.mark.parametrize("state", ["none", "stale", "fresh"])
async def test_without_state_or_profile_it_is_plain_disaggregation(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    with_profile: bool,
    state: str,
) -> None:
    c = cluster(
        policy="kairos",
        with_profile=with_profile,
        with_state=state != "none",
        state_max_age_ms=100.0,
        policy_options=EAGER,
    )
    await c.reports_arrived()
    if state == "stale":
        c.prefill[0].state = c.decode[0].state = None
        await asyncio.sleep(0.15)
    expected = "deflected" if with_profile and state == "fresh" else "kept"
    assert (await post(c, client))[2] == expected


async def test_garbage_for_state_is_counted_and_changes_nothing(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(1, 1, "kairos", True, True, policy_options=EAGER)
    await c.reports_arrived()
    for data in (b"", b"\x00", b"\x93\x01\x02\x03", b"x" * 1000):
        c.decode[0].send(data)
    for _ in range(100):
        async with client.get(f"{c.url}/metrics") as answer:
            text = await answer.text()
        if 'state_reports_total{verdict="unreadable"} 4.0' in text:
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("unreadable reports were not counted")
    assert (await post(c, client))[2] == "deflected"


async def test_an_idle_connection_closed_by_the_engine_is_no_death(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    for _ in range(3):
        assert (await post(c, client))[2] == "kept"
        await asyncio.sleep(0.01)
    fleet = c.proxy.kairos.service.fleet
    assert all(n.up for n in fleet.nodes())


async def test_bytes_arrive_as_they_are_sent_and_unchanged(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    gate = asyncio.Event()
    pieces = [b'data: {"a": "\xc3', b'\xa4"}\n\n', b": ping\n\ndata: [DONE]\n\n"]

    async def slowly(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await gate.wait()
            gate.clear()
        return response

    c = cluster()
    c.decode[0].behaviour = slowly
    async with client.post(f"{c.url}/v1/completions", json=STREAM) as answer:
        for piece in pieces:
            # Nothing is held back until the next piece.
            got = await asyncio.wait_for(answer.content.readany(), 2.0)
            assert got == piece
            gate.set()
        assert await answer.content.read() == b""


async def test_a_client_that_sends_half_a_body_and_goes_reaches_no_engine(
    cluster: MakeCluster,
) -> None:
    c = cluster()
    with socket.create_connection(("127.0.0.1", c.proxy.port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    await asyncio.sleep(0.05)
    assert not c.prefill[0].requests


@pytest.mark.parametrize("broken", ["raises", "unknown node"])
async def test_a_policy_that_fails_costs_no_request(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    def route(self: Policy, request: Request, fleet: Fleet) -> Route:
        if broken == "raises":
            raise ZeroDivisionError
        return Route("nowhere:1", "nowhere:1")

    monkeypatch.setattr(policies()["kairos"], "route", route)
    # With state in hand it would wait for a node, and not be routed on arrival.
    c = cluster(policy="kairos", with_profile=True)
    assert (await post(c, client))[::2] == (200, "kept")
    async with client.get(f"{c.url}/metrics") as answer:
        assert 'decisions_total{reason="policy_error"} 1.0' in await answer.text()


QUICK = {"node_timeout_s": 0.3, "answer_timeout_s": 1.0}


async def test_a_decode_node_silent_before_its_first_byte_is_replaced(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(decode=2, with_profile=True, with_state=True, **QUICK)
    await c.reports_arrived()

    async def stopped(request: web.Request, body: Any) -> web.StreamResponse:
        c.decode[0].state = None
        return await hang(request, body)

    c.decode[0].behaviour = stopped
    status, _, route = await asyncio.wait_for(post(c, client, STREAM), 5)
    assert (status, route) == (200, "fallback")
    (second,) = c.decode[1].bodies()
    assert not holds_a_handle(second)
    # Its server answers /health all the while; only a report brings it back.
    node = c.proxy.kairos.service.fleet[c.decode[0].address]
    await asyncio.sleep(0.5)
    assert not node.up and c.decode[0].cancelled == 1
    c.decode[0].state = report(incarnation="two", time_s=2e12)
    await until(lambda: node.up)


async def test_the_only_decode_node_silent_is_a_504_in_openai_form(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(with_state=True, **QUICK)
    await c.reports_arrived()

    async def stopped(request: web.Request, body: Any) -> web.StreamResponse:
        c.decode[0].state = None
        return await hang(request, body)

    c.decode[0].behaviour = stopped
    status, raw, _ = await asyncio.wait_for(post(c, client), 5)
    assert status == 504
    told = json.loads(raw)["error"]
    assert told["code"] == 504 and told["type"] == "Gateway Timeout"
    assert c.decode[0].address in told["message"]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
async def test_slow_is_not_dead(
    cluster: MakeCluster, client: aiohttp.ClientSession, leg: str, body: Any
) -> None:
    c = cluster(with_state=True, **QUICK)
    await c.reports_arrived()
    stub = (c.prefill if leg == "prefill" else c.decode)[0]

    async def slow(request: web.Request, body: Any) -> web.StreamResponse:
        await asyncio.sleep(1.5)  # Five time-outs, reporting all the while.
        return await stub.answer(request, body)

    stub.behaviour = slow
    assert (await post(c, client, body))[::2] == (200, "kept")


async def test_a_silent_prefill_node_leaves_the_request_to_a_decode_node(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(with_state=True, **QUICK)
    await c.reports_arrived()

    async def stopped(request: web.Request, body: Any) -> web.StreamResponse:
        c.prefill[0].state = None
        return await hang(request, body)

    c.prefill[0].behaviour = stopped
    assert (await asyncio.wait_for(post(c, client), 5))[::2] == (200, "fallback")


@pytest.mark.parametrize("how", ["no report", "no answer to /health"])
async def test_a_stream_of_a_node_that_falls_silent_ends_broken(
    cluster: MakeCluster, client: aiohttp.ClientSession, how: str
) -> None:
    c = cluster(with_state=how == "no report", **QUICK)
    await c.reports_arrived()

    async def half(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        c.decode[0].state = None
        c.decode[0].deaf = True
        await asyncio.sleep(600)
        return response

    c.decode[0].behaviour = half
    got = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with client.post(f"{c.url}/v1/completions", json=STREAM) as answer:
            async with asyncio.timeout(5):
                async for data in answer.content.iter_any():
                    got += data
    assert got == b"data: one\n\n"
    assert c.decode[0].cancelled == 1


async def test_without_reports_a_node_has_a_time_limit_though_it_answers_health(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(decode=2, **QUICK)
    c.decode[0].behaviour = hang
    started = asyncio.get_running_loop().time()
    assert (await asyncio.wait_for(post(c, client), 5))[::2] == (200, "fallback")
    assert asyncio.get_running_loop().time() - started >= 1.0


async def test_a_node_that_serves_on_without_reports_lives_without_them(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(with_state=True, **QUICK)
    await c.reports_arrived()
    c.decode[0].state = None
    await asyncio.sleep(0.5)
    assert (await post(c, client))[::2] == (200, "kept")

    async def slow(request: web.Request, body: Any) -> web.StreamResponse:
        await asyncio.sleep(0.7)
        return await c.decode[0].answer(request, body)

    c.decode[0].behaviour = slow
    assert (await post(c, client))[::2] == (200, "kept")


async def test_a_client_that_reads_slowly_is_no_fault_of_the_node(
    cluster: MakeCluster,
) -> None:
    piece = b"x" * 65536

    async def plenty(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(400):
            await response.write(piece)
        return response

    c = cluster(**{**QUICK, "answer_timeout_s": 0.3})
    c.decode[0].behaviour = plenty
    body = json.dumps(STREAM).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", c.proxy.port)
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await asyncio.sleep(1.2)
    got = await reader.read()
    writer.close()
    assert got.count(b"x") >= 400 * len(piece)
