# SPDX-License-Identifier: Apache-2.0
"""What holds in every run, whatever the policy and the workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.policies import make_policy, policies
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.files import UserError
from vllm_kairos.sim.cluster import Cluster, ClusterSettings, ModelError, SimNode
from vllm_kairos.sim.engine_request import UserRequest
from vllm_kairos.sim.node import NodeLimits
from vllm_kairos.sim.results import TTFT_PARTS, request_row
from vllm_kairos.sim.traces import TraceRow
from vllm_kairos.sim.workload import bursty

MODEL = StepModel(
    prefill=Predictor({"1": 8.0, "c": 0.03, "cp": 2e-6, "cc": 1e-6}),
    decode=Predictor({"1": 49.0, "B": 0.04, "K": 2e-5}),
    mixed=Predictor({"c": 0.006, "cp": 7e-7, "cc": 2e-6}),
)

POLICIES = (
    "disagg",
    "disagg:least",
    "sq",
    "sl",
    "oracle",
    "kairos-paper",
    "taichi",
    "sarathi",
    "splitwise",
    "distserve",
    "mooncake",
    "tetriinfer",
    "ppd",
    "nexus",
    "dynamo",
)


def cluster(
    name: str, rows: Sequence[TraceRow], limits: NodeLimits, **options: object
) -> Cluster:
    policy, _, balance = name.partition(":")
    own = {"balance": balance} if balance else {}
    chosen = ClusterSettings(
        MODEL,
        LinkModel(31104, 3e9, hops=2),
        limits,
        **options,  # type: ignore[arg-type]
    )
    return Cluster(chosen, make_policy(policy, Settings(), **own), rows, 1)


rows_of = st.lists(
    st.tuples(
        st.floats(0, 0.6), st.integers(1, 3000), st.integers(1, 30), st.integers(1, 4)
    ),
    min_size=1,
    max_size=25,
)


class Watched(Settings):
    """Settings that keep whose fields were read."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Watched.seen.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", sorted(policies()))
def test_a_policy_reads_the_margins_that_it_names_and_no_others(name: str) -> None:
    own = {"sizes": "candidates"} if name == "kairos" else {}
    policy = make_policy(name, Watched(), **own)
    Watched.seen.clear()
    chosen = ClusterSettings(MODEL, LinkModel(31104, 3e9, hops=2), NodeLimits())
    Cluster(chosen, policy, bursty(40, 12.0, seed=1), 1).run()
    # The oracle has put a setting of its own in the place of alpha.
    asked = {"alpha", "beta", "candidates"} - ({"alpha"} if name == "oracle" else set())
    assert Watched.seen & asked == set(policy.margins)


