# SPDX-License-Identifier: Apache-2.0
"""Whether two arms said the same, token by token.

The order in which a sum is taken changes the last bits of it, and a batch of
other requests changes that order, on one engine too. So the same tasks are run
on one engine one at a time and several at a time: what differs between those
two runs is the noise, and arms are held to that.
"""

from __future__ import annotations

from dataclasses import dataclass

from evaluation import Evaluation, Generation

#: A difference this many times the noise of one engine is none of its kind.
MARGIN = 8.0
#: The least that is taken for noise: rounding of 32-bit log-probabilities.
LEAST_NOISE = 1e-4


@dataclass(frozen=True)
class Noise:
    """What batch composition alone changes on one engine.

    Attributes:
        logprob: Largest change of a token's log-probability.
        different: Generations with another token somewhere.
        compared: Generations compared.
        logprobs_changed: Tokens whose log-probability changed at all.
        tokens: Tokens compared.
    """

    logprob: float
    different: int
    compared: int
    logprobs_changed: int
    tokens: int

    @property
    def bound(self) -> float:
        """Largest change that is put down to noise."""
        return MARGIN * max(self.logprob, LEAST_NOISE)


def first_difference(a: Generation, b: Generation) -> int | None:
    """Index of the first token that differs, `None` where none does."""
    for index, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if one != other:
            return index
    if len(a.tokens) != len(b.tokens):
        return min(len(a.tokens), len(b.tokens))
    return None


def measure_noise(one: Evaluation, other: Evaluation) -> Noise:
    """The noise of one engine from two runs on it."""
    largest = 0.0
    different = compared = changed = tokens = 0
    for task, generations in one.generations.items():
        for prompt, generation in generations.items():
            again = other.generations[task][prompt]
            index = first_difference(generation, again)
            compared += 1
            different += index is not None
            for a, b in list(zip(generation.logprobs, again.logprobs, strict=False))[
                :index
            ]:
                tokens += 1
                changed += a != b
                largest = max(largest, abs(a - b))
    for task, likelihoods in one.likelihoods.items():
        for a, b in zip(likelihoods, other.likelihoods[task], strict=True):
            tokens += 1
            changed += a != b
            largest = max(largest, abs(a - b))
    return Noise(largest, different, compared, changed, tokens)


def differences(reference: Evaluation, arm: Evaluation, noise: Noise) -> list[str]:
    """What an arm says differently, noise excepted, a line each.

    Args:
        reference: One engine's evaluation.
        arm: The arm's, of the same tasks or fewer documents.
        noise: Of one engine.
    """
    found = []
    for task, generations in arm.generations.items():
        for prompt, generation in generations.items():
            expected = reference.generations[task].get(prompt)
            where = f"{arm.arm}, {task}, prompt of {len(prompt)} tokens"
            if expected is None:
                found.append(f"{where}: another prompt than on one engine")
            elif line := _difference(expected, generation, noise):
                found.append(f"{where}: {line}")
    for task, likelihoods in arm.likelihoods.items():
        pairs = zip(reference.likelihoods[task], likelihoods, strict=True)
        for number, (a, b) in enumerate(pairs):
            if abs(a - b) > noise.bound:
                found.append(
                    f"{arm.arm}, {task}, answer {number}: log-likelihood {b:.4f}, "
                    f"{a:.4f} on one engine"
                )
    return found


def _difference(expected: Generation, got: Generation, noise: Noise) -> str:
    index = first_difference(expected, got)
    pairs = list(zip(expected.logprobs, got.logprobs, strict=False))[:index]
    for at, (a, b) in enumerate(pairs):
        if abs(a - b) > noise.bound:
            return (
                f"log-probability of token {at} is {b:.4f}, {a:.4f} on one engine, "
                f"more apart than the noise of {noise.logprob:.2g}"
            )
    if index is None:
        return ""
    if index < len(expected.runners_up) and expected.runners_up[index] <= noise.bound:
        # Two tokens so close that batch composition decides between them.
        return ""
    return (
        f"first different token is number {index}: "
        f"{list(got.tokens[index : index + 3])}, "
        f"{list(expected.tokens[index : index + 3])} on one engine"
    )
