# SPDX-License-Identifier: Apache-2.0
"""SLOs and workload scaled to the machine, from its profile.

The paper's are for an A100: 70 ms between tokens where a decode step takes 50,
4 s to the first token where a prompt at the 90th percentile takes about half a
second. What carries over to another machine are the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quickstart.report import Limits
from vllm_kairos.core.fleet import PrefillWork
from vllm_kairos.core.prefill import drain_ms
from vllm_kairos.core.profile import Profile
from vllm_kairos.sim.traces import TraceRow

#: Prefill time of the median prompt. It keeps a run short: a hundred requests
#: come and go in less than a minute.
MEDIAN_PREFILL_MS = 120.0
#: Outputs are as long as Bursty's times this.
OUTPUT_SCALE = 0.4
#: Decodes that share a step while the machine is busy.
BUSY_DECODES = 8
#: TTFT SLO in prefill times of a prompt at the 90th percentile.
TTFT_SLO_PREFILLS = 6.0
#: Load of the prefill nodes: time asked for over time there is.
LOAD = 0.9


@dataclass(frozen=True)
class Plan:
    """What the machine is asked to do, and by when.

    Attributes:
        rows: Arrivals and lengths.
        rate_rps: Their mean rate.
        limits: The SLOs.
    """

    rows: list[TraceRow]
    rate_rps: float
    limits: Limits


def prefill_ms(profile: Profile, tokens: int, budget_tokens: int) -> float:
    """Predicted prefill of one prompt on an idle node."""
    return drain_ms(profile.step_model(), [PrefillWork(tokens)], budget_tokens)


def tokens_within(profile: Profile, limit_ms: float, budget_tokens: int) -> int:
    """Longest prompt that an idle node prefills within a time, at least 16."""
    low, high = 16, 1 << 17
    while low < high:
        middle = (low + high + 1) // 2
        if prefill_ms(profile, middle, budget_tokens) <= limit_ms:
            low = middle
        else:
            high = middle - 1
    return low


def scale_lengths(
    rows: Sequence[TraceRow], median_tokens: int, longest_tokens: int
) -> list[TraceRow]:
    """Rows with the same shape of lengths around another median.

    Args:
        rows: The workload.
        median_tokens: Median prompt afterwards.
        longest_tokens: Most tokens of prompt and output together.
    """
    factor = median_tokens / float(np.median([row.prompt_tokens for row in rows]))
    out = []
    for row in rows:
        output = max(2, round(row.output_tokens * OUTPUT_SCALE))
        output = min(output, longest_tokens // 4)
        prompt = max(1, round(row.prompt_tokens * factor))
        prompt = min(prompt, longest_tokens - output)
        # Ids of shared prefixes lose their meaning with the lengths.
        scaled = replace(row, prompt_tokens=prompt, output_tokens=output, hash_ids=())
        out.append(scaled)
    return out


def rate_for(
    profile: Profile, rows: Sequence[TraceRow], prefill_nodes: int, budget_tokens: int
) -> float:
    """The rate at which these prompts ask `LOAD` of the prefill nodes."""
    mean_ms = np.mean(
        [prefill_ms(profile, r.prompt_tokens, budget_tokens) for r in rows]
    )
    return LOAD * prefill_nodes * 1e3 / float(mean_ms)


def limits_for(
    profile: Profile, rows: Sequence[TraceRow], budget_tokens: int
) -> Limits:
    """SLOs that mean on this machine what the paper's mean on its own.

    Tau leaves a busy decode step room for its own noise and for a small chunk
    beside it; the TTFT SLO is a few times the prefill of a long prompt.
    """
    model = profile.step_model()
    context = round(float(np.mean([r.prompt_tokens + r.output_tokens for r in rows])))
    kv_tokens = BUSY_DECODES * context
    decode_ms = model.step_ms(BUSY_DECODES, kv_tokens)
    # Between a quiet machine's and one that does not deserve a tighter bound.
    noise = min(2.0, max(1.2, profile.decode.residual_quantiles.get("0.95", 1.2)))
    chunk_ms = model.step_ms(BUSY_DECODES, kv_tokens, 64, context)
    tau_ms = max(1.4 * decode_ms * noise, 1.2 * chunk_ms)
    long_prompt = int(np.percentile([r.prompt_tokens for r in rows], 90))
    ttft_ms = TTFT_SLO_PREFILLS * prefill_ms(profile, long_prompt, budget_tokens)
    return Limits(math.ceil(tau_ms / 5) * 5.0, math.ceil(ttft_ms / 100) * 100.0)
