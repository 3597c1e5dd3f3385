# SPDX-License-Identifier: Apache-2.0
"""The real scheduler in virtual time.

vLLM's own scheduler, KV cache manager and requests; only the model is
replaced, by a step model that says how long a step takes, and the clock by a
number.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kairos.core.messages import schedule_params
from vllm_kairos.core.predictor import Predictor
from vllm_kairos.core.step_load import StepLoad
from vllm_kairos.core.step_model import StepModel
from vllm_kairos.engine.scheduler import AsyncKairosScheduler, KairosScheduler

BLOCK_SIZE = 16

#: Milliseconds of a step of the pretended model.
MODEL = StepModel(
    prefill=Predictor({"1": 5.0, "c": 0.02, "cp": 1e-6, "cc": 1e-6}),
    decode=Predictor({"1": 10.0, "B": 0.1, "K": 1e-5}),
    mixed=Predictor({"c": 0.03, "cp": 2e-6, "cc": 2e-6}),
)


@cache
def model_dir() -> str:
    """A model configuration without weights."""
    folder = Path(tempfile.mkdtemp(prefix="kairos-opt-"))
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 65536,
        "vocab_size": 50272,
        "word_embed_proj_dim": 64,
        "torch_dtype": "float16",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_scheduler(
    scheduler_class: type[Scheduler] | None = None,
    *,
    kairos: dict[str, Any] | None = None,
    async_scheduling: bool = False,
    max_num_seqs: int = 64,
    budget_tokens: int = 2048,
    num_blocks: int = 20_000,
    prefix_caching: bool = False,
    policy: str = "fcfs",
    speculative_tokens: int = 0,
    chunked_prefill: bool = True,
) -> Scheduler:
    """A scheduler as EngineCore makes it, reports off unless asked for."""
    if scheduler_class is None:
        scheduler_class = AsyncKairosScheduler if async_scheduling else KairosScheduler
    config = _config(
        async_scheduling,
        max_num_seqs,
        budget_tokens,
        prefix_caching,
        policy,
        speculative_tokens,
        chunked_prefill,
    )
    config.additional_config = {"kairos": {"report_address": "", **(kairos or {})}}
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


@cache
def _config(
    async_scheduling: bool,
    max_num_seqs: int,
    budget_tokens: int,
    prefix_caching: bool,
    policy: str,
    speculative_tokens: int,
    chunked_prefill: bool,
) -> VllmConfig:
    """The configuration is most of what a scheduler costs to make."""
    speculative = None
    if speculative_tokens:
        speculative = SpeculativeConfig(
            model="ngram", num_speculative_tokens=speculative_tokens
        )
    return VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget_tokens,
            max_model_len=65536,
            enable_chunked_prefill=chunked_prefill,
            async_scheduling=async_scheduling,
            is_encoder_decoder=False,
            policy=policy,
        ),
        model_config=ModelConfig(
            model=model_dir(), dtype="float16", seed=1, skip_tokenizer_init=True
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching
        ),
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(
            kv_connector="RemoteKv",
            kv_role="kv_both",
            kv_connector_module_path="tests.engine.remote_kv",
        ),
        speculative_config=speculative,
    )


@dataclass
class Step:
    """One step as it was scheduled.

    Attributes:
        tokens: Tokens by request.
        total: Tokens of the step.
        started_ms: Virtual time at which it was scheduled.
        latency_ms: How long it took.
        decodes: Requests that decode in it.
        decodes_alone_ms: How long it would have taken with those alone.
    """

    tokens: dict[str, int]
    total: int
    started_ms: float
    latency_ms: float
    decodes: int
    decodes_alone_ms: float


def _as_predicted(latency_ms: float) -> float:
    return latency_ms


@dataclass
class VirtualEngine:
    """Drives a scheduler step by step.

    Attributes:
        scheduler: A `make_scheduler` result.
        model: Truth about step times.
        truth: Turns a predicted latency into the true one, given the step.
        asks_for_bitmask: When the grammar bitmask of a step is asked for:
            ``launched``, as EngineCore does; ``late``, when the step before
            has ended, as it does where a grammar waits for that step's tokens;
            ``never``, as for pooling models.
    """

    scheduler: Scheduler
    model: StepModel = MODEL
    truth: Callable[[float], float] = _as_predicted
    now_ms: float = 0.0
    steps: list[Step] = field(default_factory=list)
    first_token_ms: dict[str, float] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    drafts: Callable[[str], list[int]] | None = None
    asks_for_bitmask: str = "launched"

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._ids = itertools.count()
        #: A step, the requests that give a token in it, and how long it takes.
        self._in_flight: list[tuple[SchedulerOutput, set[str], float]] = []
        self._arrived: set[str] = set()
        self._decoding: set[str] = set()
        self._remote: set[str] = set()
        if hasattr(self.scheduler, "step_clock_s"):
            self.scheduler.step_clock_s = lambda: self.now_ms / 1e3
            self.scheduler.wall_clock_s = lambda: self.now_ms / 1e3

    def add(
        self,
        prompt_tokens: int | Sequence[int],
        output_tokens: int = 8,
        *,
        chunks: Sequence[int] | None = None,
        params: Any = None,
        remote: bool = False,
        priority: int = 0,
        request_id: str | None = None,
    ) -> str:
        """Add a request; prompts of a number are fresh, never a prefix hit."""
        number = next(self._ids)
        request_id = request_id or f"r{number}"
        if isinstance(prompt_tokens, int):
            prompt = [(number * 7919 + i) % 50_000 + 10 for i in range(prompt_tokens)]
        else:
            prompt = list(prompt_tokens)
        if chunks is not None:
            params = schedule_params(f"ticket-{request_id}", chunks)
        if remote:
            params = {**(params or {}), "do_remote_prefill": True}
            self._remote.add(request_id)
        sampling = SamplingParams(
            max_tokens=output_tokens,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=self.now_ms / 1e3,
                priority=priority,
                block_hasher=self._hasher,
            )
        )
        return request_id

    def say(self, session: str, tokens: int) -> None:
        """Begin a streaming session, or give it more of its prompt."""
        self.scheduler.add_request(
            Request(
                session,
                list(range(10, 10 + tokens)),
                SamplingParams(max_tokens=3, ignore_eos=True),
                None,
                resumable=True,
                block_hasher=self._hasher,
            )
        )

    def kv_arrives(self, request_id: str) -> None:
        """The KV of a remote request is here after the next step."""
        self._arrived.add(request_id)

    def abort(self, request_id: str) -> None:
        """The client has left."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Step:
        """Schedule one step, run it, and take its output.

        An async scheduler schedules the next step before it has the output
        of the one before, as EngineCore's batch queue does.
        """
        output = self.scheduler.schedule()
        if self.asks_for_bitmask == "launched":
            self.scheduler.get_grammar_bitmask(output)
        step = self._run(output)
        requests = self.scheduler.requests
        scheduled = output.num_scheduled_tokens
        sample = {r for r in scheduled if not requests[r].is_prefill_chunk}
        took_ms = step.latency_ms if step.total else 1.0
        self._in_flight.append((output, sample, took_ms))
        # Not the configuration's word: on a CPU vLLM takes that back.
        depth = 2 if isinstance(self.scheduler, AsyncScheduler) else 1
        # Nothing is scheduled beside a step that holds nothing.
        while len(self._in_flight) >= (depth if step.total else 1):
            self._finish(*self._in_flight.pop(0))
        if self.asks_for_bitmask == "late":
            self.scheduler.get_grammar_bitmask(output)
        return step

    def drain(self, most_steps: int = 100_000) -> None:
        """Step until nothing is left."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            self.step()
        raise AssertionError("the scheduler did not drain")

    def _run(self, output: SchedulerOutput) -> Step:
        load = StepLoad()
        output_new = {new.req_id for new in output.scheduled_new_reqs}
        self._decoding -= output.scheduled_cached_reqs.resumed_req_ids
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            computed = request.num_computed_tokens - tokens
            # As the engine counts: a request joins whose KV has arrived.
            joins = request_id in output_new and request_id in self._remote
            if joins or request_id in self._decoding:
                load.decodes += 1
                load.decode_kv_tokens += computed
            else:
                load.add_prefill(tokens, computed)
            if not request.is_prefill_chunk:
                self._decoding.add(request_id)
        latency = self.truth(self.model.load_ms(load))
        step = Step(
            dict(output.num_scheduled_tokens),
            output.total_num_scheduled_tokens,
            self.now_ms,
            latency,
            load.decodes,
            self.model.step_ms(load.decodes, load.decode_kv_tokens),
        )
        self.steps.append(step)
        return step

    def _finish(
        self, output: SchedulerOutput, sample: set[str], took_ms: float
    ) -> None:
        self.now_ms += took_ms
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            request = self.scheduler.requests.get(request_id)
            if request is None or request.is_finished():
                sampled.append([])
                continue
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            sampled.append([11] * (1 + len(drafts)) if request_id in sample else [])
            if request_id in sample:
                self.first_token_ms.setdefault(request_id, self.now_ms)
        # With a connector the worker has something to say in every step.
        kv = KVConnectorOutput()
        if self._arrived:
            known = self.scheduler.requests
            self._arrived &= known.keys()
            ready = {
                r
                for r in self._arrived
                # Blocks of an aborted request are held until its KV is here.
                if known[r].is_finished()
                or (
                    known[r].status == RequestStatus.WAITING_FOR_REMOTE_KVS
                    and r not in self.scheduler.finished_recving_kv_req_ids
                )
            }
            self._arrived -= ready
            kv = KVConnectorOutput(finished_recving=ready)
        before = set(self.scheduler.requests)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={r: i for i, r in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=kv,
            ),
        )
        self.finished += sorted(before - set(self.scheduler.requests))
        if self.drafts is not None:
            live = [r for r in ids if r in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(live, [self.drafts(r) for r in live])
            )
