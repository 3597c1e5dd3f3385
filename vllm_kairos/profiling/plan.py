# SPDX-License-Identifier: Apache-2.0
"""What to run on an engine so that its steps tell the coefficients apart.

Three kinds of cells. *Alone*: prompts on an idle engine, whole and in chunks
(prefill-only steps). *Grid*: ``B`` requests decode with ``K`` KV tokens each
while one prompt after the other is prefilled beside them in five chunks of a
fixed size (the paper's Figure 1). *Replay*: Gamma arrivals with lognormal
lengths at several rates (the paper's way), every other request carrying a
chunk schedule, as a decode node sees them.

Alone and in the grid one more prompt climbs a *ladder*: small chunks of every
size at several depths of its prefix. Five chunks of 32 tokens never see a long
prefix, and a busy decode node grants little else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Sizes of Figure 1 and some below, which is what a busy decode node grants.
CHUNK_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (32, 512, 2048, 8192)
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SUCCESSIVE_CHUNKS = 5
#: Chunks of every rung of a ladder, and depths of the prefix it has rungs at.
RUNG = (32, 128, 16, 256, 64)
_RUNGS = 5
#: Shares of what the engine can just serve.
LOADS = (0.4, 0.7, 0.95)

#: Coefficient of variation of arrivals, and shape of the lengths (Table 1's
#: Bursty: P90 at about three medians).
_ARRIVAL_CV = 1.3
_PROMPT_SIGMA = 0.9
_OUTPUT_SIGMA = 0.9


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the engine allows.

    Attributes:
        max_model_len: Longest sequence.
        kv_tokens: KV cache size in tokens.
        max_num_seqs: Most requests of a step.
    """

    max_model_len: int
    kv_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Alone:
    """Prompts on an idle engine.

    Attributes:
        prompt_tokens: Prompt length.
        cut: How it is cut, for the cell's name.
        chunks: The chunks it is cut into, none for the engine's own.
    """

    prompt_tokens: int
    cut: str = "whole"
    chunks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"alone-{self.prompt_tokens}-{self.cut}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Chunks of several sizes beside a decode batch.

    Attributes:
        decodes: ``B``.
        context_tokens: Prompt of each decoding request.
        chi: Step sizes, each run as `SUCCESSIVE_CHUNKS` chunks.
    """

    decodes: int
    context_tokens: int
    chi: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"grid-{self.decodes}-{self.context_tokens}"

    def prompts(self, most_tokens: float) -> list[tuple[int, ...]]:
        """Chunk schedules of the prompts to run beside the batch.

        Args:
            most_tokens: Prefill tokens there is time for; where that is too
                little for five chunks of every size, large ones get fewer,
                and the ladder is left out.

        Returns:
            Of each prompt its step sizes, decodes counted in. The first ones
            have chunks of one size, the last is a ladder.
        """
        each = max(0.0, most_tokens - self.setup_tokens) / (len(self.chi) + 1)
        prompts = []
        for chi in self.chi:
            chunk = chi - self.decodes
            if chunk <= 2 * each or chi == self.chi[0]:
                chunks = int(min(SUCCESSIVE_CHUNKS, max(1, each // chunk)))
                prompts.append((chi,) * chunks)
        longest = SUCCESSIVE_CHUNKS * (self.chi[-1] - self.decodes)
        if each >= 2 * sum(RUNG):
            climb = ladder(int(min(each, longest)), self.chi[-1] - self.decodes)
            prompts.append(tuple(chunk + self.decodes for chunk in climb))
        return prompts

    @property
    def setup_tokens(self) -> int:
        """Tokens to prefill before the batch decodes."""
        return self.decodes * self.context_tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a replay.

    Attributes:
        at_s: Seconds from its start.
        prompt_tokens: Prompt length.
        output_tokens: Output length.
        chi: Step size of its chunk schedule, zero for none.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    chi: int


def ladder(prompt_tokens: int, most_tokens: int = CHUNK_SIZES[-1]) -> tuple[int, ...]:
    """Chunks of a prompt: a `RUNG` at even depths, large chunks in between.

    Args:
        prompt_tokens: Its length, at least that of two rungs.
        most_tokens: Largest chunk.
    """
    rung = [chunk for chunk in RUNG if chunk <= most_tokens]
    rungs = max(2, min(_RUNGS, prompt_tokens // (2 * sum(rung))))
    chunks: list[int] = []
    for number in range(rungs):
        chunks += rung
        depth = (number + 1) * (prompt_tokens - sum(rung)) // (rungs - 1)
        left = min(depth, prompt_tokens) - sum(chunks)
        while left > 0:
            chunks.append(min(left, most_tokens))
            left -= chunks[-1]
    return tuple(chunks)


def alone_cells(bounds: Bounds) -> list[Alone]:
    """Prefill-only cells, those that span the range first."""
    longest = bounds.max_model_len - 2
    prompts = [tokens for tokens in PROMPTS if tokens <= longest]
    whole = [Alone(tokens) for tokens in _ends_first(prompts)]
    cut = [
        Alone(SUCCESSIVE_CHUNKS * chunk, str(chunk), (chunk,) * SUCCESSIVE_CHUNKS)
        for chunk in _ends_first([c for c in CHUNK_SIZES if c >= 128])
        if SUCCESSIVE_CHUNKS * chunk <= longest
    ]
    climbs = [
        Alone(tokens, "ladder", ladder(tokens))
        for tokens in reversed(prompts)
        if tokens >= 2 * sum(RUNG)
    ]
    return [cell for few in _interleave(whole, climbs, cut) for cell in few]


def grid_cells(bounds: Bounds) -> list[Grid]:
    """Mixed cells, those that span batch and context first."""
    cells = []
    batches = [b for b in BATCHES if b < bounds.max_num_seqs]
    contexts = [c for c in CONTEXTS if 4 * c <= 3 * bounds.max_model_len]
    for context in _ends_first(contexts):
        for decodes in _ends_first(batches):
            chi = tuple(
                size
                for size in CHUNK_SIZES
                if size > decodes
                and SUCCESSIVE_CHUNKS * (size - decodes) <= bounds.max_model_len - 2
            )
            # Each decoder grows while it is measured; leave half as much again.
            needed = 1.5 * decodes * (context + 256) + SUCCESSIVE_CHUNKS * max(
                chi, default=0
            )
            if chi and needed <= bounds.kv_tokens:
                cells.append(Grid(decodes, context, chi))
    return sorted(cells, key=_first_seen(cells))


def _first_seen(cells: Sequence[Grid]) -> Callable[[Grid], tuple[int, int]]:
    """Order by diagonal: no value of either axis waits for all of the other."""
    decodes = list(dict.fromkeys(cell.decodes for cell in cells))
    contexts = list(dict.fromkeys(cell.context_tokens for cell in cells))
    rank = {b: i for i, b in enumerate(decodes)}
    place = {c: i for i, c in enumerate(contexts)}
    return lambda cell: (
        rank[cell.decodes] + place[cell.context_tokens],
        place[cell.context_tokens],
    )


def arrivals(
    rate_per_s: float,
    duration_s: float,
    median_prompt_tokens: int,
    median_output_tokens: int,
    bounds: Bounds,
    seed: str,
    lengths: Sequence[tuple[int, int]] = (),
) -> list[Arrival]:
    """Requests of one replay.

    Args:
        rate_per_s: Mean arrival rate.
        duration_s: How long requests arrive.
        median_prompt_tokens: Of the lognormal prompt lengths.
        median_output_tokens: Of the lognormal output lengths.
        bounds: Lengths are cut to what the engine takes.
        seed: Same seed, same requests.
        lengths: ``(prompt, output)`` of a trace to draw from instead.
    """
    rng = random.Random(seed)
    shape = 1.0 / _ARRIVAL_CV**2
    longest = bounds.max_model_len // 2
    requests: list[Arrival] = []
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(shape, 1.0 / (shape * rate_per_s))
        if at_s >= duration_s:
            return requests
        if lengths:
            prompt, output = rng.choice(lengths)
        else:
            prompt = int(
                rng.lognormvariate(math.log(median_prompt_tokens), _PROMPT_SIGMA)
            )
            output = int(
                rng.lognormvariate(math.log(median_output_tokens), _OUTPUT_SIGMA)
            )
        prompt = min(max(prompt, 8), longest)
        output = min(max(output, 2), longest)
        chi = rng.choice((0, *CHUNK_SIZES))
        requests.append(Arrival(at_s, prompt, output, chi))


def _ends_first(values: Sequence[int]) -> list[int]:
    """Least, greatest, then what lies between: early data spans the range."""
    left = sorted(values)
    ordered: list[int] = []
    while left:
        ordered.append(left.pop(0))
        if left:
            ordered.append(left.pop())
    return ordered


def _interleave(*columns: Sequence[Alone]) -> list[tuple[Alone, ...]]:
    longest = max(len(column) for column in columns)
    return [
        tuple(cell for column in columns for cell in column[i : i + 1])
        for i in range(longest)
    ]
