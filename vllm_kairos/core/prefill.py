# SPDX-License-Identifier: Apache-2.0
"""Prefill-node TTFT (paper §4.2, Eq. 1 to 3), as printed and exactly.

The paper's Eq. 2 gives every queued chunk half of all outstanding tokens as
its prefix, and Eq. 3 sums one chunk too many. Both overestimate; `exact`
packs the queue into steps as vLLM's scheduler does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from vllm_kairos.core.fleet import NodeState, PrefillWork
from vllm_kairos.core.step_model import StepModel


def queue_wait_paper_ms(
    model: StepModel, queued_tokens: int, budget_tokens: int
) -> float:
    """Eq. 2: wait behind `queued_tokens` in chunks of `budget_tokens`.

    Args:
        model: The prefill node's step model.
        queued_tokens: Sum of the prompt tokens ahead.
        budget_tokens: ``chi_p``.
    """
    chunks = queued_tokens / budget_tokens
    return chunks * model.step_ms(0, 0, budget_tokens, queued_tokens / 2)


def prefill_paper_ms(model: StepModel, prompt_tokens: int, budget_tokens: int) -> float:
    """Eq. 3: prefill of one prompt, the sum's upper bound as printed."""
    last = math.ceil(prompt_tokens / budget_tokens)
    return sum(
        model.step_ms(0, 0, budget_tokens, budget_tokens * i) for i in range(last + 1)
    )


def ttft_prefill_paper_ms(node: NodeState, prompt_tokens: int) -> float:
    """Eq. 1 as printed.

    Args:
        node: A prefill node with a model.
        prompt_tokens: ``l_r``.
    """
    assert node.model is not None
    queued = sum(work.tokens for work in node.prefills)
    return queue_wait_paper_ms(
        node.model, queued, node.budget_tokens
    ) + prefill_paper_ms(node.model, prompt_tokens, node.budget_tokens)


def drain_ms(model: StepModel, queue: list[PrefillWork], budget_tokens: int) -> float:
    """Time to prefill `queue` to its end on an otherwise idle node.

    Steps are packed as vLLM does it: first come first served, each step up to
    `budget_tokens`, several prompts in a step when they fit.

    Args:
        model: Step model.
        queue: Prompts in the order served.
        budget_tokens: ``chi_p``.
    """
    total = 0.0
    index = 0
    done = 0
    while index < len(queue):
        room = budget_tokens
        tokens = prefix = prefills = 0
        while room > 0 and index < len(queue):
            work = queue[index]
            take = min(room, work.tokens - done)
            tokens += take
            prefix += work.computed + done
            prefills += 1
            room -= take
            done += take
            if done >= work.tokens:
                index += 1
                done = 0
        total += model.step_ms(0, 0, tokens, prefix, prefills)
    return total