def as_rows(drawn: list[tuple[float, int, int, int]], hashed: bool) -> list[TraceRow]:
    rows, at = [], 0.0
    for number, (gap, prompt, output, story) in enumerate(drawn):
        at += gap
        ids: tuple[int, ...] = ()
        if hashed:
            blocks = -(-prompt // 512)
            ids = (*(story * 100 + i for i in range(blocks - 1)), 10_000 + number)
        rows.append(TraceRow(at, prompt, output, ids, turn=1 + number % 2))
    return rows


#: All that runs is preempted in one step while KV that has arrived waits.
_ALL_PUT_BACK = [(0.0, p, n, s) for p, n, s in ((366, 13, 1), (1, 1, 1), (1537, 1, 2))]
_ALL_PUT_BACK += [(0.0, p, n, s) for p, n, s in ((1, 1, 1), (2801, 1, 2), (1, 1, 1))]
_ALL_PUT_BACK += [(0.0, 384, 2, 1)]


@example(_ALL_PUT_BACK, "sl", True, True, False)
@example([(5e-324, 1, 1, 1)], "nexus", False, False, False)
@given(rows_of, st.sampled_from(POLICIES), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_run_keeps_its_books(
    drawn: list[tuple[float, int, int, int]],
    name: str,
    scarce: bool,
    hashed: bool,
    noisy: bool,
) -> None:
    rows = as_rows(drawn, hashed)
    limits = NodeLimits(
        budget_tokens=1024,
        max_num_seqs=8,
        kv_tokens=3200 if scarce else 200_000,
        prefix_caching=hashed,
    )
    error = ModelError(0.1, 0.1) if noisy else ModelError()
    run = cluster(name, rows, limits, error=error)
    computed: dict[str, int] = {}
    last: dict[str, float] = {}

    def check(node: SimNode, load: StepLoad, took_ms: float) -> None:
        assert 0 < load.tokens <= node.limits.budget_tokens
        assert load.decodes + load.prefills <= node.limits.max_num_seqs
        assert len(node.running) <= node.limits.max_num_seqs
        assert took_ms > 0
        # A node runs one step at a time, and time never goes back.
        assert run.now_ms - took_ms >= last.get(node.name, 0.0) - 1e-6
        last[node.name] = run.now_ms
        computed[node.name] = computed.get(node.name, 0) + load.tokens
        assert node.decodes >= 0 and node.decode_kv_tokens >= 0

    run.on_step = check
    users = run.run()
    assert len(users) == len(rows)
    for user in users:
        assert user.finished == (0 if user.rejected else 1)
        if user.rejected:
            continue
        assert len(user.token_ms) == user.row.output_tokens
        assert user.token_ms == sorted(user.token_ms)
        check_parts(user)
    for node in run.nodes.values():
        assert node.kv.free_blocks == node.kv.total
        assert node.idle and not node.awaiting and not node.deflected
        assert (node.decodes, node.decode_kv_tokens, node.awaiting_tokens) == (0, 0, 0)
    if not (scarce or hashed):
        assert sum(computed.values()) == tokens_due(users)


def check_parts(user: UserRequest) -> None:
    marks = (
        user.arrival_ms,
        user.prefill_start_ms,
        user.prefill_end_ms,
        user.kv_arrived_ms,
        user.token_ms[0],
    )
    assert list(marks) == sorted(marks)
    row = request_row(user)
    parts = [row[f"{part}_ms"] for part in TTFT_PARTS]
    assert min(parts) >= 0
    assert round(sum(parts), 3) == row["ttft_ms"]
    assert 0 <= row["first_step_ms"] <= row["decode_queue_ms"]
    if row["deflected"]:
        assert row["transfer_ms"] == row["decode_queue_ms"] == 0


def tokens_due(users: list[UserRequest]) -> int:
    """Tokens nodes must compute when nothing is preempted or cached.

    A prompt, and every output but the last; P/D computes the last prompt
    token once more, on the decode node, and a move does so per move.
    """
    due = 0
    for user in users:
        if user.rejected:
            continue
        assert user.route is not None
        again = 0 if user.route.deflected else 1
        due += user.row.prompt_tokens + user.row.output_tokens - 1 + again
    return due


@pytest.mark.parametrize("name", ["disagg", "kairos-paper", "taichi"])
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    def once() -> list[list[float]]:
        run = cluster(
            name, bursty(150, 9, seed=4), NodeLimits(), error=ModelError(0.0, 0.05)
        )
        return [user.token_ms for user in run.run()]

    assert once() == once()


def test_a_request_longer_than_the_kv_cache_is_refused_by_name() -> None:
    run = cluster("disagg", [TraceRow(0, 5000, 10)], NodeLimits(kv_tokens=4096))
    with pytest.raises(UserError, match="request 0: 5000 prompt and 10 output"):
        run.run()


def test_a_prefill_node_keeps_kv_until_the_decode_node_has_read_it() -> None:
    rows = [TraceRow(0.0, 2000, 3), TraceRow(0.01, 2000, 3)]
    slow = LinkModel(31104, 1e7)
    settings_ = ClusterSettings(MODEL, slow, NodeLimits(kv_tokens=3200), 1, 1)
    first, second = Cluster(settings_, make_policy("disagg", Settings()), rows).run()
    # One node's KV holds one prompt: the second prefill waits for the read.
    assert second.prefill_start_ms >= first.kv_arrived_ms
    assert first.kv_arrived_ms - first.prefill_end_ms == pytest.approx(6220.8)


def test_links_are_first_come_first_served_at_both_ends() -> None:
    rows = [TraceRow(0.0, 1000, 2), TraceRow(0.0, 1000, 2)]
    link = LinkModel(31104, 1e8)
    settings_ = ClusterSettings(MODEL, link, NodeLimits(), 2, 1)
    a, b = Cluster(settings_, make_policy("disagg", Settings()), rows).run()
    assert a.prefill_end_ms == b.prefill_end_ms
    # Two sources, one target: its ingress takes one after the other.
    assert b.kv_arrived_ms - a.kv_arrived_ms == pytest.approx(311.04)


def test_the_first_token_comes_from_a_decode_step_after_the_kv() -> None:
    settings_ = ClusterSettings(MODEL, LinkModel(31104, 3e9), NodeLimits(), 1, 1)
    rows = [TraceRow(0.0, 1000, 2)]
    (user,) = Cluster(settings_, make_policy("disagg", Settings()), rows).run()
    prefill = MODEL.step_ms(0, 0, 1000)
    transfer = 1000 * 31104 / 3e9 * 1e3
    step = MODEL.step_ms(1, 999)
    assert user.token_ms[0] == pytest.approx(prefill + transfer + step)
    assert user.token_ms[1] - user.token_ms[0] == pytest.approx(MODEL.step_ms(1, 1000))
