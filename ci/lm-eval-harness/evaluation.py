# SPDX-License-Identifier: Apache-2.0
"""What an arm said: plain data, compared by compare.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Generation:
    """What a model said to one prompt.

    Attributes:
        prompt: Token ids of the prompt.
        tokens: Token ids generated.
        logprobs: Log-probability of each, empty over the chat API.
        runners_up: Of each, the distance to the best other token.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    runners_up: tuple[float, ...] = ()


@dataclass(frozen=True)
class Work:
    """What one engine's steps held, by its own records.

    Attributes:
        prefill_tokens: Prompt tokens computed.
        pieces: Parts they were computed in: a prompt in one step is one.
        longest_piece: Tokens of the largest step.
    """

    prefill_tokens: int = 0
    pieces: int = 0
    longest_piece: int = 0


@dataclass
class Evaluation:
    """One pass of the tasks over one arm.

    Attributes:
        arm: Its name.
        metrics: By task and metric.
        likelihoods: Log-likelihoods by task, in document order.
        generations: By task and prompt.
        routes: Requests by the path the proxy took; empty for one engine.
        work: By task and engine, where prompts were computed.
        seconds: How long it took.
    """

    arm: str
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)
    likelihoods: dict[str, list[float]] = field(default_factory=dict)
    generations: dict[str, dict[tuple[int, ...], Generation]] = field(
        default_factory=dict
    )
    routes: Counter[str] = field(default_factory=Counter)
    work: dict[str, dict[str, Work]] = field(default_factory=dict)
    seconds: float = 0.0