class PrefillQueue:
    """`drain_ms` of a queue, and with one more prompt at its end in no time.

    Args:
        model: Step model.
        queue: Prompts in the order served.
        budget_tokens: ``chi_p``.

    Attributes:
        drain_ms: Time to prefill the queue to its end.
    """

    __slots__ = (
        "drain_ms",
        "_budget",
        "_closed_ms",
        "_tokens",
        "_prefix",
        "_prefills",
        "_weights",
    )

    def __init__(
        self, model: StepModel, queue: Iterable[PrefillWork], budget_tokens: int
    ):
        one, _, _, c, p, n, cp, cc, _, _ = model.coefficients(False)
        self._weights = (one, c, p, n, cp, cc)
        self._budget = budget_tokens
        self._closed_ms = 0.0
        self._tokens = self._prefix = self._prefills = 0
        for work in queue:
            if work.tokens > 0:
                self._pack(work.tokens, work.computed)
        self.drain_ms = self._closed_ms
        if self._tokens:
            self.drain_ms += self._step_ms(self._tokens, self._prefix, self._prefills)

    def _step_ms(self, tokens: int, prefix: int, prefills: int) -> float:
        """`StepModel.step_ms` of a step that only prefills."""
        one, c, p, n, cp, cc = self._weights
        attention = (cp * prefix + cc * tokens) / prefills
        return one + p * prefix + n * prefills + tokens * (c + attention)

    def _alone_ms(self, steps: int, computed: int) -> float:
        """Full steps of one prompt, which differ by their prefix only."""
        one, c, p, n, cp, cc = self._weights
        budget = self._budget
        prefix = steps * computed + budget * (steps * (steps - 1) // 2)
        fixed = one + n + budget * (c + cc * budget)
        return steps * fixed + prefix * (p + cp * budget)

    def _pack(self, left: int, computed: int) -> None:
        """Add a prompt; a step that is full is closed."""
        budget = self._budget
        while left > 0:
            if not self._tokens and left >= budget:
                whole, left = divmod(left, budget)
                self._closed_ms += self._alone_ms(whole, computed)
                computed += whole * budget
                continue
            take = min(budget - self._tokens, left)
            self._tokens += take
            self._prefix += computed
            self._prefills += 1
            left -= take
            computed += take
            if self._tokens == budget:
                self._closed_ms += self._step_ms(
                    self._tokens, self._prefix, self._prefills
                )
                self._tokens = self._prefix = self._prefills = 0

    def drain_with_ms(self, tokens: int, computed: int = 0) -> float:
        """Time to prefill the queue and one more prompt behind it.

        Args:
            tokens: Prompt tokens to compute, at least one.
            computed: Those already in the KV cache.
        """
        one, c, p, n, cp, cc = self._weights
        budget = self._budget
        take = budget - self._tokens
        if take > tokens:
            take = tokens
        step = self._tokens + take
        prefix = self._prefix + computed
        prefills = self._prefills + 1
        total = self._closed_ms + (
            one
            + p * prefix
            + n * prefills
            + step * (c + (cp * prefix + cc * step) / prefills)
        )
        left = tokens - take
        if left == 0:
            return total
        done = computed + take
        if left >= budget:
            whole, left = divmod(left, budget)
            total += self._alone_ms(whole, done)
            done += whole * budget
        if left:
            total += one + p * done + n + left * (c + (cp * done + cc * left))
        return total


def ttft_prefill_ms(
    node: NodeState,
    prompt_tokens: int,
    cached_tokens: int = 0,
    decode_step_ms: float = 0.0,
    queue: PrefillQueue | None = None,
) -> float:
    """Eq. 1 exactly, with the terms the paper leaves out.

    Queue and prompt are packed into steps; the KV transfer over the node's
    link with its backlog and the wait for a decode step are added.

    Args:
        node: A prefill node with a model.
        prompt_tokens: ``l_r``.
        cached_tokens: Prefix of the prompt this node already holds.
        decode_step_ms: A step of the decode node the KV goes to: the first
            token comes out of the first step after the KV has arrived.
        queue: The node's queue, where the caller keeps it.
    """
    assert node.model is not None
    if queue is None:
        queue = PrefillQueue(node.model, node.prefills, node.budget_tokens)
    cached = min(cached_tokens, prompt_tokens - 1)
    wait = node.step_in_flight_ms + queue.drain_with_ms(prompt_tokens - cached, cached)
    if node.worked_off_ms > 0.0:
        alone = PrefillQueue(node.model, (), node.budget_tokens)
        least = alone.drain_with_ms(prompt_tokens - cached, cached)
        wait = max(wait - node.worked_off_ms, least)
    if node.link is not None:
        wait += node.link.transfer_ms(prompt_tokens, node.link_backlog_bytes)
    return wait + decode_step_ms


def reported_work_ms(
    model: StepModel | None,
    prefills: Sequence[PrefillWork],
    budget_tokens: int,
    decodes: int,
    deflected: bool,
) -> float:
    """Least time a node was busy after the step in flight when it reported.

    Args:
        model: The node's step model, if it has one.
        prefills: Ordinary prefills of the report.
        budget_tokens: ``chi_p``.
        decodes: ``B`` of the report.
        deflected: Whether it shows deflected prefills.

    Returns:
        The drain of its ordinary prefills; infinite where their end is not
        known from them alone, beside decodes or deflected prefills.
    """
    if deflected:
        return math.inf
    if not prefills:
        return 0.0
    if model is None or decodes > 0:
        return math.inf
    return PrefillQueue(model, prefills, budget_tokens).drain_ms


def worked_off_ms(
    since_ms: float, reported_ms: float, sent_ago_ms: float | None
) -> float:
    """Work done since the step that was in flight at the report.

    A node that had nothing to prefill has worked only since it was sent
    something: time it stood idle is not to be taken off what it was sent then.

    Args:
        since_ms: Time since that step's end.
        reported_ms: `reported_work_ms` of the report.
        sent_ago_ms: How long ago it was first sent a prefill that the report
            does not show; `None` where there is none.
    """
    if since_ms <= 0.0:
        return 0.0
    if since_ms <= reported_ms:
        return since_ms
    if sent_ago_ms is None:
        return reported_ms
    return reported_ms + max(0.0, min(since_ms - reported_ms, sent_ago_ms))


def marginal_prefill_ms(
    model: StepModel, prompt_tokens: int, cached_tokens: int, budget_tokens: int
) -> float:
    """Time a prompt takes of a busy prefill node.

    Steps there are full, so the fixed cost of one is shared by its tokens.

    Args:
        model: The prefill node's step model.
        prompt_tokens: ``l_r``.
        cached_tokens: Prefix of the prompt the node already holds.
        budget_tokens: ``chi_p``.
    """
    fixed = model.prefill.terms.get("1", 0.0)
    done = min(cached_tokens, prompt_tokens - 1)
    total = fixed * (prompt_tokens - done) / budget_tokens
    while done < prompt_tokens:
        chunk = min(budget_tokens, prompt_tokens - done)
        total += model.step_ms(0, 0, chunk, done) - fixed
        done += chunk
    return total
