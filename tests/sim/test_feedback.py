# SPDX-License-Identifier: Apache-2.0
"""What the simulator tells a node's chunk rule, as an engine tells its own."""

from __future__ import annotations

import math
from pathlib import Path

from vllm_kairos.core.chunk_rule import AdaptiveRule, PlannedRule
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.policies import make_policy
from vllm_kairos.core.settings import Settings
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.files import load_profile
from vllm_kairos.sim.cluster import Cluster, ClusterSettings, ModelError, SimNode
from vllm_kairos.sim.options import limits_of
from vllm_kairos.sim.traces import TraceRow
from vllm_kairos.sim.workload import bursty

PROFILE = load_profile(
    Path(__file__).resolve().parents[2] / "profiles" / "a100-deepseek-v2-lite.json"
)
MODEL = PROFILE.step_model()

#: Decodes, prefill tokens, predicted and measured milliseconds of a step.
Seen = tuple[int, int, float, float]


class Listening(PlannedRule):
    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def observe(self, load: StepLoad, predicted_ms: float, measured_ms: float) -> None:
        self.seen.append((load.decodes, load.prefill_tokens, predicted_ms, measured_ms))


class Counting(Feedback):
    __slots__ = ("mixed", "decodes_alone")

    def __init__(self) -> None:
        self.mixed = self.decodes_alone = 0
        super().__init__(70.0)

    def observe(
        self,
        predicted_ms: float,
        measured_ms: float,
        limit_ms: float = math.inf,
    ) -> None:
        self.mixed += 1
        super().observe(predicted_ms, measured_ms, limit_ms)

    def observe_decodes(self, predicted_ms: float, measured_ms: float) -> None:
        self.decodes_alone += 1
        super().observe_decodes(predicted_ms, measured_ms)


def test_a_rule_is_told_of_every_step_once_as_it_was() -> None:
    rules: dict[str, Listening] = {}
    settings = ClusterSettings(
        MODEL,
        PROFILE.link_model(),
        limits_of(PROFILE),
        error=ModelError(0.15, 0.05),
        rule=lambda name: rules.setdefault(name, Listening()),
    )
    run = Cluster(settings, make_policy("kairos-paper", Settings()), bursty(150, 9.0))
    ran: dict[str, list[Seen]] = {name: [] for name in run.nodes}

    def note(node: SimNode, load: StepLoad, took_ms: float) -> None:
        ran[node.name].append(
            (load.decodes, load.prefill_tokens, MODEL.load_ms(load), took_ms)
        )

    run.on_step = note
    run.run()
    for name, node in run.nodes.items():
        assert rules[name].seen == ran[name]
        assert len(ran[name]) == node.steps > 0


def test_a_step_is_judged_when_the_next_one_has_been_put_together() -> None:
    order: dict[str, list[str]] = {}

    class Noting(PlannedRule):
        def __init__(self, name: str) -> None:
            self.order = order.setdefault(name, [])

        def observe(
            self, load: StepLoad, predicted_ms: float, measured_ms: float
        ) -> None:
            self.order.append("judged")

        @property
        def limits_ordinary(self) -> bool:  # type: ignore[override]
            # Asked whenever a step is put together that is not decodes alone.
            self.order.append("planned")
            return False

    settings = ClusterSettings(
        MODEL, PROFILE.link_model(), limits_of(PROFILE), rule=Noting
    )
    rows = [TraceRow(0.0, 20_000, 2)]
    Cluster(settings, make_policy("disagg", Settings()), rows).run()
    # Three chunks of a prompt; after the last a step that holds nothing.
    assert order["p0"] == ["planned", *["planned", "judged"] * 3]


def test_the_loop_learns_once_from_a_step_by_what_it_held() -> None:
    loops: dict[str, Counting] = {}

    def rule(name: str) -> AdaptiveRule:
        return AdaptiveRule(MODEL, loops.setdefault(name, Counting()))

    settings = ClusterSettings(
        MODEL, PROFILE.link_model(), limits_of(PROFILE), rule=rule
    )
    run = Cluster(settings, make_policy("kairos", Settings()), bursty(150, 9.0))
    mixed = dict.fromkeys(run.nodes, 0)
    alone = dict.fromkeys(run.nodes, 0)

    def note(node: SimNode, load: StepLoad, took_ms: float) -> None:
        if load.decodes:
            (mixed if load.prefill_tokens else alone)[node.name] += 1

    run.on_step = note
    run.run()
    for node in run.decode:
        loop = loops[node.name]
        assert loop.mixed == loop.steps == mixed[node.name] > 0
        assert loop.decodes_alone == alone[node.name] > 0
    for node in run.prefill:
        # Nobody waits for a token there.
        assert loops[node.name].mixed == loops[node.name].decodes_alone == 0
