# SPDX-License-Identifier: Apache-2.0
"""Requests answered from their prompt's own prefill: ``echo`` with one token."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.conftest import MakeCluster
from tests.proxy.stubs import report
from vllm_kairos.core.messages import parse_schedule
from vllm_kairos.core.settings import Settings

TOLD = {"prompt": list(range(1, 401)), "max_tokens": 1, "logprobs": 1}
#: A margin that no decode node meets.
KEPT = Settings(tau_ms=50.0, alpha=0.01)


@pytest.mark.parametrize("told", [{"echo": True}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("dispatch", ["eager", "late"])
async def test_one_prefill_is_deflected_though_it_answers_for_its_prompt(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    told: dict[str, object],
    dispatch: str,
) -> None:
    options = {"dispatch": dispatch}
    c = cluster(1, 1, "kairos", True, True, policy_options=options)
    c.prefill[0].state = report(prefills=((100_000, 0),))
    await c.reports_arrived()
    sent = {**TOLD, **told}
    async with client.post(f"{c.url}/v1/completions", json=sent) as answer:
        assert answer.headers["x-kairos-route"] == "deflected"
    assert not c.prefill[0].requests
    (body,) = c.decode[0].bodies()
    schedule = parse_schedule(body.pop("kv_transfer_params"))
    assert schedule is not None and len(schedule.chunks) > 1
    assert body == sent


@pytest.mark.parametrize("told", [{"echo": True}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("dispatch", ["eager", "late"])
async def test_kept_it_is_the_prefill_nodes_and_no_decode_node_is_expecting_it(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    told: dict[str, object],
    dispatch: str,
) -> None:
    options = {"dispatch": dispatch}
    c = cluster(1, 1, "kairos", True, True, slo=KEPT, policy_options=options)
    c.decode[0].state = report(decodes=60, decode_kv_tokens=10_000)
    await c.reports_arrived()
    fleet = c.proxy.kairos.service.fleet  # type: ignore[attr-defined]
    expected: list[object] = []

    async def look_and_answer(
        request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        expected.extend(fleet[c.decode[0].address].ledger.unshown())
        return await c.prefill[0].answer(request, body)

    c.prefill[0].behaviour = look_and_answer
    sent = {**TOLD, **told}
    async with client.post(f"{c.url}/v1/completions", json=sent) as answer:
        assert answer.headers["x-kairos-route"] == "prefill_only"
        assert (await answer.json())["from"] == c.prefill[0].address
    assert not c.decode[0].requests
    assert not expected and not list(fleet[c.decode[0].address].ledger.unshown())


@pytest.mark.parametrize(
    "changes", [{"prompt": [[1, 2], [3]]}, {"n": 2}, {"max_tokens": 2}]
)
async def test_what_is_more_than_one_prefill_is_not_the_policys(
    cluster: MakeCluster, client: aiohttp.ClientSession, changes: dict[str, object]
) -> None:
    c = cluster(1, 1, "kairos", True, True, policy_options={"dispatch": "eager"})
    c.prefill[0].state = report(prefills=((100_000, 0),))
    await c.reports_arrived()
    sent = {**TOLD, "echo": True, **changes}
    async with client.post(f"{c.url}/v1/completions", json=sent) as answer:
        route = answer.headers["x-kairos-route"]
    assert route == ("whole" if "max_tokens" in changes else "prefill_only")
