# SPDX-License-Identifier: Apache-2.0
"""Workloads: Table 1 of the paper as quantiles, and arrival processes.

The paper's trace is private. What it prints of it are quantiles; prompt and
output lengths are drawn from piecewise log-linear quantile functions through
all of them. The knots it does not print are chosen so that the median of
prompt over output comes out as printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_kairos.sim.traces import TraceRow

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of lengths.

    Attributes:
        knots: ``(probability, tokens)``, both ascending, from 0 to 1; between
            them the logarithm of the length is linear in the probability.
    """

    knots: tuple[tuple[float, float], ...]

    def at(self, probability: Array) -> npt.NDArray[np.int64]:
        """Lengths at probabilities, whole tokens, at least 1."""
        places, values = zip(*self.knots, strict=True)
        logs = np.interp(probability, places, np.log(values))
        tokens: npt.NDArray[np.int64] = np.rint(np.exp(logs)).astype(np.int64)
        return np.maximum(1, tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of Table 1.

    Attributes:
        name: Abbreviation, lower case.
        prompt: Prompt lengths.
        output: Output lengths, independent of them.
        rate_rps: The rate Table 1 gives.
        cv: Coefficient of variation of the inter-arrival times: 1 is Poisson.
            The paper gives none for Bursty.
        printed: Quantiles the paper prints or implies: ``prompt`` and
            ``output`` by probability, and the median P:D ratio.
    """

    name: str
    prompt: Quantiles
    output: Quantiles
    rate_rps: float
    cv: float = 1.0
    printed: dict[str, dict[float, float]] = field(default_factory=dict)


def _low_prompt(ninth: float, least: float, tenth: float, median: float) -> Quantiles:
    knots = ((0, least), (0.1, tenth), (0.5, median), (0.9, ninth), (1, 2070))
    return Quantiles(knots)


#: The workloads of Table 1. SL's deflection counts in Table 4 (3, 151 and 298
#: of 1,200) are quantiles of Bursty's prompts at 512, 1024 and 2048 tokens.
WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(
            "lpld",
            _low_prompt(1740, 200, 400, 842),
            Quantiles(((0, 5), (0.1, 9), (0.5, 15), (0.9, 19.6), (1, 20.4))),
            22,
            printed={"prompt": {0.5: 842}, "output": {0.5: 15}, "ratio": {0.5: 61.46}},
        ),
        Workload(
            "lphd",
            _low_prompt(1950, 200, 540, 998),
            Quantiles(((0, 164), (0.5, 191), (0.9, 225), (1, 500))),
            20,
            printed={"prompt": {0.5: 998}, "output": {0.5: 191}, "ratio": {0.5: 4.99}},
        ),
        Workload(
            "hpld",
            Quantiles(((0, 10340), (0.5, 14013), (0.9, 19000), (1, 32000))),
            Quantiles(((0, 6), (0.1, 7), (0.5, 9), (0.9, 17), (1, 20.4))),
            1,
            printed={
                "prompt": {0.5: 14013},
                "output": {0.5: 9},
                "ratio": {0.5: 1482.89},
            },
        ),
        Workload(
            "hphd",
            Quantiles(((0, 10340), (0.5, 13968), (0.9, 21000), (1, 32000))),
            Quantiles(((0, 164), (0.5, 198), (0.9, 335), (1, 700))),
            1,
            printed={
                "prompt": {0.5: 13968},
                "output": {0.5: 198},
                "ratio": {0.5: 66.53},
            },
        ),
        Workload(
            "bursty",
            Quantiles(
                (
                    (0, 300),
                    (0.0025, 512),
                    (0.1258, 1024),
                    (0.2483, 2048),
                    (0.25, 2071),
                    (0.5, 3569),
                    (0.7, 5200),
                    (0.9, 10336),
                    (0.95, 14000),
                    (0.99, 24600),
                    (1, 32000),
                )
            ),
            Quantiles(
                (
                    (0, 2),
                    (0.05, 6),
                    (0.25, 21),
                    (0.5, 50),
                    (0.7, 110),
                    (0.9, 163),
                    (0.99, 260),
                    (1, 500),
                )
            ),
            4,
            cv=1.3,
            printed={
                "prompt": {
                    0.0025: 512,
                    0.1258: 1024,
                    0.2483: 2048,
                    0.25: 2071,
                    0.5: 3569,
                    0.9: 10336,
                },
                "output": {0.25: 21, 0.5: 50, 0.9: 163},
                "ratio": {0.5: 69.67},
            },
        ),
    )
}


def arrivals_s(
    requests: int, rate_rps: float, cv: float, rng: np.random.Generator
) -> Array:
    """Arrival times of a renewal process with Gamma inter-arrival times.

    Args:
        requests: How many.
        rate_rps: Mean rate.
        cv: Coefficient of variation of the gaps: 1 is Poisson, 0 evenly
            spaced, above 1 bursty.
        rng: Source of randomness.

    Returns:
        Ascending seconds, shape ``(requests,)``.
    """
    if not rate_rps > 0:
        raise ValueError(f"rate_rps is {rate_rps!r}, expected > 0")
    if not cv >= 0:
        raise ValueError(f"cv is {cv!r}, expected >= 0")
    if cv < 1e-6:
        return np.arange(1, requests + 1) / rate_rps
    shape = 1.0 / (cv * cv)
    gaps = rng.gamma(shape, 1.0 / (rate_rps * shape), size=requests)
    times: Array = np.cumsum(gaps)
    return times


def synthesize(
    workload: Workload,
    requests: int,
    rate_rps: float | None = None,
    cv: float | None = None,
    seed: int = 0,
) -> list[TraceRow]:
    """A sample of a workload of Table 1.

    Lengths are stratified: every sample holds the quantiles as closely as its
    size allows, in random order, prompt and output shuffled apart. Seeds
    differ in order, pairing and arrivals, not in total work.

    Args:
        workload: Which.
        requests: How many.
        rate_rps: Mean arrival rate, the workload's own by default.
        cv: Of the inter-arrival times, the workload's own by default.
        seed: The same seed gives the same arrivals and lengths. Lengths do
            not depend on `rate_rps` or `cv`, and arrival times of two rates
            differ by a factor only.
    """
    lengths, times = np.random.default_rng(seed).spawn(2)
    places = (np.arange(requests) + 0.5) / max(requests, 1)
    prompt = workload.prompt.at(lengths.permutation(places))
    output = workload.output.at(lengths.permutation(places))
    at = arrivals_s(
        requests,
        workload.rate_rps if rate_rps is None else rate_rps,
        workload.cv if cv is None else cv,
        times,
    )
    return [
        TraceRow(float(t), int(p), int(o))
        for t, p, o in zip(at, prompt, output, strict=True)
    ]


def bursty(
    requests: int, rate_rps: float = 4.0, cv: float = 1.3, seed: int = 0
) -> list[TraceRow]:
    """The paper's Bursty workload: Gamma arrivals, long-tailed lengths."""
    return synthesize(WORKLOADS["bursty"], requests, rate_rps, cv, seed)


def resample(
    rows: Sequence[TraceRow],
    requests: int | None = None,
    rate_rps: float | None = None,
    cv: float | None = None,
    seed: int = 0,
) -> list[TraceRow]:
    """A trace at another rate.

    Args:
        rows: The trace, sorted by arrival.
        requests: The first so many rows; all by default. Asked for more than
            there are, the trace is repeated.
        rate_rps: Mean rate. Without `cv` the trace's own arrivals are
            stretched to it.
        cv: Draw Gamma arrivals instead of keeping the trace's own.
        seed: Of those arrivals.
    """
    count = len(rows) if requests is None else requests
    span = rows[-1].arrived_at_s * (len(rows) + 1) / max(len(rows), 1)
    out = []
    for index in range(count):
        lap, place = divmod(index, len(rows))
        row = rows[place]
        out.append(replace(row, arrived_at_s=row.arrived_at_s + lap * span))
    own = (len(out) - 1) / out[-1].arrived_at_s if out[-1].arrived_at_s > 0 else None
    if cv is not None or own is None:
        rng = np.random.default_rng(seed).spawn(2)[1]
        rate = rate_rps or own or 1.0
        at = arrivals_s(count, rate, 1.0 if cv is None else cv, rng)
        return [replace(r, arrived_at_s=float(t)) for r, t in zip(out, at, strict=True)]
    if rate_rps is None:
        return out
    factor = own / rate_rps
    return [replace(r, arrived_at_s=r.arrived_at_s * factor) for r in out]


def fit_table(
    workload: Workload, requests: int = 100_000
) -> list[tuple[str, float, float]]:
    """What the paper prints of a workload beside what the sample has.

    Returns:
        ``(quantity, asked, got)`` a row.
    """
    rows = synthesize(workload, requests, seed=1)
    prompt = np.array([r.prompt_tokens for r in rows], dtype=np.float64)
    output = np.array([r.output_tokens for r in rows], dtype=np.float64)
    of = {"prompt": prompt, "output": output, "ratio": prompt / output}
    return [
        (f"{name} P{100 * q:g}", asked, float(np.quantile(of[name], q)))
        for name, wanted in workload.printed.items()
        for q, asked in wanted.items()
    ]
