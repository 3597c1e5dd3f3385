# SPDX-License-Identifier: Apache-2.0
"""The loop that keeps packed steps inside the TBT SLO when the model errs.

Packing every step to exactly ``beta * tau`` is worse than no loop at all once
predictions have an error: half of the steps land above the bound, and a bias
puts all of them there. So the bound is learnt: the ratio of measured to
predicted latency is tracked, and the bound on a *prediction* is put where the
wanted share of decode steps is expected to come out late.
"""

from __future__ import annotations

import math
from math import copysign, exp, log, sqrt
from statistics import NormalDist

_INFINITE = math.inf

# Of the module, not of the class: in every step that carries a prefill they are
# looked up, and by way of an instance that takes five times as long.
#: Observations that the starting values weigh as much as.
_PRIOR_STEPS = 8.0
#: Steps that carry a prefill may be late so many times as often as all.
_MOST_UNEVEN = 4.0
#: Memory of what the last few steps were like, and what is too little of it
#: to matter.
_RECENT_STEPS = 10
_TOO_LITTLE = 1e-3
#: Memory of how many steps carry one, and how many are counted at a time.
_SHARE_STEPS = 1000
_COUNTED_STEPS = 16
_TRIM_STEP = 0.05
_LEAST_TRIM, _MOST_TRIM = 0.7, 1.05
#: Rounding does not put a step over the bound.
_JUST_OVER = 1.0 + 1e-9
#: A step's bound so far above the present one is from before a late step;
#: what each step changes by itself is less.
_LOWERED = 1.02
#: Steps without a prefill that change nothing; in a busy engine prefills
#: come more often than that. And the memory of what comes after them.
_QUIET_STEPS = 64
_QUIET_MEMORY_STEPS = 200
#: Room above the decodes, as a share of what the starting bound gives them,
#: from which on prefills tell enough by themselves.
_ROOM_TO_LEARN = 0.25
#: Outside of these a profile is of another machine.
_MOST_LOG_RATIO = math.log(4.0)


