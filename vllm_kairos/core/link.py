# SPDX-License-Identifier: Apache-2.0
"""KV-transfer time between nodes (paper §5.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Transfer of a KV cache over a link that may be busy.

    The paper's form is bytes over bandwidth: `fixed_ms` zero and no backlog.

    Attributes:
        kv_bytes_per_token: Bytes of KV cache one token occupies, all layers.
        bytes_per_s: Bandwidth.
        fixed_ms: Cost of a transfer of nothing.
        hops: Links a transfer crosses one after the other, each at
            `bytes_per_s`: 1 where it is written straight into the other GPU,
            2 where it is staged between the two.

    Raises:
        ValueError: A value is not finite or out of range.
    """

    kv_bytes_per_token: float
    bytes_per_s: float
    fixed_ms: float = 0.0
    hops: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kv_bytes_per_token) and self.kv_bytes_per_token > 0):
            raise ValueError(
                f"kv_bytes_per_token is {self.kv_bytes_per_token!r}, expected > 0"
            )
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s is {self.bytes_per_s!r}, expected > 0")
        if not (math.isfinite(self.fixed_ms) and self.fixed_ms >= 0):
            raise ValueError(f"fixed_ms is {self.fixed_ms!r}, expected >= 0")
        if self.hops < 1:
            raise ValueError(f"hops is {self.hops!r}, expected >= 1")

    def transfer_ms(self, tokens: float, backlog_bytes: float = 0.0) -> float:
        """Milliseconds until the KV of `tokens` has crossed the link.

        Args:
            tokens: KV tokens to move.
            backlog_bytes: Bytes queued on the link before these.
        """
        size = tokens * self.kv_bytes_per_token * self.hops + backlog_bytes
        return self.fixed_ms + 1e3 * size / self.bytes_per_s
