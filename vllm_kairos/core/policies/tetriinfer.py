# SPDX-License-Identifier: Apache-2.0
"""TetriInfer: fixed-size prefill chunks, decodes placed by predicted length."""

from __future__ import annotations

import random

from vllm_kairos.core.fleet import Fleet, NodeState, Request
from vllm_kairos.core.policies.base import (
    NodePlan,
    PlanContext,
    Policy,
    register,
    split,
)
from vllm_kairos.core.policies.mixed import pending_tokens
from vllm_kairos.core.route import Route
from vllm_kairos.core.settings import Settings


@register
class TetriInfer(Policy):
    """Inference without interference.

    Prefill instances run chunks of one fixed size, whatever the prompts. A
    small model predicts the range of an output's length; of two decode
    instances drawn at random among those with KV room, the request goes to
    the one with the lower share of heavy (long) decodes, so that heavy ones
    spread.

    Args:
        settings: Unused.
        chunk: Chunk size of prefill instances.
        heavy: Output tokens from which a decode is heavy.
        accuracy: Share of requests whose range is predicted right; the
            paper's predictor reaches 0.749 with ranges of 200 tokens.
        seed: Of the draws and of the predictor's errors.
    """

    name = "tetriinfer"
    source = "TetriInfer (Hu et al., 2024), arXiv 2401.11181, §3.3 and §3.4"

    def __init__(
        self,
        settings: Settings,
        chunk: int = 512,
        heavy: int = 128,
        accuracy: float = 0.749,
        seed: int = 0,
    ):
        super().__init__(settings)
        for name, value in (("chunk", chunk), ("heavy", heavy)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, expected tokens >= 1")
        if isinstance(accuracy, (bool, str)) or not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy is {accuracy!r}, expected 0 to 1")
        self.chunk = chunk
        self.heavy = heavy
        self.accuracy = accuracy
        self._rng = random.Random(seed)
        self._heavy: dict[str, int] = {}
        self._light: dict[str, int] = {}
        self._predicted: dict[str, bool] = {}

    def plan(self, context: PlanContext) -> list[NodePlan]:
        return split(context.prefill_nodes, context.decode_nodes, self.chunk)

    def predict_heavy(self, request: Request) -> bool:
        """Whether the output is predicted to be long."""
        truth = (request.output_tokens or 0) >= self.heavy
        return truth if self._rng.random() < self.accuracy else not truth

    def route(self, request: Request, fleet: Fleet) -> Route:
        prefill = min(fleet.prefill, key=pending_tokens)
        heavy = self.predict_heavy(request)
        room = [n for n in fleet.decode if n.free_kv_tokens > request.prompt_tokens]
        choice = room or list(fleet.decode)
        two = self._rng.sample(choice, min(2, len(choice)))

        def interference(node: NodeState) -> tuple[float, int]:
            heavies = self._heavy.get(node.node, 0) + heavy
            lights = self._light.get(node.node, 0) + (not heavy)
            return heavies / (heavies + lights), heavies + lights

        decode = min(two, key=interference)
        counts = self._heavy if heavy else self._light
        counts[decode.node] = counts.get(decode.node, 0) + 1
        self._predicted[request.request_id] = heavy
        return Route(prefill.node, decode.node, reason="heavy" if heavy else "light")

    def finished(self, request: Request, route: Route) -> None:
        heavy = self._predicted.pop(request.request_id, None)
        if heavy is not None:
            counts = self._heavy if heavy else self._light
            counts[route.decode] -= 1