class Feedback:
    """Bound on the predicted latency of a step that carries a prefill.

    The log of measured / predicted is taken as normal with a mean (the bias)
    and a spread that are averaged with exponentially falling weights, so

    ``limit = tau * exp(-(mean + lean + z * spread)) * trim``

    What slows a step down (a neighbour on the same cores, a transfer) often
    slows down the next ones too: `lean` is how far the last few were off the
    mean, times what such a distance has told of the next step so far, which
    is nothing where errors are independent. The spread is what is left. While
    decodes alone run the last few grow old, and tell less with every step.

    ``z`` belongs to the share of these steps that may be late. `trim` is moved
    by every step that was not known beforehand to be over the bound, a little
    up when it was in time and a lot down when it was late, so that their share
    settles there whatever the true distribution (stochastic approximation of a
    quantile).

    The target is a share of all steps that decode. Where few of them carry a
    prefill, each of those may be late more often, up to `_MOST_UNEVEN` times
    as often, less what decodes alone are late.

    A bound can fall so low that no prefill fits any more, and then no step
    would ever tell that the trouble is over. So after a while without a prefill
    and with next to no room for one, what was learnt gives way to what steps of
    decodes alone are telling, until there is some room to learn anew in.

    Args:
        tau_ms: TBT SLO.
        beta: Bound to start with, as a share of `tau_ms`.
        beta_most: The bound never exceeds this share of `tau_ms` on a
            corrected prediction.
        late_share: Target share of decode steps over `tau_ms`.
        memory_steps: Steps after which an observation has lost most of its
            weight.
        learns: False keeps the starting bound, for comparison.
    """

    __slots__ = (
        "tau_ms",
        "limit_ms",
        "late",
        "steps",
        "_beta_most",
        "_far",
        "_late_share",
        "_most_late",
        "_target_z",
        "_z",
        "_z_slope",
        "_carrying",
        "_late_alone",
        "_carried",
        "_alone",
        "_alone_late",
        "_share",
        "_decay",
        "_weight",
        "_mean",
        "_recent",
        "_told",
        "_recent_power",
        "_lean",
        "_variance",
        "_trim",
        "_learns",
        "_quiet_steps",
        "_decode_mean",
        "_decode_variance",
        "first_limit_ms",
    )

    def __init__(
        self,
        tau_ms: float,
        beta: float = 0.9,
        beta_most: float = 0.98,
        late_share: float = 0.005,
        memory_steps: int = 400,
        learns: bool = True,
    ):
        self.tau_ms = tau_ms
        self.late = 0
        self.steps = 0
        self._beta_most = max(beta, beta_most)
        #: So far below `tau_ms` (logarithm) it is never exceeded.
        self._far = log(_MOST_TRIM / self._beta_most)
        self._late_share = late_share
        normal = NormalDist()
        self._target_z = normal.inv_cdf(1.0 - late_share)
        # Between the two shares z is all but linear in the log of the share.
        # Above a half the slope would be of the wrong tail, and above one a late
        # step would raise the bound.
        self._most_late = most_late = min(0.5, _MOST_UNEVEN * late_share)
        lower = normal.inv_cdf(1.0 - most_late) - self._target_z
        self._z_slope = lower / log(most_late / late_share)
        #: Share of the decode steps that carry a prefill, and of those that
        #: carry none and are late.
        self._carrying = 1.0
        self._late_alone = 0.0
        #: Steps of either kind, and late ones, that are not in these yet.
        self._carried = self._alone = self._alone_late = 0
        #: Share of the steps that carry a prefill which may be late, and its z.
        self._share = late_share
        self._z = self._target_z
        self._decay = 1.0 - 1.0 / memory_steps
        self._weight = _PRIOR_STEPS
        self._mean = 0.0
        #: How far the last few steps were off the mean; its product with how
        #: far the next one was, and its square, on average.
        self._recent = self._told = self._recent_power = 0.0
        self._lean = 0.0
        # The spread that would make the starting bound the right one.
        self._variance = (-math.log(beta) / self._z) ** 2
        self._trim = 1.0
        self._learns = learns
        self._quiet_steps = 0
        self._decode_mean = 0.0
        self._decode_variance = self._variance
        self.first_limit_ms = self.limit_ms = self._limit_ms()

    @property
    def bias(self) -> float:
        """Measured over predicted, on average."""
        return math.exp(self._mean)

    @property
    def spread(self) -> float:
        """Standard deviation of the log of measured / predicted."""
        return math.sqrt(self._variance)

    def observe(
        self, predicted_ms: float, measured_ms: float, limit_ms: float = _INFINITE
    ) -> None:
        """Take a step that carried a prefill beside decodes.

        Args:
            predicted_ms: As the profile says, uncorrected.
            measured_ms: As it was.
            limit_ms: Bound that it was put together under.
        """
        if not (0.0 < predicted_ms < _INFINITE and 0.0 < measured_ms < _INFINITE):
            return
        # Done in every step that carries a prefill: attributes are read and
        # written once.
        late = measured_ms > self.tau_ms
        self.steps += 1
        if late:
            self.late += 1
        if not self._learns:
            return
        self._quiet_steps = 0
        carried = self._carried = self._carried + 1
        if carried == _COUNTED_STEPS:
            self._count_steps()
        ratio = log(measured_ms / predicted_ms)
        if not -_MOST_LOG_RATIO < ratio < _MOST_LOG_RATIO:
            ratio = copysign(_MOST_LOG_RATIO, ratio)
        weight = self._weight = self._weight * self._decay + 1.0
        delta, recent = ratio - self._mean, self._recent
        error = delta - self._lean
        self._variance += (error * error - self._variance) / weight
        told = self._told = self._told + (delta * recent - self._told) / weight
        power = self._recent_power
        power = self._recent_power = power + (recent * recent - power) / weight
        self._mean += delta / weight
        recent = self._recent = recent + (delta - recent) / _RECENT_STEPS
        if told <= 0.0:
            self._lean = 0.0
        else:
            self._lean = recent * told / power if told < power else recent
        if predicted_ms > limit_ms * _JUST_OVER:
            # Known to be over the bound, by an override or by its decodes
            # alone: that it is late says nothing against the bound.
            pass
        elif late and self.limit_ms * _LOWERED < limit_ms < _INFINITE:
            # Put together before the bound was lowered, since an engine judges
            # a step beside the next one: one cause must not lower it twice.
            pass
        elif late:
            trim = self._trim * (1.0 - _TRIM_STEP * (1.0 - self._share))
            self._trim = trim if trim > _LEAST_TRIM else _LEAST_TRIM
        elif predicted_ms >= 0.97 * self.limit_ms:
            # A step far below the bound tells nothing of where it should be.
            trim = self._trim * (1.0 + _TRIM_STEP * self._share)
            self._trim = trim if trim < _MOST_TRIM else _MOST_TRIM
        self.limit_ms = self._limit_ms()

    def observe_decodes(self, predicted_ms: float, measured_ms: float) -> None:
        """Take a step that held decodes alone.

        Args:
            predicted_ms: As the profile says, uncorrected.
            measured_ms: As it was.
        """
        if not self._learns or not (
            0.0 < predicted_ms < _INFINITE and 0.0 < measured_ms < _INFINITE
        ):
            return
        self._alone += 1
        if measured_ms > self.tau_ms:
            self._alone_late += 1
        if self._alone == _COUNTED_STEPS:
            self._count_steps()
        rate = 1.0 / _QUIET_MEMORY_STEPS
        ratio = log(measured_ms / predicted_ms)
        if not -_MOST_LOG_RATIO < ratio < _MOST_LOG_RATIO:
            ratio = copysign(_MOST_LOG_RATIO, ratio)
        delta = ratio - self._decode_mean
        self._decode_mean += rate * delta
        self._decode_variance += rate * (
            (1.0 - rate) * delta * delta - self._decode_variance
        )
        if self._recent:
            self._age_recent()
        self._quiet_steps += 1
        room_ms = self.first_limit_ms - predicted_ms
        if (
            self._quiet_steps <= _QUIET_STEPS
            or self.limit_ms - predicted_ms >= _ROOM_TO_LEARN * room_ms
        ):
            return
        # What is forgotten weighs no more against what comes.
        self._weight += rate * (_PRIOR_STEPS - self._weight)
        self._mean += rate * (self._decode_mean - self._mean)
        self._variance += rate * (self._decode_variance - self._variance)
        self._trim += rate * (1.0 - self._trim)
        self.limit_ms = self._limit_ms()

    def _age_recent(self) -> None:
        """The last few steps that carried a prefill are one step longer ago."""
        keep = 1.0 - 1.0 / _RECENT_STEPS
        recent = self._recent * keep
        if not -_TOO_LITTLE < recent < _TOO_LITTLE:
            self._recent = recent
            lean = self._lean * keep
        else:
            # The lean is never more than this.
            self._recent = lean = 0.0
        if lean != self._lean:
            self._lean = lean
            self.limit_ms = self._limit_ms()

    def _count_steps(self) -> None:
        """Find out anew how often steps that carry a prefill may be late."""
        carried, alone = self._carried, self._alone
        steps = carried + alone
        new = 1.0 - (1.0 - 1.0 / _SHARE_STEPS) ** steps
        self._carrying += new * (carried / steps - self._carrying)
        self._late_alone += new * (self._alone_late / steps - self._late_alone)
        self._carried = self._alone = self._alone_late = 0
        target, carrying, most = self._late_share, self._carrying, self._most_late
        room = target - self._late_alone
        if room <= target * carrying:
            share = target
        else:
            share = most if room >= most * carrying else room / carrying
        self._share = share
        self._z = self._target_z + self._z_slope * log(share / target)

    def _limit_ms(self) -> float:
        off, fall = self._mean + self._lean, self._z * sqrt(self._variance)
        limit_ms = self.tau_ms * exp(-off - fall) * self._trim
        if fall >= self._far:
            return limit_ms
        return min(limit_ms, self.tau_ms * self._beta_most * exp(-off))
