# SPDX-License-Identifier: Apache-2.0
"""Which nodes a request goes to, and what each is sent."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.proxy.conftest import MakeCluster
from tests.proxy.stubs import error, report, until
from vllm_kairos.core.messages import DeflectedReport, parse_schedule
from vllm_kairos.core.settings import Settings

PROMPT = {"prompt": list(range(1, 401)), "max_tokens": 8}
QUEUE = [(4000, 0)]
EAGER = {"dispatch": "eager"}
ONE = {**EAGER, "several": False}


async def test_prefill_node_is_asked_for_one_token_and_decode_node_gets_its_kv_handle(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    async with client.post(f"{c.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        assert await answer.read() == b"".join(c.decode[0].chunks)
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["x-kairos-route"] == "kept"
    (prefill,) = c.prefill[0].requests
    (decode,) = c.decode[0].requests
    assert prefill[0] == decode[0] == "/v1/chat/completions"
    assert prefill[1] == {
        "model": "m",
        "messages": body["messages"],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.5,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert decode[1] == {**body, "kv_transfer_params": c.prefill[0].kv}
    assert prefill[2]["X-Request-Id"] == decode[2]["X-Request-Id"]


async def test_client_sent_kv_transfer_params_reach_no_engine(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(handshake=False)
    evil = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
    raw = (
        b'{"prompt": "x", "max_tokens": 4, "kv_transfer_params": {"a": 1}, '
        b'"vllm_xargs": {"kv_transfer_params": "x", "keep": 1}, '
        b'"kv_transfer_params": {"do_remote_prefill": true}}'
    )
    headers = {"Content-Type": "application/json"}
    async with client.post(
        f"{c.url}/v1/completions", data=raw, headers=headers
    ) as answer:
        assert answer.status == 200
    body = {"prompt": "x", "n": 2, "kv_transfer_params": evil}
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert answer.status == 200
    for stub in (*c.prefill, *c.decode):
        assert stub.requests
        for seen in stub.bodies():
            assert "kv_transfer_params" not in seen
            assert seen.get("vllm_xargs", {"keep": 1}) == {"keep": 1}


async def test_round_robin_takes_the_nodes_in_turn(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(prefill=2, decode=2)
    for _ in range(4):
        async with client.post(f"{c.url}/v1/completions", json=PROMPT) as answer:
            assert answer.status == 200
    assert [len(s.requests) for s in (*c.prefill, *c.decode)] == [2, 2, 2, 2]


@pytest.mark.parametrize("policy", ["kairos", "kairos-paper"])
async def test_a_busy_prefill_node_makes_kairos_deflect_with_a_safe_schedule(
    cluster: MakeCluster, client: aiohttp.ClientSession, policy: str
) -> None:
    c = cluster(policy=policy, with_profile=True, with_state=True)
    c.prefill[0].state = report(prefills=QUEUE)
    c.decode[0].state = report(decodes=3, decode_kv_tokens=100)
    await c.reports_arrived()
    async with client.post(f"{c.url}/v1/completions", json=PROMPT) as answer:
        assert answer.headers["x-kairos-route"] == "deflected"
    assert not c.prefill[0].requests
    (body,) = c.decode[0].bodies()
    schedule = parse_schedule(body.pop("kv_transfer_params"))
    assert body == PROMPT
    assert schedule is not None
    # 10 ms + 0.1 ms a token within 0.9 * 50 ms: 350 tokens beside 3 decodes.
    if policy == "kairos":
        assert schedule.chunks == (353, 53)
    else:
        assert set(schedule.chunks) <= {256, 128}
    async with client.get(f"{c.url}/metrics") as answer:
        text = await answer.text()
    assert f'kairos_proxy_deflections_total{{node="{c.decode[0].address}"}} 1.0' in text
    assert 'kairos_proxy_decisions_total{reason="deflected"} 1.0' in text


async def test_a_request_is_kept_where_the_margin_does_not_hold(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    # 400 tokens: 401 ms and a 10 ms step on the prefill node, 70 ms here.
    slo = {alpha: Settings(tau_ms=50.0, alpha=alpha) for alpha in (0.1, 0.2)}
    for alpha, route in ((0.1, "kept"), (0.2, "deflected")):
        c = cluster(1, 1, "kairos", True, True, slo=slo[alpha], policy_options=EAGER)
        c.decode[0].state = report(decodes=1)
        await c.reports_arrived()
        async with client.post(f"{c.url}/v1/completions", json=PROMPT) as answer:
            assert answer.headers["x-kairos-route"] == route


async def test_no_second_deflection_while_one_is_in_no_report_yet(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(1, 1, "kairos", True, True, policy_options=ONE)
    c.prefill[0].state = report(prefills=QUEUE)
    c.decode[0].state = report()
    await c.reports_arrived()
    gate = asyncio.Event()
    plain = c.decode[0].behaviour

    async def wait(request, body):
        await gate.wait()
        return await plain(request, body)

    c.decode[0].behaviour = wait
    first = asyncio.create_task(client.post(f"{c.url}/v1/completions", json=PROMPT))
    await until(lambda: len(c.decode[0].requests) == 1)
    second = asyncio.create_task(client.post(f"{c.url}/v1/completions", json=PROMPT))
    await until(lambda: len(c.prefill[0].requests) == 1)
    # Reports that do not name the ticket do not clear it, however many come.
    await asyncio.sleep(0.4)
    third = asyncio.create_task(client.post(f"{c.url}/v1/completions", json=PROMPT))
    await until(lambda: len(c.prefill[0].requests) == 2)
    # One that names it as admitted, with nothing of it left, does.
    ticket = parse_schedule(c.decode[0].bodies()[0]["kv_transfer_params"]).ticket
    c.decode[0].state = report(
        admitted=[ticket], deflected=[DeflectedReport(ticket, 0, 400)]
    )
    fleet = c.proxy.kairos.service.fleet
    await until(lambda: ticket in fleet[c.decode[0].address].report.admitted)
    c.decode[0].state = report(admitted=[ticket])
    gate.set()
    for answer in await asyncio.gather(first, second, third):
        assert answer.status == 200
        answer.release()
    async with client.post(f"{c.url}/v1/completions", json=PROMPT) as answer:
        assert answer.headers["x-kairos-route"] == "deflected"


async def test_a_first_token_that_ends_the_text_is_recomputed_on_the_decode_node(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(with_profile=True, with_state=True)
    c.decode[0].state = report(decodes=1)
    c.prefill[0].kv = None
    await c.reports_arrived()
    async with client.post(f"{c.url}/v1/completions", json=PROMPT) as answer:
        assert answer.status == 200
    (body,) = c.decode[0].bodies()
    assert parse_schedule(body["kv_transfer_params"]).chunks == (351, 51)


UNSPLITTABLE = {
    "n": {"n": 2},
    "best_of": {"best_of": 3},
    "beams": {"use_beam_search": True},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "echo": {"echo": True},
    "texts": {"prompt": ["a", "b"]},
    "token lists": {"prompt": [[1, 2], [3]]},
    "min_tokens": {"min_tokens": 9},
    "limit as text": {"max_tokens": "9"},
    "limit of no kind": {"min_tokens": [9]},
    "limit as a float": {"min_tokens": 3.0},
    "longer than the model takes": {"max_tokens": 4000},
}


@pytest.mark.parametrize("name", UNSPLITTABLE)
async def test_what_pd_cannot_carry_goes_whole_to_one_decode_node(
    cluster: MakeCluster, client: aiohttp.ClientSession, name: str
) -> None:
    c = cluster(policy="kairos", with_profile=True, with_state=True)
    await c.reports_arrived()
    await until(lambda: c.proxy.kairos.service.max_model_len == 4096)
    sent = {**PROMPT, **UNSPLITTABLE[name]}
    async with client.post(f"{c.url}/v1/completions", json=sent) as answer:
        assert answer.headers["x-kairos-route"] == "whole"
    assert not c.prefill[0].requests
    (body,) = c.decode[0].bodies()
    assert parse_schedule(body.pop("kv_transfer_params")) is not None
    assert body == sent


@pytest.mark.parametrize("prompt", [["a text"], [list(range(1, 401))]])
async def test_a_list_of_one_prompt_is_carried_like_that_prompt(
    cluster: MakeCluster, client: aiohttp.ClientSession, prompt: list[object]
) -> None:
    c = cluster()
    body = {"prompt": prompt, "max_tokens": 8}
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert answer.headers["x-kairos-route"] == "kept"
    assert c.prefill[0].bodies()[0]["prompt"] == prompt
    assert c.decode[0].bodies()[0]["prompt"] == prompt


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}]
)
async def test_forced_tools_go_whole_to_one_decode_node(
    cluster: MakeCluster, client: aiohttp.ClientSession, choice: object
) -> None:
    c = cluster()
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [], "tools": tools, "tool_choice": choice}
    async with client.post(f"{c.url}/v1/chat/completions", json=body) as answer:
        assert answer.headers["x-kairos-route"] == "whole"
    assert c.decode[0].bodies() == [body]


@pytest.mark.parametrize("changes", [{}, {"echo": True, "logprobs": 1}, {"n": 2}])
async def test_one_token_comes_from_the_prefill_node_alone(
    cluster: MakeCluster, client: aiohttp.ClientSession, changes: dict[str, object]
) -> None:
    c = cluster()
    body = {**PROMPT, "max_tokens": 1, **changes}
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert (await answer.json())["from"] == c.prefill[0].address
        assert answer.headers["x-kairos-route"] == "prefill_only"
    assert c.prefill[0].bodies() == [body]
    assert not c.decode[0].requests
    c.prefill[0].behaviour = error(500)
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert (await answer.json())["from"] == c.decode[0].address


async def test_min_tokens_is_clamped_on_the_prefill_leg_only(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    body = {**PROMPT, "min_tokens": 4}
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert answer.headers["x-kairos-route"] == "kept"
    assert c.prefill[0].bodies()[0]["min_tokens"] == 1
    assert c.decode[0].bodies()[0]["min_tokens"] == 4


async def test_headers_that_matter_are_passed_on(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = cluster()
    headers = {
        "Authorization": "Bearer mine",
        "X-Request-Id": "abc",
        "traceparent": "00-1",
        "Cookie": "secret=1",
    }
    monkeypatch.setenv("OPENAI_API_KEY", "env")
    for sent in (headers, {}):
        async with client.post(
            f"{c.url}/v1/completions", json=PROMPT, headers=sent
        ) as answer:
            assert answer.status == 200
    for stub in (c.prefill[0], c.decode[0]):
        first, second = (h for _, _, h in stub.requests)
        assert first["Authorization"] == "Bearer mine"
        assert first["X-Request-Id"] == "abc"
        assert first["traceparent"] == "00-1"
        assert "Cookie" not in first
        assert second["Authorization"] == "Bearer env"
        assert second["X-Request-Id"] != "abc"


async def test_models_health_and_status_answer_for_the_cluster(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster(with_state=True)
    await c.reports_arrived()
    async with client.get(f"{c.url}/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "stub/tiny"
    async with client.get(f"{c.url}/health") as answer:
        assert answer.status == 200
    async with client.get(f"{c.url}/status") as answer:
        status = await answer.json()
    assert status["prefill_nodes"] == [c.prefill[0].address]
    assert status["nodes"][c.decode[0].address]["fresh"] is True
    await c.decode[0].die()
    async with client.get(f"{c.url}/health") as answer:
        assert answer.status == 503
    async with client.get(f"{c.url}/v1/models") as answer:
        assert answer.status == 502


async def test_a_node_can_be_added_with_the_admin_key(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = cluster()
    url = f"{c.url}/instances/add"
    node = {"type": "decode", "instance": engines[3].address}
    async with client.post(url, json=node) as answer:
        assert answer.status == 500
    monkeypatch.setenv("ADMIN_API_KEY", "k")
    for key, body, status in (
        ("wrong", node, 403),
        ("k", {"type": "x", "instance": "a:1"}, 400),
        ("k", {"type": "decode", "instance": "nonsense"}, 400),
        ("k", [], 400),
        ("k", {"type": "decode", "instance": c.decode[0].address}, 400),
        ("k", node, 200),
    ):
        async with client.post(url, json=body, headers={"x-api-key": key}) as answer:
            assert answer.status == status, body
    for _ in range(2):
        async with client.post(f"{c.url}/v1/completions", json=PROMPT) as answer:
            assert answer.status == 200
    assert len(engines[3].requests) == 1


async def test_stream_options_without_a_stream_are_left_for_the_engine_to_refuse(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    body = {**PROMPT, "stream_options": {"include_usage": True}}
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert answer.status == 200
    assert c.prefill[0].bodies()[0]["stream_options"] == {"include_usage": True}


async def test_a_body_only_python_reads_reaches_the_engine_as_it_was(
    cluster: MakeCluster, client: aiohttp.ClientSession
) -> None:
    c = cluster()
    raw = b'{"prompt": "\\ud800", "temperature": NaN, "seed": 1%s}' % (b"0" * 30)
    headers = {"Content-Type": "application/json"}
    async with client.post(
        f"{c.url}/v1/completions", data=raw, headers=headers
    ) as answer:
        assert answer.status == 200
    (body,) = c.decode[0].bodies()
    assert body["prompt"] == "\ud800"
    assert body["temperature"] != body["temperature"]
    assert body["seed"] == 10**30
