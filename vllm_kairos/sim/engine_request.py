# SPDX-License-Identifier: Apache-2.0
"""Requests: as the user sees them, and as one engine sees a leg of them."""

from __future__ import annotations

from enum import IntEnum

from vllm_kairos.core.chunk_tracker import ChunkTracker
from vllm_kairos.core.route import Route
from vllm_kairos.sim.kv_cache import BlockHash
from vllm_kairos.sim.traces import TraceRow


class UserRequest:
    """One request from arrival to last token. Times in milliseconds.

    Attributes:
        index: Its place in the workload.
        row: Lengths and prefix.
        arrival_ms: Arrival.
        route: Where it went; `None` while it waits in the proxy.
        deflected: A node of the decode pool prefills it.
        prefill_start_ms: Start of the first step that computes a part of it.
        prefill_end_ms: End of the step that finishes its prompt.
        kv_arrived_ms: Its KV is on the decode node.
        decode_start_ms: Start of the step that gives the first token the user
            sees.
        token_ms: When each token came out.
        finished: Times it finished: once, or there is a defect.
        preemptions: Times it was preempted.
        migrations: Times it moved between nodes while decoding.
        rejected: The policy turned it away.
    """

    __slots__ = (
        "index",
        "row",
        "arrival_ms",
        "route",
        "deflected",
        "prefill_start_ms",
        "prefill_end_ms",
        "kv_arrived_ms",
        "decode_start_ms",
        "token_ms",
        "finished",
        "preemptions",
        "migrations",
        "rejected",
    )

    def __init__(self, index: int, row: TraceRow):
        self.index = index
        self.row = row
        self.arrival_ms = row.arrived_at_s * 1e3
        self.route: Route | None = None
        self.deflected = False
        self.prefill_start_ms = -1.0
        self.prefill_end_ms = -1.0
        self.kv_arrived_ms = -1.0
        self.decode_start_ms = -1.0
        self.token_ms: list[float] = []
        self.finished = 0
        self.preemptions = 0
        self.migrations = 0
        self.rejected = False


class Leg(IntEnum):
    """What an engine is asked to do for a request."""

    PREFILL = 0
    """Prefill only: one token, KV kept until the decode node has read it."""
    DECODE = 1
    """Decode with KV from another node."""
    WHOLE = 2
    """Prefill and decode here: deflected, or a node that does both."""


class Phase(IntEnum):
    """Where a leg stands in its engine."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2


class Remote(IntEnum):
    """State of KV that comes from another node."""

    NONE = 0
    WANTED = 1
    LOADING = 2
    ARRIVED = 3


class EngineRequest:
    """One leg of a request inside one engine (vLLM ``Request``).

    Attributes:
        user: The request it is a leg of.
        leg: What is asked.
        prompt: Prompt tokens.
        end: Tokens at which it stops: prompt and outputs.
        tokens: Tokens it has now: prompt and outputs so far.
        computed: Of those, tokens with KV (vLLM ``num_computed_tokens``).
        phase: Waiting, prefilling or decoding.
        remote: State of remote KV.
        tracker: Place in its chunk schedule, `None` for an ordinary request.
        other_tokens: Tokens of the others when its chunk was last bounded.
        refused: Free blocks and seats beside which it was not admitted.
        priority: Lower is served first, on nodes that go by priority.
        order: Breaks ties of `priority`: order of arrival.
        blocks: KV blocks held.
        block_ids: Which, on nodes that cache prefixes.
        cached_blocks: Of those, how many others may share.
        due_ms: When its first token is due.
        joining: Its remote KV has arrived and it is about to decode.
    """

    __slots__ = (
        "user",
        "leg",
        "prompt",
        "end",
        "tokens",
        "computed",
        "phase",
        "remote",
        "tracker",
        "other_tokens",
        "refused",
        "priority",
        "order",
        "blocks",
        "block_ids",
        "cached_blocks",
        "due_ms",
        "joining",
        "source",
        "_hashes",
        "_block_size",
    )

    def __init__(
        self,
        user: UserRequest,
        leg: Leg,
        *,
        outputs: int = 0,
        chunks: tuple[int, ...] = (),
        block_size: int = 16,
        priority: float = 0.0,
    ):
        self.user = user
        self.leg = leg
        # A request that moves while it decodes brings its outputs with it:
        # to the next engine they are prompt.
        self.prompt = user.row.prompt_tokens + outputs
        left = 1 if leg == Leg.PREFILL else user.row.output_tokens - outputs
        self.end = self.prompt + left
        self.tokens = self.prompt
        self.computed = 0
        self.phase = Phase.WAITING
        self.remote = Remote.WANTED if leg == Leg.DECODE else Remote.NONE
        self.tracker = ChunkTracker(chunks) if chunks else None
        self.other_tokens = 0
        self.refused: tuple[int, int] | None = None
        self.priority = priority
        self.order = user.index
        self.blocks = 0
        self.block_ids: list[int] = []
        self.cached_blocks = 0
        self.due_ms = float("inf")
        self.joining = False
        self.source: str | None = None
        self._hashes: list[BlockHash] = []
        self._block_size = block_size

    def __lt__(self, other: EngineRequest) -> bool:
        return (self.priority, self.order) < (other.priority, other.order)

    def hashes(self, blocks: int) -> list[BlockHash]:
        """Contents of the first `blocks` blocks, at least."""
        known = self._hashes
        row = self.user.row
        while len(known) < blocks:
            place = len(known)
            end = (place + 1) * self._block_size
            if row.hash_ids and end <= row.prompt_tokens:
                # An id of the trace stands for everything up to its block, so
                # one id and a place in it name a prefix.
                wide, offset = divmod(end - 1, row.hash_block_tokens)
                known.append((row.hash_ids[wide], offset))
                continue
            known.append((self.user.index, "own", place))
        return known
