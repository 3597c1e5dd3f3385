# SPDX-License-Identifier: Apache-2.0
"""Prefill in the steps of a node that decodes, with a fixed chunk size.

What co-located systems do, and what a policy needs to predict of it.
"""

from __future__ import annotations

from vllm_kairos.core.fleet import NodeState


def mixed_ttft_ms(node: NodeState, prompt_tokens: int, cached_tokens: int = 0) -> float:
    """TTFT of a prompt prefilled where it decodes, in steps of the node's budget.

    The batch is taken to stay as it is; prefills ahead are served first.

    Args:
        node: A node with a model.
        prompt_tokens: Prompt length.
        cached_tokens: Prefix of it already on the node.
    """
    assert node.model is not None
    decodes = node.decodes + node.awaiting_kv
    room = max(node.budget_tokens - decodes, 1)
    ahead = sum(work.tokens for work in (*node.prefills, *node.deflected))
    total = node.step_in_flight_ms
    done = -ahead
    left = prompt_tokens - min(cached_tokens, prompt_tokens - 1)
    while done < left:
        chunk = min(room, left - done)
        prefix = max(done, 0) + cached_tokens
        total += node.model.step_ms(decodes, node.decode_kv_tokens, chunk, prefix)
        done += chunk
    return total


def pending_tokens(node: NodeState) -> int:
    """Prompt tokens the node has yet to prefill."""
    return sum(work.tokens for work in (*node.prefills, *node.deflected))
