# SPDX-License-Identifier: Apache-2.0
"""Which prompts' prefixes a node still has in its KV cache, as far as is known.

The proxy has sent every prompt, so it knows what a node has computed or
fetched; what a node has thrown away since it can only bound, by the size of
its cache, and learn from reports that say how much of a prompt was found.
Nothing is believed of an engine that does not say that it caches prefixes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from vllm_kairos.core.messages import StateReport

#: Tokens of a piece of a prompt. What nodes share is told in whole pieces, and
#: rounded down to whole blocks of the node.
PIECE_TOKENS = 64
#: How long a report may still tell what was found of a prompt whose prefill is
#: over: a short one ends well before the next heartbeat, and in a long step
#: no report is written anew.
TOLD_WITHIN_S = 2.0
#: Prompts whose prefill is over that a report is waited for on.
MOST_UNTOLD = 1024


def prefix_hashes(token_ids: Sequence[int], salt: object = None) -> tuple[int, ...]:
    """One hash for each prefix of whole pieces: equal hash, equal prefix.

    Args:
        token_ids: The prompt.
        salt: Told apart even where tokens are equal: model, cache salt.

    Raises:
        TypeError: An id is no integer, or `salt` cannot be hashed.
        OverflowError: An id is none.
    """
    data = array("q", token_ids).tobytes()
    piece = 8 * PIECE_TOKENS
    hashes = []
    before = hash(salt)
    for end in range(piece, len(data) + 1, piece):
        before = hash((before, data[end - piece : end]))
        hashes.append(before)
    return tuple(hashes)


class Residency:
    """Prefixes of one node, the least recently used forgotten first."""

    def __init__(self) -> None:
        #: When each prefix was last used; oldest first, and of one prompt the
        #: longest first, as an engine hands out its free blocks.
        self._used: OrderedDict[int, int] = OrderedDict()
        self._uses = 0
        self._most = 0
        self._block_size = 1
        #: By ticket when the prefixes that a prompt began with were last used:
        #: of those being prefilled, and of those done, oldest first, with the
        #: time that they were.
        self._expected: dict[str, list[int]] = {}
        self._untold: OrderedDict[str, tuple[list[int], float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def cached_tokens(self, hashes: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of a prompt that the node is believed to hold, whole blocks.

        Args:
            hashes: `prefix_hashes` of the prompt.
            prompt_tokens: Its length; the last token is always computed.
        """
        found = self._found(hashes)
        if not found:
            return 0
        tokens = min(found * PIECE_TOKENS, prompt_tokens - 1)
        return tokens // self._block_size * self._block_size

    def _found(self, hashes: Sequence[int]) -> int:
        """Pieces found: a prefix is never kept without those it begins with."""
        used = self._used
        if not used or not hashes or hashes[0] not in used:
            return 0
        low, high = 1, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in used:
                low = middle
            else:
                high = middle - 1
        return low

    def expect(self, ticket: str, hashes: Sequence[int]) -> None:
        """A prompt is sent there, which a report may say more of."""
        self._untold.pop(ticket, None)
        found = self._found(hashes)
        if found:
            self._expected[ticket] = [self._used[h] for h in hashes[:found]]

    def over(self, ticket: str, now_s: float) -> None:
        """Its prefill is over, whichever way; a report on it may yet come.

        Args:
            ticket: One that was expected; others are ignored.
            now_s: Monotonic clock.
        """
        stamps = self._expected.pop(ticket, None)
        if stamps is not None:
            self._untold[ticket] = stamps, now_s
            self._give_up(now_s)

    def _give_up(self, now_s: float) -> None:
        """Wait no more for what should have been told, or is too much."""
        untold = self._untold
        while untold:
            _, over_s = next(iter(untold.values()))
            if len(untold) <= MOST_UNTOLD and now_s - over_s <= TOLD_WITHIN_S:
                return
            untold.popitem(last=False)

    def note(self, hashes: Sequence[int]) -> None:
        """The node has a prompt's KV in its cache now."""
        if not self._most:
            return
        used = self._used
        self._uses += 1
        for each in reversed(hashes[: self._most]):
            used[each] = self._uses
            used.move_to_end(each)
        self._shrink()

    def _shrink(self) -> None:
        while len(self._used) > self._most:
            self._used.popitem(last=False)

    def observe(self, report: StateReport, restarted: bool, now_s: float) -> None:
        """Reconcile with a report of the node.

        Args:
            report: The report.
            restarted: It is the first of a new process.
            now_s: When it came, on the monotonic clock.
        """
        self._most = 0
        if report.prefix_caching:
            tokens = max(0, report.total_kv_blocks) * report.block_size
            self._most = tokens // PIECE_TOKENS
        self._block_size = report.block_size
        if restarted:
            self._used.clear()
            self._expected.clear()
            self._untold.clear()
        for ticket, tokens in report.cached:
            stamps, _ = self._untold.pop(ticket, (None, 0.0))
            stamps = self._expected.pop(ticket, stamps)
            place = max(0, tokens) // PIECE_TOKENS
            # The last piece may lack its last token, which is always computed.
            if stamps is not None and place < len(stamps) - 1:
                self._forget(stamps[place])
        self._give_up(now_s)
        self._shrink()

    def _forget(self, stamp: int) -> None:
        """A prefix last used then is gone, so all used before it are."""
        used = self._used
        while used and next(iter(used.values())) <= stamp:
            used.popitem(last=False)
