# SPDX-License-Identifier: Apache-2.0
"""Rows of a step log that say nothing about how long a step takes.

Two kinds. A *hidden* step is one whose work was measured elsewhere: under
asynchronous scheduling a step that carries a prefill can be logged in less
time than decodes alone take, its work in the row before. It is left out of
fits and of validation alike, and counted. A *stray* step is far from what a
robust fit of its own log says (first steps, compilation, garbage collection):
it is left out of the fit only and still counts in every reported error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_kairos.core.predictor import Array
from vllm_kairos.profiling.steps import Steps

Mask = npt.NDArray[np.bool_]

#: Percentile of decode-only latency under which a prefill counts as hidden.
HIDDEN_PERCENTILE = 1.0

#: Fewest decode-only steps that such a percentile is taken of.
_FEWEST_DECODES = 50

#: A chunk below this may truly vanish in the noise of a decode step.
_HIDDEN_TOKENS = 32

#: A stray step is off by this factor, and by this many robust deviations.
STRAY_FACTOR = 1.2
_STRAY_DEVIATIONS = 6.0

#: More strays than this share are no strays: the form does not fit.
_MOST_STRAY_SHARE = 0.05


def hidden(steps: Steps) -> Mask:
    """Steps that carry a prefill in less time than a decode step takes."""
    decode = steps.is_decode
    if int(decode.sum()) < _FEWEST_DECODES:
        return np.zeros(len(steps), dtype=np.bool_)
    floor = np.percentile(steps.latency_ms[decode], HIDDEN_PERCENTILE)
    mask: Mask = (
        steps.is_mixed
        & (steps.prefill_tokens >= _HIDDEN_TOKENS)
        & (steps.latency_ms < floor)
    )
    return mask


def empty(steps: Steps) -> Mask:
    """Steps with neither decode nor prefill: nothing was computed."""
    mask: Mask = (steps.decodes <= 0) & (steps.prefill_tokens <= 0)
    return mask


def stray(predicted_ms: Array, measured_ms: Array) -> Mask:
    """Steps far from a robust fit of their own log.

    None where there would be so many that the fit must be to blame.
    """
    deviation = np.log(measured_ms / np.maximum(predicted_ms, 1e-9))
    spread = 1.4826 * float(np.median(np.abs(deviation)))
    limit = max(np.log(STRAY_FACTOR), _STRAY_DEVIATIONS * spread)
    mask: Mask = np.abs(deviation) > limit
    if mask.sum() > max(2.0, _MOST_STRAY_SHARE * mask.size):
        return np.zeros(mask.size, dtype=np.bool_)
    return mask


def measured_where_it_happened(steps: Steps) -> tuple[Steps, dict[str, int]]:
    """Steps without empty and hidden ones, and how many of each there were."""
    dropped = {"empty": empty(steps), "hidden": hidden(steps)}
    keep = ~(dropped["empty"] | dropped["hidden"])
    return steps.take(keep), {name: int(mask.sum()) for name, mask in dropped.items()}
