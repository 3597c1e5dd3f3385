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
_MOST_KEPT = 512

#: What names a step: the ``num_scheduled_tokens`` of its ``SchedulerOutput``,
#: the very object. To keep the output itself would be to keep vLLM from using
#: its memory again for the next step's, which is in the processor's cache.
StepKey = dict[str, int]

#: Step, what it holds, when it began, predicted milliseconds. Without a key: the
#: steps that nobody tells of, and what the next of them holds.
_Step = tuple[StepKey | None, StepLoad, float, float]


class StepMeter:
    """Times steps from schedule to output and feeds what learns from them.

    Where the same requests decode on and on, a step is the one before it with a
    token more of each: nobody tells of those (`decodes_alone`).

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
        alone: Steps run that nobody tells of, as `decodes_alone` said.
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
        # Bounded like `_outcomes`: without EngineCore's asking nobody settles.
        self.ended: deque[tuple[StepKey, float]] = deque(maxlen=_MOST_KEPT)
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
        self._outcomes: deque[tuple[StepLoad, float, float]] = deque(maxlen=_MOST_KEPT)
        self._in_flight: deque[_Step] = deque()
        self._steps = 0
        self._last_end_s = float("-inf")
        self.contiguous = False
        self.alone = False
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

    def decodes_alone(self, decodes: int, kv_tokens: int) -> None:
        """Steps follow that nobody tells of, until the next that is told of.

        Args:
            decodes: Requests that decode, ``B``.
            kv_tokens: Their KV tokens ``K`` before the first of these steps.
        """
        in_flight = self._in_flight
        if in_flight and in_flight[-1][0] is None:
            in_flight.pop()
        load = StepLoad(decodes, kv_tokens, decodes)
        in_flight.append((None, load, float("-inf"), 0.0))

    def decodes_less(self, kv_tokens: int) -> None:
        """Of those steps, the ones that have not ended hold a request less.

        Args:
            kv_tokens: Its KV tokens.
        """
        if self.alone:
            self.settle()
            self._in_flight[-1][1].decode_kv_tokens -= kv_tokens

    def _predict_ms(self, load: StepLoad) -> float:
        return 0.0 if self._model is None else self._model.load_ms(load)

    def scheduled_nothing(self) -> None:
        """A step without tokens: the engine waits for something."""
        self.contiguous = False

    def settle(self, but: int = 0) -> None:
        """Judge the steps that have ended, before anything later is told.

        Each is compared with its prediction, and who learns from it is told.

        Args:
            but: So many are left for the next time.
        """
        ended, in_flight = self.ended, self._in_flight
        while len(ended) > but:
            key, end_s = ended[0]
            step: _Step | None
            if in_flight and in_flight[0][0] is key:
                step = in_flight.popleft()
            else:
                step = self._find(key)
            if step is not None:
                _, load, started_s, predicted_ms = step
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
                    self._record(load, end_s, measured_ms)
            # Taken away last: until then `remaining_ms` knows that it is over.
            ended.popleft()

    def _find(self, key: StepKey) -> _Step | None:
        """A step that is not the next in flight; one without output is passed over.

        Args:
            key: Names the step; its output is here.

        Returns:
            The step, no longer in flight; `None` where it held nothing.
        """
        in_flight = self._in_flight
        keys = [step[0] for step in in_flight]
        at = next((at for at, known in enumerate(keys) if known is key), None)
        untold = at is None
        if at is None:
            if not key or None not in keys:
                return None
            at = keys.index(None)
        for _ in range(at):
            in_flight.popleft()
        if not untold:
            return in_flight.popleft()
        decodes, next_load = len(key), in_flight[0][1]
        load = StepLoad(decodes, next_load.decode_kv_tokens, decodes)
        next_load.decode_kv_tokens += decodes
        return key, load, float("-inf"), self._predict_ms(load)

    def _record(self, load: StepLoad, end_s: float, measured_ms: float) -> None:
        self._records.append(
            StepRecord(
                self._steps,
                self._wall_clock_s() - (self._clock_s() - end_s),
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
        in_flight, ended = self._in_flight, self.ended
        predicted_ms, started_s = self._predicted_ms, self._started_s
        if self.alone:
            try:
                predicted_ms = self._predict_ms(in_flight[-1][1])
                started_s = max(started_s, ended[-1][1])
            except IndexError:  # They have just been judged.
                started_s = max(started_s, self._last_end_s)
        elif len(in_flight) <= len(ended) or in_flight[-1][0] is None:
            return 0.0
        return max(0.0, predicted_ms - (self._clock_s() - started_s) * 1e3)

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
