# SPDX-License-Identifier: Apache-2.0
"""The harness goes red for KV that is wrong: a check that cannot fail is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compare import differences
from evaluation import Evaluation
from models import TaskConfig
from results import Results

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

#: Documents, of which the first of both tasks are more than one chunk.
LIMIT = 3
#: Generated text whose answer stands at one place of a long prompt, and
#: log-likelihoods, which are told by the prefill itself.
TASKS = ("kairos_recall", "kairos_choice")


@pytest.fixture
def tasks(results: Results) -> dict[str, TaskConfig]:
    """The tasks of `TASKS` by name."""
    if "faulty" not in results.harness.engines:
        pytest.skip("faults are seeded on CPU engines")
    return {t.name: t for t in results.harness.config.tasks if t.name in TASKS}


def run(results: Results, fault: str, arm: str, task: TaskConfig) -> Evaluation:
    results.harness.set_fault(fault)
    try:
        return results.harness.evaluate(arm, [task], limit=LIMIT)
    finally:
        results.harness.set_fault("")


def differences_of(results: Results, found: Evaluation) -> list[str]:
    """Differences in the documents that were asked."""
    reference = results["alone"]
    answers = {
        task: reference.likelihoods[task][: len(likelihoods)]
        for task, likelihoods in found.likelihoods.items()
    }
    asked = replace(reference, likelihoods=answers)
    return differences(asked, found, results.noise)


@pytest.mark.parametrize(
    ("arm", "name", "routes"),
    [
        ("faulty_pd", "kairos_recall", {"kept": 3}),
        ("faulty_deflected", "kairos_recall", {"deflected": 3}),
        # Three answers to each of two questions, and four to the third.
        ("faulty_deflected", "kairos_choice", {"deflected": 10}),
    ],
)
def test_without_a_fault_the_engine_that_can_have_one_is_right(
    results: Results,
    tasks: dict[str, TaskConfig],
    arm: str,
    name: str,
    routes: dict[str, int],
) -> None:
    found = run(results, "", arm, tasks[name])
    assert differences_of(results, found) == []
    assert found.routes == routes


@pytest.mark.parametrize(
    ("fault", "arm", "name"),
    [
        ("corrupt_block", "faulty_deflected", "kairos_recall"),
        ("corrupt_block", "faulty_deflected", "kairos_choice"),
        ("swap_blocks", "faulty_pd", "kairos_recall"),
        ("drop_last_chunk", "faulty_deflected", "kairos_recall"),
    ],
)
def test_a_fault_turns_the_harness_red(
    results: Results,
    tasks: dict[str, TaskConfig],
    fault: str,
    arm: str,
    name: str,
) -> None:
    log = results.harness.engines["faulty"].log
    before = log.stat().st_size
    found = run(results, fault, arm, tasks[name])
    assert b"Test fault:" in log.read_bytes()[before:], "the fault was not there at all"
    lines = differences_of(results, found)
    for line in lines:
        print(line)
    assert lines, f"{fault} went unseen"
    for (task, metric), value in found.metrics.items():
        print(f"{fault}: {task} | {metric}: {value:.3f}")
