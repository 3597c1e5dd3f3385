# SPDX-License-Identifier: Apache-2.0
"""The harness goes red for KV that is wrong: a check that cannot fail is none."""

from __future__ import annotations

import pytest
from compare import differences
from evaluation import Evaluation
from models import TaskConfig
from results import Results

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

#: Documents: the shortest are one chunk, of which none can be dropped.
LIMIT = 3


@pytest.fixture
def recall(results: Results) -> TaskConfig:
    """The task whose answers stand at one place of a long prompt."""
    if "faulty" not in results.harness.engines:
        pytest.skip("faults are seeded on CPU engines")
    return results.harness.config.tasks[0]


def run(results: Results, fault: str, arm: str, task: TaskConfig) -> Evaluation:
    results.harness.set_fault(fault)
    try:
        return results.harness.evaluate(arm, [task], limit=LIMIT)
    finally:
        results.harness.set_fault("")


@pytest.mark.parametrize("arm", ["faulty_pd", "faulty_deflected"])
def test_without_a_fault_the_engine_that_can_have_one_is_right(
    results: Results, recall: TaskConfig, arm: str
) -> None:
    found = run(results, "", arm, recall)
    assert differences(results["alone"], found, results.noise) == []
    assert sum(found.routes.values()) == LIMIT


@pytest.mark.parametrize(
    ("fault", "arm"),
    [
        ("corrupt_block", "faulty_deflected"),
        ("swap_blocks", "faulty_pd"),
        ("drop_last_chunk", "faulty_deflected"),
    ],
)
def test_a_fault_turns_the_harness_red(
    results: Results, recall: TaskConfig, fault: str, arm: str
) -> None:
    found = run(results, fault, arm, recall)
    log = results.harness.engines["faulty"].log.read_text(errors="replace")
    assert "Test fault:" in log, "the fault was not there at all"
    lines = differences(results["alone"], found, results.noise)
    for line in lines:
        print(line)
    assert lines, f"{fault} went unseen"
    for (task, metric), value in found.metrics.items():
        print(f"{fault}: {task} | {metric}: {value:.3f}")
