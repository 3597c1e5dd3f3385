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
    told = Counter({"prefill_only": answers})
    assert results["pd"].routes == Counter(kept=documents) + told
    assert results["deflected"].routes == Counter(deflected=documents + answers)
    routes = results["kairos"].routes
    assert set(routes) <= {"kept", "prefill_only", "deflected"}, routes
    assert routes.total() == documents + answers, routes
    assert routes["kept"] <= documents and routes["prefill_only"] <= answers, routes


def test_prompts_were_computed_by_the_engine_their_arm_is_about_and_in_chunks(
    results: Results,
) -> None:
    harness = results.harness
    bound, decoder = harness.chunk_tokens, harness.decoder
    reference = results["alone"]
    in_chunks = Counter[str]()
    for task in harness.config.tasks:
        one = results["one at a time"].work[task.name]["prefill"]
        pd, deflected = results["pd"].work[task.name], results["deflected"].work
        asked = len(reference.generations.get(task.name, ()))
        asked += len(reference.likelihoods.get(task.name, ()))
        there, here = deflected[task.name]["prefill"], deflected[task.name][decoder]
        print(
            f"{task.name}: {asked} prompts up to {one.longest_piece} tokens long; "
            f"deflected in {here.pieces} pieces, {here.longest_piece} tokens a step"
        )
        assert pd["prefill"].prefill_tokens > 0 == pd[decoder].prefill_tokens
        assert here.prefill_tokens > 0 == there.prefill_tokens
        assert here.longest_piece <= bound
        if one.longest_piece > bound:
            assert here.pieces > asked
            in_chunks[
                "likelihood" if task.name in reference.likelihoods else "text"
            ] += 1
        if task.name in reference.likelihoods:
            # Never read from a prefix cache: all of it was computed there.
            assert here.prefill_tokens == one.prefill_tokens
    if harness.config.device == "cpu" and reference.likelihoods:
        assert set(in_chunks) == {"likelihood", "text"}
