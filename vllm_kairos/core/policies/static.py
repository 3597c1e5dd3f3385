# SPDX-License-Identifier: Apache-2.0
"""The paper's static deflection policies (§3.4, Table 4)."""

from __future__ import annotations

import abc

from vllm_kairos.core.fleet import Fleet, Request
from vllm_kairos.core.policies.base import Policy, RoundRobin, register
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings


def _checked(name: str, value: float, least: float) -> float:
    if not value >= least:
        raise ValueError(f"{name} is {value!r}, expected a number >= {least:g}")
    return value


class _Static(Policy):
    """Round robin over both pools; a deflected prefill has one chunk size."""

    sees = "truth"

    def __init__(self, settings: Settings, chunk: int):
        super().__init__(settings)
        self.chunk = int(_checked("chunk", chunk, 1))
        self._prefill = RoundRobin()
        self._decode = RoundRobin()

    @abc.abstractmethod
    def deflects(self, request: Request, fleet: Fleet) -> bool:
        """Whether the request is prefilled on a decode node."""

    def route(self, request: Request, fleet: Fleet) -> Route:
        prefill = self._prefill.pick(fleet.prefill).node
        decode = self._decode.pick(fleet.decode).node
        if self.deflects(request, fleet):
            # A schedule too short repeats its last chunk.
            return Route(decode, decode, (self.chunk,), reason="deflected")
        return Route(prefill, decode, reason="kept")


@register
class StaticQueue(_Static):
    """SQ(theta): deflect when every prefill node's queue is longer.

    Args:
        settings: Unused.
        theta: Requests waiting, not yet started, on each prefill node.
        chunk: Fixed chunk size of deflected prefills.
    """

    name = "sq"
    source = "Kairos §3.4, Static-queue; chunk 128"

    def __init__(self, settings: Settings, theta: float = 1, chunk: int = 128):
        super().__init__(settings, chunk)
        self.theta = _checked("theta", theta, 0)

    def deflects(self, request: Request, fleet: Fleet) -> bool:
        return all(
            sum(work.computed == 0 for work in node.prefills) > self.theta
            for node in fleet.prefill
        )


@register
class StaticLength(_Static):
    """SL(length): deflect every prompt shorter than a length.

    Args:
        settings: Unused.
        length: Prompt tokens.
        chunk: Fixed chunk size of deflected prefills.
    """

    name = "sl"
    source = "Kairos §3.4, Static-length; chunk 128"

    def __init__(self, settings: Settings, length: int = 2048, chunk: int = 128):
        super().__init__(settings, chunk)
        self.length = int(_checked("length", length, 1))

    def deflects(self, request: Request, fleet: Fleet) -> bool:
        return request.prompt_tokens < self.length
