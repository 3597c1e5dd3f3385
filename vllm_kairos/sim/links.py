# SPDX-License-Identifier: Apache-2.0
"""Links between nodes: shared, and first come first served at both ends."""

from __future__ import annotations

from vllm_kairos.core.link import LinkModel


class Links:
    """One egress and one ingress queue a node.

    With one hop a transfer starts when both its ends are free and holds both
    until it is over. With two it leaves over the source's link, then arrives
    over the target's, each of them a queue of its own.

    Args:
        model: Size and speed; `None` makes every transfer free.
    """

    def __init__(self, model: LinkModel | None):
        self.model = model
        self._egress_free_ms: dict[str, float] = {}
        self._ingress_free_ms: dict[str, float] = {}

    def send(self, now_ms: float, source: str, target: str, tokens: int) -> float:
        """Queue a transfer.

        Args:
            now_ms: Time of the request for it.
            source: Node that holds the KV.
            target: Node that reads it.
            tokens: KV tokens to move.

        Returns:
            When the last byte has arrived.
        """
        if self.model is None:
            return now_ms
        egress = max(now_ms, self._egress_free_ms.get(source, 0.0))
        ingress = self._ingress_free_ms.get(target, 0.0)
        hop_ms = self.model.transfer_ms(tokens) / self.model.hops
        if self.model.hops == 1:
            sent = end = max(egress, ingress) + hop_ms
        else:
            sent = egress + hop_ms
            end = max(sent, ingress) + hop_ms * (self.model.hops - 1)
        self._egress_free_ms[source] = sent
        self._ingress_free_ms[target] = end
        return end

    def backlog_bytes(self, now_ms: float, source: str) -> float:
        """What is queued on a node's egress, as bytes at its bandwidth."""
        if self.model is None:
            return 0.0
        wait_ms = self._egress_free_ms.get(source, 0.0) - now_ms
        return max(0.0, wait_ms) * self.model.bytes_per_s / 1e3
