# SPDX-License-Identifier: Apache-2.0
"""How many prefill tokens a step may take, decided while it is put together.

The engine's scheduler and the simulator's nodes call the same rule.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kairos.core.chunk_tracker import ChunkTracker
from vllm_kairos.core.feedback import Feedback
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.core.step_model import StepModel


class ChunkRule(abc.ABC):
    """Bounds the prefills of a step.

    Attributes:
        limits_ordinary: Bounds ordinary prefills too, not only those with a
            schedule.
        by_slack: Among several deflected prefills the one with the least
            slack is served first; otherwise they share in arrival order.
        follows_schedule: Asks a prefill's tracker which chunk comes next, so
            somebody must tell the tracker what was granted.
        limit_ms: Bound on a predicted step now in force, `None` where there is
            none. Not a property: every step asks.
    """

    limits_ordinary = False
    by_slack = False
    follows_schedule = True
    limit_ms: float | None = None

    @abc.abstractmethod
    def chunk(
        self,
        load: StepLoad,
        computed_tokens: int,
        wanted_tokens: int,
        tracker: ChunkTracker | None,
    ) -> int:
        """Tokens a prefill may take in the step that `load` describes.

        Args:
            load: The step so far, without this prefill.
            computed_tokens: Its prompt tokens computed so far.
            wanted_tokens: Tokens it would take unbounded.
            tracker: Its chunk schedule; `None` for an ordinary prefill.

        Returns:
            0 to `wanted_tokens`.
        """

    def observe(self, load: StepLoad, predicted_ms: float, measured_ms: float) -> None:
        """A step has run: what it held, and how long it took.

        Args:
            load: The step.
            predicted_ms: As the profile says, uncorrected; zero without one.
            measured_ms: As it was.
        """
        return


class PlannedRule(ChunkRule):
    """The paper's rule (§5.4): the step holds at most the planned ``chi``.

    The cap is on the deflected request, ``c <= chi - others``, not on the
    step: ordinary prefills and requests whose KV has just arrived are never
    held back by it.
    """

    def chunk(
        self,
        load: StepLoad,
        computed_tokens: int,
        wanted_tokens: int,
        tracker: ChunkTracker | None,
    ) -> int:
        if tracker is None:
            return wanted_tokens
        others = load.tokens
        room = tracker.step_tokens(computed_tokens, others) - others
        return max(0, min(wanted_tokens, room))


class AdaptiveRule(ChunkRule):
    """Ours: the largest chunk that is safe in the step at hand.

    The plan was made on state up to a heartbeat old; here ``B``, ``K`` and
    ``p`` are the step's own, so the chunk is smaller than planned where
    decodes have joined and larger where they have left. Ordinary prefills
    (fall-backs, recomputation) obey the same bound wherever somebody decodes,
    so that no path stalls the decodes. Where nobody does, nobody can be late,
    and the bound need not make room for the model's error.

    Args:
        model: Step model of this engine.
        feedback: Corrects the model and steers the bound.
        smallest_tokens: A chunk below this is not worth a step's fixed cost.
    """

    limits_ordinary = True
    by_slack = True
    follows_schedule = False
    limit_ms: float

    def __init__(self, model: StepModel, feedback: Feedback, smallest_tokens: int = 16):
        self._model = model
        self._feedback = feedback
        self.limit_ms = feedback.limit_ms
        self._smallest_tokens = smallest_tokens

    def chunk(
        self,
        load: StepLoad,
        computed_tokens: int,
        wanted_tokens: int,
        tracker: ChunkTracker | None,
    ) -> int:
        if tracker is None and load.decodes == 0 and not load.guarded:
            return wanted_tokens
        limit_ms = self.limit_ms
        if load.decodes == 0:
            limit_ms = max(limit_ms, self._feedback.first_limit_ms)
        chunk = self._model.largest_addition(
            load, computed_tokens, limit_ms, wanted_tokens
        )
        if chunk < self._smallest_tokens and chunk < wanted_tokens:
            return 0
        return chunk

    def observe(self, load: StepLoad, predicted_ms: float, measured_ms: float) -> None:
        if load.decodes <= 0:
            return
        feedback = self._feedback
        if load.prefill_tokens > 0:
            feedback.observe(predicted_ms, measured_ms, load.limit_ms)
        else:
            feedback.observe_decodes(predicted_ms, measured_ms)
        self.limit_ms = feedback.limit_ms


@dataclass(frozen=True, slots=True)
class Claim:
    """A deflected prefill that wants a part of the step.

    Attributes:
        key: Names it in the answer.
        computed_tokens: Prompt tokens computed so far.
        wanted_tokens: Prompt tokens left.
        tracker: Its chunk schedule.
        deadline: When its first token is due, on any clock.
        blocks: KV blocks it still needs.
        running: Has a seat in the batch.
    """

    key: str
    computed_tokens: int
    wanted_tokens: int
    tracker: ChunkTracker
    deadline: float
    blocks: int = 0
    running: bool = True


def still_refused(
    refused: tuple[int, int] | None, free_blocks: int, free_seats: int
) -> bool:
    """Whether nothing has become free since the engine did not admit a prefill.

    Args:
        refused: Free blocks and seats when it did not, `None` if it never did.
        free_blocks: KV blocks free.
        free_seats: Requests that may still join the batch.
    """
    return (
        refused is not None and free_blocks <= refused[0] and free_seats <= refused[1]
    )


def _by_slack(claim: Claim) -> tuple[float, int]:
    return claim.deadline, claim.wanted_tokens


def _that_fit(
    claims: Sequence[Claim], free_blocks: int, free_seats: int
) -> list[Claim]:
    """Those that can all be finished beside one another, by slack.

    One that runs already keeps its blocks while it is passed over, and one
    that comes later is the first to be preempted. So what has been begun is
    reckoned with before what has not.
    """
    fit = []
    for claim in sorted(claims, key=lambda c: (not c.running, *_by_slack(c))):
        free_blocks -= claim.blocks
        if free_blocks < 0:
            break
        if not claim.running:
            if free_seats <= 0:
                break
            free_seats -= 1
        fit.append(claim)
    return sorted(fit, key=_by_slack)


def share_by_slack(
    rule: ChunkRule,
    load: StepLoad,
    claims: Sequence[Claim],
    budget_tokens: int,
    free_blocks: int,
    free_seats: int,
) -> dict[str, int]:
    """Divide a step among deflected prefills, least slack first.

    Slack is the time to the deadline less what the prefill still has to do;
    steps being of like length, tokens left stand for that. Room is kept only
    for prefills that the engine can admit and finish: what is kept for one
    that it cannot is lost to those that hold the very blocks it waits for.

    Args:
        rule: Bounds each of them.
        load: The decodes of the step; the prefills are added to it.
        claims: The deflected prefills.
        budget_tokens: Of the whole step.
        free_blocks: KV blocks free.
        free_seats: Requests that may still join the batch.

    Returns:
        Tokens by key, 0 where nothing is left; without those that no room is
        kept for, which may have what is left when the engine comes to them.
    """
    shares: dict[str, int] = {}
    for claim in _that_fit(claims, free_blocks, free_seats):
        most = min(claim.wanted_tokens, budget_tokens - load.tokens)
        tokens = 0
        if most > 0:
            tokens = rule.chunk(load, claim.computed_tokens, most, claim.tracker)
        shares[claim.key] = tokens
        if tokens:
            load.add_prefill(tokens, claim.computed_tokens)
            load.guarded = True
    return shares


__all__ = [
    "AdaptiveRule",
    "ChunkRule",
    "Claim",
    "PlannedRule",
    "StepLoad",
    "share_by_slack",
    "still_refused",
]
