# SPDX-License-Identifier: Apache-2.0
"""The step clock: how long each step took, and how long it should have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from vllm.logger import init_logger

from vllm_kairos.core.chunk_rule import ChunkRule
from vllm_kairos.core.online_error import OnlineError
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.engine.recorder import StepLog, StepRecord

logger = init_logger(__name__)

_MOST_RECENT_STEPS = 64

#: What names a step: the ``num_scheduled_tokens`` of its ``SchedulerOutput``,
#: the very object. To keep the output itself would be to keep vLLM from using
#: its memory again for the next step's, which is in the processor's cache.
StepKey = dict[str, int]


class StepMeter:
    """Times steps from schedule to output and feeds what learns from them.

    A step begins when it is scheduled or, with the step before still running
    or just over, when that one has ended: what the engine does in between is
    part of what a decode feels.

    Args:
        clock_s: Step clock.
        wall_clock_s: Unix time.
        model: Step model, `None` without a profile.
        rule: Told of every step.
        log: Gets a record of every step, `None` for no records.
        errors: Gets every prediction and its outcome.
        refit_command: What a warning tells the user to run.

    Attributes:
        on: Somebody wants to know: there is a profile to be held to, or a log.
            Without either a step is not even looked at.
        recent: ``(predicted ms or -1, measured ms)`` of recent steps.
        ended: Steps whose output is here, each with when it came by the step
            clock; put there as they come, judged by `settle`.
        contiguous: A step that is scheduled while requests run begins when the
            one before it ends.
    """

    def __init__(
        self,
        clock_s: Callable[[], float],
        wall_clock_s: Callable[[], float],
        model: StepModel | None,
        rule: ChunkRule,
        log: StepLog | None,
        errors: OnlineError,
        refit_command: str,
    ):
        self.recent: deque[tuple[float, float]] = deque(maxlen=_MOST_RECENT_STEPS)
        self.errors = errors
        self.ended: deque[tuple[StepKey, float]] = deque()
        self.on = model is not None or log is not None
        self._clock_s = clock_s
        self._wall_clock_s = wall_clock_s
        self._model = model
        self._rule = rule
        self._log = log
        self._refit_command = refit_command
        self._records: deque[StepRecord] = deque()
        #: What a step held, predicted and measured milliseconds. Bounded:
        #: without a heartbeat nobody takes from it.
        self._outcomes: deque[tuple[StepLoad, float, float]] = deque(maxlen=512)
        #: Step, what it holds, when it began, predicted milliseconds.
        self._in_flight: deque[tuple[StepKey, StepLoad, float, float]] = deque()
        self._steps = 0
        self._last_end_s = float("-inf")
        self.contiguous = False
        self._started_s = 0.0
        self._predicted_ms = 0.0

    def scheduled(self, key: StepKey, load: StepLoad, began_s: float | None) -> None:
        """A step that holds tokens has been scheduled.

        Args:
            key: Names the step.
            load: What it holds.
            began_s: Step clock when scheduling began; `None` where the step
                begins when the one before it ends.
        """
        in_flight, last_end_s = self._in_flight, self._last_end_s
        if began_s is None:
            began_s = last_end_s
            if in_flight and in_flight[-1][2] > began_s:
                # The step before may have begun long after the one before that.
                began_s = in_flight[-1][2]
        model = self._model
        predicted_ms = 0.0 if model is None else model.load_ms(load)
        in_flight.append((key, load, began_s, predicted_ms))
        self._started_s = began_s if began_s > last_end_s else last_end_s
        self._predicted_ms = predicted_ms

    def scheduled_nothing(self) -> None:
        """A step without tokens: the engine waits for something."""
        self.contiguous = False

    def settle(self) -> None:
        """Judge the steps that have ended, before anything later is told.

        Each is compared with its prediction, and who learns from it is told.
        """
        ended, in_flight = self.ended, self._in_flight
        while ended:
            key, end_s = ended[0]
            if (in_flight and in_flight[0][0] is key) or self._skip_to(key):
                _, load, started_s, predicted_ms = in_flight.popleft()
                last_end_s = self._last_end_s
                if started_s < last_end_s:
                    started_s = last_end_s
                self._last_end_s = end_s
                measured_ms = (end_s - started_s) * 1e3
                self.contiguous = True
                self.recent.append((predicted_ms or -1.0, measured_ms))
                self._rule.observe(load, predicted_ms, measured_ms)
                if self._model is not None:
                    self._outcomes.append((load, predicted_ms, measured_ms))
                if self._log is not None:
                    self._record(load, measured_ms)
            # Taken away last: until then `remaining_ms` knows that it is over.
            ended.popleft()

    def _skip_to(self, key: StepKey) -> bool:
        """Pass over steps without an output; outputs come in order.

        Returns:
            Whether the step is in flight.
        """
        in_flight = self._in_flight
        if not any(step is key for step, *_ in in_flight):
            return False
        while in_flight[0][0] is not key:
            in_flight.popleft()
        return True

    def _record(self, load: StepLoad, measured_ms: float) -> None:
        self._records.append(
            StepRecord(
                self._steps,
                self._wall_clock_s(),
                load.prefill_tokens,
                load.prefills,
                load.prefill_kv_tokens,
                load.decodes,
                load.decode_kv_tokens,
                measured_ms,
            )
        )
        self._steps += 1

    def remaining_ms(self) -> float:
        """Predicted remainder of the step in flight. Any thread."""
        if len(self._in_flight) <= len(self.ended) or not self._predicted_ms:
            return 0.0
        age_ms = (self._clock_s() - self._started_s) * 1e3
        return max(0.0, self._predicted_ms - age_ms)

    def digest(self) -> None:
        """Judge the predictions and write the records so far. Heartbeat thread.

        Neither is needed by the next step, so no step pays for it.
        """
        outcomes, model = self._outcomes, self._model
        if model is not None:
            for _ in range(len(outcomes)):
                load, predicted_ms, measured_ms = outcomes.popleft()
                decodes, tokens = load.decodes, load.prefill_tokens
                outside = model.outside(
                    decodes,
                    load.decode_kv_tokens,
                    tokens,
                    load.prefill_kv_tokens,
                    load.prefills,
                )
                self.errors.add(decodes, tokens, predicted_ms, measured_ms, outside)
            warning = self.errors.warning(self._refit_command)
            if warning is not None:
                logger.warning("Kairos: %s", warning)
        records = self._records
        if self._log is None or not records:
            return
        self._log.write([records.popleft() for _ in range(len(records))])

    def close(self) -> None:
        """Write what is left and close the log. May be called twice."""
        self.settle()
        self.digest()
        if self._log is not None:
            self._log.close()
            self._log = None
