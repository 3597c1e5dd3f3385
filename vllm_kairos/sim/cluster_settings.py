# SPDX-License-Identifier: Apache-2.0
"""What a simulated cluster is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kairos.core.chunk_rule import ChunkRule
from vllm_kairos.core.link import LinkModel
from vllm_kairos.core.policies.base import Policy
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.sim.queues import NodeLimits

if TYPE_CHECKING:
    from vllm_kairos.sim.cluster import Cluster
    from vllm_kairos.sim.dispatch import Dispatcher


@dataclass(frozen=True, slots=True)
class ModelError:
    """How truth differs from prediction.

    Attributes:
        bias: True step times are ``1 + bias`` times the predicted.
        noise: Standard deviation of the log of a further factor, lognormal
            with median 1.
    """

    bias: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Everything about a cluster but its policy and its workload.

    Attributes:
        model: Step times, as the policies predict them.
        link: KV size and link; `None` where transfers are free.
        limits: Limits of every node, before a policy's own plan.
        prefill_nodes: ``N_p``.
        decode_nodes: ``N_d``.
        heartbeat_ms: Age of what reports tell, ``Delta_h``.
        error: Of the predictions.
        rule: Makes the chunk rule of a node, given its name.
        dispatcher: Makes the dispatcher of a run.
        models: Step times of the nodes, by name, that differ from `model`.
    """

    model: StepModel
    link: LinkModel | None = None
    limits: NodeLimits = field(default_factory=NodeLimits)
    prefill_nodes: int = 2
    decode_nodes: int = 2
    heartbeat_ms: float = 100.0
    error: ModelError = field(default_factory=ModelError)
    rule: Callable[[str], ChunkRule] | None = None
    dispatcher: Callable[[Cluster, Policy], Dispatcher] | None = None
    models: Mapping[str, StepModel] = field(default_factory=dict)
