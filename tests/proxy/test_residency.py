# SPDX-License-Identifier: Apache-2.0
"""Cached prefixes: what is believed of a node, and what a second turn gains."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.proxy.conftest import Cluster, MakeCluster
from tests.proxy.stubs import hang, report, until
from vllm_kairos.core.fleet import Request
from vllm_kairos.core.messages import parse_schedule, ticket_of
from vllm_kairos.core.route import Route
from vllm_kairos.proxy.body import CHAT, COMPLETIONS, Body
from vllm_kairos.proxy.metrics import ProxyMetrics
from vllm_kairos.proxy.prompt_length import PromptCounter
from vllm_kairos.proxy.residency import (
    MOST_UNTOLD,
    PIECE_TOKENS,
    TOLD_WITHIN_S,
    Residency,
    prefix_hashes,
)


def caching(**changes: Any) -> Any:
    return report(prefix_caching=True, **changes)


def holding(**changes: Any) -> Residency:
    residency = Residency()
    residency.observe(caching(**changes), False, 0.0)
    return residency


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda parts: [part for part in parts for _ in range(PIECE_TOKENS)]
)


@given(kept=st.lists(PROMPTS, max_size=5), asked=PROMPTS, extra=st.integers(0, 63))
def test_what_is_found_is_the_longest_prefix_of_any_prompt_kept(
    kept: list[list[int]], asked: list[int], extra: int
) -> None:
    residency = holding()
    for prompt in kept:
        residency.note(prefix_hashes(prompt))
    shared = max((_common(prompt, asked) for prompt in kept), default=0)
    asked = asked + [9] * extra
    expected = min(shared // PIECE_TOKENS * PIECE_TOKENS, len(asked) - 1) // 16 * 16
    assert residency.cached_tokens(prefix_hashes(asked), len(asked)) == expected


def _common(one: list[int], other: list[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


@given(kept=st.lists(PROMPTS, max_size=12), blocks=st.integers(0, 40))
def test_no_more_is_believed_than_the_cache_holds(
    kept: list[list[int]], blocks: int
) -> None:
    residency = holding(total_kv_blocks=blocks)
    for prompt in kept:
        residency.note(prefix_hashes(prompt))
    assert len(residency) * PIECE_TOKENS <= blocks * 16
    if kept and blocks >= 4:
        hashes = prefix_hashes(kept[-1])
        assert residency.cached_tokens(hashes, 10**6) >= PIECE_TOKENS


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    old, new = prefix_hashes([1] * 256), prefix_hashes([2] * 128)
    residency = holding(total_kv_blocks=16)  # Four pieces.
    residency.note(old)
    residency.note(new)
    assert residency.cached_tokens(old, 1000) == 128
    assert residency.cached_tokens(new, 1000) == 128


def test_whole_blocks_of_the_node_count_and_never_the_last_token() -> None:
    hashes = prefix_hashes([1] * 128)
    residency = holding(block_size=48)
    residency.note(hashes)
    assert residency.cached_tokens(hashes, 1000) == 96
    assert residency.cached_tokens(hashes, 96) == 48


def test_salt_and_model_tell_equal_tokens_apart() -> None:
    tokens = [1] * 64
    assert prefix_hashes(tokens, ("m", "a")) != prefix_hashes(tokens, ("m", "b"))


def test_an_engine_that_does_not_cache_or_does_not_say_so_holds_nothing() -> None:
    hashes = prefix_hashes([1] * 128)
    for said in (None, report()):
        residency = Residency()
        if said is not None:
            residency.observe(said, False, 0.0)
        residency.note(hashes)
        assert residency.cached_tokens(hashes, 1000) == 0
    residency = holding()
    residency.note(hashes)
    residency.observe(report(seq=2), False, 1.0)
    assert residency.cached_tokens(hashes, 1000) == 0


def test_a_prefix_that_was_not_found_is_gone_and_all_that_is_older_with_it() -> None:
    first, second, third = (prefix_hashes([n] * 256) for n in (1, 2, 3))
    residency = holding()
    for hashes in (first, second, third):
        residency.note(hashes)
    residency.expect("t", second)
    said = [("t", 0), ("other", 0)]
    residency.observe(caching(seq=2, cached=said), False, 1.0)
    left = [residency.cached_tokens(h, 1000) for h in (first, second, third)]
    assert left == [0, 0, 256]
    # What was computed again meanwhile is not taken away by a late word.
    residency.note(first)
    residency.expect("u", first)
    residency.note(first)
    residency.observe(caching(seq=3, cached=[("u", 0)]), False, 2.0)
    assert residency.cached_tokens(first, 1000) == 256


def twice_asked() -> tuple[Residency, list[tuple[int, ...]]]:
    """Three prompts are held; the second was asked for again, and is computed."""
    prompts = [prefix_hashes([n] * 256) for n in (1, 2, 3)]
    residency = holding()
    for hashes in prompts:
        residency.note(hashes)
    residency.expect("t", prompts[1])
    residency.over("t", 1.0)
    residency.note(prompts[1])
    return residency, prompts


def test_a_report_that_comes_after_the_prefill_still_corrects_what_is_believed() -> (
    None
):
    residency, prompts = twice_asked()
    residency.observe(caching(seq=2), False, 1.1)
    residency.observe(caching(seq=3, cached=[("t", 0)]), False, 1.2)
    # The first is older than the second was; that one has been computed since.
    assert [residency.cached_tokens(h, 1000) for h in prompts] == [0, 256, 256]


def test_a_report_is_waited_for_no_longer_than_it_may_take() -> None:
    residency, prompts = twice_asked()
    residency.observe(caching(seq=2), False, 1.1 + TOLD_WITHIN_S)
    residency.observe(caching(seq=3, cached=[("t", 0)]), False, 1.2 + TOLD_WITHIN_S)
    assert [residency.cached_tokens(h, 1000) for h in prompts] == [256, 256, 256]


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("eor"), st.integers(0, 7), st.floats(0.0, 1.0)),
        max_size=60,
    )
)
def test_of_prompts_that_are_over_few_and_none_for_long_are_waited_on(
    steps: list[tuple[str, int, float]],
) -> None:
    residency, hashes, now_s = holding(), prefix_hashes([1] * 64), 0.0
    residency.note(hashes)
    over: dict[str, float] = {}
    for step, number, waited_s in steps:
        now_s += waited_s
        ticket = str(number)
        if step == "e":
            residency.expect(ticket, hashes)
            over.pop(ticket, None)
        elif step == "o" and ticket in residency._expected:
            residency.over(ticket, now_s)
            over[ticket] = now_s
        elif step == "r":
            residency.observe(caching(cached=[(ticket, 64)]), False, now_s)
            over.pop(ticket, None)
            over = {t: s for t, s in over.items() if now_s - s <= TOLD_WITHIN_S}
            assert residency._untold.keys() == over.keys()
    # The node is dead and reports no more.
    for number in range(MOST_UNTOLD + 10):
        residency.expect(f"x{number}", hashes)
        residency.over(f"x{number}", now_s)
    assert len(residency._untold) == MOST_UNTOLD


def test_a_new_process_is_not_taken_at_the_word_of_the_old_one() -> None:
    residency, prompts = twice_asked()
    residency.observe(caching(incarnation="two"), True, 1.1)
    for hashes in prompts:
        residency.note(hashes)
    residency.observe(caching(seq=2, incarnation="two", cached=[("t", 0)]), False, 1.2)
    assert [residency.cached_tokens(h, 1000) for h in prompts] == [256, 256, 256]


async def prefixes(body: dict[str, Any], path: str = COMPLETIONS) -> tuple[int, ...]:
    import json

    counter = PromptCounter(None, ProxyMetrics())
    return (await counter.count(Body(json.dumps(body).encode(), path))).prefixes


async def test_only_prompts_whose_tokens_are_all_of_them_have_prefixes() -> None:
    ids = list(range(200))
    plain = await prefixes({"prompt": ids})
    assert len(plain) == 3
    assert await prefixes({"prompt": ids, "cache_salt": "s"}) != plain
    assert await prefixes({"prompt": ids, "truncate_prompt_tokens": 100}) == ()
    assert await prefixes({"prompt": ids, "prompt_logprobs": 0}) == ()
    assert await prefixes({"prompt": "text"}) == ()
    assert await prefixes({"prompt": [ids, ids]}) == ()
    for odd in ([1, "a"] * 50, [1 << 70] * 80, [1.5, *ids], [None, *ids]):
        assert await prefixes({"prompt": odd}) == ()
    assert await prefixes({"prompt": ids, "cache_salt": {"a": 1}}) == ()
    assert await prefixes({"messages": []}, CHAT) == ()


TURN_1 = list(range(1000, 1640))
TURN_2 = [*TURN_1, *range(5000, 5060)]


class Seen:
    """What the policy was shown and what it answered."""

    def __init__(self, c: Cluster, monkeypatch: pytest.MonkeyPatch):
        self.requests: list[Request] = []
        self.routes: list[Route] = []
        policy = c.proxy.kairos._dispatcher._policy  # type: ignore[attr-defined]
        plain, assigned = policy.route, policy.assign

        def route(request: Request, fleet: Any) -> Route:
            self.requests.append(request)
            self.routes.append(plain(request, fleet))
            return self.routes[-1]

        def assign(fleet: Any, most: int) -> list[tuple[Request, Route]]:
            routed: list[tuple[Request, Route]] = assigned(fleet, most)
            self.requests += [request for request, _ in routed]
            self.routes += [route for _, route in routed]
            return routed

        monkeypatch.setattr(policy, "route", route)
        monkeypatch.setattr(policy, "assign", assign)


async def ask(c: Cluster, client: aiohttp.ClientSession, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": 8}
    async with client.post(f"{c.url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()
        return answer.headers["x-kairos-route"]


async def conversing(
    cluster: MakeCluster, prefix_caching: bool = True, dispatch: str = "eager"
) -> Cluster:
    """Two decode nodes; a prefill node busy enough that turns are deflected."""
    c = cluster(1, 2, "kairos", True, True, policy_options={"dispatch": dispatch})
    c.prefill[0].state = report(prefills=[(3000, 0)], prefix_caching=prefix_caching)
    c.decode[0].state = report(decodes=2, prefix_caching=prefix_caching)
    c.decode[1].state = report(decodes=1, prefix_caching=prefix_caching)
    await c.reports_arrived()
    fleet = c.proxy.kairos.service.fleet  # type: ignore[attr-defined]
    await until(lambda: fleet[c.decode[1].address].report.decodes == 1)
    await until(lambda: fleet[c.decode[0].address].report.decodes == 2)
    await until(lambda: bool(fleet[c.prefill[0].address].report.prefills))
    return c


@pytest.mark.parametrize("dispatch", ["eager", "late"])
async def test_a_second_turn_is_estimated_and_routed_with_its_cached_prefix(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    dispatch: str,
) -> None:
    c = await conversing(cluster, dispatch=dispatch)
    seen = Seen(c, monkeypatch)
    assert await ask(c, client, TURN_1) == "deflected"
    first = next(s for s in c.decode if s.requests)
    assert await ask(c, client, TURN_2) == "deflected"
    assert seen.requests[0].cached == {}
    assert seen.requests[1].cached == {first.address: 640}
    assert [route.decode for route in seen.routes] == [first.address] * 2
    # The profile: a step of 10 ms and 0.1 ms a token. 640 tokens, then 60.
    before, after = (r.estimates.ttft_decode_ms for r in seen.routes)
    assert before == pytest.approx(84.0) and after == pytest.approx(16.0)
    # The schedule is right whether the prefix is there or not: its place is
    # told by tokens computed from the first one on.
    params = first.bodies()[1]["kv_transfer_params"]
    schedule = parse_schedule(params)
    assert schedule is not None and ticket_of(params) == schedule.ticket
    others = first.state.decodes  # type: ignore[union-attr]
    assert sum(chunk - others for chunk in schedule.chunks[:-1]) >= 640
    assert len(first.requests) == 2


@pytest.mark.parametrize("how", ["restarted", "off", "evicted"])
async def test_a_node_that_lost_its_cache_is_believed_to_hold_nothing(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    c = await conversing(cluster, prefix_caching=how != "off")
    seen = Seen(c, monkeypatch)
    await ask(c, client, TURN_1)
    first = next(s for s in c.decode if s.requests)
    node = c.proxy.kairos.service.fleet[first.address]  # type: ignore[attr-defined]
    assert bool(len(node.residency)) == (how != "off")
    if how == "restarted":
        first.state = report(
            decodes=1, prefix_caching=True, incarnation="two", time_s=2e12
        )
        await until(lambda: node.report.incarnation == "two")
    elif how == "evicted":
        node.residency.expect("t", prefix_hashes(TURN_1, (None, None)))
        first.state = report(decodes=1, prefix_caching=True, cached=[("t", 0)])
        await until(lambda: node.report.cached == [("t", 0)])
    await ask(c, client, TURN_2)
    assert seen.requests[1].cached == {}
    assert seen.routes[1].estimates.ttft_decode_ms > 80.0


@pytest.mark.parametrize("left", [False, True])
async def test_what_a_node_says_after_its_first_byte_is_heard(
    cluster: MakeCluster, client: aiohttp.ClientSession, left: bool
) -> None:
    """Also where the client did not wait for that byte."""
    c = cluster(1, 1, "kairos", True, True, policy_options={"dispatch": "eager"})
    c.prefill[0].state = report(prefills=[(3000, 0)])
    stub = c.decode[0]
    stub.state = report(prefix_caching=True)
    await c.reports_arrived()
    node = c.proxy.kairos.service.fleet[stub.address]  # type: ignore[attr-defined]
    await until(lambda: node.report.prefix_caching)
    for prompt in (TURN_1[::-1], TURN_1):
        assert await ask(c, client, prompt) == "deflected"
    older = prefix_hashes(TURN_1[::-1], (None, None))
    assert node.residency.cached_tokens(older, 1000) == 640
    if left:
        stub.behaviour = hang
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await ask(c, client, TURN_2)
        await until(lambda: stub.cancelled == 1)
    else:
        assert await ask(c, client, TURN_2) == "deflected"
    await until(lambda: not node.residency._expected)
    ticket = ticket_of(stub.bodies()[-1]["kv_transfer_params"])
    stub.state = report(prefix_caching=True, cached=[(ticket, 0)])
    await until(lambda: node.report.cached == [(ticket, 0)])
    assert node.residency.cached_tokens(older, 1000) == 0
    newer = prefix_hashes(TURN_1, (None, None))
    assert node.residency.cached_tokens(newer, 1000) == (0 if left else 640)


async def test_a_prefill_node_and_the_decode_node_that_fetched_both_hold_it(
    cluster: MakeCluster,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = cluster(2, 1, "kairos", True, True, policy_options={"dispatch": "eager"})
    full = {"free_kv_blocks": 0, "decodes": 64}
    c.decode[0].state = report(prefix_caching=True, **full)
    for stub in c.prefill:
        stub.state = report(prefix_caching=True)
    await c.reports_arrived()
    fleet = c.proxy.kairos.service.fleet  # type: ignore[attr-defined]
    await until(lambda: fleet[c.decode[0].address].report.decodes == 64)
    seen = Seen(c, monkeypatch)
    assert await ask(c, client, TURN_1) == "kept"
    holder = next(s for s in c.prefill if s.requests)
    assert await ask(c, client, TURN_2) == "kept"
    assert seen.requests[1].cached == {holder.address: 640, c.decode[0].address: 640}
    assert seen.routes[1].prefill == holder.address
    assert len(holder.requests) == 2
