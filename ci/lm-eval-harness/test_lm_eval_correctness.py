# SPDX-License-Identifier: Apache-2.0
"""lm-eval against one engine, P/D, every request deflected, and Kairos.

    pytest -s -v ci/lm-eval-harness \
        --config-list-file=ci/lm-eval-harness/configs/models-small.txt

With ``--fault corrupt_block`` (or another, see faults.py) these tests fail.
"""

from __future__ import annotations

from collections import Counter

import pytest
from compare import differences
from results import Results

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

ARMS = ("pd", "deflected", "kairos")


def test_one_engine_reaches_every_value(results: Results) -> None:
    config = results.harness.config
    measured = results["alone"].metrics
    short = []
    for task in config.tasks:
        for metric in task.metrics:
            value = measured[task.name, metric.name]
            print(
                f"{task.name} | {metric.name}: ground_truth={metric.value:.3f} | "
                f"measured={value:.3f} | rtol={config.rtol}"
            )
            if value < metric.value * (1 - config.rtol):
                short.append((task.name, metric.name, value))
    assert not short


def test_batch_composition_alone_changes_low_bits_on_one_engine(
    results: Results,
) -> None:
    noise = results.noise
    print(
        f"one engine, one request at a time or {results.harness.config.num_concurrent}:"
        f" {noise.logprobs_changed} of {noise.tokens} log-probabilities differ, by "
        f"{noise.logprob:.2g} at most; {noise.different} of {noise.compared} "
        "generations have another token"
    )
    assert noise.compared > 0 and noise.tokens > noise.compared
    # Noise above this would excuse what a wrong KV block does.
    assert noise.bound < 0.5


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_says_what_one_engine_says(results: Results, arm: str) -> None:
    reference, noise = results["alone"], results.noise
    found = differences(reference, results[arm], noise)
    for line in found:
        print(line)
    assert found == []


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_scores_what_one_engine_scores(results: Results, arm: str) -> None:
    once, again = results["alone"].metrics, results["one at a time"].metrics
    for key, value in results[arm].metrics.items():
        # What the same engine differs by with itself, and no more.
        noise = abs(once[key] - again[key])
        assert abs(value - once[key]) <= noise + 1e-9, (arm, *key, value, once[key])


def test_requests_took_the_path_that_their_arm_is_about(results: Results) -> None:
    reference = results["alone"]
    documents = sum(len(found) for found in reference.generations.values())
    answers = sum(len(found) for found in reference.likelihoods.values())
    assert documents > 0
    # lm-eval asks for log-likelihoods with echo and one token: no decode at all.
    echoed = Counter({"prefill_only": answers})
    assert results["pd"].routes == Counter(kept=documents) + echoed
    assert results["deflected"].routes == Counter(deflected=documents) + echoed
    routes = results["kairos"].routes
    assert routes["kept"] + routes["deflected"] == documents, routes
    assert routes["prefill_only"] == answers
