# SPDX-License-Identifier: Apache-2.0
"""How many tokens each request may take of the step a node puts together.

What ``engine/chunks.py`` is to vLLM's scheduler. Both ask the same rule and
share the same way; the twin test holds one against the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_kairos.core.chunk_rule import (
    ChunkRule,
    Claim,
    share_by_slack,
    still_refused,
)
from vllm_kairos.core.overdue import OverdueTurns
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.sim.engine_request import EngineRequest, Phase

if TYPE_CHECKING:
    from vllm_kairos.sim.node import Node

#: What a step asks about a request: given that, its computed tokens and those
#: about to be scheduled, how many of them to take.
Limiter = Callable[[EngineRequest, int, int], int]


class ChunkLimits:
    """Bounds the prefills of each step by the rule, decodes never.

    Args:
        node: Its requests, blocks and limits are gone by.
        rule: Says how many tokens are safe.

    Attributes:
        overrides: Steps that gave a held prefill a chunk without headroom.
        bound_ms: Bound that the step is put together under.
    """

    __slots__ = (
        "overrides",
        "bound_ms",
        "_node",
        "_deflected",
        "_awaiting",
        "_rule",
        "_now_ms",
        "_load",
        "_shares",
        "_free_before",
        "_overdue",
        "_turn",
        "_limiter",
    )

    def __init__(self, node: Node, rule: ChunkRule):
        self.overrides = 0
        self.bound_ms = math.inf
        self._node = node
        # Looked up once: every request of a step is asked about.
        self._deflected = node.deflected
        self._awaiting = node.awaiting
        self._rule = rule
        self._now_ms = 0.0
        self._load = StepLoad()
        #: Tokens of deflected prefills that room is kept for in the load.
        self._shares: dict[EngineRequest, int] = {}
        self._free_before = (0, 0)
        self._overdue: OverdueTurns[EngineRequest] = OverdueTurns()
        #: Who has the turn, its tokens, and whether they are over the bound.
        self._turn: tuple[EngineRequest, int, bool] | None = None
        self._limiter = self._limit

    def prepare(self, now_ms: float) -> Limiter | None:
        """What the step that starts now asks about its requests, if anything."""
        node = self._node
        rule = self._rule
        self._turn = None
        if self._shares:
            self._shares = {}
        self._overdue.step_over()
        ordinary = rule.limits_ordinary and (node.decodes or node.arrived)
        if not self._deflected and not ordinary:
            return None
        self._now_ms = now_ms
        decodes = node.decodes + len(node.arrived)
        kv_tokens = node.decode_kv_tokens + sum(r.computed for r in node.arrived)
        self._load = StepLoad(decodes, kv_tokens, decodes)
        limit_ms = rule.limit_ms
        self.bound_ms = math.inf if limit_ms is None else limit_ms
        self._overdue.start()
        if self._overdue.holder is not None:
            self._keep_turn(self._overdue.holder)
        if rule.by_slack and len(self._deflected) > 1:
            self._share_by_slack()
        return self._limiter

    def note_scheduled(self, scheduled: Sequence[tuple[EngineRequest, int]]) -> None:
        """A step has been scheduled: keep no room again for whom it was in vain."""
        if not self._shares:
            return
        taken = {request for request, _ in scheduled}
        for request, share in self._shares.items():
            if share:
                request.refused = None if request in taken else self._free_before

    def _keep_turn(self, request: EngineRequest) -> None:
        """Keep room for the prefill whose turn it is, before any other's."""
        if request.phase == Phase.DECODE or request.tokens == request.end:
            return
        held = request in self._deflected
        load = self._load
        wanted = request.tokens - request.computed
        tracker = request.tracker if held else None
        chunk = self._rule.chunk(load, request.computed, wanted, tracker)
        if chunk and held and self._rule.by_slack:
            # There is headroom again, and it is the first to be served.
            return
        tokens = min(wanted, self._node.limits.smallest_chunk_tokens)
        load.add_prefill(tokens, request.computed)
        load.guarded |= held
        self._turn = request, tokens, chunk < tokens

    def _share_by_slack(self) -> None:
        """Keep room for deflected prefills, least slack first."""
        node = self._node
        held = dict(enumerate(self._deflected))
        blocks = node.kv.free_blocks
        seats = node.limits.max_num_seqs - len(node.running)
        size = node.limits.block_size
        self._free_before = blocks, seats
        shares = share_by_slack(
            self._rule,
            self._load,
            [
                Claim(
                    str(place),
                    request.computed,
                    request.tokens - request.computed,
                    request.tracker,
                    request.due_ms,
                    -(-request.tokens // size) + -request.computed // size,
                    request.phase == Phase.PREFILL,
                )
                for place, request in held.items()
                if request.tracker is not None
                and not still_refused(request.refused, blocks, seats)
                and not (self._turn and self._turn[0] is request)
            ],
            node.limits.budget_tokens,
            blocks,
            seats,
        )
        self._shares = {held[int(place)]: tokens for place, tokens in shares.items()}
        for request, tokens in self._shares.items():
            if tokens:
                self._overdue.served(request.due_ms)

    def _limit(self, request: EngineRequest, computed: int, tokens: int) -> int:
        """Tokens of a request in the step being scheduled."""
        held = request in self._deflected
        if not held and (request.phase == Phase.DECODE or request in self._awaiting):
            return tokens
        load = self._load
        tracker = request.tracker if held else None
        turn = self._turn
        if turn is not None and turn[0] is request:
            _, kept, over = turn
            if computed != request.computed and not over:
                load.take_back(kept, request.computed)
                kept = min(kept, tokens)
                over = self._rule.chunk(load, computed, kept, tracker) < kept
                load.add_prefill(kept, computed)
            return self._take_turn(request, tokens, kept, over)
        share = self._shares.get(request)
        found = computed != request.computed and share != 0
        if share is not None:
            granted = min(tokens, share)
            if found:
                # A part is in the prefix cache: it is bounded for what is left.
                load.take_back(share, request.computed)
                granted = self._rule.chunk(load, computed, granted, tracker)
                share = None
        else:
            granted = self._rule.chunk(load, computed, tokens, tracker)
        if found and not granted and self._overdue.holder is request:
            kept = min(tokens, self._node.limits.smallest_chunk_tokens)
            load.add_prefill(kept, computed)
            return self._take_turn(request, tokens, kept, True)
        if held:
            request.other_tokens = load.tokens
        if granted:
            self._overdue.served(request.due_ms)
            if share is None:
                load.add_prefill(granted, computed)
                load.guarded |= held
        elif self._now_ms > request.due_ms:
            # Held back for ever it would starve.
            self._overdue.held_back(request, request.due_ms)
        return granted

    def _take_turn(
        self, request: EngineRequest, tokens: int, kept: int, over: bool
    ) -> int:
        """As the engine's ``ChunkLimits._take_turn``."""
        self.overrides += over
        request.other_tokens = self._load.tokens - kept
        self._overdue.held_back(request, request.due_ms)
        return min(tokens, kept)
