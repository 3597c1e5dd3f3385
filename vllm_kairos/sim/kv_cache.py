# SPDX-License-Identifier: Apache-2.0
"""KV blocks of a node, as vLLM's block pool and KV cache manager keep them.

Two forms of one interface. `CountedBlocks` only counts: enough where no two
prompts share a prefix. `CachedBlocks` keeps block identities, content hashes
and the order of eviction (vLLM ``BlockPool``, ``FullAttentionManager``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kairos.sim.engine_request import EngineRequest

#: Content of a block: anything hashable that tells one prefix from another.
BlockHash = object


class CountedBlocks:
    """Blocks as a number.

    Args:
        blocks: Usable blocks.
        block_size: Tokens of a block.
    """

    __slots__ = ("total", "free_blocks", "block_size")

    def __init__(self, blocks: int, block_size: int):
        self.total = blocks
        self.free_blocks = blocks
        self.block_size = block_size

    def find_prefix(self, request: EngineRequest) -> int:
        """Tokens of the request found in the cache: none here."""
        return 0

    def allocate(
        self,
        request: EngineRequest,
        tokens: int,
        *,
        hit_tokens: int = 0,
        cache: bool = True,
    ) -> bool:
        """Give the request room for its first `tokens` tokens.

        Args:
            request: Whose blocks.
            tokens: Tokens that need a slot, those already held included.
            hit_tokens: Of those, what `find_prefix` has just found.
            cache: Full blocks become visible to other requests.

        Returns:
            False where there are too few blocks; nothing has changed then.
        """
        need = -(-tokens // self.block_size) - request.blocks
        if need > 0:
            if need > self.free_blocks:
                return False
            self.free_blocks -= need
            request.blocks += need
        return True

    def cache(self, request: EngineRequest, tokens: int) -> None:
        """The first `tokens` tokens are in place: others may share them."""

    def free(self, request: EngineRequest) -> None:
        """Give back all blocks of the request."""
        self.free_blocks += request.blocks
        request.blocks = 0


class CachedBlocks(CountedBlocks):
    """Blocks with prefix caching.

    Freed blocks keep their content until they are handed out again, oldest
    first, the end of a prompt before its beginning.
    """

    __slots__ = ("_free", "_refs", "_hash_of", "_ids_of")

    def __init__(self, blocks: int, block_size: int):
        super().__init__(blocks, block_size)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._refs = [0] * blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._ids_of: dict[BlockHash, dict[int, None]] = {}

    def _hits(self, hashes: Sequence[BlockHash], most: int) -> list[int]:
        hits = []
        for content in hashes[:most]:
            ids = self._ids_of.get(content)
            if not ids:
                break
            hits.append(next(iter(ids)))
        return hits

    def find_prefix(self, request: EngineRequest) -> int:
        # The last token is computed again even if all are cached, to have
        # something to sample from; a hit is whole blocks only.
        most = (request.tokens - 1) // self.block_size
        return len(self._hits(request.hashes(most), most)) * self.block_size

    def allocate(
        self,
        request: EngineRequest,
        tokens: int,
        *,
        hit_tokens: int = 0,
        cache: bool = True,
    ) -> bool:
        size = self.block_size
        held = request.block_ids
        hits: list[int] = []
        if hit_tokens and not held:
            most = hit_tokens // size
            hits = self._hits(request.hashes(most), most)
        need = -(-tokens // size) - len(held) - len(hits)
        idle_hits = sum(1 for block in hits if not self._refs[block])
        if max(need, 0) + idle_hits > len(self._free):
            return False
        for block in hits:
            if not self._refs[block]:
                del self._free[block]
            self._refs[block] += 1
        if hits:
            held.extend(hits)
            request.cached_blocks = len(hits)
        for _ in range(need):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            held.append(block)
        self.free_blocks = len(self._free)
        request.blocks = len(held)
        if cache:
            self.cache(request, min(tokens, request.tokens))
        return True

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block, None)
        if content is None:
            return
        ids = self._ids_of[content]
        del ids[block]
        if not ids:
            del self._ids_of[content]

    def cache(self, request: EngineRequest, tokens: int) -> None:
        full = tokens // self.block_size
        first = request.cached_blocks
        if full <= first:
            return
        hashes = request.hashes(full)
        for place in range(first, full):
            block = request.block_ids[place]
            content = hashes[place]
            self._hash_of[block] = content
            self._ids_of.setdefault(content, {})[block] = None
        request.cached_blocks = full

    def free(self, request: EngineRequest) -> None:
        for block in reversed(request.block_ids):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
        request.block_ids.clear()
        request.blocks = 0
        request.cached_blocks = 0
        self.free_blocks = len(self._free)
