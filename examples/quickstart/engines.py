# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU, one a core, joined by NIXL."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from quickstart.processes import Server, layer

#: Start of two engines on two cores, with room for a slow disk.
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class EngineSpec:
    """What one engine is started with.

    Attributes:
        name: For logs and messages; also its id in state reports.
        model: Path of the model.
        port: Of its HTTP server.
        side_channel_port: NIXL's.
        report_port: Of its state reports.
        core: CPU core it computes on, `None` for vLLM's choice.
        role: vLLM's ``kv_role``; `None` for an engine without a connector.
        scheduler: vLLM's ``--scheduler-cls``; `None` for vLLM's own.
        settings: Kairos's engine settings beside address, id and step log.
        step_log: File for step records.
        max_model_len: Longest sequence.
        budget_tokens: Most tokens of a step.
        max_num_seqs: Most requests of a step.
        kv_cache_gib: Size of the KV cache.
        extra: More arguments of ``vllm serve``.
        environment: More environment variables.
    """

    name: str
    model: Path
    port: int
    side_channel_port: int
    report_port: int
    core: int | None = None
    role: str | None = "kv_both"
    scheduler: str | None = "kairos"
    settings: Mapping[str, Any] = field(default_factory=dict)
    step_log: Path | None = None
    max_model_len: int = 16384
    budget_tokens: int = 2048
    max_num_seqs: int = 64
    kv_cache_gib: int = 1
    extra: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """``host:port`` as a proxy names it."""
        return f"127.0.0.1:{self.port}"

    @property
    def report_address(self) -> str:
        """ZMQ address of its state reports."""
        return f"tcp://127.0.0.1:{self.report_port}"

    @property
    def computing_core(self) -> int | None:
        """CPU core that its model is computed on, `None` for any."""
        return self.core

    def command(self) -> list[str]:
        """``vllm serve`` and its arguments."""
        words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        words += [str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--max-model-len", str(self.max_model_len)]
        words += ["--max-num-batched-tokens", str(self.budget_tokens)]
        words += ["--max-num-seqs", str(self.max_num_seqs)]
        words += ["--enforce-eager", "--dtype", "float32"]
        words += ["--disable-uvicorn-access-log"]
        if self.role is not None:
            transfer = {
                "kv_connector": "NixlConnector",
                "kv_role": self.role,
                "kv_buffer_device": "cpu",
                # A prefill node that dies takes KV with it: compute it again.
                "kv_load_failure_policy": "recompute",
            }
            words += ["--kv-transfer-config", json.dumps(transfer)]
        if self.scheduler is not None:
            kairos = {
                "report_address": self.report_address,
                "engine_id": self.name,
                **self.settings,
            }
            if self.step_log is not None:
                kairos["step_log"] = str(self.step_log)
            words += ["--scheduler-cls", self.scheduler]
            words += ["--additional-config", json.dumps({"kairos": kairos})]
        return [*words, *self.extra]

    def engine_environment(self) -> dict[str, str]:
        """Environment variables, the preloads of the CPU build included."""
        variables = dict(os.environ)
        preload = layer().get("ld_preload")
        if preload:
            variables["LD_PRELOAD"] = preload
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "VLLM_HOST_IP": "127.0.0.1",
            "UCX_TLS": "tcp,self,sm",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.core is not None:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = str(self.core)
        return variables | dict(self.environment)


class Engine(Server):
    """A running ``vllm serve``.

    Args:
        spec: What it is started with.
        log: File for its output.
    """

    def __init__(self, spec: EngineSpec, log: Path):
        self.spec = spec
        super().__init__(
            spec.name,
            spec.command(),
            f"http://{spec.address}",
            log,
            spec.engine_environment(),
        )
        self._placed = False

    def is_ready(self) -> bool:
        """Whether it answers; its threads are where they should be by then."""
        ready = super().is_ready()
        if ready and not self._placed:
            self._place_threads()
            self._placed = True
        return ready

    def _place_threads(self) -> None:
        # On the CPU vLLM's NixlConnector binds the thread that loads it to the
        # last core of its NUMA node, and with it the model's computation and
        # every thread started from there on. Two engines of one machine would
        # share that core, and an engine's input thread can then wait seconds
        # for its turn. Only the computation is bound, each to its own core.
        everywhere = os.sched_getaffinity(0)
        core = self.spec.computing_core
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, everywhere)
                if core is not None and process.name().startswith("VLLM::EngineCor"):
                    os.sched_setaffinity(process.pid, {core})


def core_for(index: int) -> int:
    """Core of the engine of that number, of those this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[index % len(cores)]
